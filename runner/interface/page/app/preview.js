// What can be seen of one file, as the server has read it.
import { Hooks, html } from "./lib.js";
import { Media } from "./media.js";
import { useLoaded } from "./loaded.js";

const { useEffect, useMemo } = Hooks;
const WIDE = 1200;

function Facts({ facts }) {
  const all = Object.entries(facts);
  if (!all.length) return null;
  return html`<dl class="facts-of">${all.map(([name, each]) => html`<div key=${name}><dt>${name}</dt><dd>${each}</dd></div>`)}</dl>`;
}

function Rows({ found, label }) {
  return html`<div class="scroll rows" tabindex="0" role="region" aria-label=${label}><table>
    <thead><tr>${found.columns.map((name, n) => html`<th scope="col" key=${n}>${name}</th>`)}</tr></thead>
    <tbody>${found.rows.map((row, n) => html`<tr key=${n}>${found.columns.map((_, at) => html`<td key=${at}>${row[at] ?? ""}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}

function Shown({ media, file, found, label }) {
  const { value, error } = useLoaded(async wanted => {
    if (found.kind === "picture") return media.picture(file, WIDE, wanted);
    return found.kind === "audio" ? media.sound({ ...file, type: found.type }, wanted) : "";
  }, [file.key, found.kind]);
  if (error) return html`<p>${error.message}</p>`;
  if (found.kind === "picture") return value && html`<img class="whole" src=${value} alt=${label} />`;
  if (found.kind === "audio") return html`<audio controls aria-label=${label} src=${value || undefined}></audio>`;
  if (found.kind === "text" && found.text) return html`<pre tabindex="0" role="region" aria-label=${label}>${found.text}</pre>`;
  return found.columns.length ? html`<${Rows} found=${found} label=${label} />` : null;
}

/** The preview of a file of a run. */
export function Preview({ feed, file }) {
  const media = useMemo(() => new Media(feed.path), [feed]);
  useEffect(() => () => media.close(), [media]);
  const { value: found, error } = useLoaded(wanted => media.preview(file, wanted), [media, file.key]);
  if (error) return html`<div class="preview"><p role="alert">${error.message}</p></div>`;
  if (!found) return html`<div class="preview"><p class="quiet" role="status">…</p></div>`;
  return html`<div class="preview" data-kind=${found.kind}>
    ${found.words && html`<p class="quiet">${found.words}</p>`}
    <${Facts} facts=${found.facts} />
    <${Shown} media=${media} file=${file} found=${found} label=${"preview of " + (file.path || file.name)} />
  </div>`;
}
