// Several runs or trials side by side: their curves, results and inputs.
import { Hooks, html } from "./lib.js";
import { address, change, route } from "./route.js";
import { kind, short, sign, words } from "./text.js";
import { direction, family } from "./columns.js";
import { CurveSet, MOST, curveOf, differingInputs, input, membersOf, metricsOf } from "./members.js";
import { matcher } from "./find.js";
import { Key, Multiple } from "./multiple.js";
import { Against, within } from "./against.js";
import { SideBySide } from "./samples.js";
import { follow, loading, rows } from "./store.js";

const { useEffect, useMemo, useState } = Hooks;
const CHARTS = 12;
const AXES = { step: "step", elapsed: "elapsed time", at: "wall clock", seconds: "training time (time_step), s" };

function Legend({ members, metric, remove, lit, light, inside }) {
  return html`<ul class="legend" aria-label="compared">
    ${members.map(member => html`<li key=${member.key} class=${inside(member) ? "" : "out"} onMouseEnter=${() => light(member.n)} onMouseLeave=${() => light(null)}>
      <${Key} n=${member.n} />
      <a href=${address({ run: member.row.id })} class=${lit === member.n ? "lit" : ""} onFocus=${() => light(member.n)} onBlur=${() => light(null)} title=${member.row.recipe + " " + member.row.id}>${member.label}</a>
      <span class=${"sign " + kind(member.leaf.word || member.leaf.state)} title=${words(member.leaf.word || member.leaf.state)}>${sign(kind(member.leaf.word || member.leaf.state))}</span>
      ${typeof member.leaf.metrics[metric]?.best === "number" && html`<small title=${"best " + metric}>${short(member.leaf.metrics[metric].best)}</small>`}
      <button type="button" class="plain" aria-label=${"leave out " + member.label} onClick=${() => remove(member.key)}>×</button>
    </li>`)}
  </ul>`;
}

function Heads({ members }) {
  return html`<thead><tr><th scope="col"><span class="unseen">name</span></th>${members.map(member => html`<th scope="col" key=${member.key}><${Key} n=${member.n} />${member.label}</th>`)}</tr></thead>`;
}

/** The best of each metric, marked within one recipe and its sweeps, and how far from the baseline. */
function Results({ members, metrics, base }) {
  if (!metrics.length) return null;
  const leaves = members.map(member => member.leaf);
  const best = name => {
    const found = new Map();
    for (const { row, leaf } of members) {
      const metric = leaf.metrics[name];
      if (typeof metric?.best !== "number") continue;
      const known = found.get(family(row)) || { values: new Set() };
      known.values.add(metric.best);
      known.best = known.best === undefined ? metric.best : metric.better === "max" ? Math.max(known.best, metric.best) : Math.min(known.best, metric.best);
      found.set(family(row), known);
    }
    return row => (found.get(family(row))?.values.size > 1 ? found.get(family(row)).best : undefined);
  };
  const cell = (member, name, least) => {
    const metric = member.leaf.metrics[name], from = base && family(base.row) === family(member.row) ? base.leaf.metrics[name]?.best : undefined;
    if (!metric) return html`<td key=${member.key} class="number"><span class="none">·</span></td>`;
    const delta = typeof from === "number" && typeof metric.best === "number" && member !== base ? metric.best - from : 0;
    const better = metric.better === "max" ? delta > 0 : delta < 0, isBest = metric.best === least(member.row);
    return html`<td key=${member.key} class=${"number" + (isBest ? " best" : "")}>${typeof metric.best === "number" ? short(metric.best) : String(metric.best)}${isBest && html`<span class="unseen"> best</span>`}
      ${delta !== 0 && html`<small class=${better ? "good" : "worse"}>${(delta > 0 ? "+" : "−") + short(Math.abs(delta))}</small>`}</td>`;
  };
  return html`<section id="results-of"><h2>Results <small>best value of each metric${base ? ", and the difference from " + base.label : ""}</small></h2>
    <div class="scroll" tabindex="0" role="region" aria-label="results"><table><${Heads} members=${members} /><tbody>
      ${metrics.map(name => {
        const least = best(name);
        return html`<tr key=${name} data-metric=${name}><th scope="row">${name} <small>${direction(leaves, name)}</small></th>${members.map(member => cell(member, name, least))}</tr>`;
      })}
    </tbody></table></div></section>`;
}

function Inputs({ members }) {
  const [all, setAll] = useState(false);
  const names = all ? [...new Set(members.flatMap(({ leaf }) => Object.keys(leaf.inputs)))] : differingInputs(members);
  return html`<section id="inputs-of"><h2>Inputs</h2>
    <p class="controls"><label><input type="checkbox" checked=${!all} onChange=${event => setAll(!event.target.checked)} /> only inputs that differ</label></p>
    ${names.length ? html`<div class="scroll" tabindex="0" role="region" aria-label="inputs"><table><${Heads} members=${members} /><tbody>
      ${names.map(name => html`<tr key=${name}><th scope="row">${name}</th>${members.map(({ key, leaf }) => html`<td key=${key}>${leaf.inputs[name] === undefined ? html`<span class="none">·</span>` : input(leaf.inputs[name])}</td>`)}</tr>`)}
    </tbody></table></div>` : html`<p class="quiet">All inputs are the same.</p>`}
  </section>`;
}

/** The samples of two of them, side by side: the first two, or those that are chosen. */
function SamplesOf({ members }) {
  const [keys, choose] = useState(["", ""]);
  if (members.length < 2) return null;
  const at = n => members.find(each => each.key === keys[n]) || members[n], pair = [at(0), at(1)];
  const choice = n => html`<label>${n ? "right" : "left"} <select id=${n ? "right" : "left"} value=${pair[n].key} onChange=${event => choose(n ? [keys[0], event.target.value] : [event.target.value, keys[1]])}>
    ${members.map(each => html`<option key=${each.key} value=${each.key}>${each.label}</option>`)}</select></label>`;
  return html`<div class="sheets">
    <${SideBySide} key=${pair.map(each => each.key).join(" ")} one=${pair[0]} other=${pair[1]} controls=${members.length > 2 && html`${choice(0)}${choice(1)}`} />
  </div>`;
}

/** The view of what is compared; `tell` shows an error. */
export function Compare() {
  const parameters = route.value, ids = (parameters.get("compare") || "").split(" ").filter(Boolean);
  const axis = Object.hasOwn(AXES, parameters.get("axis")) ? parameters.get("axis") : "step", group = parameters.get("group") || "", pin = parameters.get("pin") || "";
  const [weight, setWeight] = useState(0), [logX, setLogX] = useState(false), [logY, setLogY] = useState(false);
  const [zoom, setZoom] = useState(null), [lit, light] = useState(null), [wanted, setWanted] = useState(""), [metric, setMetric] = useState(""), [ranges, setRanges] = useState({});
  const set = useMemo(() => new CurveSet(), []);
  useEffect(() => {
    document.title = "Compare · recipe";
    const ends = new AbortController();
    follow(ends.signal);
    return () => {
      ends.abort();
      set.stop();
    };
  }, []);
  const named = useMemo(() => membersOf(ids, rows.value).map((each, n) => ({ ...each, n })), [parameters.get("compare"), rows.value]);
  const members = useMemo(() => named.slice(0, MOST), [named]);
  const keys = members.map(each => each.key).join(" ");
  useEffect(() => {
    if (members.length) set.follow(members, axis, zoom);
  }, [keys, axis, zoom]);
  const curves = set.runs.value, names = useMemo(() => metricsOf(members, curves), [members, curves]);
  const shown = names.filter(matcher(wanted)).slice(0, CHARTS);
  const results = [...new Set([...names, ...members.flatMap(({ leaf }) => Object.keys(leaf.metrics))])];
  const main = results.includes(metric) ? metric : results.find(name => members.some(({ leaf }) => typeof leaf.metrics[name]?.best === "number")) || "";
  const inside = member => within(member, main, ranges);
  const lines = useMemo(() => new Map(shown.map(name => [name, members.filter(inside).map(member => {
    const found = curveOf(member, curves, name), points = found ? found.x.map((x, n) => [x, found.y[n]]) : [];
    return { n: member.n, label: member.label, group: group ? `${group}=${input(member.leaf.inputs[group] ?? null)}` : "", points, failed: (member.leaf.word || member.leaf.state) === "FAILED" };
  }).filter(each => each.points.length)])), [members, curves, shown.join("\n"), group, JSON.stringify(ranges), main]);
  useEffect(() => { window.compared = curves.size; });
  if (!members.length) return html`<p class="quiet empty">${loading.value ? "…" : html`Nothing to compare. Select <a href="#">runs</a> with <kbd>x</kbd>, then press <kbd>c</kbd>.`}</p>`;
  const remove = key => change({ compare: members.filter(each => each.key !== key).map(each => each.key).join(" ") });
  const base = members.find(each => each.row.id === pin || each.key === pin) || null;
  const toggle = (id, name, on, turn) => html`<button type="button" id=${id} aria-pressed=${String(on)} onClick=${() => turn(!on)}>${name}</button>`;
  const groups = differingInputs(members);
  const given = { weight, logX, logY, zoom, setZoom, isGrouped: Boolean(group), lit, axis, isTime: axis === "at", isSpan: axis === "elapsed", sync: "compare", hint: "their best values are in the table of results" };
  return html`<section id="compare"><h1>Compare ${members.length} ${members.some(each => each.leaf !== each.row) ? "trials" : "runs"}</h1>
    ${named.length > MOST && html`<p class="quiet">Showing ${MOST} of ${named.length}.</p>`}
    <div class="controls">
      <label>metrics <input id="metrics" type="search" placeholder="all" value=${wanted} onInput=${event => setWanted(event.target.value)} /></label>
      <label>smooth <input id="weight" type="range" min="0" max="0.98" step="0.02" value=${weight} onInput=${event => setWeight(Number(event.target.value))} /></label>
      ${toggle("log-y", "log y", logY, setLogY)}${toggle("log-x", "log x", logX, setLogX)}
      <label>x axis <select id="axis" value=${axis} onChange=${event => { setZoom(null); change({ axis: event.target.value === "step" ? null : event.target.value }); }}>${Object.entries(AXES).map(([name, label]) => html`<option key=${name} value=${name}>${label}</option>`)}</select></label>
      <label>average by <select id="group" value=${group} onChange=${event => change({ group: event.target.value || null })}><option value="">none</option>${groups.map(name => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>
      <label>baseline <select id="baseline" value=${base?.key || ""} onChange=${event => change({ pin: event.target.value || null })}><option value="">none</option>${members.map(each => html`<option key=${each.key} value=${each.key}>${each.label}</option>`)}</select></label>
      ${zoom && html`<button type="button" id="unzoom" onClick=${() => setZoom(null)}>${`${short(zoom[0])} – ${short(zoom[1])} ×`}</button>`}
    </div>
    <div class="compare">
      <${Legend} members=${members} metric=${main} remove=${remove} lit=${lit} light=${light} inside=${inside} />
      <div class="multiples">${shown.filter(name => lines.get(name).length).map(name => html`<${Multiple} key=${name} metric=${name} lines=${lines.get(name)} ...${given} />`)}
        ${axis !== "step" && !shown.length && html`<p class="quiet">${axis === "seconds" ? html`No run reports <code>time_step</code>, the seconds per step.` : "These runs have no recorded times."}</p>`}</div>
    </div>
    <${Against} members=${members} metrics=${results.filter(name => members.some(({ leaf }) => typeof leaf.metrics[name]?.best === "number"))} metric=${main} setMetric=${setMetric} ranges=${ranges} setRange=${(name, range) => setRanges(known => ({ ...known, [name]: range }))} lit=${lit} light=${light} />
    <${Results} members=${members} metrics=${results} base=${base} />
    <${Inputs} members=${members} />
    <${SamplesOf} members=${members} />
  </section>`;
}
