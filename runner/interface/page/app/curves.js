// Curves: smoothed, thinned and drawn by uPlot, for the report and for the live page.
import { short } from "./text.js";

// Okabe and Ito's colours; a lighter set for dark.
const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8f6f00", "#3a8fc4", "#5d5d5d"];
const DARK = ["#56b4e9", "#ff9a56", "#2fd3a5", "#e8a3cb", "#f0e442", "#9fd8ff", "#b8b8b8"];
const POINTS = 600;
const MOST = 24;
const HEIGHT = 320;
const scheme = matchMedia("(prefers-color-scheme: dark)");

/** Whether the page is dark: by choice, else as the system has it. */
export function dark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : scheme.matches;
}

/** Call `then` when the page turns dark or light. */
export function onTheme(then) {
  scheme.addEventListener("change", then);
  const watch = new MutationObserver(then);
  watch.observe(document.documentElement, { attributeFilter: ["data-theme"] });
  return () => {
    scheme.removeEventListener("change", then);
    watch.disconnect();
  };
}

/** The colour of the n-th curve. */
export function colour(n) {
  return (dark() ? DARK : LIGHT)[n % LIGHT.length];
}

/** An exponential mean of [x, y] without the bias of its beginning. */
export function smoothed(points, weight) {
  let mean = 0, share = 1;
  return points.map(([x, y]) => {
    mean = weight * mean + (1 - weight) * y;
    share *= weight;
    return [x, mean / (1 - share)];
  });
}

/** Of many points the least and the greatest of each part, in their order, and the last. */
export function thinned(points) {
  if (points.length <= POINTS) return points;
  const size = points.length / (POINTS / 2), kept = [];
  for (let n = 0; n < POINTS / 2; n++) {
    const begin = Math.floor(n * size), end = Math.floor((n + 1) * size);
    let least = begin, greatest = begin;
    for (let at = begin; at < end; at++) {
      if (points[at][1] < points[least][1]) least = at;
      if (points[at][1] > points[greatest][1]) greatest = at;
    }
    kept.push(points[Math.min(least, greatest)]);
    if (least !== greatest) kept.push(points[Math.max(least, greatest)]);
  }
  if (kept.at(-1) !== points.at(-1)) kept.push(points.at(-1));
  return kept;
}

/** All x of several curves, and for each curve its y there, or null. */
export function aligned(all) {
  const x = [...new Set(all.flatMap(points => points.map(each => each[0])))].sort((a, b) => a - b);
  const place = new Map(x.map((each, n) => [each, n]));
  const rows = all.map(points => {
    const row = new Array(x.length).fill(null);
    for (const [at, y] of points) row[place.get(at)] = y;
    return row;
  });
  return [x, rows];
}

const decade = y => y > 0 && Math.abs(Math.log10(y) - Math.round(Math.log10(y))) < 1e-9;

/** What of rows a scale can show. */
export function onScale(rows, log) {
  return log ? rows.map(row => row.map(y => (y > 0 ? y : null))) : rows;
}

/**
 * A chart of `rows` over `x`.
 * @param {Element} target where it is drawn, in the width of that
 * @param {object[]} lines how each row is drawn, as uPlot's series
 * @param {{log?: boolean, frame?: [number, number] | null}} how the scale of y, and which values are shown
 */
export function chart(target, xName, x, lines, rows, { log = false, frame = null } = {}) {
  const css = getComputedStyle(document.documentElement);
  const ink = css.getPropertyValue(dark() ? "--quiet-dark" : "--quiet-light").trim();
  const line = css.getPropertyValue(dark() ? "--line-dark" : "--line-light").trim();
  const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, size: 60 };
  const range = log || !frame ? undefined : (_, low, high) => {
    const [a, b] = frame, pad = (b - a) * 0.05 || Math.abs(b) * 0.05 || 1;
    return [Math.max(low, a) - pad, Math.min(high, b) + pad];
  };
  const points = { show: x.length < 40, size: 4 };
  return new globalThis.uPlot({
    width: target.clientWidth,
    height: HEIGHT,
    legend: { show: false },
    series: [{ label: xName }, ...lines.map(each => ({ ...each, spanGaps: true, points }))],
    scales: { x: { time: false }, y: { distr: log ? 3 : 1, range } },
    cursor: { focus: { prox: 24 } },
    focus: { alpha: 0.25 },
    axes: [{ ...axis, size: 40 }, {
      ...axis,
      values: (_, all) => all.map(y => (y === null ? "" : short(y))),
      filter: log ? (_, all) => all.map(y => (decade(y) ? y : null)) : undefined,
    }],
  }, [x, ...onScale(rows, log)], target);
}

/** What each colour is, and notes behind it. */
export function legend(target, names, notes) {
  target.replaceChildren(...names.slice(0, MOST).map((text, n) => {
    const entry = document.createElement("span"), box = document.createElement("span");
    entry.className = "entry";
    box.className = "key";
    box.style.background = colour(n);
    entry.append(box, text);
    return entry;
  }));
  const more = names.length > MOST ? ["and " + (names.length - MOST) + " more"] : [];
  target.append([...notes, ...more].join(" · "));
}

/** Keep a chart as wide as its place; its height stays, for phones resize while they scroll. */
export function fit(target, current) {
  let width = 0;
  const watch = new ResizeObserver(() => {
    const now = target.clientWidth;
    if (current() && now && now !== width) current().setSize({ width: now, height: HEIGHT });
    width = now;
  });
  watch.observe(target);
  return () => watch.disconnect();
}
