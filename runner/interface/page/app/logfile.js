// The log of one attempt: a part of its lines by their numbers, which goes on while the attempt runs; or its lines that contain a text.
import { Signals } from "./lib.js";
import { Refusal, ask, json, keep, part, pieces } from "./api.js";

const PAGE = 500;
const MOST = 2000;
const BEFORE = 100;
const AGAIN = 3000;
const DRAW = 250;

/** What a terminal leaves of a line: what was written over is gone. */
function folded(line) {
  return line.replace(/\r+$/, "").split("\r").pop();
}

/** One log; `open` reads it until `close`. */
export class LogFile {
  /** @param {{path: string, step: string, attempt: number, node: number, find: string, line: number}} place */
  constructor(place) {
    this.place = place;
    /** {number, text, cut}, in order. */
    this.lines = Signals.signal([]);
    /** What the server says of the log; null until it is read. */
    this.about = Signals.signal(null);
    this.note = Signals.signal("");
    this.ends = new AbortController();
    this.due = 0;
  }

  close() {
    this.ends.abort();
    clearTimeout(this.due);
  }

  async read(first, limit) {
    const { path, step, attempt, node, find } = this.place;
    const query = new URLSearchParams({ step, attempt, node, find, first, limit });
    return json(`${path}/logs/lines?${query}`, { signal: this.ends.signal });
  }

  /** Read the part that is asked for, and go on with what comes. */
  async open() {
    const { find, line, node } = this.place, { signal } = this.ends;
    try {
      await this.show(line ? Math.max(1, line - BEFORE) : find ? 1 : 0);
    } catch (error) {
      if (!signal.aborted) this.note.value = error.message;
      if (!(error instanceof Refusal) || ![404, 409].includes(error.status)) return;
      if (!signal.aborted) keep(signal, AGAIN, () => this.again());
      return;
    }
    if (this.about.value.ended || signal.aborted) return;
    if (find || node) keep(signal, AGAIN, () => this.again());
    else if (this.isAtEnd) this.follow();
  }

  async show(first) {
    const found = await this.read(first, PAGE);
    this.note.value = "";
    this.lines.value = found.lines;
    this.about.value = found;
  }

  /** Read what cannot be followed again; false when it is over. */
  async again() {
    await this.show(this.place.find ? 1 : 0).catch(error => {
      if (!(error instanceof Refusal)) throw error;
    });
    return !this.about.value?.ended;
  }

  get isAtEnd() {
    return !this.lines.value.length || this.lines.value.at(-1).number >= this.about.value.total;
  }

  /** Put the lines before these above them. */
  async earlier() {
    const end = this.lines.value[0].number, first = Math.max(1, end - PAGE);
    const found = await this.read(first, end - first);
    this.lines.value = [...found.lines, ...this.lines.value].slice(0, MOST);
  }

  /** Put the next lines below these. */
  async later() {
    const found = await this.read(this.lines.value.at(-1).number + 1, PAGE);
    this.lines.value = [...this.lines.value, ...found.lines].slice(-MOST);
    this.about.value = found;
    if (this.isAtEnd && !found.ended && !this.place.find) this.follow();
  }

  /** Follow the log from the last line that has an end. */
  follow() {
    const { signal } = this.ends, decoder = new TextDecoder(), { step, attempt, is_open: isOpen, size, total } = this.about.value;
    let passed = size, rest = "", number = total - (isOpen ? 1 : 0), lines = this.lines.value.filter(each => each.number <= number);
    const draw = () => {
      this.due = 0;
      const last = rest && folded(rest);
      this.about.value = { ...this.about.value, total: number + (last ? 1 : 0) };
      this.lines.value = last ? [...lines, { number: number + 1, text: last.slice(0, MOST), cut: last.length > MOST }] : lines;
    };
    return keep(signal, 1000, async () => {
      const query = `?step=${part(step)}&attempt=${attempt}&follow=true&offset=${passed}`;
      const answer = await ask(this.place.path + "/logs" + query, { signal });
      for await (const chunk of pieces(answer.body, signal)) {
        passed += chunk.length;
        const whole = (rest + decoder.decode(chunk, { stream: true })).split("\n");
        rest = whole.pop();
        if (rest.length > 1 << 16) rest = folded(rest);
        lines = [...lines, ...whole.map(text => ({ number: ++number, text: folded(text).slice(0, MOST), cut: text.length > MOST }))].slice(-MOST);
        this.due ||= setTimeout(draw, DRAW);
      }
      this.about.value = { ...this.about.value, ended: true };
      return false;
    });
  }
}
