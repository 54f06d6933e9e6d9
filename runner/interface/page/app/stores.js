// How much is kept: in this workspace, and in the shared stores.
import { Hooks, html } from "./lib.js";
import { json, part } from "./api.js";
import { Table } from "./table.js";
import { bytes } from "./text.js";

const { useState } = Hooks;

function Here({ stores }) {
  const whole = stores.parts.reduce((sum, each) => sum + each.bytes, 0);
  const share = each => html`<span class="share"><span style=${{ width: (whole ? (100 * each.bytes) / whole : 0) + "%" }}></span></span>`;
  const row = each => ({ key: each.name, cells: [html`${each.name}${share(each)}`, (each.whole ? "" : "over ") + bytes(each.bytes), each.files] });
  return html`<div><${Table} label="workspace storage" isNarrow=${true} heads=${["This workspace", "Size", "Files"]} rows=${stores.parts.map(row)} />
    <p class="quiet">${bytes(stores.free)} of ${bytes(stores.total)} free on this disk. <code>recipe gc</code> deletes unused data.</p></div>`;
}

/** The size of a shared store, which costs requests, and so is counted when somebody asks. */
function Size({ store }) {
  const [found, setFound] = useState(null), [busy, setBusy] = useState(false);
  const count = async () => {
    setBusy(true);
    setFound(await json(`/stores/${part(store.name)}/size`).catch(error => ({ failed: error.message })));
    setBusy(false);
  };
  if (found && !found.failed) return html`${(found.whole ? "" : "over ") + bytes(found.bytes)}<small class="why">${(found.whole ? "" : "over ") + found.files} files</small>`;
  return html`<button type="button" disabled=${busy} aria-label=${"measure " + store.name} onClick=${count}>${busy ? "Measuring…" : "Measure"}</button>
    ${found?.failed && html`<small class="why worse">${found.failed}</small>`}`;
}

function Shared({ shared }) {
  if (!shared.length) return html`<p class="quiet">No shared stores. To add one, write <code>[stores.NAME]</code> in recipe.toml.</p>`;
  const row = each => ({
    key: each.name,
    cells: [
      html`${each.name}${each.default && html` <small>default</small>`}`,
      html`<code>${each.url}</code>${each.checkpoints && html`<small class="why">with checkpoints</small>`}`, html`<${Size} store=${each} />`,
    ],
  });
  return html`<${Table} label="shared stores" heads=${["Shared store", "Address", "Size"]} rows=${shared.map(row)} />`;
}

/** Both; `stores` is null until they are read. */
export function Stores({ stores }) {
  if (!stores) return html`<p class="quiet">Counting…</p>`;
  return html`<div class="stores"><${Here} stores=${stores} /><div><${Shared} shared=${stores.shared} /></div></div>`;
}
