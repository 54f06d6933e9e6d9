// What is asked for while a view is shown.
import { Hooks } from "./lib.js";

const { useEffect, useState } = Hooks;

/** What a promise brings, and the error that it ends with; what was there before stays until then. */
export function useLoaded(work, keys) {
  const [state, set] = useState({ value: null, error: null });
  useEffect(() => {
    let isLate = false;
    work().then(value => isLate || set({ value, error: null }), error => isLate || set({ value: null, error }));
    return () => { isLate = true; };
  }, keys);
  return state;
}
