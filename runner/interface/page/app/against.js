// Inputs against a metric: parallel axes with a range on each, and a scatter.
import { Hooks, html } from "./lib.js";
import { colour } from "./curves.js";
import { differingInputs, input } from "./members.js";
import { short, value } from "./text.js";

const { useState } = Hooks;
const [WIDE, TALL, TOP, SIDE] = [620, 190, 22, 64];

/** How an axis places values: numbers by size, or by decades where they span more than two; words one below the other. */
function axisOf(name, values) {
  const there = values.filter(each => each !== undefined && each !== null);
  if (there.length && there.every(each => typeof each === "number")) {
    const low = Math.min(...there), high = Math.max(...there), log = low > 0 && high / low >= 20;
    const scale = y => (log ? Math.log(y) : y), size = scale(high) - scale(low) || 1;
    return { name, numeric: true, low, high, log, part: each => (high > low ? (scale(each) - scale(low)) / size : 0.5), ticks: [low, high].filter((each, n) => !n || high > low) };
  }
  const words = [...new Set(there.map(value))].sort();
  return { name, numeric: false, words, part: each => (words.length > 1 ? words.indexOf(value(each)) / (words.length - 1) : 0.5), ticks: words.slice(0, 12) };
}

/** A number of an axis, held between two fields; the same can be drawn with the mouse along the axis. */
function Range({ axis, range, set }) {
  const field = (n, label) => html`<input type="number" step="any" aria-label=${`${label} ${axis.name}`} placeholder=${short(n ? axis.high : axis.low)} value=${range?.[n] ?? ""}
    onInput=${event => {
      const next = [range?.[0] ?? null, range?.[1] ?? null];
      next[n] = event.target.value === "" ? null : Number(event.target.value);
      set(next[0] === null && next[1] === null ? null : next);
    }} />`;
  return html`<span class="range"><b>${axis.name}</b> ${field(0, "least")}–${field(1, "most")}</span>`;
}

/** Whether a member is within all ranges. */
export function within(member, metric, ranges) {
  return Object.entries(ranges).every(([name, range]) => {
    if (!range) return true;
    const each = name === metric ? member.leaf.metrics[metric]?.best : member.leaf.inputs[name];
    return typeof each === "number" && (range[0] === null || each >= range[0]) && (range[1] === null || each <= range[1]);
  });
}

function Parallel({ members, axes, valueOf, ranges, setRange, lit, light, inside }) {
  const [from, setFrom] = useState(null);
  const x = n => SIDE + (axes.length > 1 ? n * (WIDE - 2 * SIDE) / (axes.length - 1) : 0), y = part => TOP + (TALL - TOP - 12) * (1 - part);
  const lineOf = member => axes.map((axis, n) => [axis, valueOf(member, axis.name), n]).filter(([, each]) => each !== undefined && each !== null).map(([axis, each, n]) => `${x(n).toFixed(1)} ${y(axis.part(each)).toFixed(1)}`);
  const partAt = event => {
    const box = event.currentTarget.ownerSVGElement.getBoundingClientRect();
    return Math.min(1, Math.max(0, 1 - ((event.clientY - box.top) * TALL / box.height - TOP) / (TALL - TOP - 12)));
  };
  const valueAt = (axis, part) => (axis.log ? Math.exp(Math.log(axis.low) + part * Math.log(axis.high / axis.low)) : axis.low + part * (axis.high - axis.low));
  const ended = axis => event => {
    const to = partAt(event);
    if (from !== null && Math.abs(to - from) > 0.02) setRange(axis.name, [from, to].sort((a, b) => a - b).map(part => Number(valueAt(axis, part).toPrecision(4))));
    else setRange(axis.name, null);
    setFrom(null);
  };
  return html`<svg class="parallel" viewBox=${`0 0 ${WIDE} ${TALL}`} role="img" aria-label="Inputs and metric of each run on parallel axes. The fields below filter the runs.">
    ${members.map(member => html`<path key=${member.key} class=${"thread" + (inside(member) ? "" : " out") + (lit === member.n ? " lit" : "")} d=${"M" + lineOf(member).join("L")} style=${{ stroke: colour(member.n) }}
      onMouseEnter=${() => light(member.n)} onMouseLeave=${() => light(null)}><title>${member.label}</title></path>`)}
    ${axes.map((axis, n) => {
      const range = ranges[axis.name], edge = n === axes.length - 1 ? "end" : n ? "middle" : "start";
      const ends = range && axis.numeric ? [range[0] ?? axis.low, range[1] ?? axis.high].map(each => y(Math.min(1, Math.max(0, axis.part(each))))) : null;
      return html`<g key=${axis.name}>
        <path class="edge" d=${`M${x(n)} ${TOP}V${TALL - 12}`} />
        <text x=${x(n)} y="13" text-anchor="middle" class="name">${axis.name.slice(0, edge === "middle" ? 22 : 16)}</text>
        ${axis.ticks.map(each => html`<text key=${String(each)} class="quiet" x=${x(n) + (edge === "start" ? -6 : 6)} text-anchor=${edge === "start" ? "end" : "start"} y=${y(axis.part(each)) + 4}>${input(each).slice(0, edge === "middle" ? 14 : 8)}</text>`)}
        ${ends && html`<rect class="brush" x=${x(n) - 6} width="12" y=${ends[1]} height=${Math.max(2, ends[0] - ends[1])} />`}
        ${axis.numeric && html`<rect class="grip" x=${x(n) - 9} y=${TOP} width="18" height=${TALL - TOP - 12} onPointerDown=${event => { event.currentTarget.setPointerCapture(event.pointerId); setFrom(partAt(event)); }} onPointerUp=${ended(axis)} />`}
      </g>`;
    })}
  </svg>`;
}

function Scatter({ members, axis, metric, valueOf, lit, light, inside }) {
  const up = axisOf(metric, members.map(member => valueOf(member, metric))), x = part => 70 + part * 226, y = part => 12 + 140 * (1 - part);
  const dots = members.map(member => [member, valueOf(member, axis.name), valueOf(member, metric)]).filter(([, a, b]) => a !== undefined && typeof b === "number");
  return html`<svg class="scatter" viewBox="0 0 320 190" role="img" aria-label=${`${metric} over ${axis.name}`}>
    <path class="edge" d="M70 12V152H300" />
    ${up.ticks.map(each => html`<text key=${"y" + each} class="quiet end" x="64" y=${y(up.part(each)) + 4}>${input(each).slice(0, 9)}</text>`)}
    ${axis.ticks.map(each => html`<text key=${"x" + each} class="quiet" text-anchor="middle" x=${x(axis.part(each))} y="168">${input(each).slice(0, 12)}</text>`)}
    <text class="quiet" x="183" y="186" text-anchor="middle">${axis.name.slice(0, 30) + (axis.log ? " (log)" : "")}</text>
    ${dots.map(([member, a, b]) => html`<circle key=${member.key} class=${inside(member) ? "" : "out"} cx=${x(axis.part(a))} cy=${y(up.part(b))} r=${lit === member.n ? 7 : 5} style=${{ fill: colour(member.n) }}
      onMouseEnter=${() => light(member.n)} onMouseLeave=${() => light(null)}><title>${`${member.label}: ${short(b)}`}</title></circle>`)}
  </svg>`;
}

/** Parallel axes and a scatter of the inputs that differ; `ranges` narrows who is shown. */
export function Against({ members, metrics, metric, setMetric, ranges, setRange, lit, light }) {
  const names = differingInputs(members).slice(0, 6), [over, setOver] = useState("");
  const valueOf = (member, name) => (name === metric ? member.leaf.metrics[metric]?.best : member.leaf.inputs[name]);
  if (members.length < 2 || !names.length || !metric) return null;
  const axes = [...names, metric].map(name => axisOf(name, members.map(member => valueOf(member, name))));
  const chosen = axes.find(axis => axis.name === over) || axes[0], inside = member => within(member, metric, ranges);
  const select = (label, id, now, all, set) => html`<label><span class=${id === "over" ? "" : "unseen"}>${label}</span> <select id=${id} value=${now} onChange=${event => set(event.target.value)}>${all.map(name => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>`;
  return html`<section id="against"><h2>Inputs against ${select("metric", "against-metric", metric, metrics, setMetric)}</h2>
    <div class="against">
      <div class="scroll" tabindex="0" role="region" aria-label="parallel axes"><${Parallel} members=${members} axes=${axes} valueOf=${valueOf} ranges=${ranges} setRange=${setRange} lit=${lit} light=${light} inside=${inside} /></div>
      <div>${select("x axis", "over", chosen.name, names, setOver)}<${Scatter} members=${members} axis=${chosen} metric=${metric} valueOf=${valueOf} lit=${lit} light=${light} inside=${inside} /></div>
    </div>
    <p class="ranges">${axes.filter(axis => axis.numeric).map(axis => html`<${Range} key=${axis.name} axis=${axis} range=${ranges[axis.name]} set=${range => setRange(axis.name, range)} />`)}</p>
  </section>`;
}
