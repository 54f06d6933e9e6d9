// Which columns a table of runs has by itself: inputs that differ, and metrics with their best.
import { value } from "./text.js";

const [INPUTS, METRICS] = [5, 4];
const BESIDE = /^(?:step|epoch|lr|learning_rate|grad_norm|samples_per_second|tokens_per_second|memory_gb|gpu|timestamp|time|time_.*)$/;
const HELD_OUT = /eval|val|test/i;

/** Runs of one recipe and of its sweeps have one family: only within it metrics are compared. */
export function family(row) {
  return row.recipe.replace(/-(?:sweep|search)(?=@)/, "");
}

/** A row, or its trials where it is a sweep. */
export function leaves(row) {
  return row.trials.length ? row.trials : [row];
}

/**
 * Inputs that are not the same in all rows, the most varied first; one that only few runs have comes later.
 * @returns {{names: string[], varied: string[], numeric: Set<string>}} `varied`: those with several values; `numeric`: those that are numbers somewhere
 */
export function differing(rows) {
  const seen = new Map(), numeric = new Set();
  let all = 0;
  for (const row of rows) {
    for (const leaf of leaves(row)) {
      all += 1;
      for (const name in leaf.inputs) {
        const each = leaf.inputs[name];
        let found = seen.get(name);
        if (!found) seen.set(name, found = { values: new Set(), runs: 0 });
        if (typeof each === "number") numeric.add(name);
        if (found.values.size < 50) found.values.add(typeof each === "object" ? value(each) : each);
        found.runs += 1;
      }
    }
  }
  const weight = ([, { values, runs }]) => (values.size > 1 ? 1 : 0) + Math.min(values.size, 20) / 20 * runs / all;
  const found = [...seen].filter(([, { values, runs }]) => values.size > 1 || runs < all).sort((a, b) => weight(b) - weight(a));
  return { names: found.map(([name]) => name), varied: found.filter(([, { values }]) => values.size > 1).map(([name]) => name), numeric };
}

/** Metrics that say what came of a run: those that most runs have first, of these the ones of data held out. */
export function metricNames(rows) {
  const seen = new Map();
  for (const row of rows) {
    for (const name in row.metrics) if (typeof row.metrics[name].best === "number") seen.set(name, (seen.get(name) || 0) + 1);
  }
  for (const name of seen.keys()) if (BESIDE.test(name)) seen.delete(name);
  const rank = ([name, count]) => count * (HELD_OUT.test(name) ? 1.5 : /loss/i.test(name) ? 1.2 : 1);
  return [...seen].sort((a, b) => rank(b) - rank(a)).map(([name]) => name);
}

/** Which way a metric is better, where all rows agree; else "". */
export function direction(rows, name) {
  const found = new Set(rows.map(row => row.metrics[name]?.better).filter(Boolean));
  return found.size === 1 ? [...found][0] : "";
}

/** By family and metric, the best value of finished rows and trials. */
export function bests(rows, names) {
  const found = new Map(), differ = new Set();
  for (const row of rows) {
    for (const leaf of leaves(row)) {
      for (const name of names) {
        const metric = leaf.metrics[name];
        if (typeof metric?.best !== "number") continue;
        const key = family(row) + "\n" + name, before = found.get(key);
        if (before !== undefined && metric.best !== before) differ.add(key);
        const better = before === undefined || (metric.better === "max" ? metric.best > before : metric.best < before);
        if (better) found.set(key, metric.best);
      }
    }
  }
  for (const key of found.keys()) if (!differ.has(key)) found.delete(key); // all alike, or one alone: none is the best
  return found;
}

/** The columns that a table has by itself, of those that it could have. */
export function automatic({ varied, metrics }) {
  return { inputs: varied.slice(0, INPUTS), metrics: metrics.slice(0, METRICS) };
}

/** What a column of a row is sorted by. */
export function sortValue(row, column) {
  const [of, name] = [column.slice(0, 2), column.slice(2)];
  if (of === "i.") return row.inputs[name];
  if (of === "m.") return row.metrics[name]?.best;
  if (column === "run") return (row.name || row.recipe || row.id).toLowerCase();
  if (column === "status") return row.word;
  if (column === "took") return row.at === undefined ? undefined : (row.over ?? Date.now()) - row.at;
  return row.at;
}

/** Rows in the order of a column, those without a value last. */
export function sorted(rows, column, descending) {
  const keyed = rows.map(row => [sortValue(row, column), row]);
  const missing = each => each === undefined || each === null;
  keyed.sort(([a], [b]) => {
    if (missing(a) || missing(b)) return missing(a) - missing(b);
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    const x = typeof a === "object" ? value(a) : a, y = typeof b === "object" ? value(b) : b;
    return (x < y ? -1 : x > y ? 1 : 0) * (descending ? -1 : 1);
  });
  return keyed.map(([, row]) => row);
}
