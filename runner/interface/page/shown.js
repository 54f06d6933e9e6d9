"use strict";
// How things are written and drawn.  Everything that a server sends is the text of strangers: it becomes text nodes, never markup.
const shown = (() => {
  const ANSI = /\x1b(?:\[[0-?]*[ -\/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -\/]*[0-~])|[\x80-\x9f]/g;
  const HIDDEN = /(?![\n\t])[\p{Cc}\p{Cf}\p{Cs}\p{Co}]/gu;
  const code = each => "<U+" + each.codePointAt(0).toString(16).toUpperCase().padStart(4, "0") + ">";
  const visible = text => String(text).replace(ANSI, "").replace(HIDDEN, code);
  // Of a line that was written over, what stood there last.
  const lines = text => visible(text.split("\n").map(line => line.replace(/\r+$/, "").split("\r").pop().slice(0, 2000)).join("\n"));

  // An element.  A function among the attributes hears the event of that name; children are text or elements.
  const make = (space, name, attributes, children) => {
    const found = space ? document.createElementNS(space, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (typeof value === "function") found.addEventListener(key, value);
      else if (value !== undefined && value !== null && value !== false) found.setAttribute(key, value === true ? "" : visible(value));
    }
    found.append(...children.map(each => each instanceof Node ? each : visible(each)));
    return found;
  };
  const el = (name, attributes = {}, ...children) => make(null, name, attributes, children);
  const svg = (name, attributes = {}, ...children) => make("http://www.w3.org/2000/svg", name, attributes, children);

  const CLASSES = {
    DONE: "done", COMPLETED: "done", FAILED: "failed", FAILED_PROVISIONING: "failed", FRESH: "fresh", WAITING: "waiting", READY: "waiting", QUEUED: "waiting",
    RUNNING: "running", ACTIVE: "running", EXECUTING: "running", BLOCKED: "blocked", SKIPPED: "skipped", CANCELLED: "cancelled",
  };
  const SIGNS = { done: "✓", failed: "✗", fresh: "=", running: "…", waiting: "·", cancelled: "–", other: "◦" };
  // The worst first; and in the order in which a bar shows them.
  const WORST = ["failed", "running", "blocked", "cancelled", "other", "waiting", "done", "fresh", "skipped"];
  const SHARES = ["failed", "done", "fresh", "running", "blocked", "cancelled", "other", "waiting", "skipped"];
  const state = word => CLASSES[word] || "other";
  const sign = kind => SIGNS[kind] || "–";
  const words = text => text.toLowerCase().replaceAll("_", " ");

  const span = seconds => {
    if (seconds < 1) return Math.round(seconds * 1000) + " ms";
    if (seconds < 60) return (seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)) + " s";
    const [h, m, s] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.floor(seconds) % 60];
    return h >= 48 ? Math.floor(h / 24) + " d " + h % 24 + " h" : h ? h + " h " + m + " min" : m + " min " + s + " s";
  };
  const ago = (then, now) => {
    const seconds = (now - then) / 1000;
    return seconds < 5 ? "now" : seconds < 60 ? Math.floor(seconds) + " s" : seconds < 3600 ? Math.floor(seconds / 60) + " min"
      : seconds < 172800 ? Math.floor(seconds / 3600) + " h" : Math.floor(seconds / 86400) + " d";
  };
  const bytes = n => n === null ? "" : n < 1000 ? n + " B" : n < 1e6 ? (n / 1e3).toPrecision(3) + " kB" : n < 1e9 ? (n / 1e6).toPrecision(3) + " MB" : (n / 1e9).toPrecision(3) + " GB";
  const value = each => typeof each === "string" ? each : JSON.stringify(each);
  // An id as people read it: `tokenize[file=a/b]`.
  const readable = id => id.replace(/(?:%[0-9A-F]{2})+/g, each => {
    try { return decodeURIComponent(each).replace(/[,=[\]% ]|\p{C}/gu, encodeURIComponent); } catch { return each; }
  });
  const bare = id => id.replace(/\[[^\]]*\]/g, "");

  // Boxes for the steps of a graph, from left to right by the longest way to what needs nothing.
  const WIDTH = 196, HEIGHT = 66, ACROSS = 56, DOWN = 22;
  const boxes = graph => {
    const depth = new Map(), rows = [], places = new Map();
    for (const { step, needs } of graph) {
      const n = 1 + Math.max(-1, ...needs.map(each => depth.get(each) ?? -1));
      depth.set(step, n);
      (rows[n] ||= []).push({ step, needs });
    }
    rows.forEach((row, n) => {
      const centre = each => {
        const found = each.needs.map(need => places.get(need)).filter(Boolean).map(place => place.y);
        return found.length ? found.reduce((a, b) => a + b) / found.length : Infinity;
      };
      if (n) row.sort((a, b) => (centre(a) - centre(b)) || 0);
      row.forEach((each, m) => places.set(each.step, { x: n * (WIDTH + ACROSS) + 2, y: m * (HEIGHT + DOWN) + 2 }));
    });
    const high = Math.max(0, ...rows.map(row => row.length));
    return { places, width: Math.max(0, rows.length * (WIDTH + ACROSS) - ACROSS + 4), height: Math.max(0, high * (HEIGHT + DOWN) - DOWN + 4) };
  };

  // The graph; `tallies` has for each step how many instances are in which state.
  const graph = (found, tallies, open) => {
    const { places, width, height } = boxes(found);
    const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
    for (const { step, needs } of found) {
      for (const need of needs.filter(each => places.has(each))) {
        const a = places.get(need), b = places.get(step), x = a.x + WIDTH, y = a.y + HEIGHT / 2, v = b.y + HEIGHT / 2, bend = (b.x - x) / 2;
        picture.append(svg("path", { class: "edge", d: `M${x} ${y}C${x + bend} ${y} ${b.x - bend} ${v} ${b.x} ${v}` }));
      }
    }
    for (const { step, instances } of found) {
      const { x, y } = places.get(step), counts = tallies.get(step) || {};
      const worst = WORST.find(kind => counts[kind]) || "waiting", tally = SHARES.filter(kind => counts[kind]).map(kind => [kind, counts[kind]]);
      const text = tally.map(([kind, count]) => count + " " + kind).join(", ");
      const name = visible(step), short = name.length > 20 ? name.slice(0, 19) + "…" : name;
      const box = svg("g", {
        class: worst, role: "button", tabindex: 0, "aria-label": `${step}: ${text}`, click: () => open(step),
        keydown: event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(step); } },
      }, svg("title", {}, `${step}: ${text}`), svg("rect", { class: "box", x, y, width: WIDTH, height: HEIGHT, rx: 7 }),
      svg("text", { x: x + 10, y: y + 22, class: "name" }, sign(worst) + " " + short + (instances > 1 ? " ×" + instances : "")),
      svg("text", { x: x + 10, y: y + 40, class: "quiet" }, text.length > 28 ? text.slice(0, 27) + "…" : text));
      let at = x + 10;
      const all = tally.reduce((sum, [, count]) => sum + count, 0) || 1;
      for (const [kind, count] of tally) {
        const part = (WIDTH - 20) * count / all;
        box.append(svg("rect", { class: "part " + kind, x: at, y: y + 50, width: part, height: 6, rx: 2 }));
        at += part;
      }
      picture.append(box);
    }
    return picture;
  };

  // -- curves: an exponential mean without its bias; of many points the least and the greatest of each part, in their order
  const smoothed = (points, weight) => {
    let mean = 0, share = 1;
    return points.map(([x, y]) => {
      mean = weight * mean + (1 - weight) * y;
      share *= weight;
      return [x, mean / (1 - share)];
    });
  };
  const POINTS = 600;
  const thinned = points => {
    if (points.length <= POINTS) return points;
    const size = points.length / (POINTS / 2), kept = [];
    for (let n = 0; n < POINTS / 2; n++) {
      const part = points.slice(Math.floor(n * size), Math.floor((n + 1) * size));
      const by = part.map((each, m) => [each[1], m]).sort((a, b) => a[0] - b[0]);
      for (const m of new Set([by[0][1], by[by.length - 1][1]].sort((a, b) => a - b))) kept.push(part[m]);
    }
    if (kept[kept.length - 1] !== points[points.length - 1]) kept.push(points[points.length - 1]);
    return kept;
  };
  const aligned = all => {
    const x = [...new Set(all.flatMap(points => points.map(each => each[0])))].sort((a, b) => a - b), place = new Map(x.map((each, n) => [each, n]));
    return [x, all.map(points => {
      const row = new Array(x.length).fill(null);
      for (const [at, y] of points) row[place.get(at)] = y;
      return row;
    })];
  };

  // What a file is by its first bytes; null where it is no picture.
  const picture = data => {
    const head = String.fromCharCode(...data.slice(0, 12));
    return head.startsWith("\x89PNG\r\n\x1a\n") ? "image/png" : head.startsWith("\xff\xd8\xff") ? "image/jpeg" : head.startsWith("GIF8") ? "image/gif"
      : head.startsWith("RIFF") && head.endsWith("WEBP") ? "image/webp" : null;
  };
  return { WORST, visible, lines, el, state, sign, words, span, ago, bytes, value, readable, bare, graph, smoothed, thinned, aligned, picture };
})();
