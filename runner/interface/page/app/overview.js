// The first tab of a run: what failed and how to go on, how its steps stand, its first curves, and what it costs.
import { Hooks, html } from "./lib.js";
import { addressOf, go } from "./route.js";
import { Painter } from "./ansi.js";
import { bare, bytes, readable, value } from "./text.js";
import { Charts, drawable } from "./charts.js";
import { ordered } from "./feed.js";
import { Graph } from "./graph.js";
import { mayOperate } from "./me.js";
import { MoneyTable } from "./money.js";
import { Typed } from "./typed.js";

const { useEffect, useRef, useState } = Hooks;
const FAILURES = 10;
const CHARTS = 4;
const [INPUTS, OUTPUTS] = [16, 10];

/** The last lines that a step printed, in their colours. */
function LastLines({ lines }) {
  const box = useRef(null);
  useEffect(() => { if (box.current) box.current.scrollTop = box.current.scrollHeight; }, [lines.length]);
  if (!lines.length) return null;
  const painter = new Painter();
  return html`<pre class="last-lines" ref=${box} tabindex="0" role="region" aria-label="last lines">${lines.map((line, n) => html`<span key=${n}>${painter.paint(line).map(part => html`<span class=${part.look}>${part.text}</span>`)}${"\n"}</span>`)}</pre>`;
}

/** The exit code or signal of a step, in words; empty if it was not started. */
function exitOf(failure) {
  if (failure.signal) return "signal " + failure.signal;
  return typeof failure.exit === "number" ? "exit " + failure.exit : "";
}

/** How a step ended, in a few words. */
function ending(failure) {
  return [failure.kind, exitOf(failure)].filter((each, n, all) => each && all.indexOf(each) === n).join(", ");
}

function FailureBox({ run, failure }) {
  return html`<article class="failure" data-step=${failure.step}>
    <h3>✗ ${failure.step ? readable(failure.step) : "The run"} <small>${ending(failure)}</small></h3>
    ${failure.words && failure.words !== exitOf(failure) && html`<p class="reason">${failure.words}</p>`}
    <${LastLines} lines=${failure.lines} />
    ${failure.fix && html`<p class="fix"><b>Fix:</b> <${Typed} text=${failure.fix} /></p>`}
    <p class="ways">${failure.step && html`<a href=${addressOf(run.id, "log", { step: failure.step })}>Whole log</a>`}
      ${mayOperate() && html`<a href=${"#new&like=" + encodeURIComponent(run.id)}>Rerun with changes</a>`}</p>
  </article>`;
}

/** Every failure of a run: those of its steps, else its own. */
function failuresOf(run, steps) {
  const found = ordered(steps).filter(([, each]) => each.state === "FAILED").map(([id, each]) => ({
    step: id, kind: each.reason, words: each.detail, exit: each.exit, signal: each.signal, lines: each.lines || [], fix: each.fix || "",
  }));
  if (found.length || !run.failed) return found;
  return [run.failed];
}

function Failures({ run, steps }) {
  const failures = failuresOf(run, steps);
  if (!failures.length) return null;
  return html`<section id="failed"><h2 class="unseen">Failed steps</h2>
    ${failures.slice(0, FAILURES).map(each => html`<${FailureBox} key=${each.step} run=${run} failure=${each} />`)}
    ${failures.length > FAILURES && html`<p class="quiet">Showing ${FAILURES} of ${failures.length} failures. <a href=${addressOf(run.id, "details")}>All steps</a></p>`}
  </section>`;
}

function Warnings({ steps }) {
  const all = [...steps].flatMap(([id, each]) => (each.warnings || []).map(text => ({ id, text })));
  if (!all.length) return null;
  return html`<section id="warnings" class="warnings"><h2 class="unseen">Warnings</h2><ul>
    ${all.slice(0, 20).map(({ id, text }) => html`<li key=${id + text}><b>${readable(id)}</b> ${text}</li>`)}
  </ul>${all.length > 20 && html`<p class="quiet">and ${all.length - 20} more</p>`}</section>`;
}

function Steps({ feed, run, steps }) {
  if (!steps.size && !run.graph.length) return null;
  const open = step => {
    const id = [...steps.keys()].reverse().find(each => bare(each) === step);
    if (id) go({ run: run.id, tab: "log", step: id });
  };
  return html`<section id="steps"><h2>Steps</h2>
    <div class="scroll" tabindex="0" role="region" aria-label="graph of the steps"><${Graph} run=${run} steps=${steps} why=${feed.why.value} open=${open} /></div>
  </section>`;
}

function FirstCurves({ feed, run }) {
  const [zoom, setZoom] = useState(null), names = drawable(feed.series.value);
  if (!names.length) return null;
  return html`<section id="curves"><h2>Curves ${names.length > CHARTS && html`<small><a href=${addressOf(run.id, "curves")}>all ${names.length}</a></small>`}</h2>
    <${Charts} feed=${feed} names=${names.slice(0, CHARTS)} weight=${0} logY=${false} zoom=${zoom} setZoom=${setZoom} />
  </section>`;
}

function Facts({ id, name, facts, most, more }) {
  if (!facts.length) return null;
  return html`<section id=${id}><h2>${name}</h2><table class="facts-table"><tbody>
    ${facts.slice(0, most).map(([key, text]) => html`<tr key=${key}><th scope="row" title=${key}>${key}</th><td title=${text}>${text}</td></tr>`)}
  </tbody></table>${facts.length > most && html`<p><a href=${more}>All ${facts.length}</a></p>`}</section>`;
}

/** The tab. */
export function Overview({ feed, run }) {
  const steps = feed.steps.value;
  const tried = Object.entries(run.sweep?.axes || {}).map(([name, values]) => [name, values.map(value).join(", ")]);
  const inputs = [...tried, ...Object.entries(run.inputs).map(([name, each]) => [name, value(each)])];
  const outputs = run.outputs.map(each => [readable(each.name), bytes(each.bytes)]);
  return html`<div class="columns">
    <div>
      <${Failures} run=${run} steps=${steps} />
      <${Warnings} steps=${steps} />
      <${Steps} feed=${feed} run=${run} steps=${steps} />
      <${FirstCurves} feed=${feed} run=${run} />
    </div>
    <aside aria-label="facts">
      <${Facts} id="given" name="Inputs" facts=${inputs} most=${INPUTS} more=${addressOf(run.id, "details")} />
      <section id="money"><h2>Machine and cost</h2><${MoneyTable} run=${run} /></section>
      <${Facts} id="came-out" name="Outputs" facts=${outputs} most=${OUTPUTS} more=${addressOf(run.id, "outputs")} />
    </aside>
  </div>`;
}
