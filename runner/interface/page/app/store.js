// All runs that the page knows: read page by page, then kept as they go.  How they come here is known to this module alone.
import { Signals } from "./lib.js";
import { json, keep, part } from "./api.js";

const { signal } = Signals;
const PAGE = 200;
const MOST = 2000;
const EVERY = 3000;
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

/** The newest runs, those that are not over, and those that ended since. */
async function news(signal) {
  const [newest, open] = await Promise.all([
    page({ limit: 50 }, signal),
    json(`/runs?limit=${PAGE}&${OPEN.map(each => "state=" + each).join("&")}`, { signal }),
  ]);
  const now = new Set([...newest.runs, ...open.runs].map(each => each.id));
  const ended = [...known.values()].filter(({ row: each }) => OPEN.includes(each.state) && !now.has(each.id));
  const last = await Promise.all(ended.slice(0, 20).map(each => json("/runs/" + part(each.row.id), { signal }).catch(() => null)));
  if (take([...newest.runs, ...open.runs, ...last.filter(Boolean)])) show();
}

/** Read a run again, after it was changed here. */
export async function refresh(id) {
  if (take([await json("/runs/" + part(id))])) show();
}

/** Keep the rows as they are on the server, until `signal` ends it. */
export function follow(signal) {
  let whole = !loading.value;
  keep(signal, EVERY, async () => {
    if (!whole) {
      await readAll(signal);
      whole = true;
    } else {
      await news(signal);
    }
  });
}
