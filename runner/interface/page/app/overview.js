// The first tab of a run: what failed, how its steps stand, and its first curve.
import { html } from "./lib.js";
import { addressOf, go } from "./route.js";
import { bare, readable } from "./text.js";
import { ordered } from "./feed.js";
import { Curves, drawable } from "./charts.js";
import { Graph } from "./graph.js";

const FAILURES = 20;

/** The address of a step's log. */
function logOf(run, step) {
  return addressOf(run.id, "log", { step });
}

function Failures({ run, steps }) {
  const failures = ordered(steps).filter(([, each]) => each.state === "FAILED");
  if (!failures.length) return null;
  return html`<section id="failed"><h2>What failed</h2>
    ${failures.slice(0, FAILURES).map(([id, each]) => html`<article class="failure" key=${id}>
      <h3>✗ ${readable(id)} <small>${each.reason}</small></h3>
      ${each.detail && html`<p>${each.detail}</p>`}
      <a href=${logOf(run, id)}>The whole log</a>
    </article>`)}
  </section>`;
}

function Steps({ run, steps }) {
  if (!steps.size && !run.graph.length) return null;
  const open = step => {
    const id = [...steps.keys()].reverse().find(each => bare(each) === step);
    if (id) go({ run: run.id, tab: "log", step: id });
  };
  return html`<section id="steps"><h2>Steps</h2>
    <div class="scroll" tabindex="0" role="region" aria-label="graph of the steps"><${Graph} run=${run} steps=${steps} open=${open} /></div>
  </section>`;
}

/** The tab. */
export function Overview({ feed, run }) {
  const steps = feed.steps.value, series = feed.series.value;
  return html`<${Failures} run=${run} steps=${steps} />
    <${Steps} run=${run} steps=${steps} />
    ${drawable(series).length > 0 && html`<${Curves} feed=${feed} />`}`;
}
