// What costs money now, who carries out runs, which runs wait and why, and how much is kept.
import { Hooks, html } from "./lib.js";
import { json, keep, part } from "./api.js";
import { address } from "./route.js";
import { ago, bytes, span, words } from "./text.js";
import { usd } from "./money.js";
import { mayOperate } from "./me.js";

const { useEffect, useState } = Hooks;
const [EVERY, EVERY_STORES, SURE] = [3000, 60000, 5000];
const MOST = 200;
const A_YEAR = 365 * 86400 * 1000;

function Tile({ id, what, children }) {
  return html`<li class="tile" id=${id}><b>${children}</b><span>${what}</span></li>`;
}

/** A table that scrolls by itself where it is wider than the window. */
function Table({ label, heads, children }) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}><table class="wide-table"><thead><tr>
    ${heads.map(each => html`<th key=${each} scope="col">${each || html`<span class="unseen">what can be done</span>`}</th>`)}</tr></thead><tbody>${children}</tbody></table></div>`;
}

/** A text in which `this` is typed in a terminal. */
function Typed({ text }) {
  return text.split("`").map((each, n) => (n % 2 ? html`<code key=${n}>${each}</code>` : each));
}

function RunLink({ id }) {
  return html`<a href=${address({ run: id })}><code>${id}</code></a>`;
}

function since(moment) {
  return moment ? ago(Date.parse(moment), Date.now()) : "";
}

function until(moment) {
  if (!moment) return "no end";
  const left = Date.parse(moment) - Date.now();
  if (left <= 0) return "over";
  return left > A_YEAR ? "in over a year" : "in " + span(left / 1000);
}

/** A button that asks once more before it acts. */
function Sure({ label, about, act }) {
  const [sure, setSure] = useState(false), [busy, setBusy] = useState(false);
  useEffect(() => {
    if (!sure) return undefined;
    const timer = setTimeout(() => setSure(false), SURE);
    return () => clearTimeout(timer);
  }, [sure]);
  const press = async () => {
    if (!sure) {
      setSure(true);
      return;
    }
    setBusy(true);
    await act();
    setBusy(false);
    setSure(false);
  };
  return html`<button type="button" class="stop" aria-label=${`${sure ? `Really ${label.toLowerCase()}` : label} ${about}`} disabled=${busy} onClick=${press}>${busy ? "…" : sure ? `Really ${label.toLowerCase()}?` : label}</button>`;
}

function Leases({ leases, act }) {
  if (!leases.length) return html`<p class="quiet">No machine is rented.</p>`;
  const end = lease => act(async () => {
    const done = await json(`/leases/${part(lease.key)}/end`, { body: {} });
    if (!done.ended) throw new Error(`${lease.key} has not ended: ${done.said}`);
  });
  return html`<${Table} label="machines" heads=${["Machine", "State", "Run", "There for", "Ends", "$/h", "So far", ...(mayOperate() ? [""] : [])]}>
    ${leases.slice(0, MOST).map(each => html`<tr key=${each.key} class=${each.used === "at-work" ? "" : "unused"}><th scope="row">${each.gpus ? `${each.gpus} × ${each.gpu || "GPU"}` : "no GPU"} <small>${each.provider} <code>${each.key}</code></small></th>
      <td>${words(each.state)}<small class="why">${each.why}</small></td>
      <td>${each.run && (each.here ? html`<${RunLink} id=${each.run} />` : html`<code>${each.run}</code><small class="why">of another folder</small>`)}</td>
      <td>${since(each.since)}</td><td>${until(each.until)}</td><td class="number">${each.usd_an_hour.toFixed(2)}</td><td class="number">${usd(each.usd)}</td>
      ${mayOperate() && html`<td>${each.used === "at-work" ? html`<small>cancel its run first</small>` : html`<${Sure} label="End" about=${each.key} act=${() => end(each)} />`}</td>`}</tr>`)}
  <//>`;
}

function Workers({ workers }) {
  if (!workers.length) return html`<p class="quiet">No worker is here. In a terminal: <code>recipe worker</code></p>`;
  const takes = each => [
    each.takes_runs ? "" : "its own run alone", each.driver && "driver " + each.driver, ...Object.entries(each.labels).map(([name, value]) => `${name}=${value}`),
    ...Object.entries(each.at_most).map(([name, most]) => `at most ${most} of one ${name}`), each.any_workspace ? "of all folders" : "", each.capacity > 1 ? `${each.capacity} at once` : "",
  ].filter(Boolean).join(", ") || "any run";
  const state = each => (!each.alive ? "gone" : each.idle ? "idle" : "at work");
  return html`<${Table} label="workers" heads=${["Worker", "State", "Runs", "Takes", "Heard of"]}>
    ${workers.slice(0, MOST).map(each => html`<tr key=${each.worker}><th scope="row">${each.worker}</th>
      <td><span class=${"chip small " + (each.alive ? (each.idle ? "" : "running") : "failed")}>${state(each)}</span></td>
      <td>${each.runs.map(id => html`<div key=${id}><${RunLink} id=${id} /></div>`)}</td><td>${takes(each)}</td><td>${since(each.heard)}</td></tr>`)}
  <//>`;
}

/** The priority of a run that waits, which can be changed. */
function Priority({ run, act }) {
  const [text, setText] = useState(null), shown = text ?? String(run.priority);
  if (!mayOperate()) return run.priority;
  const save = event => {
    event.preventDefault();
    act(() => json("/runs/" + part(run.run), { method: "PATCH", body: { priority: Number(shown) } }).then(() => setText(null)));
  };
  return html`<form class="priority" onSubmit=${save}><input aria-label=${"priority of " + run.run} inputmode="numeric" size="4" value=${shown} onInput=${event => setText(event.target.value)} />
    ${text !== null && Number(text) !== run.priority && html`<button>Set</button>`}</form>`;
}

function Queue({ runs, act }) {
  if (!runs.length) return html`<p class="quiet">No run waits.</p>`;
  return html`<${Table} label="queue" heads=${["Place", "Run", "Why it waits", "Priority"]}>
    ${runs.slice(0, MOST).map(each => html`<tr key=${each.run}><td>${each.position}</td><th scope="row">${each.recipe} <small><${RunLink} id=${each.run} /> ${each.user}</small></th>
      <td>${each.waits.words}${each.waits.fix && html`<small class="why"><${Typed} text=${each.waits.fix} /></small>`}</td><td><${Priority} run=${each} act=${act} /></td></tr>`)}
  <//>${runs.length > MOST && html`<p class="quiet">${runs.length - MOST} more wait.</p>`}`;
}

function Stores({ stores }) {
  if (!stores) return html`<p class="quiet">Counting…</p>`;
  const whole = stores.parts.reduce((sum, each) => sum + each.bytes, 0);
  return html`<div class="stores"><div><${Table} label="kept here" heads=${["Kept here", "Size", "Files"]}>
      ${stores.parts.map(each => html`<tr key=${each.name}><th scope="row">${each.name}<span class="share"><span style=${{ width: (whole ? (100 * each.bytes) / whole : 0) + "%" }}></span></span></th>
        <td class="number">${each.whole ? "" : "over "}${bytes(each.bytes)}</td><td class="number">${each.files}</td></tr>`)}
    <//><p class="quiet">${bytes(stores.free)} of ${bytes(stores.total)} of the disk are free. <code>recipe gc</code> frees what no run needs.</p></div>
    <div>${stores.shared.length
      ? html`<${Table} label="shared stores" heads=${["Shared store", "Where"]}>${stores.shared.map(each => html`<tr key=${each.name}><th scope="row">${each.name}${each.default && html` <small>default</small>`}</th>
          <td><code>${each.url}</code>${each.checkpoints && html`<small class="why">with checkpoints</small>`}</td></tr>`)}<//>`
      : html`<p class="quiet">No store is shared: <code>[stores.NAME]</code> in recipe.toml names one.</p>`}</div></div>`;
}

/** Read all again and again, until `signal` ends it. */
function follow(signal, setFound, setStores) {
  keep(signal, EVERY, async () => {
    if (document.hidden) return;
    const [leases, workers, queue] = await Promise.all(["/leases", "/workers", "/queue"].map(path => json(path, { signal })));
    setFound({ leases, workers: workers.workers, queue: queue.runs });
  });
  keep(signal, EVERY_STORES, async () => setStores(await json("/stores", { signal })));
}

/** The view of machines, workers, queue and stores; `tell` shows an error. */
export function Machines({ tell }) {
  const [found, setFound] = useState(null), [stores, setStores] = useState(null), [turn, setTurn] = useState(0);
  useEffect(() => {
    document.title = "Machines · recipe";
    const control = new AbortController();
    follow(control.signal, setFound, setStores);
    return () => control.abort();
  }, [turn]);
  const act = work => {
    tell(null);
    return work().catch(tell).then(() => setTurn(n => n + 1));
  };
  if (!found) return html`<section id="machines"><h1>Machines</h1><p class="quiet" role="status">Reading…</p></section>`;
  const { leases, workers, queue } = found, idle = workers.filter(each => each.alive && each.idle).length;
  const spent = leases.leases.reduce((sum, each) => sum + each.usd, 0);
  return html`<section id="machines"><h1>Machines</h1>
    <ul class="tiles">
      <${Tile} id="an-hour" what="an hour now">${usd(leases.usd_an_hour)}<//><${Tile} id="so-far" what="so far, of what is rented">${usd(spent)}<//>
      <${Tile} id="rented" what=${leases.leases.length === 1 ? "machine" : "machines"}>${leases.leases.length}<//>
      <${Tile} id="alive" what=${`workers, ${idle} idle`}>${workers.filter(each => each.alive).length}<//><${Tile} id="waiting" what=${queue.length === 1 ? "run waits" : "runs wait"}>${queue.length}<//>
    </ul>
    <h2>Rented</h2><${Leases} leases=${leases.leases} act=${act} />
    <h2>Queue</h2><${Queue} runs=${queue} act=${act} />
    <h2>Workers</h2><${Workers} workers=${workers} />
    <h2>Stores</h2><${Stores} stores=${stores} />
  </section>`;
}
