// One run as it goes: read once, then its events are followed, and what they change is read again.
import { Signals } from "./lib.js";
import { ask, json, keep, link, part, pieces } from "./api.js";
import { kind } from "./text.js";

const { signal, batch } = Signals;
const FINAL = ["COMPLETED", "FAILED", "CANCELLED"];
const OVER = ["FRESH", "DONE", "FAILED", "SKIPPED", "BLOCKED", "CANCELLED"];
const BESIDE = /^(?:step|max_steps|total_steps|epoch|timestamp|time|time_.*)$/;
const WORST = ["failed", "running", "blocked", "cancelled", "other", "waiting", "done", "fresh", "skipped"];
const DRAW = 250;

/** Whether a run has ended. */
export function isOver(run) {
  return FINAL.includes(run.state);
}

/** Steps, the worst first. */
export function ordered(steps) {
  const place = ([, each]) => WORST.indexOf(kind(each.state));
  return [...steps].sort((a, b) => place(a) - place(b));
}

/** A run of the server. `start` follows it until `stop`. */
export class Feed {
  constructor(id) {
    this.id = id;
    this.path = "/runs/" + part(id);
    this.run = signal(null);
    /** By step its state, reason, attempts and host. */
    this.steps = signal(new Map());
    /** By metric and step its points, [x, y]; a new value says that there are more. */
    this.series = signal(new Map());
    this.artifacts = signal([]);
    this.error = signal(null);
    this.live = new AbortController();
    this.measuring = new Set();
    this.cursors = new Map();
    this.waits = new Map();
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
    for (const [id, each] of this.steps.value) if (each.state === "RUNNING") this.measuring.add(id);
    keep(signal, 500, () => this.events());
    keep(signal, 5000, async () => {
      if (!isOver(this.run.value)) await this.refresh();
      return !isOver(this.run.value);
    });
    keep(signal, 1000, () => this.measure());
    this.list().catch(() => {});
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
      const steps = new Map(this.steps.value);
      for (const { id, ...each } of found.steps) steps.set(id, each);
      this.steps.value = steps;
      this.run.value = { ...found, seq: Math.max(found.seq, seen) };
    });
  }

  /** The stream of events, resumed after the last that was seen. */
  async events() {
    const headers = { Accept: "text/event-stream" }, { signal } = this.live;
    const answer = await ask(`${this.path}/events?after=${this.run.value.seq}`, { signal, headers });
    link.value = "live";
    const decoder = new TextDecoder();
    let text = "";
    for await (const chunk of pieces(answer.body, signal)) {
      const frames = (text + decoder.decode(chunk, { stream: true })).split("\n\n");
      text = frames.pop();
      for (const frame of frames) {
        const data = frame.split("\n").filter(line => line.startsWith("data: ")).map(line => line.slice(6)).join("\n");
        if (data) this.heard(JSON.parse(data));
      }
    }
    await this.refresh();
    return !isOver(this.run.value);
  }

  heard(event) {
    this.run.value = { ...this.run.value, seq: event.seq };
    if (event.subject === "step") {
      const known = { ...this.steps.value.get(event.id) || { attempts: 0, host: "", state: "", detail: "" } };
      const { attempt } = event.data;
      if (event.after === "RUNNING" && Number.isInteger(attempt) && attempt !== this.cursors.get(event.id)?.attempt) {
        known.attempts = attempt;
        this.cursors.set(event.id, { attempt, n: 0 });
      }
      this.steps.value = new Map(this.steps.value).set(event.id, { ...known, state: event.after, reason: event.reason });
      if (event.after === "RUNNING" || OVER.includes(event.after)) this.measuring.add(event.id);
      if (event.after === "DONE") this.later(this.list);
    }
    this.later(this.refresh, event.subject === "step" ? 1000 : 0);
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

  /** Points that came since; of a step that was done twice they stand where the later ones put them. */
  async measure() {
    if (!this.cursors.size && isOver(this.run.value)) {
      await this.whole();
      return false;
    }
    if (!this.cursors.size) await this.points();
    for (const step of [...this.measuring].slice(0, 24)) {
      const over = OVER.includes(this.steps.value.get(step)?.state);
      const cursor = this.cursors.get(step) || { attempt: 0, n: 0 };
      await this.points(step, cursor.attempt, cursor.n);
      if (over) this.measuring.delete(step);
    }
    return !isOver(this.run.value) || this.measuring.size > 0;
  }

  /** The curves of a run that is over, of each part the least and the greatest: no more comes. */
  async whole() {
    const answer = await ask(`${this.path}/metrics?bins=1000`, { signal: this.live.signal });
    const series = new Map();
    for (const line of (await answer.text()).split("\n")) {
      if (!line) continue;
      const { step, metric, x, y } = JSON.parse(line);
      if (BESIDE.test(metric)) continue;
      if (!series.has(metric)) series.set(metric, new Map());
      series.get(metric).set(step, new Map(x.map((each, n) => [each, y[n]])));
    }
    this.measuring.clear();
    this.series.value = series;
  }

  async points(step, attempt, after) {
    const query = step ? `?step=${part(step)}&attempt=${attempt}&after=${after}` : "";
    const text = await (await ask(this.path + "/metrics" + query, { signal: this.live.signal })).text();
    const series = this.series.value;
    for (const line of text.split("\n")) {
      if (!line) continue;
      const point = JSON.parse(line), { values } = point, cursor = this.cursors.get(point.step);
      if (!cursor || point.attempt > cursor.attempt) this.cursors.set(point.step, { attempt: point.attempt, n: point.n });
      else if (point.attempt === cursor.attempt) cursor.n = Math.max(cursor.n, point.n);
      const x = [values.step, values.epoch].find(Number.isFinite) ?? point.n - 1;
      for (const [name, y] of Object.entries(values)) {
        if (!Number.isFinite(y) || BESIDE.test(name)) continue;
        if (!series.has(name)) series.set(name, new Map());
        const found = series.get(name);
        if (!found.has(point.step)) found.set(point.step, new Map());
        found.get(point.step).set(x, y);
      }
    }
    if (text) this.draw();
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

  /** The bytes of a file among the outputs. */
  async file(name, path = "", headers = {}) {
    const query = path ? "?path=" + part(path) : "";
    return ask(`${this.path}/artifacts/${part(name)}${query}`, { signal: this.live.signal, headers });
  }
}

