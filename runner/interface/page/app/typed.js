// Words of the server in which commands stand between backticks.
import { html } from "./lib.js";

/** A text in which what is to be typed in a terminal looks so. */
export function Typed({ text }) {
  return text.split("`").map((each, n) => (n % 2 ? html`<code key=${n}>${each}</code>` : each));
}
