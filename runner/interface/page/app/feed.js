// One run as it goes: read once, then its stream is followed, and what that changes is read again.
import { Signals } from "./lib.js";
import { ask, json, keep, part, pause } from "./api.js";
import { Line } from "./lines.js";
import { subscribe } from "./share.js";
import { kind } from "./text.js";

const { signal, batch } = Signals;
const FINAL = ["COMPLETED", "FAILED", "CANCELLED"];
const BESIDE = /^(?:step|max_steps|total_steps|epoch|timestamp|time|time_.*)$/;
const WORST = ["failed", "running", "blocked", "cancelled", "other", "waiting", "done", "fresh", "skipped"];
const KINDS = ["move", "progress", "metrics", "warning"];
const DRAW = 250;
const SELDOM = 30000;
const BINS = 900;

/** Whether a run has ended. */
export function isOver(run) {
  return FINAL.includes(run.state);
}

/** Steps, the worst first. */
export function ordered(steps) {
  const place = ([, each]) => WORST.indexOf(kind(each.state));
  return [...steps].sort((a, b) => place(a) - place(b));
}

/** Curves in bins: by metric and step its Line. */
export async function readCurves(path, signal) {
  const text = await (await ask(path, { signal })).text(), found = new Map();
  for (const line of text.split("\n")) {
    if (!line) continue;
    const { step, metric, x, y } = JSON.parse(line);
    if (!found.has(metric)) found.set(metric, new Map());
    found.get(metric).set(step, new Line(x, y));
  }
  return found;
}

/** A run of the server. `start` follows it until `stop`. */
export class Feed {
  constructor(id) {
    this.id = id;
    this.path = "/runs/" + part(id);
    this.run = signal(null);
    /** By step what the run says of it. */
    this.steps = signal(new Map());
    /** By metric and step its Line; a new value says that there are more points. */
    this.series = signal(new Map());
    this.artifacts = signal([]);
    /** By step what had changed since it ran last. */
    this.why = signal({});
    this.error = signal(null);
    this.live = new AbortController();
    this.waits = new Map();
    this.early = null;
    this.isStale = false;
    this.drawing = 0;
  }

  /** Read the run, and follow it. */
  async start() {
    this.live = new AbortController();
    const { signal } = this.live;
    try {
      await this.refresh();
    } catch (error) {
      if (!signal.aborted) this.error.value = error;
      return;
    }
    if (signal.aborted) return;
    this.later(this.curves, 0);
    this.later(this.list, 0);
    this.later(this.reasons, 0);
    if (isOver(this.run.value)) return;
    this.early = [];
    subscribe(this.path + "/stream", KINDS, () => this.run.value.seq, signal, each => this.heard(each));
    await pause(SELDOM, signal);
    keep(signal, SELDOM, async () => {
      await this.refresh(); // what it costs grows without an event
      return !isOver(this.run.value);
    });
  }

  stop() {
    this.live.abort();
    for (const timer of this.waits.values()) clearTimeout(timer);
    this.waits.clear();
  }

  async refresh() {
    const found = await json(this.path, { signal: this.live.signal });
    const seen = this.run.value?.seq ?? 0;
    batch(() => {
      this.steps.value = new Map(found.steps.map(({ id, ...each }) => [id, each]));
      this.run.value = { ...found, seq: Math.max(found.seq, seen) };
    });
  }

  heard({ event, data }) {
    const { run } = this;
    if (event === "move") this.moved(data);
    else if (event === "progress") run.value = { ...run.value, state: data.state, word: data.word, progress: data };
    else if (event === "metrics") this.reported(data);
    else if (event === "warning") this.change(data.step, each => ({ warnings: [...new Set([...each.warnings, data.text])] }));
    else if (event === "lost") this.isStale = true;
    if (event === "end" || (event === "connected" && this.isStale)) {
      this.isStale = false;
      for (const work of [this.refresh, this.curves, this.list, this.reasons]) this.later(work, 0);
    }
  }

  /** Change what is known of a step, until the run is read again. */
  change(step, changes) {
    const known = { state: "", reason: "", detail: "", host: "", attempts: 0, warnings: [], values: {}, lines: [], ...this.steps.value.get(step) };
    this.steps.value = new Map(this.steps.value).set(step, { ...known, ...changes(known) });
  }

  moved(event) {
    const { attempt } = event.data;
    this.run.value = { ...this.run.value, seq: Math.max(event.seq, this.run.value.seq) };
    if (event.subject === "step") {
      this.change(event.id, each => ({
        state: event.after,
        reason: event.reason,
        attempts: event.after === "RUNNING" && Number.isInteger(attempt) ? attempt : each.attempts,
      }));
      if (event.after === "DONE") this.later(this.list);
      if (event.before === "RUNNING") this.later(this.reasons);
    }
    this.later(this.refresh, event.subject === "step" ? 1000 : 0);
  }

  /** Points of a step, as they come. */
  reported(data) {
    if (this.early) this.early.push(data);
    else this.put(data.step, data.new, data.points);
    this.change(data.step, () => ({ values: data.values }));
  }

  put(step, points, total) {
    const series = this.series.value;
    points.forEach((values, n) => {
      const x = [values.step, values.epoch].find(Number.isFinite) ?? total - points.length + n;
      for (const [name, y] of Object.entries(values)) {
        if (!Number.isFinite(y) || BESIDE.test(name)) continue;
        if (!series.has(name)) series.set(name, new Map());
        const found = series.get(name);
        if (!found.has(step)) found.set(step, new Line());
        found.get(step).put(x, y);
      }
    });
    this.draw();
  }

  /** The curves so far, of each part the least and the greatest; points that came meanwhile follow. */
  async curves() {
    this.early ||= [];
    try {
      this.series.value = await readCurves(`${this.path}/metrics?bins=${BINS}`, this.live.signal);
    } finally {
      const early = this.early;
      this.early = null;
      for (const each of early) this.put(each.step, each.new, each.points);
    }
  }

  /** Do something soon, and once for all who ask meanwhile. */
  later(work, ms = 500) {
    if (this.waits.has(work)) return;
    const { signal } = this.live;
    this.waits.set(work, setTimeout(() => {
      this.waits.delete(work);
      if (!signal.aborted) work.call(this).catch(() => {});
    }, ms));
  }

  /** Show the series at most four times a second. */
  draw() {
    this.drawing ||= setTimeout(() => {
      this.drawing = 0;
      this.series.value = new Map(this.series.value);
    }, DRAW);
  }

  async list() {
    this.artifacts.value = (await json(this.path + "/artifacts", { signal: this.live.signal })).artifacts;
  }

  async reasons() {
    this.why.value = (await json(this.path + "/why", { signal: this.live.signal })).steps;
  }
}
