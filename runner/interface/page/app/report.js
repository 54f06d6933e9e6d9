// The report: a table that sorts and filters, logs that open by their address, and curves.
import { chart, colour, fit, legend, onTheme } from "./curves.js";

const by = id => document.getElementById(id);

/** Sort by a click on a column; a second turns the order. */
function sortable(body, heads) {
  const rows = [...body.rows];
  const value = (row, n) => {
    const cell = row.cells[n];
    return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
  };
  heads.forEach((head, n) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const each of heads) each.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const order = (a, b) => {
        const x = value(a, n), y = value(b, n);
        if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
        return (x < y ? -1 : x > y ? 1 : 0) * (up ? 1 : -1);
      };
      body.append(...[...rows].sort(order));
    });
  });
}

/** Show only rows that have every word of the field. */
function filtered(rows) {
  const filter = by("filter");
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/);
    let left = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every(word => text.includes(word));
      left += row.hidden ? 0 : 1;
    }
    by("count").textContent = left + " of " + rows.length;
  });
}

/** Open the log that the address names. */
function openNamed() {
  const target = location.hash && by(decodeURIComponent(location.hash.slice(1)));
  if (target && target.tagName === "DETAILS") target.open = true;
}

/** The curves of the metric that is chosen. */
function drawCurves(data) {
  const controls = { metric: by("metric"), colour: by("colour"), log: by("log"), smooth: by("smooth") };
  by("controls").hidden = false;
  let current = null;
  const isLog = () => controls.log.getAttribute("aria-pressed") === "true";
  const draw = () => {
    const found = data.metrics[controls.metric.value];
    const key = controls.colour ? controls.colour.value : null;
    const word = n => (key === null ? found.names[n] : key + " = " + (found.values[n][key] ?? ""));
    const groups = [...new Set(found.names.map((_, n) => word(n)))];
    const many = found.names.length > 30;
    const lines = found.names.map((name, n) => ({
      label: name,
      stroke: colour(groups.indexOf(word(n))),
      width: found.best === n ? 2.5 : 1.2,
      dash: found.failed[n] ? [5, 4] : undefined,
      alpha: many && found.best !== n && !found.failed[n] ? 0.35 : 1,
    }));
    const log = isLog();
    current?.destroy();
    current = chart(by("chart"), data.x, found.x, lines, found.curves[controls.smooth.value], { log, frame: found.frame });
    const notes = [];
    if (found.best >= 0) notes.push("thick: the best, " + found.names[found.best]);
    if (found.failed.some(Boolean)) notes.push("dashed: failed");
    if (!log && found.leaving) notes.push(found.leaving + " curve" + (found.leaving > 1 ? "s leave" : " leaves") + " the frame");
    legend(by("legend"), groups, notes);
  };
  const begin = () => {
    controls.log.setAttribute("aria-pressed", String(data.metrics[controls.metric.value].log));
    draw();
  };
  controls.metric.addEventListener("change", begin);
  for (const each of [controls.colour, controls.smooth]) if (each) each.addEventListener("change", draw);
  controls.log.addEventListener("click", () => {
    controls.log.setAttribute("aria-pressed", String(!isLog()));
    draw();
  });
  onTheme(draw);
  fit(by("chart"), () => current);
  begin();
}

const table = by("results");
if (table) {
  for (const each of document.querySelectorAll(".js")) each.hidden = false;
  sortable(table.tBodies[0], [...table.tHead.rows[0].cells]);
  filtered([...table.tBodies[0].rows]);
}
addEventListener("beforeprint", () => {
  for (const each of document.querySelectorAll("details")) each.open = true;
});
addEventListener("hashchange", openNamed);
openNamed();
if (by("data")) drawCurves(JSON.parse(by("data").textContent));
window.ready = true;
