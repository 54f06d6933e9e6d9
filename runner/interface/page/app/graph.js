// The graph of the steps of a run, from left to right by the longest way to what needs nothing.
import { html } from "./lib.js";
import { bare, kind, sign, span, words } from "./text.js";
import { isOver, ordered } from "./feed.js";

const [WIDTH, HEIGHT, ACROSS, DOWN] = [196, 84, 56, 22];
const MOST = 200;
const WORST = ["failed", "running", "blocked", "cancelled", "other", "waiting", "done", "fresh", "skipped"];
const SHARES = ["failed", "done", "fresh", "running", "blocked", "cancelled", "other", "waiting", "skipped"];

/** By step of the recipe, how many of its instances are of which kind. */
export function tallied(run, steps) {
  const found = new Map(run.graph.map(each => [each.step, each.fresh ? { fresh: each.fresh } : {}]));
  const most = new Map(run.graph.map(each => [each.step, each.instances]));
  const sum = tally => Object.values(tally).reduce((a, b) => a + b, 0);
  for (const [id, each] of ordered(steps)) {
    const tally = found.get(bare(id)) || {}, of = kind(each.state);
    // What was fresh before the run began is counted already, whether it has a row or not.
    if (each.state !== "FRESH" || sum(tally) < (most.get(bare(id)) ?? Infinity)) tally[of] = (tally[of] || 0) + 1;
    found.set(bare(id), tally);
  }
  for (const { step, instances } of run.graph) {
    const tally = found.get(step), left = instances - sum(tally);
    const rest = isOver(run) ? "skipped" : "waiting";
    if (left > 0) tally[rest] = (tally[rest] || 0) + left;
  }
  return found;
}

/** How many steps are in each kind of state, in words. */
export function inWords(run, steps) {
  const all = {};
  for (const counts of tallied(run, steps).values()) for (const [of, count] of Object.entries(counts)) all[of] = (all[of] || 0) + count;
  return SHARES.filter(of => all[of]).map(of => `${all[of]} ${of}`).join(", ");
}

function placed(graph) {
  const depth = new Map(), rows = [], places = new Map();
  for (const { step, needs } of graph) {
    const n = 1 + Math.max(-1, ...needs.map(each => depth.get(each) ?? -1));
    depth.set(step, n);
    (rows[n] ||= []).push({ step, needs });
  }
  rows.forEach((row, n) => {
    const centre = each => {
      const found = each.needs.map(need => places.get(need)).filter(Boolean).map(place => place.y);
      return found.length ? found.reduce((a, b) => a + b) / found.length : Infinity;
    };
    if (n) row.sort((a, b) => (centre(a) - centre(b)) || 0);
    row.forEach((each, m) => places.set(each.step, { x: n * (WIDTH + ACROSS) + 2, y: m * (HEIGHT + DOWN) + 2 }));
  });
  const high = Math.max(0, ...rows.map(row => row.length));
  const width = Math.max(0, rows.length * (WIDTH + ACROSS) - ACROSS + 4);
  return { places, width, height: Math.max(0, high * (HEIGHT + DOWN) - DOWN + 4) };
}

const cut = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);

/** What one instance of a step does now, or what it did. */
function doing(state) {
  const { step, total, percent } = state.progress || {}, reported = state.values || {};
  const at = reported.step ?? step, of = reported.max_steps ?? reported.total_steps ?? total;
  if (state.state === "RUNNING" && Number.isFinite(at)) return `running, ${at}${of ? "/" + of : ""}`;
  if (state.state === "RUNNING") return "running" + (state.reason ? ", " + state.reason : "") + (percent ? `, ${Math.round(percent)} %` : "");
  if (state.state === "FAILED") return "failed" + (state.reason ? ", " + state.reason : "");
  return words(state.state) + (typeof state.seconds === "number" && state.state === "DONE" ? ", " + span(state.seconds) : "");
}

/** Why the instances of a step ran, in short: what changed, and of how many. */
function reasonOf(ids, why) {
  const all = ids.flatMap(id => why[id] || []), different = [...new Set(all)];
  return different.length ? different[0] + (different.length > 1 ? `, and ${different.length - 1} more` : "") : "";
}

function Box({ step, instances, at: { x, y }, counts, states, reason, open }) {
  const worst = WORST.find(of => counts[of]) || "waiting";
  const tally = SHARES.filter(of => counts[of]).map(of => [of, counts[of]]);
  const alone = instances === 1 && states.length < 2;
  const text = alone ? (states.length ? doing(states[0]) : worst) : tally.map(([of, count]) => count + " " + of).join(", ");
  const percent = alone && states[0]?.state === "RUNNING" ? states[0].progress?.percent : null;
  const shares = typeof percent === "number" ? [["running", percent], ["waiting", 100 - percent]] : tally;
  const all = shares.reduce((sum, [, count]) => sum + count, 0) || 1;
  let at = x + 10;
  const parts = shares.map(([of, count]) => {
    const width = (WIDTH - 20) * count / all, begin = at;
    at += width;
    return html`<rect class=${"part " + of} x=${begin} y=${y + 68} width=${width} height="6" rx="2" />`;
  });
  const pressed = event => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    open(step);
  };
  const name = sign(worst) + " " + cut(step, 20) + (instances > 1 ? " ×" + instances : "");
  return html`<g class=${worst} role="button" tabindex="0" aria-label=${`${name} ${cut(text, 28)}${reason ? " " + cut(reason, 28) : ""}${step.length > 20 ? ` (${step})` : ""}`} onClick=${() => open(step)} onKeyDown=${pressed}>
    <rect class="box" x=${x} y=${y} width=${WIDTH} height=${HEIGHT} rx="7" />
    <text x=${x + 10} y=${y + 22} class="name">${name}</text>${" "}
    <text x=${x + 10} y=${y + 40} class="quiet">${cut(text, 28)}</text>${" "}
    ${reason && html`<text x=${x + 10} y=${y + 58} class="quiet">${cut(reason, 28)}<title>${reason}</title></text>`}
    ${parts}
  </g>`;
}

/** The graph; `why` has by step what had changed, and `open` is called with the step of a box. */
export function Graph({ run, steps, why, open }) {
  const ids = new Map();
  for (const id of steps.keys()) ids.set(bare(id), [...(ids.get(bare(id)) || []), id]);
  const tallies = tallied(run, steps);
  const whole = run.graph.length ? run.graph : [...tallies.keys()].map(step => ({ step, needs: [], instances: 1 }));
  const graph = whole.slice(0, MOST), { places, width, height } = placed(graph);
  const edges = graph.flatMap(({ step, needs }) => needs.filter(each => places.has(each)).map(need => {
    const a = places.get(need), b = places.get(step);
    const x = a.x + WIDTH, y = a.y + HEIGHT / 2, v = b.y + HEIGHT / 2, bend = (b.x - x) / 2;
    return html`<path class="edge" d=${`M${x} ${y}C${x + bend} ${y} ${b.x - bend} ${v} ${b.x} ${v}`} />`;
  }));
  return html`<svg width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`}>
    ${edges}
    ${graph.map(({ step, instances }) => html`
      <${Box} key=${step} step=${step} instances=${instances} at=${places.get(step)} counts=${tallies.get(step) || {}} open=${open}
        states=${(ids.get(step) || []).map(id => steps.get(id))} reason=${reasonOf(ids.get(step) || [], why)} />`)}
  </svg>`;
}
