// The tab of details: each step with why it stands as it does, and what the run was given.
import { html } from "./lib.js";
import { kind, readable, sign, value, words } from "./text.js";
import { ordered } from "./feed.js";

const ROWS = 200;

function Steps({ steps }) {
  if (!steps.size) return null;
  const all = ordered(steps);
  return html`<section id="each"><h2>Steps</h2>
    <div class="scroll" tabindex="0" role="region" aria-label="steps"><table>
      <thead><tr>${["step", "state", "tries", "where", "why"].map(name => html`<th scope="col" key=${name}>${name}</th>`)}</tr></thead>
      <tbody>${all.slice(0, ROWS).map(([id, each]) => html`<tr key=${id}>
        <th scope="row">${readable(id)}</th>
        <td><span class=${"sign " + kind(each.state)}>${sign(kind(each.state))}</span>${words(each.state)}</td>
        <td>${each.attempts || ""}</td><td>${each.host}</td><td>${each.reason}</td>
      </tr>`)}</tbody>
    </table></div>
    ${all.length > ROWS && html`<p class="quiet">The first ${ROWS} of ${all.length} steps.</p>`}
  </section>`;
}

function Inputs({ inputs }) {
  if (!Object.keys(inputs).length) return null;
  return html`<section id="given"><h2>Inputs</h2>
    <div class="scroll" tabindex="0" role="region" aria-label="inputs"><table><tbody>
      ${Object.entries(inputs).map(([name, each]) => html`<tr key=${name}><th scope="row">${name}</th><td>${value(each)}</td></tr>`)}
    </tbody></table></div>
  </section>`;
}

/** The tab. */
export function Details({ feed, run }) {
  return html`<${Steps} steps=${feed.steps.value} /><${Inputs} inputs=${run.inputs} />`;
}
