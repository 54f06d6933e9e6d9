// Tables of the machines' view, and what stands in their cells.
import { html } from "./lib.js";
import { address } from "./route.js";
import { ago } from "./text.js";

/**
 * A table that scrolls by itself if it is wider than the window; on a phone each row is a card.
 * @param {{rows: {key: string, look?: string, cells: unknown[]}[]}} props `head`: the place of the cell that names its row; `isNarrow`: it fits on a phone as it is
 */
export function Table({ label, heads, rows, head = 0, isNarrow = false }) {
  const cell = (each, n) => (n === head
    ? html`<th scope="row">${each}</th>`
    : html`<td data-head=${heads[n]}>${each}</td>`);
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}><table class=${"wide-table" + (isNarrow ? "" : " stacked")}>
    <thead><tr>${heads.map(each => html`<th key=${each} scope="col">${each || html`<span class="unseen">actions</span>`}</th>`)}</tr></thead>
    <tbody>${rows.map(({ key, look = "", cells }) => html`<tr key=${key} class=${look}>${cells.map(cell)}</tr>`)}</tbody>
  </table></div>`;
}

export function RunLink({ id }) {
  return html`<a href=${address({ run: id })}><code>${id}</code></a>`;
}

/** How long ago a moment was; nothing for null. */
export function since(moment) {
  return moment ? ago(Date.parse(moment), Date.now()) : "";
}
