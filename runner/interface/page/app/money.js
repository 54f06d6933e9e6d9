// What a run costs: so far, an hour, and to its end.
import { html } from "./lib.js";
import { span } from "./text.js";
import { isOver } from "./feed.js";

const OPEN = ["COMING", "UP"];

/** US dollars; fractions of a cent are shown as such. */
export function usd(amount) {
  return "$" + (amount && amount < 0.01 ? amount.toFixed(4) : amount.toFixed(2));
}

/** What its machines cost an hour now. */
export function hourly(run) {
  return run.instances.filter(each => OPEN.includes(each.state)).reduce((sum, each) => sum + each.usd_an_hour, 0);
}

/** Driver, machines and cost of a run. */
export function MoneyTable({ run }) {
  const perHour = hourly(run), { seconds, cost } = run.estimate;
  const rows = [
    ["driver", run.driver],
    ...run.instances.map(each => [each.key || each.provider, `${each.state.toLowerCase()}, ${usd(each.usd_an_hour)}/h`]),
    ["cost so far", usd(run.cost)],
    ...(perHour ? [["cost per hour", usd(perHour)]] : []),
    ...(!isOver(run) && seconds !== null ? [["remaining", `about ${span(seconds)}` + (cost ? `, ${usd(cost)}` : "")]] : []),
  ];
  return html`<table class="facts-table"><tbody>${rows.map(([name, text]) => html`<tr key=${name}><th scope="row" title=${name}>${name}</th><td>${text}</td></tr>`)}</tbody></table>`;
}
