// The rows of the table of all runs, and on a phone the lines that stand for them.
import { html } from "./lib.js";
import { direction, family, sorted } from "./columns.js";
import { address } from "./route.js";
import { ago, kind, readable, short, sign, span, value, words } from "./text.js";

/** A number, text or object of a cell. */
function written(each) {
  if (each === undefined || each === null) return html`<span class="none" aria-label="none">·</span>`;
  return typeof each === "number" ? short(each) : value(each);
}

/** The value of an input; of a sweep those of its trials, as a range of numbers or their count. */
function input(leaf, name) {
  if (leaf.inputs[name] !== undefined || !leaf.trials?.length) return written(leaf.inputs[name]);
  const tried = [...new Set(leaf.trials.map(each => each.inputs[name]).filter(each => each !== undefined))];
  if (tried.length < 2) return written(tried[0]);
  const numbers = tried.every(each => typeof each === "number"), all = tried.map(value).join(", ");
  return html`<span class="quiet" title=${all}>${numbers ? `${short(Math.min(...tried))} … ${short(Math.max(...tried))}` : `${tried.length} values`}</span>`;
}

function Sparkline({ curve }) {
  if (!curve) return null;
  const points = curve.values;
  const low = Math.min(...points), high = Math.max(...points), wide = 72, tall = 18;
  const at = (y, n) => `${(n * wide / (points.length - 1)).toFixed(1)} ${(1 + (tall - 2) * (1 - (high > low ? (y - low) / (high - low) : 0.5))).toFixed(1)}`;
  return html`<svg class="spark" width=${wide} height=${tall} role="img" aria-label=${"curve of " + curve.metric}><title>${curve.metric}</title><path d=${"M" + points.map(at).join("L")} /></svg>`;
}

function Metric({ leaf, name, best, base }) {
  const metric = leaf.metrics[name];
  if (!metric) return html`<td class="number">${written(undefined)}</td>`;
  const isBest = typeof metric.best === "number" && metric.best === best;
  const where = `last ${written(metric.last)} of ${metric.n ?? "?"}` + (metric.step_of_best !== null ? `, best at step ${metric.step_of_best}` : "");
  const from = base?.metrics[name]?.best, differs = typeof from === "number" && leaf !== base && typeof metric.best === "number";
  const delta = differs ? metric.best - from : 0;
  const better = metric.better === "max" ? delta > 0 : delta < 0;
  return html`<td class=${"number" + (isBest ? " best" : "")} title=${where}>
    ${written(metric.best)}${isBest && html`<span class="unseen"> best</span>`}
    ${differs && delta !== 0 && html`<small class=${better ? "good" : "worse"}>${(delta > 0 ? "+" : "−") + short(Math.abs(delta))}</small>`}
  </td>`;
}

function State({ leaf }) {
  const of = kind(leaf.word || leaf.state), word = words(leaf.word || leaf.state);
  return html`<span class=${"sign " + of} aria-hidden="true">${sign(of)}</span><span class=${of === "done" ? "unseen" : "word " + of}>${word}</span>`;
}

function label(row) {
  return row.name || row.recipe;
}

/** The run's own cells beside its name: recipe, id, preset, tags. */
function Beside({ row }) {
  return html`<small>${row.name ? row.recipe + " · " : ""}${row.id.slice(-6)}${row.preset ? " · " + row.preset : ""}</small>
    ${row.tags.map(each => html`<span class="tag" key=${each}>#${each}</span>`)}
    ${row.archived && html`<span class="tag">archived</span>`}
    ${row.note && html`<span class="note-sign" title=${row.note} role="img" aria-label=${"note: " + row.note}>✎</span>`}`;
}

/** A run, and its trials while it is open. */
export function Row({ row, columns, numeric, best, base, view, now }) {
  const chosen = view.chosen.has(row.id), pinned = view.pin === row.id, open = view.open.has(row.id);
  const baseline = base && family(base) === family(row) ? base : null;
  const cells = leaf => html`
    ${columns.inputs.map(name => html`<td key=${"i" + name} class=${numeric.has(name) ? "number" : "text"}>${input(leaf, name)}</td>`)}
    ${columns.metrics.map(name => html`<${Metric} key=${"m" + name} leaf=${leaf} name=${name} best=${best.get(family(row) + "\n" + name)} base=${baseline} />`)}`;
  return html`<tr data-run=${row.id} class=${(chosen ? "chosen " : "") + (pinned ? "pinned" : "")}>
      <td class="tick"><input type="checkbox" checked=${chosen} aria-label=${"select " + label(row) + " " + row.id} onChange=${() => view.select(row.id)} /></td>
      <th scope="row"><div class="run-cell">
        <button type="button" class="star" aria-pressed=${String(pinned)} aria-label=${"baseline " + row.id} title="baseline" onClick=${() => view.pinTo(row.id)}>${pinned ? "★" : "☆"}</button>
        <a class="row" href=${address({ run: row.id })}>${label(row)}</a> <${Beside} row=${row} />
        ${row.trials.length > 0 && html`<button type="button" class="fold" aria-expanded=${String(open)} onClick=${() => view.fold(row.id)}>${open ? "▾" : "▸"} ${row.trials.length} trials</button>`}
      </div></th>
      <td><${State} leaf=${row} />${row.request && html`<small>${row.request} requested</small>`}</td>
      <td class="when" title=${row.created}>${ago(row.at, now)}</td>
      <td class="number">${span(Math.max(0, ((row.over ?? now) - row.at) / 1000))}</td>
      ${cells(row)}
      <td class="curve"><${Sparkline} curve=${row.curve} /></td>
    </tr>
    ${open && sorted(row.trials, view.sort, view.descending).map(trial => html`<tr key=${trial.id} class="trial">
      <td></td><th scope="row"><span class="branch">└</span>${readable(trial.id)}</th><td><${State} leaf=${trial} /></td><td></td><td></td>${cells(trial)}<td></td>
    </tr>`)}`;
}

/** The heads of all columns, which sort. */
export function Head({ columns, all, view }) {
  const head = (column, text, of = "", note = "") => {
    const is = view.sort === column, direction_ = is ? (view.descending ? "descending" : "ascending") : undefined;
    return html`<th scope="col" key=${column} class=${of} aria-sort=${direction_}>
      <button type="button" title=${text} onClick=${() => view.sortBy(column)}><span class="head">${text}</span>${note && html` <small>${note}</small>`}${is ? (view.descending ? " ↓" : " ↑") : ""}</button>
    </th>`;
  };
  return html`<thead><tr>
    <th scope="col"><span class="unseen">select</span></th>
    ${head("run", "Run")}${head("status", "Status")}${head("created", "Created")}${head("took", "Took", "number")}
    ${columns.inputs.map(name => head("i." + name, name, all.numeric.has(name) ? "number" : ""))}
    ${columns.metrics.map(name => head("m." + name, name, "number", direction(all.rows, name)))}
    <th scope="col">Curve</th>
  </tr></thead>`;
}

/** On a phone a run is two lines. */
export function Lines({ row, columns, best, view, now }) {
  const of = kind(row.word), chosen = view.chosen.has(row.id), open = view.open.has(row.id);
  const shown = leaf => columns.inputs.filter(name => leaf.inputs[name] !== undefined).map(name => `${name}=${typeof leaf.inputs[name] === "number" ? short(leaf.inputs[name]) : value(leaf.inputs[name])}`).join(" ");
  const main = leaf => columns.metrics.find(name => typeof leaf.metrics[name]?.best === "number");
  const number = (leaf, name = main(leaf)) => name && html`<span class="main-metric">${name} <b class=${leaf.metrics[name].best === best.get(family(row) + "\n" + name) ? "best" : ""}>${short(leaf.metrics[name].best)}</b></span>`;
  return html`<li data-run=${row.id} class=${(chosen ? "chosen " : "") + (view.pin === row.id ? "pinned" : "")}>
    <input type="checkbox" checked=${chosen} aria-label=${"select " + label(row) + " " + row.id} onChange=${() => view.select(row.id)} />
    <div class="lines">
      <div class="line"><span><span class=${"sign " + of} aria-hidden="true">${sign(of)}</span><span class="unseen">${words(row.word)}</span>
        ${view.pin === row.id && "★ "}<a class="row" href=${address({ run: row.id })}>${label(row)}</a> <${Beside} row=${row} /></span>
        <small>${ago(row.at, now)}</small></div>
      <div class="line"><small>${shown(row) || (of === "failed" ? row.reason : "")}</small>${number(row)}</div>
    </div>
    ${row.trials.length > 0 && html`<button type="button" class="fold" aria-expanded=${String(open)} aria-label=${`${row.trials.length} trials`} onClick=${() => view.fold(row.id)}>${open ? "▾" : "▸"} ${row.trials.length}</button>`}
    ${open && html`<ol class="trials">${sorted(row.trials, view.sort, view.descending).map(trial => html`<li key=${trial.id}>
      <div class="line"><small><${State} leaf=${trial} /> ${readable(trial.id)}</small>${number(trial)}</div></li>`)}</ol>`}
  </li>`;
}
