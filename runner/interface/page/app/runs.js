// The view of all runs: found, sorted, selected, and compared with a baseline.
import { Hooks, Signals, html } from "./lib.js";
import { automatic, bests, differing, direction, metricNames, sorted } from "./columns.js";
import { matching } from "./filter.js";
import { prepare } from "./members.js";
import { change, route } from "./route.js";
import { useKeys } from "./runkeys.js";
import { Head, Lines, Row } from "./runtable.js";
import { Chips, Columns, Selected, Views, download } from "./runtools.js";
import { follow, loading, rows, truncated } from "./store.js";

const { useEffect, useMemo, useRef, useState } = Hooks;
const AT_ONCE = 70;
// Held outside of the view, for a key may come before the one before it is drawn; and who comes back finds them.
const chosenRuns = Signals.signal(new Set());
Signals.effect(() => {
  const chosen = chosenRuns.value;
  for (const row of Signals.untracked(() => rows.value)) if (chosen.has(row.id)) prepare(row);
});
const openRuns = Signals.signal(new Set());
const narrow = Signals.signal(matchMedia("(max-width: 760px)").matches);
matchMedia("(max-width: 760px)").addEventListener("change", event => { narrow.value = event.matches; });

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
  useKeys(view, () => chosenRuns.value);
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
    <p class="worse" id="query-error">${error && "Invalid /regex/: " + error}</p>
    <div class="chips"><span class="quiet" role="status" id="tallied">${matched.length} of ${all.length} runs${loading.value && all.length ? ", loading…" : ""}</span>
      <${Chips} all=${all} matched=${matched} query=${query} setQuery=${setQuery} /></div>
    ${truncated.value && html`<p class="quiet">Showing the newest ${all.length} runs. <code>recipe runs</code> lists all.</p>`}
    <${Selected} view=${view} all=${all} tell=${tell} />
    ${!all.length && !loading.value && html`<p class="quiet empty">No runs yet. Start one with <a href="#new">New run</a>, or in a terminal: <code>recipe run ./recipe.yaml</code></p>`}
    ${all.length > 0 && !shown.length && html`<p class="quiet empty">No run matches the filter. <button type="button" class="plain" onClick=${() => setQuery("")}>Clear filter</button></p>`}
    ${shown.length > 0 && (narrow.value
      ? html`<ol class="run-list">${some.map(row => html`<${Lines} key=${row.id} row=${row} ...${given} />`)}</ol>`
      : html`<div class="table scroll" tabindex="0" role="region" aria-label="runs"><table id="runs"><${Head} columns=${columns} all=${names} view=${view} />
          <tbody>${some.map(row => html`<${Row} key=${row.id} row=${row} base=${base} numeric=${names.numeric} ...${given} />`)}</tbody></table></div>`)}
    ${shown.length > most && html`<p class="controls"><button type="button" ref=${end} onClick=${() => setMost(most + AT_ONCE)}>More</button></p>`}
  </section>`;
}
