// The log of one step: the newest that runs, or that of one's choice.
import { Hooks, html } from "./lib.js";
import { Refusal, ask, keep, part, pieces } from "./api.js";
import { change, route } from "./route.js";
import { lines, readable } from "./text.js";
import { ordered } from "./feed.js";

const { useEffect, useRef, useState } = Hooks;
const KEPT = 256 << 10;
const MOST = 200;
const DRAW = 250;

/** Follow the log of an attempt: `show` gets its end, `note` what is to be said of it. */
function follow(feed, id, signal, show, note) {
  let passed = 0, kept = "";
  const decoder = new TextDecoder();
  return keep(signal, 1000, async () => {
    const query = `?step=${part(id)}&follow=true` + (passed ? "&offset=" + passed : "");
    let answer;
    try {
      answer = await ask(feed.path + "/logs" + query, { signal, headers: passed ? {} : { Range: "bytes=-" + KEPT } });
    } catch (error) {
      if (!(error instanceof Refusal) || ![404, 409].includes(error.status)) throw error;
      note(error.message);
      return false;
    }
    if (answer.status === 206 && !answer.headers.get("Content-Range")?.startsWith("bytes 0-")) note("the end of its log");
    for await (const chunk of pieces(answer.body, signal)) {
      passed += chunk.length;
      kept += decoder.decode(chunk, { stream: true });
      if (kept.length > KEPT) {
        kept = kept.slice(-KEPT);
        note("the end of its log");
      }
      show(kept);
    }
    if (!passed) note("it printed nothing");
    return false;
  });
}

/** The tab of logs: of the step that the address names, or the newest. */
export function Logs({ feed }) {
  const steps = feed.steps.value, chosen = route.value.get("step") || "";
  const choose = step => change({ step });
  const known = ordered(steps).filter(([, each]) => each.attempts || each.state === "RUNNING").map(([id]) => id).slice(0, MOST);
  const running = [...steps].filter(([, each]) => each.state === "RUNNING").map(([id]) => id);
  const last = useRef("");
  const id = chosen || running.at(-1) || (steps.has(last.current) ? last.current : known[0]);
  const attempt = steps.get(id)?.attempts || 0;
  const [note, setNote] = useState("");
  const box = useRef(null);
  useEffect(() => {
    if (!id) return undefined;
    last.current = id;
    const ends = new AbortController();
    let due = 0, text = "";
    const draw = () => {
      due = 0;
      if (ends.signal.aborted) return;
      const { current } = box, atEnd = current.scrollHeight - current.scrollTop - current.clientHeight < 30;
      current.textContent = lines(text);
      if (atEnd) current.scrollTop = current.scrollHeight;
    };
    setNote("");
    box.current.textContent = "";
    follow(feed, id, ends.signal, kept => {
      text = kept;
      due ||= setTimeout(draw, DRAW);
    }, setNote);
    return () => {
      clearTimeout(due);
      ends.abort();
    };
  }, [feed, id, attempt]);
  if (!known.length) return html`<p class="quiet empty">No step of this run has begun yet.</p>`;
  return html`<section id="logs"><h2>Log</h2>
    <p class="controls">
      <label>step <select id="which" value=${chosen} onChange=${event => choose(event.target.value)}>
        <option value="">newest</option>
        ${known.map(each => html`<option key=${each} value=${each}>${readable(each)}</option>`)}
      </select></label>
      <span id="logged" class="quiet">${readable(id) + (note ? ": " + note : "")}</span>
    </p>
    <pre id="text" ref=${box} tabindex="0" role="region" aria-label="what the step printed"></pre>
  </section>`;
}
