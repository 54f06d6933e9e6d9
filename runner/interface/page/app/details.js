// The tab of details: each step with why it ran, what the run was given, with what it was carried out, and everything that happened.
import { Hooks, html } from "./lib.js";
import { json } from "./api.js";
import { addressOf } from "./route.js";
import { kind, readable, sign, span, words } from "./text.js";
import { ordered } from "./feed.js";
import { Environment } from "./environment.js";
import { Inputs } from "./inputs.js";

const { useEffect, useRef, useState } = Hooks;
const ROWS = 200;
const SOON = 1000;
const HEADS = ["step", "state", "attempts", "started", "took", "host", "why it ran"];

/** A moment in the reader's own time. */
function clock(moment) {
  return moment ? new Date(moment).toLocaleTimeString() : "";
}

function Steps({ run, steps, why }) {
  if (!steps.size) return null;
  const all = ordered(steps);
  return html`<section id="each"><h2>Steps</h2>
    <div class="scroll" tabindex="0" role="region" aria-label="steps"><table class="stacked">
      <thead><tr>${HEADS.map(name => html`<th scope="col" key=${name}>${name}</th>`)}</tr></thead>
      <tbody>${all.slice(0, ROWS).map(([id, each]) => html`<tr key=${id}>
        <th scope="row">${each.attempts ? html`<a href=${addressOf(run.id, "log", { step: id })}>${readable(id)}</a>` : readable(id)}</th>
        <td data-head="state"><span><span class=${"sign " + kind(each.state)}>${sign(kind(each.state))}</span>${words(each.state)}</span></td>
        <td data-head="attempts" class="number">${each.attempts || ""}</td><td data-head="started">${clock(each.began)}</td>
        <td data-head="took" class="number">${typeof each.seconds === "number" ? span(each.seconds) : ""}</td><td data-head="host">${each.host}</td>
        <td data-head="why it ran">${(why[id] || []).join("; ") || each.reason}</td>
      </tr>`)}</tbody>
    </table></div>
    ${all.length > ROWS && html`<p class="quiet">Showing ${ROWS} of ${all.length} steps.</p>`}
  </section>`;
}

/** The newest events of a run; read again when there are more. */
function useEvents(feed, seq) {
  const [events, setEvents] = useState([]), due = useRef(0), last = useRef(seq);
  last.current = seq;
  useEffect(() => {
    due.current ||= setTimeout(async () => {
      due.current = 0;
      const found = await json(`${feed.path}/events?after=${Math.max(0, last.current - ROWS)}`).catch(() => null);
      if (found) setEvents(found.events.reverse());
    }, events.length ? SOON : 0);
  }, [feed, seq]);
  useEffect(() => () => clearTimeout(due.current), []);
  return events;
}

function Events({ feed, run }) {
  const events = useEvents(feed, run.seq);
  return html`<section id="events"><h2>Events</h2>
    <div class="scroll tall" tabindex="0" role="region" aria-label="events"><table><tbody>
      ${events.map(each => html`<tr key=${each.seq}><td class="quiet">${clock(each.at)}</td><th scope="row">${each.subject === "step" ? readable(each.id) : each.subject}</th>
        <td>${each.before === each.after ? "" : words(each.after)}</td><td>${each.reason}</td></tr>`)}
    </tbody></table></div>
    ${run.seq > ROWS && html`<p class="quiet">Showing the last ${ROWS} of ${run.seq} events.</p>`}
  </section>`;
}

/** The tab. */
export function Details({ feed, run }) {
  return html`<${Steps} run=${run} steps=${feed.steps.value} why=${feed.why.value} /><${Inputs} feed=${feed} /><${Environment} feed=${feed} run=${run} /><${Events} feed=${feed} run=${run} />`;
}
