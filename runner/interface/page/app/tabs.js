// The tabs of a run, each with an address: #run=RUN&tab=ID.
import { Hooks, html } from "./lib.js";
import { addressOf } from "./route.js";
import { CurvesTab } from "./charts.js";
import { Details } from "./details.js";
import { Logs } from "./logs.js";
import { Machine } from "./machine.js";
import { Outputs } from "./outputs.js";
import { Overview } from "./overview.js";
import { Samples } from "./samples.js";

const { useEffect } = Hooks;

/**
 * In their order.  A view gets `feed`, the `run` as it was read last, and `tell`, which shows an error.
 * @type {{id: string, name: string, View: Function}[]}
 */
export const TABS = [
  { id: "overview", name: "Overview", View: Overview },
  { id: "curves", name: "Curves", View: CurvesTab },
  { id: "machine", name: "Machine", View: Machine },
  { id: "log", name: "Log", View: Logs },
  { id: "samples", name: "Samples", View: Samples },
  { id: "outputs", name: "Outputs", View: Outputs },
  { id: "details", name: "Details", View: Details },
];

/** The tab that an address names; the first by default. */
export function tabOf(parameters) {
  return TABS.find(each => each.id === parameters.get("tab")) || TABS[0];
}

/** Links to the tabs of a run. */
export function Tabs({ run, current }) {
  useEffect(() => document.getElementById("tab-" + current)?.scrollIntoView({ block: "nearest", inline: "nearest" }), [current]);
  return html`<nav class="tabs" aria-label="parts of the run">
    ${TABS.map(({ id, name }) => html`<a key=${id} id=${"tab-" + id} href=${addressOf(run.id, id)} aria-current=${id === current ? "page" : undefined}>${name}</a>`)}
  </nav>`;
}
