// The head of a run: its state, what it is called, how far it is, and what can be asked of it.
import { Hooks, html } from "./lib.js";
import { json } from "./api.js";
import { go } from "./route.js";
import { kind, sign, span, words } from "./text.js";
import { isOver } from "./feed.js";
import { About } from "./about.js";
import { inWords } from "./graph.js";
import { mayOperate, onlyRun } from "./me.js";
import { hourly, usd } from "./money.js";

const { useEffect, useState } = Hooks;
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
  const more = html`${mayOperate() && html`<a class="button" id="like" href=${"#new&like=" + encodeURIComponent(run.id)}>Rerun with changes</a>`}
    <a class="button" id="compare-this" href=${"#compare=" + encodeURIComponent(run.id)}>Compare</a>`;
  if (!mayOperate()) return html`<p class="controls" id="actions">${more}</p>`;
  if (isOver(run)) return html`<p class="controls" id="actions">${button("Run again", "retry")}${more}</p>`;
  return html`<p class="controls" id="actions">
    ${more}${resumes ? button("Resume", "resume", "main") : button("Pause", "pause")}
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

/** The head of a run; `tell` shows an error. */
export function Head({ feed, run, tell }) {
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
    run.state === "QUEUED" ? "queued for a worker" : (over ? "took " : "for ") + took,
    run.provider, run.user, run.preset && "preset " + run.preset, run.reason, run.cost ? usd(run.cost) + " so far" : "", hourly(run) ? usd(hourly(run)) + " an hour" : "",
  ].filter(Boolean);
  const { percent, step, total, eta } = run.progress;
  return html`<header class="run-head">
    ${!onlyRun() && html`<a class="back" href="#">‹ all runs</a>`}
    <div class="title-row"><h1>
      <span class=${"chip " + of} id="chip">${sign(of) + " " + words(run.word) + (run.request ? `, ${run.request} requested` : "")}</span>
      ${" "}<span id="name">${run.name || run.recipe}</span>
    </h1><${Actions} feed=${feed} run=${run} tell=${tell} /></div>
    <p class="facts" id="facts">${run.name ? run.recipe + " · " : ""}<code>${run.id}</code>${facts.map(each => " · " + each)}</p>
    <${Links} links=${run.links} />
    <${About} run=${run} changed=${() => feed.refresh()} tell=${tell} />
    <div class=${"bar-of " + of} role="progressbar" aria-valuemin="0" aria-valuemax="100" aria-valuenow=${percent ?? 0} aria-label="progress" id="bar">
      <span style=${{ width: (percent ?? 0) + "%" }}></span>
    </div>
    <p class="quiet" id="tally">${total === null ? "" : over && run.state !== "COMPLETED" ? `${total} steps: ${inWords(run, feed.steps.value)}` : `${step}/${total} steps finished` + (eta && !over ? `, about ${span(eta)} left` : "")}</p>
  </header>`;
}
