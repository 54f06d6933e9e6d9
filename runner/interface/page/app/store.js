// All runs that the page knows: read page by page, then kept by the stream of all runs.  How they come here is known to this module alone.
import { Signals } from "./lib.js";
import { Refusal, json, part, pause } from "./api.js";
import { subscribe } from "./share.js";

const { signal } = Signals;
const PAGE = 200;
const MOST = 2000;
const SOON = 300;
const SELDOM = 3000;
const DRAW = 250;
const AT_ONCE = 20;
const KINDS = ["move", "progress", "metrics"];
const OPEN = ["QUEUED", "ACTIVE", "PAUSED"];

/** Rows of the table, the newest first. */
export const rows = signal([]);
/** Whether older runs are still being read. */
export const loading = signal(true);
/** Whether there are more runs than are read. */
export const truncated = signal(false);

const known = new Map();

/** An object by names of strangers: it has these, and nothing that every object has. */
function named(pairs) {
  const found = Object.create(null);
  for (const [name, each] of pairs) found[name] = each;
  return found;
}

/** The best value of each metric: the least or the greatest, as the recipe has it. */
function withBest(metrics) {
  const best = each => (each.better === "max" ? each.max : each.min);
  return named(Object.entries(metrics).map(([name, each]) => [name, { ...each, best: best(each) ?? each.last }]));
}

/** A run as the table reads it. */
function row(run) {
  const trials = run.trials.map(each => ({ ...each, inputs: named(Object.entries(each.inputs)), metrics: withBest(each.metrics) }));
  const inputs = named(Object.entries(run.inputs));
  return { ...run, inputs, metrics: withBest(run.metrics), trials, at: Date.parse(run.created), over: run.ended ? Date.parse(run.ended) : null };
}

function take(runs) {
  let changed = false;
  for (const run of runs) {
    const text = JSON.stringify(run), before = known.get(run.id);
    if (before?.text === text) continue;
    known.set(run.id, { text, row: row(run) });
    changed = true;
  }
  return changed;
}

function show() {
  rows.value = [...known.values()].map(each => each.row).sort((a, b) => (a.id < b.id ? 1 : -1));
}

let due = 0;

/** The same at most four times a second. */
function showSoon() {
  due ||= setTimeout(() => {
    due = 0;
    show();
  }, DRAW);
}

async function page(query, signal) {
  return json("/runs?" + new URLSearchParams(query), { signal });
}

/** Everything, page by page; the first is shown at once. */
async function readAll(signal) {
  for (let after = ""; known.size < MOST;) {
    const found = await page({ limit: after ? PAGE : 60, ...(after ? { after } : {}) }, signal);
    const first = !after;
    take(found.runs);
    after = found.next;
    if (first || !after || known.size >= MOST) show();
    if (!after) break;
    if (known.size >= MOST) truncated.value = true;
  }
  loading.value = false;
}

function openRuns(signal) {
  return json(`/runs?limit=${PAGE}&${OPEN.map(each => "state=" + each).join("&")}`, { signal });
}

/** The newest runs, those that are not over, and those that ended since. */
async function news(signal) {
  const [newest, open] = await Promise.all([page({ limit: 50 }, signal), openRuns(signal)]);
  const now = new Set([...newest.runs, ...open.runs].map(each => each.id));
  const ended = [...known.values()].filter(({ row: each }) => OPEN.includes(each.state) && !now.has(each.id));
  const last = await Promise.all(ended.slice(0, AT_ONCE).map(each => json("/runs/" + part(each.row.id), { signal }).catch(() => null)));
  if (take([...newest.runs, ...open.runs, ...last.filter(Boolean)])) show();
}

/** Read a run again, after it was changed here. */
export async function refresh(id) {
  if (take([await json("/runs/" + part(id))])) show();
}

/** What the stream says of runs, put into their rows; what it does not tell is read soon. */
class News {
  constructor(signal) {
    this.signal = signal;
    this.place = "";
    this.changed = new Set();
    this.isReported = this.isStale = this.isReading = false;
    this.reported = 0;
  }

  heard({ event, id, data }) {
    this.place = id || this.place;
    if (event === "move" && (data.subject === "run" || !known.has(data.run))) this.changed.add(data.run);
    if (event === "progress") this.progressed(data);
    if (event === "metrics") this.isReported = true;
    if (["gap", "lost", "end"].includes(event)) this.isStale = true;
    if (!this.isReading && (this.changed.size || this.isReported || this.isStale)) this.read();
  }

  progressed({ run, state, word, step, total, percent, eta }) {
    const before = known.get(run);
    if (!before) this.changed.add(run);
    else {
      known.set(run, { text: "", row: { ...before.row, state, word, progress: { step, total, percent, eta } } });
      showSoon();
    }
  }

  /** Read what has changed, until nothing has; the numbers of runs that report at most every 3 seconds. */
  async read() {
    this.isReading = true;
    for (await pause(SOON, this.signal); !this.signal.aborted; await pause(SOON, this.signal)) {
      const changed = [...this.changed], isStale = this.isStale || changed.length > AT_ONCE;
      const isReported = this.isReported && Date.now() - this.reported > SELDOM;
      if (!changed.length && !isStale && !this.isReported) break;
      if (!changed.length && !isStale && !isReported) continue;
      this.changed.clear();
      this.isStale = false;
      try {
        if (isStale) await news(this.signal);
        else {
          if (isReported) {
            this.isReported = false;
            this.reported = Date.now();
            if (take((await openRuns(this.signal)).runs)) show();
          }
          await Promise.all(changed.map(each => refresh(each)));
        }
      } catch {
        this.isStale = true;
        await pause(SELDOM, this.signal);
      }
    }
    this.isReading = false;
  }
}

/** Keep the rows as they are on the server, until `signal` ends it. */
export async function follow(signal) {
  const stream = new News(signal);
  subscribe("/stream", KINDS, () => stream.place, signal, each => stream.heard(each));
  stream.isStale = !loading.value;
  while (loading.value && !signal.aborted) {
    try {
      await readAll(signal);
    } catch (error) {
      if (error instanceof Refusal && error.status < 500 && error.status !== 429) return;
      await pause(SELDOM, signal);
    }
  }
  if (stream.isStale) stream.heard({ event: "gap" });
}
