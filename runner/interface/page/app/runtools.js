// What stands above the table of all runs: states, columns, kept views, and what is done to selected runs.
import { Hooks, html } from "./lib.js";
import { describe, tagsOf } from "./about.js";
import { csv } from "./csv.js";
import { matching } from "./filter.js";
import { address, change } from "./route.js";
import { refresh } from "./store.js";
import { kind, words } from "./text.js";

const { useEffect, useMemo, useRef, useState } = Hooks;
const VIEWS = "recipe.views";

/** A button for each state that some run is in; it filters by it, and keeps the rest of the filter. */
export function Chips({ all, matched, query, setQuery }) {
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

/** The choice of columns. */
export function Columns({ all, columns, auto }) {
  const pick = (of, name) => {
    const now = new Set(columns[of]);
    if (!now.delete(name)) now.add(name);
    const next = { ...columns, [of]: [...now] };
    change({ cols: JSON.stringify([next.inputs, next.metrics]) });
  };
  const box = (of, name) => html`<label key=${name}><input type="checkbox" checked=${columns[of].includes(name)} onChange=${() => pick(of, name)} /> ${name}</label>`;
  const list = (title, of, names) => names.length > 0 && html`<fieldset><legend>${title}</legend>${names.slice(0, 60).map(name => box(of, name))}</fieldset>`;
  return html`<${Menu} id="columns" name="Columns">
    ${list("Metrics (best value)", "metrics", [...new Set([...all.metrics, ...columns.metrics])])}
    ${list("Inputs that differ", "inputs", [...new Set([...all.inputs, ...columns.inputs])])}
    ${!auto && html`<button type="button" onClick=${() => change({ cols: null })}>Automatic</button>`}
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

/** Addresses of this table that were kept by a name, in this browser. */
export function Views() {
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
    <form class="controls" onSubmit=${save}><input id="view-name" aria-label="name of this view" placeholder="View name" value=${name} onInput=${event => setName(event.target.value)} /><button>Save</button></form>
    <p class="quiet">To share a view, send its address. It contains filter, columns, order and baseline.</p>
  <//>`;
}

/** Hand out what is shown as a CSV file. */
export function download(shown) {
  const url = URL.createObjectURL(new Blob([csv(shown)], { type: "text/csv" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = "runs.csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** What is done to the runs that are selected. */
export function Selected({ view, all, tell }) {
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
    <button type="button" id="archive-selected" onClick=${() => each(() => ({ archived: !back })).then(view.clear)}>${back ? "Unarchive" : "Archive"}</button>
    <button type="button" class="plain" onClick=${view.clear}>Clear</button>
  </div>`;
}
