// What the token of the page may do.
import { Signals } from "./lib.js";
import { json } from "./api.js";

const scope = Signals.signal("");
let asked = null;

/** Whether runs may be started, stopped and described; false until it is known. */
export function mayOperate() {
  asked ||= json("/me").then(found => { scope.value = found.scope; }, () => { asked = null; });
  return scope.value === "operate" || scope.value === "admin";
}
