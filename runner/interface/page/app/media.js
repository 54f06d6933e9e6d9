// What is fetched of the files of a run, to be looked at: pictures as the server draws them anew, sound as it is, text and rows as previews.
import { ask, json, part } from "./api.js";

const AT_ONCE = 4;
const KEPT = 300;
const [LOUDEST, SOUNDS] = [16 << 20, ["audio/wav", "audio/mpeg", "audio/flac", "audio/ogg"]];

/**
 * Fetch the bytes of a file; of a picture as the server draws it anew, where a width is given.  Raises Refusal.
 * @param {string} run the address of the run below /v1
 */
export async function fetched(run, { name, path }, { width = 0, signal } = {}) {
  const query = new URLSearchParams({ ...(path && { path }), ...(width && { width }) });
  return ask(`${run}/artifacts/${part(name)}${query.size ? "?" + query : ""}`, { signal });
}

/** Files of one run, by its address.  Each is fetched once, a few at a time, until `close`. */
export class Media {
  constructor(run) {
    this.run = run;
    this.live = new AbortController();
    this.found = new Map();
    this.waiting = [];
    this.running = 0;
  }

  /** The address in this page of a picture, at most so many pixels wide; not fetched once `wanted` has ended.  Raises Refusal. */
  picture(file, width, wanted) {
    return this.once(`${file.key} ${width}`, wanted, async () => {
      const answer = await fetched(this.run, file, { width, signal: this.live.signal });
      return URL.createObjectURL(new Blob([await answer.arrayBuffer()], { type: "image/webp" }));
    });
  }

  /** The address in this page of a sound.  Raises Error for one that is too large. */
  sound(file, wanted) {
    return this.once(file.key, wanted, async () => {
      if (!SOUNDS.includes(file.type) || file.bytes > LOUDEST) throw new Error("the audio file is too large to play here; download it");
      const answer = await fetched(this.run, file, { signal: this.live.signal });
      return URL.createObjectURL(new Blob([await answer.arrayBuffer()], { type: file.type }));
    });
  }

  /** What the server shows of a file.  Raises Refusal. */
  preview(file, wanted) {
    return this.once("preview " + file.key, wanted, () => json(`${this.run}/preview?name=${part(file.name)}&path=${part(file.path)}`, { signal: this.live.signal }));
  }

  once(key, wanted, work) {
    const known = this.found.get(key);
    if (known && (known.begun || !known.wanted.aborted)) return known.promise;
    const entry = { wanted, begun: false };
    entry.promise = this.turn(entry, work).catch(error => {
      if (this.found.get(key) === entry) this.found.delete(key);
      throw error;
    });
    this.found.set(key, entry);
    if (this.found.size > KEPT) this.forget(this.found.keys().next().value);
    return entry.promise;
  }

  async turn(entry, work) {
    if (this.running >= AT_ONCE) await new Promise(begin => this.waiting.push(begin));
    else this.running += 1;
    try {
      entry.wanted.throwIfAborted();
      entry.begun = true;
      return await work();
    } finally {
      const next = this.waiting.shift();
      if (next) next();
      else this.running -= 1;
    }
  }

  forget(key) {
    this.found.get(key).promise.then(each => typeof each === "string" && URL.revokeObjectURL(each), () => {});
    this.found.delete(key);
  }

  close() {
    this.live.abort();
    for (const key of [...this.found.keys()]) this.forget(key);
  }
}
