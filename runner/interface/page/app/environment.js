// With what a run was carried out: commit and diff of its code, packages, machines.
import { Hooks, html } from "./lib.js";
import { json } from "./api.js";
import { matcher } from "./find.js";
import { useLoaded } from "./loaded.js";

const { useState } = Hooks;
const LINES = 2000;

/** How a line of a diff is shown: added, removed, the head of a part, or as it is. */
function sort(line) {
  if (/^(diff|index|---|\+\+\+) /.test(line)) return "head";
  return { "+": "added", "-": "removed", "@": "part" }[line[0]] || "";
}

function Diff({ code }) {
  const lines = code.diff.replace(/\n$/, "").split("\n"), more = code.changed_count - 5;
  return html`<details id="diff"><summary>${`Changed since the commit: ${code.changed.slice(0, 5).join(", ")}${more > 0 ? ` and ${more} more` : ""}`}</summary>
    <pre class="diff" tabindex="0" role="region" aria-label="changes since the commit">${lines.slice(0, LINES).map((line, n) => html`<span key=${n} class=${sort(line)}>${line || " "}</span>`)}</pre>
    ${(code.diff_cut || lines.length > LINES) && html`<p class="quiet">The diff is truncated.</p>`}
  </details>`;
}

function Code({ code }) {
  const [copied, copy] = useState(false);
  const take = () => navigator.clipboard.writeText(code.commit).then(() => copy(true), () => {});
  return html`<div class="code"><p>commit <code id="commit">${code.commit}</code>${code.branch && code.branch !== "HEAD" ? ` on ${code.branch}` : ""}
      ${" "}<button type="button" aria-label="copy the commit" onClick=${take}>${copied ? "Copied" : "Copy"}</button></p>
    ${code.changed_count ? html`<${Diff} code=${code} />` : html`<p class="quiet">No changes since the commit.</p>`}
    ${code.untracked_count > 0 && html`<p class="quiet">${code.untracked_count === 1 ? "1 untracked file or directory" : `${code.untracked_count} untracked files and directories`}: ${code.untracked.slice(0, 5).join(", ")}${code.untracked_count > 5 ? " and others" : ""}. Their contents are not kept with the run.</p>`}
  </div>`;
}

function Packages({ python }) {
  const [wanted, want] = useState("");
  const shown = python.packages.filter(matcher(wanted));
  return html`<details class="packages"><summary>${`Python ${python.version || python.path}: ${python.packages.length} packages, ${python.words}`}</summary>
    <p class="facts"><code>${python.path}</code>${` for ${python.steps.join(", ")}`}</p>
    ${python.packages.length > 0 && html`<p class="controls"><label>packages <input type="search" placeholder="all" aria-label="packages that are shown" value=${wanted} onInput=${event => want(event.target.value)} /></label></p>
      <ul class="package-list">${shown.map(each => html`<li key=${each}><code>${each}</code></li>`)}</ul>`}
  </details>`;
}

/** What is known of the machines, as pairs of a name and words. */
function machines(found) {
  const { machine, rented } = found;
  return [
    ["system", machine.system], ["processors", machine.cpus || ""], ["GPUs", machine.gpus.join(", ")], ["GPU driver", machine.gpu_driver],
    ...rented.map(each => ["rented", `${each.provider} ${each.key}${each.gpu ? `, ${each.gpus} × ${each.gpu}` : ""}`]),
    ["recipe", found.recipe],
  ].filter(([, words]) => words);
}

/** The locks and files of code whose contents are in the keys of steps. */
function Keyed({ locks }) {
  const files = locks.length === 1 ? "1 code or lock file" : `${locks.length} code and lock files`;
  return html`<details class="packages"><summary>${files} in the cache keys</summary>
    <ul class="package-list">${locks.map((each, n) => html`<li key=${n}><code>${each.name}</code> <small>${each.content.slice(2, 14)}</small></li>`)}</ul>
  </details>`;
}

/** The section. */
export function Environment({ feed, run }) {
  const { value: found, error } = useLoaded(() => json(feed.path + "/environment"), [feed, run.state]);
  if (error) return html`<section id="environment"><h2>Environment and code</h2><p class="quiet">${error.message}</p></section>`;
  if (!found) return null;
  return html`<section id="environment"><h2>Environment and code</h2>
    ${found.words.map(each => html`<p class="quiet" key=${each}>${each}</p>`)}
    ${found.code && html`<${Code} code=${found.code} />`}
    ${found.pythons.map(each => html`<${Packages} key=${each.path + each.version} python=${each} />`)}
    ${found.locks.length > 0 && html`<${Keyed} locks=${found.locks} />`}
    <dl class="facts-of">${machines(found).map(([name, words], n) => html`<div key=${n}><dt>${name}</dt><dd>${words}</dd></div>`)}</dl>
  </section>`;
}
