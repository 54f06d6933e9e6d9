// The table of all runs by keys alone.
import { Hooks } from "./lib.js";
import { go } from "./route.js";

const { useEffect } = Hooks;

function isTyping(event) {
  return event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey;
}

/** Keys of the table: / finds, j and k go down and up, x selects, c compares, p pins.  `chosenNow` is asked when a key comes. */
export function useKeys(view, chosenNow) {
  useEffect(() => {
    const pressed = event => {
      const field = document.getElementById("query");
      if (event.target === field && event.key === "Escape") {
        event.preventDefault(); // a search field would lose its text
        field.blur();
        return;
      }
      if (isTyping(event) && event.target.type !== "checkbox") return;
      const links = [...document.querySelectorAll("[data-run] a.row")];
      const holder = document.activeElement?.closest?.("[data-run]"), at = links.findIndex(each => holder?.contains(each));
      if (event.key === "/") field.focus();
      else if (event.key === "j") links[Math.min(at + 1, links.length - 1)]?.focus();
      else if (event.key === "k") links[Math.max(at - 1, 0)]?.focus();
      else if (event.key === "x" && holder) view.select(holder.dataset.run);
      else if (event.key === "c" && chosenNow().size) go({ compare: [...chosenNow()].join(" "), pin: view.pin });
      else if (event.key === "p" && holder) view.pinTo(holder.dataset.run);
      else return;
      event.preventDefault();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  });
}
