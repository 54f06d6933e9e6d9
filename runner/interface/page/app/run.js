// One run: its head, and the tab of it that the address names.
import { Hooks, html } from "./lib.js";
import { address, route } from "./route.js";
import { kind, sign } from "./text.js";
import { Feed } from "./feed.js";
import { Guard } from "./guard.js";
import { Head } from "./head.js";
import { Tabs, tabOf } from "./tabs.js";

const { useEffect, useMemo } = Hooks;

/** The view of a run; `tell` shows an error. */
export function Run({ id, tell }) {
  const feed = useMemo(() => new Feed(id), [id]);
  useEffect(() => {
    // A tab that is not looked at holds no stream: a browser has six connections for a server.
    const turned = () => (document.hidden ? feed.stop() : feed.start());
    feed.start();
    document.addEventListener("visibilitychange", turned);
    return () => {
      document.removeEventListener("visibilitychange", turned);
      feed.stop();
    };
  }, [feed]);
  const run = feed.run.value, error = feed.error.value, tab = tabOf(route.value);
  useEffect(() => {
    document.title = run ? `${sign(kind(run.word))} ${run.name || run.recipe} · recipe` : "recipe";
  }, [run?.word, run?.name, run?.recipe]);
  if (error) return html`<p class="failure" role="alert">${error.message}</p><a class="back" href=${address({})}>‹ all runs</a>`;
  if (!run) return html`<p class="quiet" role="status">…</p>`;
  return html`<article id="run">
    <${Head} feed=${feed} run=${run} tell=${tell} />
    <${Tabs} run=${run} current=${tab.id} />
    <${Guard} key=${tab.id}><${tab.View} feed=${feed} run=${run} tell=${tell} /><//>
  </article>`;
}
