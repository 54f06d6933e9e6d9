// The curves of one run: one metric over its steps.
import { Hooks, html } from "./lib.js";
import { readable, visible } from "./text.js";
import { aligned, chart, colour, fit, legend, onScale, onTheme, smoothed, thinned } from "./curves.js";

const { useEffect, useRef, useState } = Hooks;
const CURVES = 100;

/** Metrics with a curve, losses first. */
export function drawable(series) {
  const names = [...series].filter(([, found]) => [...found.values()].some(points => points.size > 1)).map(([name]) => name);
  return names.sort((a, b) => !/loss/.test(a) - !/loss/.test(b) || (a < b ? -1 : 1));
}

/** The tab of curves. */
export function CurvesTab({ feed }) {
  if (!drawable(feed.series.value).length) return html`<p class="quiet empty">No step of this run has reported a metric yet.</p>`;
  return html`<${Curves} feed=${feed} />`;
}

/** Curves of a metric that is chosen; those of steps that failed are dashed. */
export function Curves({ feed }) {
  const series = feed.series.value, failed = step => feed.steps.value.get(step)?.state === "FAILED";
  const names = drawable(series);
  const [wanted, setWanted] = useState(""), [log, setLog] = useState(false), [weight, setWeight] = useState(0);
  const [, redraw] = useState(0);
  const place = useRef(null), key = useRef(null), current = useRef(null);
  const metric = names.includes(wanted) ? wanted : names[0];

  useEffect(() => fit(place.current, () => current.current), []);
  useEffect(() => onTheme(() => {
    key.current = "";
    redraw(n => n + 1);
  }), []);
  useEffect(() => () => current.current?.destroy(), []);
  useEffect(() => {
    const found = [...series.get(metric)].filter(([, points]) => points.size > 1).slice(0, CURVES);
    const points = found.map(([, each]) => thinned(smoothed([...each].sort((a, b) => a[0] - b[0]), weight)));
    const [x, rows] = aligned(points), ids = found.map(([id]) => id);
    const now = JSON.stringify([metric, log, x.length < 40, ids, ids.map(failed)]);
    place.current.dataset.points = String(points.reduce((sum, each) => sum + each.length, 0));
    if (now === key.current) {
      current.current.setData([x, ...onScale(rows, log)]);
      return;
    }
    current.current?.destroy();
    const line = (id, n) => ({ label: readable(id), stroke: colour(n), width: 1.6, dash: failed(id) ? [5, 4] : undefined });
    current.current = chart(place.current, "step", x, ids.map(line), rows, { log });
    key.current = now;
    legend(document.getElementById("legend"), ids.map(id => visible(readable(id))), []);
  });

  return html`<section id="curves"><h2>Curves</h2>
    <div class="controls">
      <label>metric <select id="metric" value=${metric} onChange=${event => setWanted(event.target.value)}>
        ${names.map(name => html`<option key=${name} value=${name}>${name}</option>`)}
      </select></label>
      <button type="button" id="log" aria-pressed=${String(log)} onClick=${() => setLog(!log)}>log scale</button>
      <label>smooth <select id="smooth" value=${String(weight)} onChange=${event => setWeight(Number(event.target.value))}>
        <option>0</option><option>0.6</option><option>0.9</option>
      </select></label>
      <span class="quiet wide-only">drag: zoom · double click: all</span>
    </div>
    <div id="chart" ref=${place} role="img" aria-label="curves of the chosen metric over steps"></div>
    <p id="legend" class="quiet"></p>
  </section>`;
}
