// What is asked for while a view is shown.
import { Hooks } from "./lib.js";

const { useEffect, useState } = Hooks;

/** What `work` brings, and the error that it ends with; what was there before stays until then.  It gets a signal that says when it is not wanted any more. */
export function useLoaded(work, keys) {
  const [state, set] = useState({ value: null, error: null });
  useEffect(() => {
    const over = new AbortController(), { signal } = over;
    work(signal).then(value => signal.aborted || set({ value, error: null }), error => signal.aborted || set({ value: null, error }));
    return () => over.abort();
  }, keys);
  return state;
}
