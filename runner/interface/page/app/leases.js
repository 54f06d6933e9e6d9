// Rented machines: which run has each, until when, and what it costs.
import { html } from "./lib.js";
import { json, part } from "./api.js";
import { mayOperate } from "./me.js";
import { usd } from "./money.js";
import { Sure } from "./sure.js";
import { RunLink, Table, since } from "./table.js";
import { span } from "./text.js";

const MOST = 200;
const A_YEAR = 365 * 86400 * 1000;
const STATES = { ASKED: "requested", COMING: "starting", UP: "up", RELEASING: "ending" };
const HEADS = ["Machine", "State", "Run", "Age", "Expires", "$/h", "Cost"];

function until(moment) {
  if (!moment) return "never";
  const left = Date.parse(moment) - Date.now();
  if (left <= 0) return "expired";
  return left > A_YEAR ? "in over a year" : "in " + span(left / 1000);
}

/** Ask a provider to end a machine.  Raises Error if it is still there. */
async function end(lease) {
  const done = await json(`/leases/${part(lease.key)}/end`, { body: {} });
  if (!done.ended) throw new Error(`cannot terminate ${lease.key}: ${done.said}`);
}

function Holder({ lease }) {
  if (!lease.run) return null;
  return lease.here ? html`<${RunLink} id=${lease.run} />` : html`<code>${lease.run}</code><small class="why">in another workspace</small>`;
}

/** The table; `act` does what changes something, and reads all again. */
export function Leases({ leases, act }) {
  if (!leases.length) return html`<p class="quiet">No rented machines.</p>`;
  const action = lease => (lease.used === "at-work"
    ? html`<small>cancel the run first</small>`
    : html`<${Sure} label="End" about=${lease.key} act=${() => act(() => end(lease))} />`);
  const row = lease => ({
    key: lease.key,
    look: lease.used === "at-work" ? "" : "unused",
    cells: [
      html`${lease.gpus ? `${lease.gpus} × ${lease.gpu || "GPU"}` : "no GPU"} <small>${lease.provider} <code>${lease.key}</code></small>`,
      html`${STATES[lease.state] || lease.state.toLowerCase()}<small class="why">${lease.why}</small>`,
      html`<${Holder} lease=${lease} />`, since(lease.since), until(lease.until), lease.usd_an_hour.toFixed(2), usd(lease.usd),
      ...(mayOperate() ? [action(lease)] : []),
    ],
  });
  return html`<${Table} label="machines" heads=${[...HEADS, ...(mayOperate() ? [""] : [])]} rows=${leases.slice(0, MOST).map(row)} />
    ${leases.length > MOST && html`<p class="quiet">Showing ${MOST} of ${leases.length} rented machines.</p>`}`;
}
