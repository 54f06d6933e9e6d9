// The table of all runs.
import { Hooks, Signals, html } from "./lib.js";
import { address, change, go, route } from "./route.js";
import { ago, kind, readable, short, sign, span, value, words } from "./text.js";
import { automatic, bests, differing, direction, family, metricNames, sorted } from "./columns.js";
import { describe, tagsOf } from "./about.js";
import { csv } from "./csv.js";
import { matching } from "./filter.js";
import { prepare } from "./members.js";
import { follow, loading, refresh, rows, truncated } from "./store.js";

const { useEffect, useMemo, useRef, useState } = Hooks;
const AT_ONCE = 70;
const VIEWS = "recipe.views";
// Held outside of the view, for a key may come before the one before it is drawn; and who comes back finds them.
const chosenRuns = Signals.signal(new Set());
Signals.effect(() => {
  const chosen = chosenRuns.value;
  for (const row of Signals.untracked(() => rows.value)) if (chosen.has(row.id)) prepare(row);
});
const openRuns = Signals.signal(new Set());
const narrow = Signals.signal(matchMedia("(max-width: 760px)").matches);
matchMedia("(max-width: 760px)").addEventListener("change", event => { narrow.value = event.matches; });

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

function Row({ row, columns, best, base, view, now }) {
  const chosen = view.chosen.has(row.id), pinned = view.pin === row.id, open = view.open.has(row.id);
  const baseline = base && family(base) === family(row) ? base : null;
  const cells = leaf => html`
    ${columns.inputs.map(name => html`<td key=${"i" + name} class=${typeof leaf.inputs[name] === "number" ? "number" : "text"}>${input(leaf, name)}</td>`)}
    ${columns.metrics.map(name => html`<${Metric} key=${"m" + name} leaf=${leaf} name=${name} best=${best.get(family(row) + "\n" + name)} base=${baseline} />`)}`;
  return html`<tr data-run=${row.id} class=${(chosen ? "chosen " : "") + (pinned ? "pinned" : "")}>
      <td class="tick"><input type="checkbox" checked=${chosen} aria-label=${"select " + label(row) + " " + row.id} onChange=${() => view.select(row.id)} /></td>
      <th scope="row"><div class="run-cell">
        <button type="button" class="star" aria-pressed=${String(pinned)} aria-label=${"baseline " + row.id} title="baseline" onClick=${() => view.pinTo(row.id)}>${pinned ? "★" : "☆"}</button>
        <a class="row" href=${address({ run: row.id })}>${label(row)}</a> <${Beside} row=${row} />
        ${row.trials.length > 0 && html`<button type="button" class="fold" aria-expanded=${String(open)} onClick=${() => view.fold(row.id)}>${open ? "▾" : "▸"} ${row.trials.length} trials</button>`}
      </div></th>
      <td><${State} leaf=${row} />${row.request && html`<small>${row.request} asked</small>`}</td>
      <td class="when" title=${row.created}>${ago(row.at, now)}</td>
      <td class="number">${span(Math.max(0, ((row.over ?? now) - row.at) / 1000))}</td>
      ${cells(row)}
      <td class="curve"><${Sparkline} curve=${row.curve} /></td>
    </tr>
    ${open && sorted(row.trials, view.sort, view.descending).map(trial => html`<tr key=${trial.id} class="trial">
      <td></td><th scope="row"><span class="branch">└</span>${readable(trial.id)}</th><td><${State} leaf=${trial} /></td><td></td><td></td>${cells(trial)}<td></td>
    </tr>`)}`;
}

function Head({ columns, all, view }) {
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
function Lines({ row, columns, best, view, now }) {
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

function Chips({ all, matched, query, setQuery }) {
  const asked = /(?:^|\s)status:(\S+)/.exec(query)?.[1]?.toLowerCase();
  const others = useMemo(() => (asked ? matching(all, query.replace(/(?:^|\s)status:\S+/g, "")).rows : matched), [all, matched, query]);
  const counts = new Map();
  for (const row of others) counts.set(row.word, (counts.get(row.word) || 0) + 1);
  const toggle = word => {
    const rest = query.replace(/(?:^|\s)status:\S+/g, "").trim();
    setQuery(asked === word ? rest : `${rest} status:${word}`.trim());
  };
  return html`${[...counts].sort().map(([word, count]) => {
    const name = word.toLowerCase();
    return html`<button type="button" key=${word} class=${"state-chip " + kind(word)} aria-pressed=${String(asked === name)} onClick=${() => toggle(name)}>${words(word)} <b>${count}</b></button>`;
  })}`;
}

/** A button that opens what is beside it; Escape and a click elsewhere close it. */
function Menu({ id, name, children }) {
  const [open, setOpen] = useState(false), box = useRef(null);
  useEffect(() => {
    if (!open) return undefined;
    const away = event => {
      if (event.type === "keydown" ? event.key === "Escape" : !box.current.contains(event.target)) {
        setOpen(false);
        if (event.type === "keydown") box.current.querySelector("button").focus();
      }
    };
    addEventListener("pointerdown", away);
    addEventListener("keydown", away);
    return () => {
      removeEventListener("pointerdown", away);
      removeEventListener("keydown", away);
    };
  }, [open]);
  return html`<div class="menu" ref=${box}>
    <button type="button" id=${id} aria-expanded=${String(open)} onClick=${() => setOpen(!open)}>${name}</button>
    ${open && html`<div class="sheet-menu" role="group" aria-label=${name}>${children}</div>`}
  </div>`;
}

function Columns({ all, columns, auto }) {
  const pick = (of, name) => {
    const now = new Set(columns[of]);
    if (!now.delete(name)) now.add(name);
    const next = { ...columns, [of]: [...now] };
    change({ cols: JSON.stringify([next.inputs, next.metrics]) });
  };
  const box = (of, name) => html`<label key=${name}><input type="checkbox" checked=${columns[of].includes(name)} onChange=${() => pick(of, name)} /> ${name}</label>`;
  const list = (title, of, names) => names.length > 0 && html`<fieldset><legend>${title}</legend>${names.slice(0, 60).map(name => box(of, name))}</fieldset>`;
  return html`<${Menu} id="columns" name="Columns">
    ${list("Metrics, their best", "metrics", [...new Set([...all.metrics, ...columns.metrics])])}
    ${list("Inputs that differ", "inputs", [...new Set([...all.inputs, ...columns.inputs])])}
    ${!auto && html`<button type="button" onClick=${() => change({ cols: null })}>By themselves</button>`}
  <//>`;
}

function storedViews() {
  try {
    const found = JSON.parse(localStorage.getItem(VIEWS) || "[]");
    return Array.isArray(found) ? found.filter(each => typeof each?.name === "string" && typeof each.hash === "string" && /^#/.test(each.hash)) : [];
  } catch {
    return [];
  }
}

function Views() {
  const [views, setViews] = useState(storedViews), [name, setName] = useState("");
  const store = next => {
    localStorage.setItem(VIEWS, JSON.stringify(next));
    setViews(next);
  };
  const save = event => {
    event.preventDefault();
    if (name.trim()) store([...views.filter(each => each.name !== name.trim()), { name: name.trim(), hash: location.hash || "#" }]);
    setName("");
  };
  return html`<${Menu} id="views" name="Views">
    ${views.map(each => html`<p class="controls" key=${each.name}><a href=${each.hash}>${each.name}</a>
      <button type="button" class="plain" aria-label=${"forget " + each.name} onClick=${() => store(views.filter(other => other !== each))}>×</button></p>`)}
    <form class="controls" onSubmit=${save}><input id="view-name" aria-label="name of this view" placeholder="name of this view" value=${name} onInput=${event => setName(event.target.value)} /><button>Save</button></form>
    <p class="quiet">Filter, columns, sort and baseline are in the address: send it to share the view.</p>
  <//>`;
}

function download(shown) {
  const url = URL.createObjectURL(new Blob([csv(shown)], { type: "text/csv" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = "runs.csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** What is done to the runs that are selected. */
function Selected({ view, all, tell }) {
  const [tag, setTag] = useState("");
  const chosen = all.filter(row => view.chosen.has(row.id));
  if (!chosen.length) return null;
  const each = async changes => {
    try {
      for (const row of chosen) {
        await describe(row.id, changes(row));
        await refresh(row.id);
      }
      tell(null);
    } catch (error) {
      tell(error);
    }
  };
  const back = chosen.every(row => row.archived);
  const add = event => {
    event.preventDefault();
    if (tag.trim()) each(row => ({ tags: [...new Set([...row.tags, ...tagsOf(tag)])] })).then(() => setTag(""));
  };
  return html`<div class="selected" role="region" aria-label="selected runs">
    <b>${chosen.length} selected</b>
    <form class="controls" onSubmit=${add}><input id="tag" aria-label="tag of the selected runs" placeholder="tag" value=${tag} onInput=${event => setTag(event.target.value)} /><button id="add-tag">Tag</button></form>
    <a class="button" id="compare-selected" href=${address({ compare: chosen.map(row => row.id).join(" "), pin: view.pin })}>Compare</a>
    <button type="button" id="archive-selected" onClick=${() => each(() => ({ archived: !back })).then(view.clear)}>${back ? "Bring back" : "Archive"}</button>
    <button type="button" class="plain" onClick=${view.clear}>Clear</button>
  </div>`;
}

function isTyping(event) {
  return event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey;
}

/** Keys of the table: / finds, j and k go down and up, x selects, c compares, p pins. */
function useKeys(view) {
  useEffect(() => {
    const pressed = event => {
      const field = document.getElementById("query");
      if (event.target === field && event.key === "Escape") {
        event.preventDefault(); // a search field would lose its text
        field.blur();
        return;
      }
      if (isTyping(event) && event.target.type !== "checkbox") return;
      const links = [...document.querySelectorAll("[data-run] a.row")];
      const holder = document.activeElement?.closest?.("[data-run]"), at = links.findIndex(each => holder?.contains(each));
      if (event.key === "/") field.focus();
      else if (event.key === "j") links[Math.min(at + 1, links.length - 1)]?.focus();
      else if (event.key === "k") links[Math.max(at - 1, 0)]?.focus();
      else if (event.key === "x" && holder) view.select(holder.dataset.run);
      else if (event.key === "c" && chosenRuns.value.size) go({ compare: [...chosenRuns.value].join(" "), pin: view.pin });
      else if (event.key === "p" && holder) view.pinTo(holder.dataset.run);
      else return;
      event.preventDefault();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  });
}

/** Columns out of the address; null where it names none. */
function ofAddress(text) {
  try {
    const [inputs, metrics] = JSON.parse(text);
    const named = each => Array.isArray(each) && each.every(name => typeof name === "string");
    return named(inputs) && named(metrics) ? { inputs, metrics } : null;
  } catch {
    return null;
  }
}

/** The view of all runs; `tell` shows an error. */
export function Runs({ tell }) {
  const parameters = route.value, query = parameters.get("q") || "", pin = parameters.get("pin") || "";
  const sort = parameters.get("sort") || "created", descending = parameters.get("up") === null;
  const chosen = chosenRuns.value, open = openRuns.value, [most, setMost] = useState(AT_ONCE);
  const [now, setNow] = useState(Date.now());
  const end = useRef(null), field = useRef(null);
  useEffect(() => {
    document.title = "Runs · recipe";
    let ends = new AbortController();
    follow(ends.signal);
    const turned = () => {
      ends.abort();
      if (document.hidden) return;
      ends = new AbortController();
      follow(ends.signal);
    };
    document.addEventListener("visibilitychange", turned);
    const clock = setInterval(() => setNow(Date.now()), 5000);
    return () => {
      clearInterval(clock);
      document.removeEventListener("visibilitychange", turned);
      ends.abort();
    };
  }, []);
  // The field keeps what is typed into it: a key may come before the one before it is drawn.
  useEffect(() => {
    if (document.activeElement !== field.current) field.current.value = query;
  }, [query]);
  const toggle = (set, id) => {
    const next = new Set(set.value);
    if (!next.delete(id)) next.add(id);
    set.value = next;
  };
  const view = {
    chosen, open, pin, sort, descending,
    select: id => toggle(chosenRuns, id),
    clear: () => { chosenRuns.value = new Set(); },
    fold: id => toggle(openRuns, id),
    pinTo: id => change({ pin: route.value.get("pin") === id ? null : id }),
    sortBy: column => change(sort === column ? { up: descending ? "" + 1 : null } : { sort: column, up: directionOf(column) }),
  };
  const all = rows.value;
  const directionOf = column => (column.startsWith("m.") && direction(all, column.slice(2)) !== "max") || column === "run" ? "1" : null;
  const { rows: matched, error } = useMemo(() => matching(all, query), [all, query]);
  const names = useMemo(() => {
    const { names: inputs, varied, numeric } = differing(matched);
    return { rows: matched, inputs, varied, numeric, metrics: metricNames(matched) };
  }, [matched]);
  const own = ofAddress(parameters.get("cols") || "");
  const columns = useMemo(() => own || automatic(names), [names, parameters.get("cols")]);
  const best = useMemo(() => bests(matched, columns.metrics), [matched, columns]);
  const base = all.find(row => row.id === pin) || null;
  const shown = useMemo(() => {
    const found = sorted(matched, sort, descending).filter(row => row !== base);
    return base ? [base, ...found] : found;
  }, [matched, sort, descending, base]);
  useEffect(() => {
    if (!end.current) return undefined;
    const watch = new IntersectionObserver(seen => seen.some(each => each.isIntersecting) && setMost(n => n + AT_ONCE), { rootMargin: "600px" });
    watch.observe(end.current);
    return () => watch.disconnect();
  }, [shown.length > most, most]);
  useKeys(view);
  useEffect(() => { window.ready = !loading.value; });
  const setQuery = next => {
    if (field.current.value !== next) field.current.value = next;
    setMost(AT_ONCE);
    change({ q: next });
  };
  const some = shown.slice(0, most), given = { columns, best, view, now };
  return html`<section id="runs-view"><h1 class="unseen">Runs</h1>
    <div class="bar-tools">
      <input id="query" type="search" aria-label="filter runs" aria-describedby="query-error" spellcheck="false" autocomplete="off" ref=${field}
        placeholder="Filter: words, lr>0.01, loss<2, status:failed, -word, /regex/   ( / )" onInput=${event => setQuery(event.target.value)} />
      <${Columns} all=${names} columns=${columns} auto=${!own} />
      <${Views} />
      <button type="button" id="csv" disabled=${!shown.length} onClick=${() => download(shown)}>CSV</button>
    </div>
    <p class="worse" id="query-error">${error && "This /regex/ cannot be read: " + error}</p>
    <div class="chips"><span class="quiet" role="status" id="tallied">${matched.length} of ${all.length} runs${loading.value && all.length ? ", reading on" : ""}</span>
      <${Chips} all=${all} matched=${matched} query=${query} setQuery=${setQuery} /></div>
    ${truncated.value && html`<p class="quiet">Only the newest ${all.length} are here; <code>recipe runs</code> lists all.</p>`}
    <${Selected} view=${view} all=${all} tell=${tell} />
    ${!all.length && !loading.value && html`<p class="quiet empty">No runs yet. <a href="#new">New run</a> starts one.</p>`}
    ${all.length > 0 && !shown.length && html`<p class="quiet empty">No run is like this. <button type="button" class="plain" onClick=${() => setQuery("")}>Show all</button></p>`}
    ${shown.length > 0 && (narrow.value
      ? html`<ol class="run-list">${some.map(row => html`<${Lines} key=${row.id} row=${row} ...${given} />`)}</ol>`
      : html`<div class="table scroll" tabindex="0" role="region" aria-label="runs"><table id="runs"><${Head} columns=${columns} all=${names} view=${view} />
          <tbody>${some.map(row => html`<${Row} key=${row.id} row=${row} base=${base} ...${given} />`)}</tbody></table></div>`)}
    ${shown.length > most && html`<p class="controls"><button type="button" ref=${end} onClick=${() => setMost(most + AT_ONCE)}>More</button></p>`}
  </section>`;
}
