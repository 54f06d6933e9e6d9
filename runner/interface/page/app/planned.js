// What would run: steps and why, time, memory, machines and cost; and what else could be rented.
import { Hooks, html } from "./lib.js";
import { json } from "./api.js";
import { usd } from "./money.js";
import { bytes, readable, span } from "./text.js";
import { Typed } from "./typed.js";

const { useState } = Hooks;
const [SHOWN, ROWS, OFFERS] = [5, 200, 8];
const SIGNS = { run: "▶", maybe: "?", fresh: "=", restore: "↓", skip: "–" };
const WORDS = { run: "runs", maybe: "may run", fresh: "up to date", restore: "restored from cache", skip: "skipped" };

/** Why a step runs, or does not. */
function why(step) {
  return step.reasons.join("; ") || (step.answer === "run" ? "no cached result" : "");
}

/** The steps: first those that would run. */
function Steps({ steps: given }) {
  const [all, setAll] = useState(false), runs = each => ["run", "maybe"].includes(each.answer);
  const steps = [...given.filter(runs), ...given.filter(each => !runs(each))], shown = steps.slice(0, all ? ROWS : SHOWN);
  return html`<ol class="plan-steps">${shown.map(each => html`<li key=${each.id}>
      <b><span class="sign" aria-hidden="true">${SIGNS[each.answer] || "·"}</span>${readable(each.id)}</b> <small>${WORDS[each.answer] || each.answer}${each.seconds ? `, ${span(each.seconds)}` : ""}</small>
      ${why(each) && html`<small class="why">${why(each)}</small>`}
    </li>`)}</ol>
    ${!all && steps.length > SHOWN && html`<button type="button" class="plain" onClick=${() => setAll(true)}>${steps.length - SHOWN} more steps</button>`}
    ${all && steps.length > ROWS && html`<p class="quiet">Showing ${ROWS} of ${steps.length} steps. <code>recipe plan</code> lists all.</p>`}`;
}

const FITS = { FITS: "done", TIGHT: "other", NO: "failed" };

function Memory({ steps }) {
  const known = steps.filter(each => each.memory).slice(0, 4);
  return known.map(({ id, memory }) => html`<p key=${id} class="fit">
    <span class=${"chip small " + (FITS[memory.fits] || "unknown")}>${memory.fits ? { FITS: "fits", TIGHT: "tight", NO: "does not fit" }[memory.fits] : "memory unknown"}</span>
    ${memory.bytes !== null ? `${bytes(memory.bytes)} of GPU memory` : ""}${memory.gpu ? ` on ${memory.gpu}` : ""}${known.length > 1 ? `, ${readable(id)}` : ""}
    <small class="why">${memory.words}</small></p>`);
}

function Machines({ plan }) {
  return plan.machines.map(each => html`<p key=${each.step} class="fit">${each.offer === null
    ? html`<span class="worse">✗ ${each.failed}</span>`
    : html`<b>${each.gpus ? `${each.gpus} × ${each.gpu}` : "CPU machine"}</b> ${` from ${each.driver}, ${each.market}, ${usd(each.usd_an_hour)} an hour`
      + (each.hours === null ? ", duration unknown" : `, ${span(each.hours * 3600)}`) + (each.usd === null ? "" : `: ${usd(each.usd)}`)}`}</p>`);
}

/** How long it takes and what it costs, in a sentence. */
function totals(plan) {
  const time = plan.seconds ? `about ${span(plan.seconds)}` : plan.seconds === 0 ? "" : "no time estimate before the first run";
  const cost = plan.usd_of_machines ?? plan.usd;
  return [time, cost ? `about ${usd(cost)}` : ""].filter(Boolean).join(", ");
}

/** The plan; `missing` are fields that are needed still, `general` the problems of no field; of a search it is that of one trial. */
export function Plan({ plan, busy, missing, general, instances, isSearch }) {
  const would = plan ? plan.steps.filter(each => ["run", "maybe"].includes(each.answer)).length : 0;
  return html`<section id="planned" aria-busy=${busy ? "true" : "false"}><h2>Plan</h2>
    <div role="status">
      ${missing.length > 0 && html`<p id="needed">Missing inputs: ${missing.join(", ")}</p>`}
      ${general.map((each, n) => html`<p key=${n} class="worse">✗ ${each.message}${each.fix && html` — <${Typed} text=${each.fix} />`}</p>`)}
      ${plan && html`<p id="tallied-steps">${isSearch ? `${instances} trials. For each, ` : instances > 1 ? `${instances} combinations. ` : ""}${would ? `${would} of ${plan.steps.length} steps would run` : "Everything is up to date"}${totals(plan) && `; ${totals(plan)}`}.</p>`}
      ${!plan && busy && html`<p class="quiet">Planning…</p>`}
    </div>
    ${plan && html`<${Steps} steps=${plan.steps} /><${Memory} steps=${plan.steps} /><${Machines} plan=${plan} />`}
  </section>`;
}

/** The machines that all drivers offer for it; `take` chooses a driver. */
export function Offers({ body, stale, take, tell }) {
  const [found, setFound] = useState(null), [busy, setBusy] = useState(false);
  const look = async () => {
    setBusy(true);
    tell(null);
    const { limits, driver, ...what } = body();
    await json("/offers", { body: what }).then(({ drivers }) => setFound(drivers), tell);
    setBusy(false);
  };
  const offers = (found || []).flatMap(each => each.offers.map(offer => ({ ...offer, driver: each.driver, step: each.step })));
  offers.sort((a, b) => (a.step === b.step ? a.rank - b.rank : a.step < b.step ? -1 : 1));
  const silent = [...new Map((found || []).filter(each => each.failed).map(each => [each.driver, each.failed]))];
  return html`<div id="offers">
    <button type="button" id="ask-offers" disabled=${busy || stale} onClick=${look}>${busy ? "Asking providers…" : found ? "Ask again" : "Compare offers"}</button>
    <div role="status">${found && !offers.length && html`<p>${silent.length === found.length && found.length ? "No provider answered." : "This run needs no rented machine."}</p>`}</div>
    ${offers.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="offers"><table>
      <thead><tr><th scope="col">Provider</th><th scope="col">GPU</th><th scope="col">$/h</th><th scope="col">Total</th><td></td></tr></thead>
      <tbody>${offers.slice(0, OFFERS).map((each, n) => html`<tr key=${n}><th scope="row">${each.driver}${each.market === "spot" ? ", spot" : ""}</th>
        <td>${each.gpus ? `${each.gpus} × ${each.gpu}` : "none"}</td><td class="number">${each.usd_an_hour.toFixed(2)}</td>
        <td class="number">${each.usd === null ? "?" : (each.hours_guessed ? "~" : "") + usd(each.usd) + (each.hours_without.length ? "+" : "")}</td>
        <td><button type="button" aria-label=${`use ${each.driver}, offer ${n + 1}`} onClick=${() => take(each.driver)}>Use</button></td></tr>`)}</tbody>
    </table></div>
    ${offers.length > OFFERS && html`<p class="quiet">Showing the ${OFFERS} cheapest of ${offers.length}.</p>`}`}
    ${silent.length > 0 && html`<details><summary>${silent.length === 1 ? "1 provider" : `${silent.length} providers`} without offers</summary>
      ${silent.map(([driver, why]) => html`<p key=${driver}><b>${driver}</b> <small>${why}</small></p>`)}</details>`}
  </div>`;
}
