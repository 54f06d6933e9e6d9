// The curves of one run: a small chart for each metric, which goes on while the run does.
import { Hooks, html } from "./lib.js";
import { readable, short } from "./text.js";
import { smoothed, thinned } from "./curves.js";
import { readCurves } from "./feed.js";
import { matcher } from "./find.js";
import { Key, Multiple } from "./multiple.js";

const { useEffect, useState } = Hooks;
const CURVES = 50;
const CHARTS = 12;
const LEGEND = 24;
const BINS = 400;

/** Metrics with a curve, losses first. */
export function drawable(series) {
  const names = [...series].filter(([, found]) => [...found.values()].some(line => line.size > 1)).map(([name]) => name);
  return names.sort((a, b) => !/loss/.test(a) - !/loss/.test(b) || (a < b ? -1 : 1));
}

/** The steps that report one of these metrics, in the order of their colours. */
function stepsOf(series, names) {
  return [...new Set(names.flatMap(name => [...series.get(name).keys()]))].slice(0, CURVES);
}

function Legend({ steps }) {
  if (steps.length < 2) return null;
  return html`<p class="legend-row" aria-label="steps">
    ${steps.slice(0, LEGEND).map((step, n) => html`<span key=${step}><${Key} n=${n} />${readable(step)}</span>`)}
    ${steps.length > LEGEND && html`<span class="quiet">and ${steps.length - LEGEND} more</span>`}
  </p>`;
}

/** Charts of some metrics; `close` are their curves within the zoom, read with all their peaks. */
export function Charts({ feed, names, weight, logY, zoom, setZoom, close = new Map() }) {
  const series = feed.series.value, steps = stepsOf(series, names);
  const failed = step => steps.length > 1 && feed.steps.value.get(step)?.state === "FAILED";
  const lineOf = (name, step) => (zoom && close.get(name)?.get(step)) || series.get(name).get(step);
  const linesOf = name => steps.filter(step => lineOf(name, step)?.size > 1).map(step => {
    const pairs = lineOf(name, step).pairs();
    return { n: steps.indexOf(step), label: readable(step), group: "", failed: failed(step), points: thinned(weight ? smoothed(pairs, weight) : pairs) };
  });
  const last = name => {
    const known = [...series.get(name).values()];
    return known.length === 1 ? short(known[0].y.at(-1)) : "";
  };
  return html`<${Legend} steps=${steps} />
    <div class="multiples">${names.map(name => html`<${Multiple} key=${name} metric=${name} lines=${linesOf(name)} logY=${logY} weight=${0} zoom=${zoom} setZoom=${setZoom} axis="step" sync="run" value=${last(name)} hint="the last value stands beside its name" />`)}</div>`;
}

/** What a range of steps shows when it is read closely; nothing until it is read. */
function useClose(feed, zoom) {
  const [close, setClose] = useState(new Map());
  useEffect(() => {
    const ends = new AbortController();
    setClose(new Map());
    if (zoom) readCurves(`${feed.path}/metrics?bins=${BINS}&low=${zoom[0]}&high=${zoom[1]}`, ends.signal).then(setClose, () => {});
    return () => ends.abort();
  }, [feed, zoom]);
  return close;
}

/** The tab of curves. */
export function CurvesTab({ feed }) {
  const [wanted, setWanted] = useState(""), [logY, setLogY] = useState(false), [weight, setWeight] = useState(0);
  const [zoom, setZoom] = useState(null), [most, setMost] = useState(CHARTS);
  const close = useClose(feed, zoom);
  const all = drawable(feed.series.value), names = all.filter(matcher(wanted));
  if (!all.length) return html`<p class="quiet empty">No curves yet. A curve needs at least two values of a metric.</p>`;
  return html`<section id="curves"><h2 class="unseen">Curves</h2>
    <div class="controls">
      <label>metrics <input id="metrics" type="search" placeholder="all" value=${wanted} onInput=${event => setWanted(event.target.value)} /></label>
      <label>smooth <input id="weight" type="range" min="0" max="0.98" step="0.02" value=${weight} onInput=${event => setWeight(Number(event.target.value))} /></label>
      <button type="button" id="log-y" aria-pressed=${String(logY)} onClick=${() => setLogY(!logY)}>log y</button>
      ${zoom && html`<button type="button" id="unzoom" onClick=${() => setZoom(null)}>${`${short(zoom[0])} – ${short(zoom[1])} ×`}</button>`}
      <span class="quiet wide-only">drag to zoom, double-click to reset</span>
    </div>
    <${Charts} feed=${feed} names=${names.slice(0, most)} weight=${weight} logY=${logY} zoom=${zoom} setZoom=${setZoom} close=${close} />
    ${names.length > most && html`<p><button type="button" onClick=${() => setMost(most + CHARTS)}>${`Show more of ${names.length} metrics`}</button></p>`}
  </section>`;
}
