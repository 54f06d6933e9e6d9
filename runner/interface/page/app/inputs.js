// The inputs of a run beside the defaults of its recipe.
import { Hooks, html } from "./lib.js";
import { json } from "./api.js";
import { value } from "./text.js";
import { useLoaded } from "./loaded.js";

const { useState } = Hooks;
const MANY = 12;

/** Whether an input is another than its default; without one it is null. */
function differs(each) {
  return JSON.stringify(each.value) !== JSON.stringify(each.default);
}

const WHO = { caller: "given", preset: "preset", "": "" };

function Row({ each }) {
  const isOther = differs(each);
  return html`<tr data-input=${each.name} class=${isOther ? "other" : ""}>
    <th scope="row">${each.name}${each.doc && html`<small>${each.doc}</small>`}</th>
    <td data-head="value" class="value">${isOther ? html`<b>${value(each.value)}</b>` : value(each.value)}</td>
    <td data-head="default" class="value quiet">${each.has_default ? value(each.default) : ""}</td><td data-head="set by" class="quiet">${WHO[each.set_by]}</td>
  </tr>`;
}

/** All of them, or what differs from the defaults alone. */
export function Inputs({ feed }) {
  const [chosen, choose] = useState(null);
  const { value: found, error } = useLoaded(() => json(feed.path + "/inputs"), [feed]);
  if (error) return html`<section id="given"><h2>Inputs</h2><p class="quiet">${error.message}</p></section>`;
  if (!found || !found.inputs.length) return null;
  const isShort = chosen ?? found.inputs.length > MANY;
  const shown = found.inputs.filter(each => !isShort || differs(each)), count = found.inputs.filter(differs).length;
  return html`<section id="given"><h2>Inputs <small>${`${count} of ${found.inputs.length} differ from the default`}</small></h2>
    ${found.words && html`<p class="quiet">${found.words}</p>`}
    <p class="controls"><label><input id="only-other" type="checkbox" checked=${isShort} onChange=${event => choose(event.target.checked)} /> only values that differ</label></p>
    ${shown.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="inputs"><table class="stacked">
      <thead><tr>${["input", "value", "default", "set by"].map(name => html`<th scope="col" key=${name}>${name}</th>`)}</tr></thead>
      <tbody>${shown.map(each => html`<${Row} key=${each.name} each=${each} />`)}</tbody>
    </table></div>`}
  </section>`;
}
