// Queued runs, with why each waits, and the workers that take them.
import { Hooks, html } from "./lib.js";
import { json, part } from "./api.js";
import { mayOperate } from "./me.js";
import { RunLink, Table, since } from "./table.js";
import { Typed } from "./typed.js";

const { useState } = Hooks;
const MOST = 200;

/** The priority of a queued run, which can be changed. */
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

/** The queue, the next run first; `act` does what changes something, and reads all again. */
export function Queue({ runs, act }) {
  if (!runs.length) return html`<p class="quiet">No queued runs.</p>`;
  const row = each => ({
    key: each.run,
    cells: [
      each.position, html`${each.recipe} <small><${RunLink} id=${each.run} /> ${each.user}</small>`,
      html`${each.waits.words}${each.waits.fix && html`<small class="why"><${Typed} text=${each.waits.fix} /></small>`}`,
      html`<${Priority} run=${each} act=${act} />`,
    ],
  });
  return html`<${Table} label="queue" heads=${["Position", "Run", "Waiting for", "Priority"]} head=${1} rows=${runs.slice(0, MOST).map(row)} />
    ${runs.length > MOST && html`<p class="quiet">Showing ${MOST} of ${runs.length} queued runs.</p>`}`;
}

/** Which runs a worker takes, in words. */
function accepts(worker) {
  return [
    worker.takes_runs ? "" : "only its own run", worker.driver && "driver " + worker.driver,
    ...Object.entries(worker.labels).map(([name, value]) => `${name}=${value}`),
    ...Object.entries(worker.at_most).map(([name, most]) => `at most ${most} per ${name}`),
    worker.any_workspace ? "all workspaces" : "", worker.capacity > 1 ? `${worker.capacity} at once` : "",
  ].filter(Boolean).join(", ") || "any run";
}

function Standing({ worker }) {
  const [word, look] = !worker.alive ? ["lost", "failed"] : worker.idle ? ["idle", ""] : ["busy", "running"];
  return html`<span class=${"chip small " + look}>${word}</span>`;
}

/** The workers, idle ones too. */
export function Workers({ workers }) {
  if (!workers.length) return html`<p class="quiet">No workers. Start one with <code>recipe worker</code>.</p>`;
  const row = each => ({
    key: each.worker,
    cells: [each.worker, html`<${Standing} worker=${each} />`, each.runs.map(id => html`<div key=${id}><${RunLink} id=${id} /></div>`), accepts(each), since(each.heard)],
  });
  return html`<${Table} label="workers" heads=${["Worker", "State", "Runs", "Accepts", "Last seen"]} rows=${workers.slice(0, MOST).map(row)} />
    ${workers.length > MOST && html`<p class="quiet">Showing ${MOST} of ${workers.length} workers.</p>`}`;
}
