// What is compared: runs and trials out of the address, with their curves.
import { Signals } from "./lib.js";
import { ask, keep, part } from "./api.js";
import { leaves } from "./columns.js";
import { rows } from "./store.js";
import { readable, short, value } from "./text.js";

/** So many are compared at once. */
export const MOST = 20;
const BINS = 300;
const EVERY = 3000;

/** A value of an input as a label has it. */
export function input(each) {
  return typeof each === "number" ? short(each) : value(each);
}

/**
 * The members that an address names, by RUN or RUN!TRIAL; a sweep as a whole is its trials.
 * @returns {{key: string, row: object, leaf: object, label: string}[]}
 */
export function membersOf(ids, known = rows.value) {
  const by = new Map(known.map(row => [row.id, row])), found = new Map();
  for (const id of ids) {
    const cut = id.indexOf("!"), row = by.get(cut < 0 ? id : id.slice(0, cut)), trial = cut < 0 ? "" : id.slice(cut + 1);
    if (!row) continue;
    for (const leaf of trial ? row.trials.filter(each => each.id === trial) : leaves(row)) {
      const key = leaf === row ? row.id : `${row.id}!${leaf.id}`;
      found.set(key, { key, row, leaf });
    }
  }
  const members = [...found.values()].slice(0, MOST + 1), names = differingInputs(members);
  const labels = members.map(({ row, leaf }) => {
    const inputs = names.filter(name => leaf.inputs[name] !== undefined).slice(0, 3).map(name => `${name}=${input(leaf.inputs[name])}`);
    if (row.name && leaf === row) return row.name;
    return inputs.join(" ") || (leaf === row ? row.recipe : readable(leaf.id));
  });
  return members.map((each, n) => ({ ...each, label: labels.filter(other => other === labels[n]).length > 1 ? `${labels[n]} ${each.row.id.slice(-6)}` : labels[n] }));
}

/** The inputs that are not the same in all members. */
export function differingInputs(members) {
  const names = new Set(members.flatMap(({ leaf }) => Object.keys(leaf.inputs)));
  return [...names].filter(name => new Set(members.map(({ leaf }) => value(leaf.inputs[name] ?? null))).size > 1);
}

async function readBins(id, axis, range, signal) {
  const answer = await ask(`/runs/${part(id)}/metrics?bins=${BINS}&x=${axis}${range}`, { signal });
  return (await answer.text()).split("\n").filter(Boolean).map(line => JSON.parse(line));
}

const early = new Map();

/** Read the curves of a run that is over, and that is selected to be compared, before they are asked for. */
export function prepare(row) {
  if (row.over === null || early.has(row.id) || early.size >= MOST) return;
  early.set(row.id, readBins(row.id, "step", ""));
  early.get(row.id).catch(() => early.delete(row.id));
}

/** The curves of a run: those that were prepared, once, or read now. */
function curvesOf(id, axis, range, signal) {
  const found = axis === "step" && !range ? early.get(id) : undefined;
  early.delete(id);
  return found || readBins(id, axis, range, signal);
}

/** Curves of the members, read in bins: of each part the least and the greatest. */
export class CurveSet {
  constructor() {
    /** By run its curves, {step, metric, n, points}. */
    this.runs = Signals.signal(new Map());
    this.error = Signals.signal(null);
    this.ends = new AbortController();
  }

  /** Read the curves of runs, and those of runs that go on again and again. */
  follow(members, axis, zoom) {
    this.ends.abort();
    this.ends = new AbortController();
    const { signal } = this.ends, by = new Map(members.map(({ row }) => [row.id, row]));
    const range = zoom ? `&low=${zoom[0]}&high=${zoom[1]}` : "";
    let open = [...by.values()];
    keep(signal, EVERY, async () => {
      const found = await Promise.all(open.map(async row => [row.id, await curvesOf(row.id, axis, range, signal)]));
      const now = new Map([...this.runs.value].filter(([id]) => by.has(id)));
      for (const [id, curves] of found) now.set(id, curves);
      this.runs.value = now;
      open = open.filter(row => rows.value.find(each => each.id === row.id)?.over === null);
      return open.length > 0;
    });
  }

  stop() {
    this.ends.abort();
  }
}

/** The curve of a member: of several steps with this metric, the one that reported it most. */
export function curveOf(member, curves, metric) {
  const own = (curves.get(member.row.id) || []).filter(each => each.metric === metric && (member.leaf === member.row || each.step.startsWith(member.leaf.id)));
  return own.sort((a, b) => b.n - a.n)[0] || null;
}

/** The metrics that members have curves of, losses and what is held out first. */
export function metricsOf(members, curves) {
  const names = new Set(members.flatMap(({ row }) => (curves.get(row.id) || []).filter(each => each.n > 1).map(each => each.metric)));
  const rank = name => (/val|eval|test/i.test(name) ? 0 : /loss/i.test(name) ? 1 : /^(lr|learning_rate|grad_norm|epoch)$/.test(name) ? 3 : 2);
  return [...names].sort((a, b) => rank(a) - rank(b));
}
