"use strict";
// Curves drawn by uPlot, for the report and for the live page.
const curves = (() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  // Okabe and Ito's colours; a lighter set for dark.
  const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b08800", "#56b4e9", "#5d5d5d"];
  const DARK = ["#56b4e9", "#ff9a56", "#2fd3a5", "#e8a3cb", "#f0e442", "#9fd8ff", "#b8b8b8"];
  const MOST = 24, HEIGHT = 320;
  const colour = n => (dark.matches ? DARK : LIGHT)[n % LIGHT.length];
  const short = y => Math.abs(y) >= 1e5 || (y !== 0 && Math.abs(y) < 1e-3) ? y.toExponential(0) : String(Number(y.toPrecision(4)));
  const decade = y => y > 0 && Math.abs(Math.log10(y) - Math.round(Math.log10(y))) < 1e-9;
  const shown = (rows, log) => rows.map(row => log ? row.map(y => y > 0 ? y : null) : row);

  // A chart of `rows` over `x`; `lines` says how each row is drawn, `frame` which values are shown.
  const chart = (target, xName, x, lines, rows, { log = false, frame = null } = {}) => {
    const css = getComputedStyle(document.documentElement);
    const ink = css.getPropertyValue("--quiet").trim(), line = css.getPropertyValue("--line").trim();
    const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, size: 60 };
    const range = log || !frame ? undefined : (_, low, high) => {
      const [a, b] = frame, pad = (b - a) * 0.05 || Math.abs(b) * 0.05 || 1;
      return [Math.max(low, a) - pad, Math.min(high, b) + pad];
    };
    return new uPlot({
      width: target.clientWidth, height: HEIGHT, legend: { show: false },
      series: [{ label: xName }, ...lines.map(each => ({ ...each, spanGaps: true, points: { show: x.length < 40, size: 4 } }))],
      scales: { x: { time: false }, y: { distr: log ? 3 : 1, range } }, cursor: { focus: { prox: 24 } }, focus: { alpha: 0.25 },
      axes: [{ ...axis, size: 40 }, {
        ...axis, values: (_, all) => all.map(y => y === null ? "" : short(y)), filter: log ? (_, all) => all.map(y => decade(y) ? y : null) : undefined,
      }],
    }, [x, ...shown(rows, log)], target);
  };

  const legend = (target, names, notes) => {
    target.replaceChildren(...names.slice(0, MOST).map((text, n) => {
      const entry = document.createElement("span"), box = document.createElement("span");
      entry.className = "entry";
      box.className = "key";
      box.style.background = colour(n);
      entry.append(box, text);
      return entry;
    }));
    target.append([...notes, ...names.length > MOST ? ["and " + (names.length - MOST) + " more"] : []].join(" · "));
  };

  // Keeps a chart as wide as its place; its height stays, for phones resize while they scroll.
  const fit = (target, current) => {
    let width = 0;
    new ResizeObserver(() => {
      const now = target.clientWidth;
      if (current() && now && now !== width) current().setSize({ width: now, height: HEIGHT });
      width = now;
    }).observe(target);
  };
  return { dark, colour, shown, chart, legend, fit };
})();
