// A button for what cannot be taken back.
import { Hooks, html } from "./lib.js";

const { useEffect, useState } = Hooks;
const SURE = 5000;

/** A button that asks once more before it acts; `about` names for screen readers what it acts on. */
export function Sure({ label, about, act }) {
  const [sure, setSure] = useState(false), [busy, setBusy] = useState(false), again = `Really ${label.toLowerCase()}`;
  useEffect(() => {
    if (!sure) return undefined;
    const timer = setTimeout(() => setSure(false), SURE);
    return () => clearTimeout(timer);
  }, [sure]);
  const press = async () => {
    if (!sure) {
      setSure(true);
      return;
    }
    setBusy(true);
    await act();
    setBusy(false);
    setSure(false);
  };
  return html`<button type="button" class="stop" aria-label=${`${sure ? again : label} ${about}`} disabled=${busy} onClick=${press}>${busy ? "…" : sure ? again + "?" : label}</button>`;
}
