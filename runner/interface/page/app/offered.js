// The recipes that may be started: those used here first, then those of the workspace, of packages and of the library.
import { Hooks, html } from "./lib.js";
import { json } from "./api.js";
import { matcher } from "./find.js";
import { address } from "./route.js";
import { ago } from "./text.js";

const { useEffect, useState } = Hooks;

function Card({ recipe }) {
  const from = recipe.file || recipe.package;
  return html`<li><a class="card" href=${address({ new: recipe.id })}>
    <b>${recipe.id}</b>${recipe.used && html`<small> used ${ago(Date.parse(recipe.used), Date.now())} ago</small>`}
    <span>${recipe.summary || "No summary."}</span>
    ${from && html`<small><code>${from}</code></small>`}
  </a></li>`;
}

function Group({ title, recipes }) {
  if (!recipes.length) return null;
  return html`<h2>${title}</h2><ul class="cards">${recipes.map(each => html`<${Card} key=${each.id} recipe=${each} />`)}</ul>`;
}

/** The list of recipes; `tell` shows an error. */
export function Offered({ tell }) {
  const [all, setAll] = useState(null), [query, setQuery] = useState("");
  useEffect(() => {
    document.title = "New run · recipe";
    json("/recipes").then(found => setAll(found.recipes), tell);
  }, []);
  if (!all) return html`<section id="offered"><h1>New run</h1><p class="quiet" role="status">Loading recipes…</p></section>`;
  const fits = matcher(query), found = all.filter(each => fits(each.id + " " + each.summary + " " + each.file));
  const used = found.filter(each => each.used).sort((a, b) => (a.used < b.used ? 1 : -1)), rest = found.filter(each => !each.used);
  return html`<section id="offered"><div class="title-row"><h1>New run</h1>
      <input id="find-recipe" type="search" aria-label="find a recipe" placeholder="Find a recipe" spellcheck="false" value=${query} onInput=${event => setQuery(event.target.value)} /></div>
    <${Group} title="Used here" recipes=${used} />
    <${Group} title="In this folder" recipes=${rest.filter(each => each.file)} />
    <${Group} title="Packages" recipes=${rest.filter(each => each.package)} />
    <${Group} title="Library" recipes=${rest.filter(each => !each.file && !each.package)} />
    ${!found.length && html`<p class="quiet empty">No recipe matches. <button type="button" class="plain" onClick=${() => setQuery("")}>Clear filter</button></p>`}
  </section>`;
}
