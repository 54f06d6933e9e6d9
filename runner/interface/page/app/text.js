// How things are written.  Everything that a server sends is the text of strangers: it becomes text nodes, never markup.

const ANSI = /\x1b(?:\[[0-?]*[ -\/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -\/]*[0-~])|[\x80-\x9f]/g;
const HIDDEN = /(?![\n\t])[\p{Cc}\p{Cf}\p{Cs}\p{Co}]/gu;
const PLAIN = /^[\n\t\x20-\x7e]*$/;

/** Name a character that hides, or turns what follows. */
function named(each) {
  return "<U+" + each.codePointAt(0).toString(16).toUpperCase().padStart(4, "0") + ">";
}

/** A text with nothing in it that could not be seen: no escape sequences, and names for characters that hide. */
export function visible(text) {
  const all = String(text);
  return PLAIN.test(all) ? all : all.replace(ANSI, "").replace(HIDDEN, named);
}

/** The lines of a log; of a line that was written over what stood there last. */
export function lines(text) {
  const last = line => line.replace(/\r+$/, "").split("\r").pop().slice(0, 2000);
  return visible(text.split("\n").map(last).join("\n"));
}

const CLASSES = {
  DONE: "done", COMPLETED: "done", FAILED: "failed", FAILED_PROVISIONING: "failed", FRESH: "fresh",
  WAITING: "waiting", READY: "waiting", QUEUED: "waiting", RUNNING: "running", ACTIVE: "running",
  EXECUTING: "running", BLOCKED: "blocked", SKIPPED: "skipped", CANCELLED: "cancelled",
};
const SIGNS = { done: "✓", failed: "✗", fresh: "=", running: "…", waiting: "·", cancelled: "–", other: "◦" };

/** The kind of a state of a run or step, as style sheets call it. */
export function kind(word) {
  return CLASSES[word] || "other";
}

/** The sign of a kind. */
export function sign(of) {
  return SIGNS[of] || "–";
}

/** A state in words. */
export function words(state) {
  return state.toLowerCase().replaceAll("_", " ");
}

/** A number of seconds for people. */
export function span(seconds) {
  if (seconds < 1) return Math.round(seconds * 1000) + " ms";
  if (seconds < 60) return (seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)) + " s";
  const [h, m, s] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.floor(seconds) % 60];
  if (h >= 48) return Math.floor(h / 24) + " d " + (h % 24) + " h";
  return h ? h + " h " + m + " min" : m + " min " + s + " s";
}

/** How long ago a moment was; both in milliseconds. */
export function ago(then, now) {
  const seconds = (now - then) / 1000;
  if (seconds < 5) return "now";
  if (seconds < 60) return Math.floor(seconds) + " s";
  if (seconds < 3600) return Math.floor(seconds / 60) + " min";
  if (seconds < 172800) return Math.floor(seconds / 3600) + " h";
  return seconds < 90 * 86400 ? Math.floor(seconds / 86400) + " d" : new Date(then).toISOString().slice(0, 10);
}

/** A number of bytes for people; nothing for null. */
export function bytes(n) {
  if (n === null) return "";
  if (n < 1000) return n + " B";
  if (n < 1e6) return (n / 1e3).toPrecision(3) + " kB";
  return n < 1e9 ? (n / 1e6).toPrecision(3) + " MB" : (n / 1e9).toPrecision(3) + " GB";
}

/** A value of JSON as it is typed. */
export function value(each) {
  return typeof each === "string" ? each : JSON.stringify(each) ?? "";
}

/** A number in four digits. */
export function short(y) {
  if (y !== 0 && (Math.abs(y) >= 1e6 || Math.abs(y) < 1e-3)) return y.toExponential(2).replace(/\.?0+e/, "e");
  return String(Number(y.toPrecision(4)));
}

/** An id of a step as people read it: `tokenize[file=a/b]`. */
export function readable(id) {
  return id.replace(/(?:%[0-9A-F]{2})+/g, each => {
    try {
      return decodeURIComponent(each).replace(/[,=[\]% ]|\p{C}/gu, encodeURIComponent);
    } catch {
      return each;
    }
  });
}

/** The step of an instance. */
export function bare(id) {
  return id.replace(/\[[^\]]*\]/g, "");
}
