// What the token of the page may do.
import { Signals } from "./lib.js";
import { json } from "./api.js";

const token = Signals.signal({ scope: "", run: "", expires: null });
let asked = null;

function known() {
  asked ||= json("/me").then(found => { token.value = found; }, () => { asked = null; });
  return token.value;
}

/** Whether runs may be started, stopped and described; false until it is known. */
export function mayOperate() {
  return ["operate", "admin"].includes(known().scope);
}

/** The one run that the token opens; empty where it opens all, and until it is known. */
export function onlyRun() {
  return known().run;
}
