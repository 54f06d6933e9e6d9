// The tab of logs: lines with numbers that are addresses, searched in the whole log, followed while the step runs.
import { Hooks, html } from "./lib.js";
import { addressOf, change, route } from "./route.js";
import { Painter } from "./ansi.js";
import { readable, visible, words } from "./text.js";
import { ordered } from "./feed.js";
import { LogFile } from "./logfile.js";

const { useEffect, useLayoutEffect, useMemo, useRef, useState } = Hooks;
const MOST = 200;
const TYPING = 250;
const WRAP = "recipe.wrap";

/** The parts of a text that contain what is looked for, in any case, and those between. */
function marked(text, find) {
  if (!find) return text;
  const found = [], low = text.toLowerCase(), wanted = find.toLowerCase();
  let from = 0;
  for (let at = low.indexOf(wanted); at >= 0 && low.length === text.length; at = low.indexOf(wanted, from)) {
    found.push(text.slice(from, at), html`<mark>${text.slice(at, at + wanted.length)}</mark>`);
    from = at + wanted.length;
  }
  return [...found, text.slice(from)];
}

/** The elements of lines.  Those that were drawn before are the same objects, so that they are not compared again. */
function useRows(lines, find, line, addressOfLine) {
  const known = useRef(new Map());
  return useMemo(() => {
    const painter = new Painter(), now = new Map();
    const rows = lines.map(each => {
      const key = JSON.stringify([each, painter.look, find, each.number === line]), parts = painter.paint(visibleLine(each.text));
      const row = known.current.get(key) || html`<div key=${each.number} id=${"L" + each.number} class=${"log-line" + (each.number === line ? " lit" : "")}>
        <a class="n" tabindex="-1" href=${addressOfLine(each.number)} aria-label=${"line " + each.number}>${each.number}</a><span>${parts.map(part => html`<span class=${part.look}>${marked(part.text, find)}</span>`)}${each.cut && html`<small> … cut</small>`}${"\n"}</span></div>`;
      now.set(key, row);
      return row;
    });
    known.current = now;
    return rows;
  }, [lines, find, line, addressOfLine]);
}

/** A line with names for characters that hide, and with its escape sequences. */
function visibleLine(text) {
  return text.split("\x1b").map(visible).join("\x1b");
}

/** Which step, attempt and node of a run the address names; the step that runs, or the worst, by default. */
function placeOf(feed, parameters) {
  const steps = feed.steps.value, number = name => Math.max(0, Math.floor(Number(parameters.get(name)) || 0));
  const known = ordered(steps).filter(([, each]) => each.attempts).map(([id]) => id);
  const named = parameters.get("step") || "";
  const step = steps.has(named) ? named : [...steps].filter(([, each]) => each.state === "RUNNING").map(([id]) => id).at(-1) || known[0] || "";
  return { path: feed.path, step, attempt: number("attempt") || steps.get(step)?.attempts || 0, node: number("node"), find: parameters.get("find") || "", line: number("line"), known };
}

function Choice({ name, label, value, options }) {
  return html`<label>${label} <select id=${"log-" + name} value=${value} onChange=${event => change({ [name]: event.target.value, line: null, ...(name === "step" ? { attempt: null, node: null } : {}) })}>
    ${options.map(([key, text]) => html`<option key=${key} value=${key}>${text}</option>`)}
  </select></label>`;
}

function upTo(count, from) {
  return Array.from({ length: count }, (_, n) => [n + from, String(n + from)]);
}

/** The text that is looked for; the address has it when one stops typing. */
function Find({ find }) {
  const [typed, setTyped] = useState(find), timer = useRef(0);
  useEffect(() => setTyped(find), [find]);
  useEffect(() => () => clearTimeout(timer.current), []);
  const type = text => {
    setTyped(text);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => change({ find: text || null, line: null }), TYPING);
  };
  return html`<label>find <input id="find" type="search" value=${typed} maxlength="400" spellcheck="false" onInput=${event => type(event.target.value)} /></label>
    <button type="button" id="errors" aria-pressed=${String(find === "error")} onClick=${() => change({ find: find === "error" ? null : "error", line: null })}>Errors</button>`;
}

/** How much of the log is shown. */
function countOf(about, lines, find) {
  if (!about) return "";
  const number = n => n.toLocaleString("en");
  if (find) return `${number(about.matches)} of ${number(about.total)} lines` + (lines.length < about.matches ? `, the first ${number(lines.length)}` : "");
  if (!about.total) return about.ended ? "No output." : "No output yet.";
  return lines.length < about.total ? `lines ${number(lines[0]?.number || 0)}–${number(lines.at(-1)?.number || 0)} of ${number(about.total)}` : `${number(about.total)} lines`;
}

/** The tab. */
export function Logs({ feed, run, tell }) {
  const place = placeOf(feed, route.value), { step, attempt, node, find, line, known } = place;
  const file = useMemo(() => new LogFile(place), [feed, step, attempt, node, find, line]);
  const [wrap, setWrap] = useState(localStorage.getItem(WRAP) !== "no");
  const box = useRef(null), atEnd = useRef(true);
  useEffect(() => {
    if (step) file.open();
    atEnd.current = !find;
    return () => file.close();
  }, [file]);
  const lines = file.lines.value, about = file.about.value;
  const addressOfLine = useMemo(() => n => addressOf(run.id, "log", { step, attempt, node: node || null, line: n }), [run.id, step, attempt, node]);
  const rows = useRows(lines, find, line, addressOfLine);
  useLayoutEffect(() => {
    const target = line && document.getElementById("L" + line);
    if (target && file.shown !== line) {
      file.shown = line;
      box.current.scrollTop = target.offsetTop - box.current.clientHeight / 3;
    } else if (!line && atEnd.current && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [lines]);
  if (!step) return html`<p class="quiet empty">No step of this run has started yet.</p>`;
  const more = work => file[work]().catch(tell);
  const turn = () => {
    localStorage.setItem(WRAP, wrap ? "no" : "yes");
    setWrap(!wrap);
  };
  const toEnd = () => {
    if (line) change({ line: null });
    else box.current.scrollTop = box.current.scrollHeight;
  };
  const attempts = feed.steps.value.get(step)?.attempts || attempt;
  return html`<section id="logs"><h2 class="unseen">Log</h2>
    <div class="controls">
      <${Choice} name="step" label="step" value=${step} options=${(known.includes(step) ? known : [step, ...known]).slice(0, MOST).map(id => [id, `${readable(id)} (${words(feed.steps.value.get(id)?.state || "")})`])} />
      ${attempts > 1 && html`<${Choice} name="attempt" label="attempt" value=${attempt} options=${upTo(attempts, 1)} />`}
      ${about?.nodes > 1 && html`<${Choice} name="node" label="node" value=${node} options=${upTo(about.nodes, 0)} />`}
      <${Find} find=${find} />
      <button type="button" id="wrap" aria-pressed=${String(wrap)} onClick=${turn}>Wrap</button>
      <button type="button" id="to-end" onClick=${toEnd}>To the end</button>
      <span id="logged" class="quiet" role="status">${file.note.value || countOf(about, lines, find)}</span>
    </div>
    <div id="text" ref=${box} class=${"log" + (wrap ? " wrap" : "")} tabindex="0" role="region" aria-label="what the step printed"
      onScroll=${({ target }) => { atEnd.current = target.scrollHeight - target.scrollTop - target.clientHeight < 30; }}>
      ${!find && lines[0]?.number > 1 && html`<button type="button" class="plain" id="earlier" onClick=${() => more("earlier")}>Earlier lines</button>`}
      ${rows}
      ${about && !find && lines.length > 0 && lines.at(-1).number < about.total && html`<button type="button" class="plain" id="later" onClick=${() => more("later")}>Later lines</button>`}
    </div>
  </section>`;
}
