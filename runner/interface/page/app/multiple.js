// One of several small charts: a metric of all members, with a cursor and a zoom that all of them share.
import { Hooks, html } from "./lib.js";
import { aligned, colour, dark, onTheme, smoothed } from "./curves.js";
import { short, span } from "./text.js";

const { useEffect, useRef, useState } = Hooks;
const HEIGHT = 190;
const TALL = 420;
const GRID = 200;
/** Of more members than there are colours, the next ones are dashed, then dotted. */
const DASHES = [undefined, [7, 3], [2, 3]];

/** The colour of a member as its curve is drawn. */
export function Key({ n }) {
  return html`<span class="key" style=${{ borderTop: `3px ${["solid", "dashed", "dotted"][Math.floor(n / 7) % 3]} ${colour(n)}` }}></span>`;
}

/** The value of a curve at a place, between its points; null outside. */
function at(points, x) {
  if (!points.length || x < points[0][0] || x > points.at(-1)[0]) return null;
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= x) low = middle;
    else high = middle;
  }
  const [a, y] = points[low], [b, z] = points[high];
  return b > a ? y + (z - y) * Math.min(1, (x - a) / (b - a)) : y;
}

/** The mean, least and greatest of curves on one grid: rows [mean, least, greatest] for each group. */
export function grouped(lines) {
  const groups = new Map();
  for (const line of lines) {
    if (!groups.has(line.group)) groups.set(line.group, { group: line.group, n: groups.size, members: [] });
    groups.get(line.group).members.push(line.points);
  }
  const ends = lines.flatMap(({ points }) => (points.length ? [points[0][0], points.at(-1)[0]] : []));
  const low = Math.min(...ends), high = Math.max(...ends);
  const x = Array.from({ length: GRID }, (_, n) => low + (high - low) * n / (GRID - 1));
  const rows = [...groups.values()].map(each => {
    const columns = x.map(place => each.members.map(points => at(points, place)).filter(y => y !== null));
    return {
      ...each,
      mean: columns.map(all => (all.length ? all.reduce((a, b) => a + b, 0) / all.length : null)),
      least: columns.map(all => (all.length ? Math.min(...all) : null)),
      greatest: columns.map(all => (all.length ? Math.max(...all) : null)),
    };
  });
  return { x, rows };
}

/** The series, data and bands of a chart: a line for each member, or a mean with its band for each group. */
function drawn(lines, isGrouped) {
  if (!isGrouped) {
    const [x, rows] = aligned(lines.map(each => each.points));
    return { x, rows, bands: [], series: lines.map(each => ({ label: each.label, stroke: colour(each.n), width: 1.5, dash: DASHES[Math.floor(each.n / 7) % 3], alpha: each.failed ? 0.5 : 1, spanGaps: true, points: { show: x.length < 40, size: 4 } })) };
  }
  const { x, rows } = grouped(lines), none = { width: 0, points: { show: false } };
  return {
    x,
    rows: rows.flatMap(each => [each.mean, each.greatest, each.least]),
    series: rows.flatMap(each => [{ label: each.group, stroke: colour(each.n), width: 2, points: { show: false } }, { ...none, stroke: colour(each.n) }, { ...none, stroke: colour(each.n) }]),
    bands: rows.map((each, n) => ({ series: [3 * n + 2, 3 * n + 3], fill: colour(each.n) + "33" })),
  };
}

/**
 * A chart of one metric.  Charts of one `sync` share a cursor.
 * @param {{lines: {n: number, label: string, group: string, points: number[][], failed: boolean}[]}} props `hint`: what a screen reader says of it; `value`: what stands beside its name; `frame`: the range of y; `isTime`: x is seconds since the epoch, `isSpan`: seconds
 */
export function Multiple({ metric, lines, weight = 0, logX = false, logY = false, zoom, setZoom, isGrouped = false, lit = null, axis, isTime = false, isSpan = false, frame = null, sync, value = "", hint }) {
  const place = useRef(null), chart = useRef(null), shape = useRef("");
  const [tall, setTall] = useState(false), [theme, turn] = useState(0);
  const [near, setNear] = useState("");
  useEffect(() => onTheme(() => turn(n => n + 1)), []);
  useEffect(() => () => chart.current?.destroy(), []);
  useEffect(() => {
    const soft = lines.map(each => ({ ...each, points: weight ? smoothed(each.points, weight) : each.points }));
    const positive = points => points.filter(([x]) => !logX || x > 0);
    const { x, rows, series, bands } = drawn(soft.map(each => ({ ...each, points: positive(each.points) })), isGrouped);
    const data = [x, ...rows.map(row => (logY ? row.map(y => (y > 0 ? y : null)) : row))];
    const now = JSON.stringify([metric, isTime, isSpan, logX, logY, tall, theme, dark(), zoom, isGrouped, x.length < 40, series.map(each => each.label), soft.map(each => each.failed)]);
    if (now === shape.current) {
      chart.current.setData(data);
      return;
    }
    shape.current = now;
    chart.current?.destroy();
    const css = getComputedStyle(document.documentElement);
    const ink = css.getPropertyValue(dark() ? "--quiet-dark" : "--quiet-light").trim(), grid = css.getPropertyValue(dark() ? "--line-dark" : "--line-light").trim();
    const side = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "11px system-ui, sans-serif" };
    const decade = y => y > 0 && Math.abs(Math.log10(y) - Math.round(Math.log10(y))) < 1e-9;
    const sparse = (_, all) => all.map(y => (decade(y) ? y : null));
    chart.current = new globalThis.uPlot({
      width: place.current.clientWidth,
      height: tall ? TALL : HEIGHT,
      legend: { show: false },
      bands,
      series: [{ label: axis }, ...series],
      scales: { x: { time: isTime, distr: logX ? 3 : 1, ...(zoom ? { range: () => zoom } : {}) }, y: { distr: logY ? 3 : 1, ...(frame ? { range: () => frame } : {}) } },
      padding: [10, 12, 0, 0],
      cursor: { sync: { key: sync, setSeries: false }, focus: { prox: 24 }, drag: { x: true, y: false, setScale: false } },
      focus: { alpha: 0.2 },
      axes: [{ ...side, size: 30, filter: logX ? sparse : undefined, ...(isSpan ? { values: (_, all) => all.map(x => (x === null ? "" : span(x))) } : {}) }, { ...side, size: 54, values: (_, all) => all.map(y => (y === null ? "" : short(y))), filter: logY ? sparse : undefined }],
      hooks: {
        setSelect: [each => {
          const { left, width } = each.select;
          if (width < 3) return;
          setZoom([each.posToVal(left, "x"), each.posToVal(left + width, "x")]);
        }],
        setSeries: [(each, n) => {
          const { idx } = each.cursor, y = n && idx !== null ? each.data[n]?.[idx] : null;
          setNear(n ? each.series[n].label + (typeof y === "number" ? " " + short(y) : "") : "");
        }],
      },
    }, data, place.current);
    place.current.querySelector(".u-over").addEventListener("dblclick", () => setZoom(null));
  }, [metric, lines, weight, logX, logY, tall, theme, zoom, isGrouped]);
  useEffect(() => {
    const watch = new ResizeObserver(() => {
      const width = place.current.clientWidth;
      if (chart.current && width && width !== chart.current.width) chart.current.setSize({ width, height: tall ? TALL : HEIGHT });
    });
    watch.observe(place.current);
    return () => watch.disconnect();
  }, [tall]);
  useEffect(() => {
    const n = lit === null || isGrouped ? -1 : lines.findIndex(each => each.n === lit);
    chart.current?.setSeries(n < 0 ? null : n + 1, { focus: true });
  }, [lit, lines]);
  const count = lines.reduce((sum, each) => sum + each.points.length, 0);
  return html`<figure class=${"multiple" + (tall ? " tall" : "")} data-metric=${metric} data-points=${count}>
    <figcaption><b>${metric}</b> <button type="button" class="plain" aria-expanded=${String(tall)} aria-label=${(tall ? "make smaller: " : "enlarge: ") + metric} onClick=${() => setTall(!tall)}>${tall ? "smaller" : "enlarge"}</button>
      <small class="near">${near || value}</small></figcaption>
    <div ref=${place} class="plot" role="img" aria-label=${`curves of ${metric}; ${hint}`}></div>
  </figure>`;
}
