"use strict";
(() => {
  const by = id => document.getElementById(id);
  const table = by("results");
  if (table) {
    for (const each of document.querySelectorAll(".js")) each.hidden = false;
    const body = table.tBodies[0], rows = [...body.rows], heads = [...table.tHead.rows[0].cells];
    const value = (row, n) => {
      const cell = row.cells[n];
      return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
    };
    heads.forEach((head, n) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        for (const each of heads) each.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const order = (a, b) => {
          const x = value(a, n), y = value(b, n);
          if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
          return (x < y ? -1 : x > y ? 1 : 0) * (up ? 1 : -1);
        };
        body.append(...[...rows].sort(order));
      });
    });
    const filter = by("filter");
    filter.addEventListener("input", () => {
      const words = filter.value.toLowerCase().split(/\s+/);
      let left = 0;
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every(word => text.includes(word));
        left += row.hidden ? 0 : 1;
      }
      by("count").textContent = left + " of " + rows.length;
    });
  }
  addEventListener("beforeprint", () => { for (const each of document.querySelectorAll("details")) each.open = true; });
  const open = () => {
    const target = location.hash && by(decodeURIComponent(location.hash.slice(1)));
    if (target && target.tagName === "DETAILS") target.open = true;
  };
  addEventListener("hashchange", open);
  open();

  if (!by("data")) { window.ready = true; return; }
  const data = JSON.parse(by("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  // Okabe and Ito's colours; a lighter set for dark.
  const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b08800", "#56b4e9", "#5d5d5d"];
  const DARK = ["#56b4e9", "#ff9a56", "#2fd3a5", "#e8a3cb", "#f0e442", "#9fd8ff", "#b8b8b8"];
  const controls = { metric: by("metric"), colour: by("colour"), log: by("log"), smooth: by("smooth") };
  by("controls").hidden = false;
  let chart = null;
  const short = y => Math.abs(y) >= 1e5 || (y !== 0 && Math.abs(y) < 1e-3) ? y.toExponential(0) : String(Number(y.toPrecision(4)));
  const draw = () => {
    const found = data.metrics[controls.metric.value];
    const key = controls.colour ? controls.colour.value : null;
    const word = n => key === null ? found.names[n] : key + " = " + (found.values[n][key] ?? "");
    const groups = [...new Set(found.names.map((_, n) => word(n)))];
    const colours = dark.matches ? DARK : LIGHT;
    const colour = n => colours[groups.indexOf(word(n)) % colours.length];
    const log = controls.log.getAttribute("aria-pressed") === "true";
    const many = found.names.length > 30;
    const series = found.names.map((name, n) => ({
      label: name, stroke: colour(n), width: found.best === n ? 2.5 : 1.2, dash: found.failed[n] ? [5, 4] : undefined, spanGaps: true,
      alpha: many && found.best !== n && !found.failed[n] ? 0.35 : 1, points: { show: found.x.length < 40, size: 4 },
    }));
    const css = getComputedStyle(document.documentElement);
    const ink = css.getPropertyValue("--quiet").trim(), line = css.getPropertyValue("--line").trim();
    const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, size: 60 };
    const values = found.curves[controls.smooth.value].map(row => log ? row.map(y => y > 0 ? y : null) : row);
    const decade = y => y > 0 && Math.abs(Math.log10(y) - Math.round(Math.log10(y))) < 1e-9;
    const range = log || !found.frame ? undefined : (_, low, high) => {
      const [a, b] = found.frame, pad = (b - a) * 0.05 || Math.abs(b) * 0.05 || 1;
      return [Math.max(low, a) - pad, Math.min(high, b) + pad];
    };
    if (chart) chart.destroy();
    chart = new uPlot({
      width: by("chart").clientWidth, height: 320, series: [{ label: data.x }, ...series], legend: { show: false },
      scales: { x: { time: false }, y: { distr: log ? 3 : 1, range } }, cursor: { focus: { prox: 24 } }, focus: { alpha: 0.25 },
      axes: [{ ...axis, size: 40 }, {
        ...axis, values: (_, all) => all.map(y => y === null ? "" : short(y)), filter: log ? (_, all) => all.map(y => decade(y) ? y : null) : undefined,
      }],
    }, [found.x, ...values], by("chart"));
    const legend = by("legend");
    legend.replaceChildren(...groups.slice(0, 24).map((text, n) => {
      const entry = document.createElement("span"), box = document.createElement("span");
      entry.className = "entry";
      box.className = "key";
      box.style.background = colours[n % colours.length];
      entry.append(box, text);
      return entry;
    }));
    const notes = [];
    if (found.best >= 0) notes.push("thick: the best, " + found.names[found.best]);
    if (found.failed.some(Boolean)) notes.push("dashed: failed");
    if (!log && found.leaving) notes.push(found.leaving + " curve" + (found.leaving > 1 ? "s leave" : " leaves") + " the frame");
    if (groups.length > 24) notes.push("and " + (groups.length - 24) + " more");
    legend.append(notes.join(" · "));
  };
  const begin = () => {
    controls.log.setAttribute("aria-pressed", String(data.metrics[controls.metric.value].log));
    draw();
  };
  controls.metric.addEventListener("change", begin);
  for (const each of [controls.colour, controls.smooth]) if (each) each.addEventListener("change", draw);
  controls.log.addEventListener("click", () => {
    controls.log.setAttribute("aria-pressed", String(controls.log.getAttribute("aria-pressed") !== "true"));
    draw();
  });
  dark.addEventListener("change", draw);
  let width = 0;
  new ResizeObserver(() => {
    const now = by("chart").clientWidth;
    if (chart && now !== width) chart.setSize({ width: now, height: 320 });
    width = now;
  }).observe(by("chart"));
  begin();
  window.ready = true;
})();
