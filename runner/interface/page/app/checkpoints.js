// The checkpoints that the steps of a run keep: which is the best, and from which one a run resumes.
import { Hooks, html } from "./lib.js";
import { json } from "./api.js";
import { go } from "./route.js";
import { ago, bytes, readable } from "./text.js";
import { isOver } from "./feed.js";
import { useLoaded } from "./loaded.js";
import { mayOperate } from "./me.js";

const { useState } = Hooks;
const ROWS = 100;

/** Make a checkpoint count, and start the run again from its step.  Raises Refusal. */
async function resumeFrom(feed, { step, state, number }) {
  await json(`${feed.path}/checkpoints/resume`, { body: { step, state, number } });
  const done = await json(`${feed.path}/retry`, { body: { from: step } });
  go({ run: done.run });
}

/** What is to be said of a checkpoint. */
function said(each) {
  if (!each.whole) return each.why;
  if (each.aside) return "put aside";
  return each.newest ? "a run resumes from it" : "";
}

/** How long ago a moment was. */
function since(moment) {
  const words = ago(Date.parse(moment), Date.now());
  return /^\d+ /.test(words) ? words + " ago" : words;
}

function Resume({ feed, checkpoint, tell }) {
  const [sure, setSure] = useState(false), [busy, setBusy] = useState(false);
  const name = `${readable(checkpoint.step)} ${checkpoint.name}`;
  const resume = async () => {
    setBusy(true);
    await resumeFrom(feed, checkpoint).catch(tell);
    setBusy(false);
  };
  if (!sure) return html`<button type="button" onClick=${() => setSure(true)}>Resume from here<span class="unseen">${": " + name}</span></button>`;
  return html`<button type="button" class="main" disabled=${busy} onClick=${resume}>Set newer checkpoints aside and start a run</button>
    ${" "}<button type="button" onClick=${() => setSure(false)}>Back</button>`;
}

/** Those of a run; nothing where no step keeps any. */
export function Checkpoints({ feed, run, tell }) {
  const { value: found, error } = useLoaded(() => json(feed.path + "/checkpoints"), [feed, run.state]);
  const all = found?.checkpoints || [], may = isOver(run) && mayOperate();
  if (error && error.status !== 404) return html`<section id="checkpoints"><h2>Checkpoints</h2><p class="quiet">${error.message}</p></section>`;
  if (!all.length && !found?.unknown.length) return null;
  return html`<section id="checkpoints"><h2>Checkpoints</h2>
    ${all.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="checkpoints"><table>
      <thead><tr><th scope="col">step</th><th scope="col">checkpoint</th><th scope="col" class="wide-only">at step</th><th scope="col">size</th><th scope="col">made</th><th scope="col"><span class="unseen">resume</span></th></tr></thead>
      <tbody>${all.slice(0, ROWS).map(each => html`<tr key=${`${each.step} ${each.state} ${each.name} ${each.aside}`} data-number=${each.number}>
        <th scope="row">${readable(each.step)}</th>
        <td>${each.name}${each.best && html` <span class="tag best-of">best</span>`}${said(each) && html`<small>${said(each)}</small>`}</td>
        <td class="number wide-only">${each.at_step ?? ""}</td><td class="number">${bytes(each.bytes)}</td><td class="since">${since(each.made)}</td>
        <td>${may && each.whole && each.number !== null && html`<${Resume} feed=${feed} checkpoint=${each} tell=${tell} />`}</td>
      </tr>`)}</tbody></table></div>`}
    ${all.length > ROWS && html`<p class="quiet">The first ${ROWS} of ${all.length} checkpoints.</p>`}
    ${found.unknown.length > 0 && html`<p class="quiet">${`Checkpoints of ${found.unknown.map(readable).join(", ")} are unknown until their dependencies finish.`}</p>`}
  </section>`;
}
