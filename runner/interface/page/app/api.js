// The server: every request of the page goes through here, with the token of its reader.
import { Signals } from "./lib.js";

/** Whether the server answers: "", "live" or "lost". */
export const link = Signals.signal("");
/** Whether a token is asked for. */
export const unknown = Signals.signal(false);

/** What the server refused, in words with what to do. */
export class Refusal extends Error {
  constructor(status, fault) {
    const problems = (fault.problems || []).slice(0, 20);
    const each = problem => "· " + problem.message + (problem.fix ? " — " + problem.fix : "");
    super([fault.message, ...problems.map(each), problems.length ? "" : fault.fix].filter(Boolean).join("\n"));
    this.status = status;
    this.problems = problems;
  }
}

/** Take the token out of the address, before anything is asked. */
export function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (given.has("token")) {
    setToken(given.get("token"));
    given.delete("token");
    history.replaceState(null, "", location.pathname + (given.size ? "#" + given : ""));
  }
  unknown.value = !sessionStorage.getItem("token");
}

/** Use a token from now on, in this tab alone. */
export function setToken(token) {
  sessionStorage.setItem("token", token);
}

/**
 * Ask the server.  Raises Refusal.
 * @param {string} path below /v1
 */
export async function ask(path, { signal, headers = {}, body, method } = {}) {
  const typed = body === undefined ? {} : { "Content-Type": "application/json" };
  const answer = await fetch("/v1" + path, {
    method: method || (body === undefined ? "GET" : "POST"),
    signal,
    credentials: "omit",
    redirect: "error",
    cache: "no-store",
    headers: { Authorization: "Bearer " + sessionStorage.getItem("token"), ...typed, ...headers },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (answer.ok) return answer;
  const silent = { message: "the server returned status " + answer.status, fix: "" };
  const fault = await answer.json().then(each => each.error, () => silent);
  if (answer.status === 401) unknown.value = true;
  throw new Refusal(answer.status, fault);
}

/** Ask for JSON.  Raises Refusal. */
export async function json(path, options) {
  return (await ask(path, options)).json();
}

/** A part of an address. */
export function part(id) {
  return encodeURIComponent(id);
}

/** Wait for so many milliseconds, or until `signal` ends it. */
export function pause(ms, signal) {
  return new Promise(done => {
    const timer = setTimeout(done, ms);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      done();
    }, { once: true });
  });
}

/** Do `work` again and again until it answers false; a server that is away is asked less often. */
export async function keep(signal, ms, work) {
  for (let wait = ms; !signal.aborted; await pause(wait, signal)) {
    try {
      if ((await work()) === false) return;
      link.value = "live";
      wait = ms;
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refusal && error.status < 500 && error.status !== 429) return;
      link.value = "lost";
      wait = Math.min(10000, Math.max(1000, wait * 2));
    }
  }
}

/** The pieces of a body as they come. */
export async function* pieces(stream, signal) {
  const reader = stream.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done || signal.aborted) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
