// Where one is: everything that a view shows by choice is in the address, behind #.
import { Signals } from "./lib.js";

/** The parameters of the address. */
export const route = Signals.signal(new URLSearchParams(location.hash.slice(1)));

addEventListener("hashchange", () => {
  route.value = new URLSearchParams(location.hash.slice(1));
});

/** The address with parameters: those that are null are left out. */
export function address(parameters) {
  const kept = Object.entries(parameters).filter(([, each]) => each !== null && each !== "");
  return "#" + new URLSearchParams(kept);
}

/** The address of a tab of a run; the first tab by default. */
export function addressOf(run, tab = "", more = {}) {
  return address({ run, tab: tab === "overview" ? "" : tab, ...more });
}

/** Go to an address. */
export function go(parameters) {
  location.hash = address(parameters);
}

/** Change parameters of the view in place, without a step in the history. */
export function change(parameters) {
  const now = Object.fromEntries(route.value);
  history.replaceState(null, "", location.pathname + address({ ...now, ...parameters }));
  route.value = new URLSearchParams(location.hash.slice(1));
}
