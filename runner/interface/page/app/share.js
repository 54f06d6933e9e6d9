// Streams of the server.  Tabs of one browser that follow the same stream share one connection: the tab that holds a lock reads, and tells the others.
import { Refusal, ask, link, pause, pieces } from "./api.js";

const FIRST = 500;
const LONGEST = 10000;

/** A short mark that differs between tokens, and from which no token can be computed. */
function mark(token) {
  let sum = 2166136261;
  for (const each of token || "") sum = Math.imul(sum ^ each.charCodeAt(0), 16777619) >>> 0;
  return sum.toString(16);
}

/** The events of one connection, one after the other: {event, id, data}. */
async function* events(path, signal) {
  const answer = await ask(path, { signal, headers: { Accept: "text/event-stream" } });
  const decoder = new TextDecoder();
  let text = "";
  for await (const chunk of pieces(answer.body, signal)) {
    const frames = (text + decoder.decode(chunk, { stream: true })).split("\n\n");
    text = frames.pop();
    for (const frame of frames) {
      const fields = Object.fromEntries(frame.split("\n").map(line => [line.slice(0, line.indexOf(": ")), line.slice(line.indexOf(": ") + 2)]));
      if (fields.data) yield { event: fields.event, id: fields.id || "", data: JSON.parse(fields.data) };
    }
  }
}

/** Read a stream until it is over; a server that is away is asked less and less often. */
async function read(path, kinds, since, signal, tell) {
  const query = kinds.map(each => "kind=" + each).join("&");
  for (let wait = FIRST; !signal.aborted; await pause(wait, signal)) {
    try {
      const place = since();
      tell({ event: "connected" });
      for await (const each of events(`${path}?${query}${place ? "&after=" + place : ""}`, signal)) {
        wait = FIRST;
        tell(each);
        if (each.event === "end" && each.data.code === "over") return;
      }
      tell({ event: "lost" });
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refusal && error.status < 500 && error.status !== 429) {
        tell({ event: "end", id: "", data: { code: "refused", message: error.message } });
        return;
      }
      tell({ event: "lost" });
      wait = Math.min(LONGEST, Math.max(1000, wait * 2));
    }
  }
}

/**
 * Follow a stream until it is over, or `signal` ends it.
 * @param {string} path below /v1
 * @param {string[]} kinds of events
 * @param {() => string | number} since the place behind which a new connection begins
 * @param {({event: string, id: string, data: object}) => void} take gets each event; "connected" stands for a new connection, "lost" for its end
 */
export async function subscribe(path, kinds, since, signal, take) {
  const heard = each => {
    link.value = each.event === "lost" ? "lost" : "live";
    take(each);
  };
  if (!globalThis.navigator.locks || !globalThis.BroadcastChannel) return read(path, kinds, since, signal, heard);
  const name = `recipe ${mark(sessionStorage.getItem("token"))} ${path} ${kinds.join(" ")}`;
  const channel = new BroadcastChannel(name), over = new AbortController();
  const ends = AbortSignal.any([signal, over.signal]);
  const isOver = each => each.event === "end" && each.data.code === "over";
  channel.onmessage = ({ data }) => {
    heard(data);
    if (isOver(data)) over.abort();
  };
  const tell = each => {
    channel.postMessage(each);
    heard(each);
  };
  try {
    await navigator.locks.request(name, { signal: ends }, () => (ends.aborted ? undefined : read(path, kinds, since, ends, tell)));
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  } finally {
    channel.close();
  }
}
