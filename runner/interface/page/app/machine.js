// The tab of machines: what the GPUs, processors, memory, disk and network of each step had to do, over time; and what they cost.
import { Hooks, html } from "./lib.js";
import { pause } from "./api.js";
import { readable } from "./text.js";
import { isOver, readCurves } from "./feed.js";
import { MoneyTable } from "./money.js";
import { Key, Multiple } from "./multiple.js";

const { useEffect, useState } = Hooks;
const EVERY = 10000;
const BINS = 300;
const STEPS = 50;
/** What is drawn: the name of a sample's number, its title, its unit, and how many decimals its last value has. */
const DRAWN = [
  ["gpu_utilization_percent", "GPU", "%", 0],
  ["gpu_memory_used_gb", "GPU memory", "GB", 1],
  ["gpu_power_w", "GPU power", "W", 0],
  ["gpu_temperature_c", "GPU temperature", "°C", 0],
  ["cpu_percent", "CPU", "%", 0],
  ["ram_used_gb", "Memory", "GB", 1],
  ["disk_free_gb", "Free disk", "GB", 1],
  ["net_received_mb_per_s", "Network in", "MB/s", 2],
  ["net_sent_mb_per_s", "Network out", "MB/s", 2],
];

/** The samples of a run's machines, read again while it runs; null until they are read. */
function useSamples(feed, isLive) {
  const [found, setFound] = useState(null);
  useEffect(() => {
    const ends = new AbortController(), { signal } = ends;
    const read = async () => {
      do {
        if (!document.hidden) setFound(await readCurves(`${feed.path}/metrics?of=machine&x=at&bins=${BINS}`, signal));
        if (isLive) await pause(EVERY, signal);
      } while (isLive && !signal.aborted);
    };
    read().catch(() => setFound(known => known || new Map()));
    return () => ends.abort();
  }, [feed, isLive]);
  return found;
}

/** The last value of a number, if one step alone has it. */
function lastOf(by, unit, places) {
  return by.size === 1 ? `${[...by.values()][0].y.at(-1).toFixed(places)} ${unit}` : unit;
}

/** The tab. */
export function Machine({ feed, run }) {
  const [zoom, setZoom] = useState(null), found = useSamples(feed, !isOver(run));
  const drawn = DRAWN.filter(([name]) => found?.has(name));
  const steps = [...new Set(drawn.flatMap(([name]) => [...found.get(name).keys()]))].slice(0, STEPS);
  const linesOf = name => steps.filter(step => found.get(name).has(step)).map(step => ({
    n: steps.indexOf(step), label: readable(step), group: "", failed: false, points: found.get(name).get(step).pairs(),
  }));
  return html`<section id="machine">
    ${steps.length > 0 && html`<p class="legend-row" aria-label="steps">${steps.map((step, n) => html`<span key=${step}><${Key} n=${n} />${readable(step)}<small>${feed.steps.value.get(step)?.host}</small></span>`)}
      ${zoom && html`<button type="button" id="unzoom" onClick=${() => setZoom(null)}>Reset zoom</button>`}</p>`}
    <div class="multiples">${drawn.map(([name, title, unit, places]) => html`<${Multiple} key=${name} metric=${title} lines=${linesOf(name)} zoom=${zoom} setZoom=${setZoom} axis="time" isTime=${true} sync="machine" frame=${unit === "%" ? [0, 100] : null} value=${lastOf(found.get(name), unit, places)} hint="over time" />`)}</div>
    ${found && !drawn.length && html`<p class="quiet empty">No samples yet. While a step runs, its machine is sampled every 5 seconds.</p>`}
    ${!found && html`<p class="quiet" role="status">…</p>`}
    <h2>Cost</h2><div class="narrow"><${MoneyTable} run=${run} /></div>
  </section>`;
}
