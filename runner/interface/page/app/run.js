// One run: how it goes, what it reported, printed and made, and what can be asked of it.
import { Hooks, html } from "./lib.js";
import { json } from "./api.js";
import { address, go } from "./route.js";
import { bare, kind, readable, sign, span, value, words } from "./text.js";
import { Feed, isOver, ordered } from "./feed.js";
import { Graph } from "./graph.js";
import { Curves, drawable } from "./charts.js";
import { Logs } from "./logs.js";
import { Outputs, Samples } from "./outputs.js";
import { About } from "./about.js";

const { useEffect, useMemo, useState } = Hooks;
const ROWS = 200;
const SURE = 4000;

/** Buttons for what can be asked of the run now. */
function Actions({ feed, run, tell }) {
  const [busy, setBusy] = useState(false), [sure, setSure] = useState(false);
  useEffect(() => {
    if (!sure) return undefined;
    const timer = setTimeout(() => setSure(false), SURE);
    return () => clearTimeout(timer);
  }, [sure]);
  const does = async verb => {
    if (verb === "cancel" && !sure) {
      setSure(true);
      return;
    }
    setBusy(true);
    tell(null);
    try {
      const done = await json(`${feed.path}/${verb}`, { body: {} });
      if (verb === "retry") go({ run: done.run });
      else await feed.refresh();
    } catch (error) {
      tell(error);
    }
    setSure(false);
    setBusy(false);
  };
  const button = (label, verb, of = "") => html`<button type="button" class=${of} data-verb=${verb} disabled=${busy} onClick=${() => does(verb)}>${label}</button>`;
  const resumes = run.state === "PAUSED" || run.request === "pause" || run.word === "NEEDS_RECOVERY";
  if (isOver(run)) return html`<p class="controls" id="actions">${button("Run again", "retry")}</p>`;
  return html`<p class="controls" id="actions">
    ${resumes ? button("Resume", "resume", "main") : button("Pause", "pause")}
    ${button(sure ? "Really cancel?" : "Cancel", "cancel", "stop")}
  </p>`;
}

/** Where else its numbers can be looked at; only addresses of the web are links. */
function Links({ links }) {
  if (!links.length) return null;
  const to = each => (/^https?:\/\//.test(each)
    ? html`<a href=${each} rel="noopener noreferrer" target="_blank">${each}</a>`
    : html`<code>${each}</code>`);
  return html`<p class="facts" id="links">
    ${links.map((each, n) => html`<span key=${n}>${n ? " · " : ""}${`${each.name} of ${each.step}: `}${to(each.to)}</span>`)}
  </p>`;
}

function Head({ feed, run, tell }) {
  const [now, setNow] = useState(Date.now());
  const over = isOver(run), of = kind(run.word);
  useEffect(() => {
    if (over) return undefined;
    const timer = setInterval(() => setNow(Date.now()), 1000);
    return () => clearInterval(timer);
  }, [over]);
  const took = span(Math.max(0, ((run.ended ? Date.parse(run.ended) : now) - Date.parse(run.created)) / 1000));
  const facts = [
    new Date(run.created).toLocaleString(),
    run.state === "QUEUED" ? "waits for a worker" : (over ? "took " : "for ") + took,
    run.provider, run.user, run.preset && "preset " + run.preset, run.reason, run.cost ? "$" + run.cost.toFixed(2) : "",
  ].filter(Boolean);
  const { percent, step, total, eta } = run.progress;
  return html`<header class="run-head">
    <a class="back" href="#">‹ all runs</a>
    <div class="title-row"><h1>
      <span class=${"chip " + of} id="chip">${sign(of) + " " + words(run.word) + (run.request ? `, ${run.request} asked` : "")}</span>
      ${" "}<span id="name">${run.name || run.recipe}</span>
    </h1><${Actions} feed=${feed} run=${run} tell=${tell} /></div>
    <p class="facts" id="facts">${run.name ? run.recipe + " · " : ""}<code>${run.id}</code>${facts.map(each => " · " + each)}</p>
    <${Links} links=${run.links} />
    <${About} run=${run} changed=${() => feed.refresh()} tell=${tell} />
    <div class=${"bar-of " + of} role="progressbar" aria-valuemin="0" aria-valuemax="100" aria-valuenow=${percent ?? 0} aria-label="progress" id="bar">
      <span style=${{ width: (percent ?? 0) + "%" }}></span>
    </div>
    <p class="quiet" id="tally">${total === null ? "" : `${step}/${total} steps finished` + (eta && !over ? `, about ${span(eta)} left` : "")}</p>
  </header>`;
}

function Failures({ steps, open }) {
  const failures = ordered(steps).filter(([, each]) => each.state === "FAILED");
  if (!failures.length) return null;
  return html`<section id="failed"><h2>What failed</h2>
    ${failures.slice(0, 20).map(([id, each]) => html`<article class="failure" key=${id}>
      <h3>✗ ${readable(id)} <small>${each.reason}</small></h3>
      ${each.detail && html`<p>${each.detail}</p>`}
      <button type="button" onClick=${() => open(id)}>its log</button>
    </article>`)}
  </section>`;
}

function Steps({ run, steps, open }) {
  if (!steps.size && !run.graph.length) return null;
  const all = ordered(steps);
  return html`<section id="steps"><h2>Steps</h2>
    <div class="scroll" tabindex="0" role="region" aria-label="graph of the steps">
      <${Graph} run=${run} steps=${steps} open=${step => open([...steps.keys()].reverse().find(id => bare(id) === step) || "")} />
    </div>
    <details id="each"><summary>each step</summary>
      <div class="scroll" tabindex="0" role="region" aria-label="steps"><table>
        <thead><tr>${["step", "state", "tries", "where", "why"].map(name => html`<th scope="col" key=${name}>${name}</th>`)}</tr></thead>
        <tbody>${all.slice(0, ROWS).map(([id, each]) => html`<tr key=${id}>
          <th scope="row">${readable(id)}</th>
          <td><span class=${"sign " + kind(each.state)}>${sign(kind(each.state))}</span>${words(each.state)}</td>
          <td>${each.attempts || ""}</td><td>${each.host}</td><td>${each.reason}</td>
        </tr>`)}</tbody>
      </table></div>
      <p class="quiet">${all.length > ROWS ? `the first ${ROWS} of ${all.length}` : ""}</p>
    </details>
  </section>`;
}

function Inputs({ inputs }) {
  if (!Object.keys(inputs).length) return null;
  return html`<section id="given"><h2>Inputs</h2>
    <div class="scroll" tabindex="0" role="region" aria-label="inputs"><table><tbody>
      ${Object.entries(inputs).map(([name, each]) => html`<tr key=${name}><th scope="row">${name}</th><td>${value(each)}</td></tr>`)}
    </tbody></table></div>
  </section>`;
}

/** The view of a run; `tell` shows an error. */
export function Run({ id, tell }) {
  const feed = useMemo(() => new Feed(id), [id]);
  const [chosen, choose] = useState("");
  useEffect(() => {
    // A tab that is not looked at holds no stream: a browser has six connections for a server.
    const turned = () => (document.hidden ? feed.stop() : feed.start());
    choose("");
    feed.start();
    document.addEventListener("visibilitychange", turned);
    return () => {
      document.removeEventListener("visibilitychange", turned);
      feed.stop();
    };
  }, [feed]);
  const run = feed.run.value, steps = feed.steps.value, error = feed.error.value;
  useEffect(() => {
    document.title = run ? `${sign(kind(run.word))} ${run.name || run.recipe} · recipe` : "recipe";
  }, [run?.word, run?.name, run?.recipe]);
  if (error) return html`<p class="failure" role="alert">${error.message}</p><a class="back" href=${address({})}>‹ all runs</a>`;
  if (!run) return html`<p class="quiet" role="status">…</p>`;
  const open = step => {
    choose(step);
    requestAnimationFrame(() => document.getElementById("logs")?.scrollIntoView({ block: "start" }));
  };
  const series = feed.series.value, artifacts = feed.artifacts.value;
  return html`<article id="run">
    <${Head} feed=${feed} run=${run} tell=${tell} />
    <${Failures} steps=${steps} open=${open} />
    <${Steps} run=${run} steps=${steps} open=${open} />
    ${drawable(series).length > 0 && html`<${Curves} series=${series} failed=${step => steps.get(step)?.state === "FAILED"} />`}
    <${Samples} feed=${feed} artifacts=${artifacts} />
    <${Logs} feed=${feed} steps=${steps} chosen=${chosen} choose=${choose} />
    <${Outputs} feed=${feed} artifacts=${artifacts} tell=${tell} />
    <${Inputs} inputs=${run.inputs} />
  </article>`;
}
