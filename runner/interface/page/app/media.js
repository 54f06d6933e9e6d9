// What is fetched of the files of a run, to be looked at: pictures as the server draws them anew, sound as it is, text and rows as previews.
import { json, part } from "./api.js";

const AT_ONCE = 4;
const KEPT = 300;
const [LOUDEST, SOUNDS] = [16 << 20, ["audio/wav", "audio/mpeg", "audio/flac", "audio/ogg"]];

/** Files of one run.  Each is fetched once, a few at a time, until `close`. */
export class Media {
  constructor(feed) {
    this.feed = feed;
    this.found = new Map();
    this.waiting = [];
    this.running = 0;
  }

  /** The address in this page of a picture, at most so many pixels wide.  Raises Refusal. */
  picture(file, width) {
    return this.once(`${file.key} ${width}`, async () => {
      const answer = await this.feed.file(file.name, file.path, {}, width);
      return URL.createObjectURL(new Blob([await answer.arrayBuffer()], { type: "image/webp" }));
    });
  }

  /** The address in this page of a sound.  Raises Error for one that is too large. */
  sound(file) {
    return this.once(file.key, async () => {
      if (!SOUNDS.includes(file.type) || file.bytes > LOUDEST) throw new Error("this sound is too large to play here: save it");
      const answer = await this.feed.file(file.name, file.path);
      return URL.createObjectURL(new Blob([await answer.arrayBuffer()], { type: file.type }));
    });
  }

  /** What the server shows of a file.  Raises Refusal. */
  preview(file) {
    return this.once("preview " + file.key, () => json(`${this.feed.path}/preview?name=${part(file.name)}&path=${part(file.path)}`));
  }

  once(key, work) {
    if (!this.found.has(key)) {
      this.found.set(key, this.turn(work).catch(error => {
        this.found.delete(key);
        throw error;
      }));
      if (this.found.size > KEPT) this.forget(this.found.keys().next().value);
    }
    return this.found.get(key);
  }

  async turn(work) {
    if (this.running >= AT_ONCE) await new Promise(begin => this.waiting.push(begin));
    else this.running += 1;
    try {
      return await work();
    } finally {
      const next = this.waiting.pop(); // what was asked for last is being looked at
      if (next) next();
      else this.running -= 1;
    }
  }

  forget(key) {
    this.found.get(key).then(each => typeof each === "string" && URL.revokeObjectURL(each), () => {});
    this.found.delete(key);
  }

  close() {
    for (const key of [...this.found.keys()]) this.forget(key);
  }
}
