// A fault in drawing one part of the page leaves the others usable.
import { Hooks, html } from "./lib.js";

/** Draw `children`, or the fault of drawing them with a button to try again. */
export function Guard({ children }) {
  const [error, reset] = Hooks.useErrorBoundary(found => console.error(found));
  if (!error) return children;
  return html`<p class="failure" role="alert">This view cannot be shown: ${String(error.message || error)}</p>
    <p><button type="button" onClick=${reset}>Try again</button></p>`;
}
