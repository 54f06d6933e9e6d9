// The table as a file for spreadsheets.
import { value } from "./text.js";

/** A cell as CSV has it: nothing in it is a formula. */
export function cell(given) {
  if (given === undefined || given === null) return "";
  if (typeof given === "number") return String(given);
  const text = value(given), safe = /^[=+\-@\t\r]/.test(text) ? "'" + text : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

/** Runs with all their inputs and the best and last of all metrics; a sweep has a line for each trial. */
export function csv(rows) {
  const inputs = new Set(), metrics = new Set(), all = rows.flatMap(row => [row, ...row.trials]);
  for (const each of all) {
    for (const name of Object.keys(each.inputs)) inputs.add(name);
    for (const name of Object.keys(each.metrics)) metrics.add(name);
  }
  const head = ["run", "trial", "recipe", "name", "tags", "note", "state", "user", "created", "ended",
    ...inputs, ...[...metrics].flatMap(name => [name + " best", name + " last"])];
  const line = (row, leaf) => [
    row.id, leaf === row ? "" : leaf.id, row.recipe, row.name, row.tags.join(" "), row.note, leaf.word || leaf.state, row.user,
    row.created, row.ended, ...[...inputs].map(name => leaf.inputs[name]),
    ...[...metrics].flatMap(name => [leaf.metrics[name]?.best, leaf.metrics[name]?.last]),
  ];
  const table = [head, ...rows.flatMap(row => [row, ...row.trials].map(leaf => line(row, leaf)))];
  return table.map(cells => cells.map(cell).join(",")).join("\r\n") + "\r\n";
}
