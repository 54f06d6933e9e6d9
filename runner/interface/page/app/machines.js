// What costs money now, who carries out runs, which runs wait and why, and how much is kept.
import { Hooks, html } from "./lib.js";
import { json, keep } from "./api.js";
import { Leases } from "./leases.js";
import { usd } from "./money.js";
import { Queue, Workers } from "./queue.js";
import { Stores } from "./stores.js";

const { useEffect, useState } = Hooks;
const [EVERY, EVERY_STORES] = [3000, 60000];

function Tile({ id, what, children }) {
  return html`<li class="tile" id=${id}><b>${children}</b><span>${what}</span></li>`;
}

/** Read all again and again, until `signal` ends it. */
function follow(signal, setFound, setStores) {
  keep(signal, EVERY, async () => {
    if (document.hidden) return;
    const [leases, workers, queue] = await Promise.all(["/leases", "/workers", "/queue"].map(path => json(path, { signal })));
    setFound({ leases, workers: workers.workers, queue: queue.runs });
  });
  keep(signal, EVERY_STORES, async () => setStores(await json("/stores", { signal })));
}

/** The view of machines, workers, queue and stores; `tell` shows an error. */
export function Machines({ tell }) {
  const [found, setFound] = useState(null), [stores, setStores] = useState(null), [turn, setTurn] = useState(0);
  useEffect(() => {
    document.title = "Machines · recipe";
    const control = new AbortController();
    follow(control.signal, setFound, setStores);
    return () => control.abort();
  }, [turn]);
  const act = work => {
    tell(null);
    return work().catch(tell).then(() => setTurn(n => n + 1));
  };
  if (!found) return html`<section id="machines"><h1>Machines</h1><p class="quiet" role="status">Loading…</p></section>`;
  const { leases, workers, queue } = found, alive = workers.filter(each => each.alive).length, idle = workers.filter(each => each.alive && each.idle).length;
  const spent = leases.leases.reduce((sum, each) => sum + each.usd, 0);
  return html`<section id="machines"><h1>Machines</h1>
    <ul class="tiles">
      <${Tile} id="an-hour" what="per hour">${usd(leases.usd_an_hour)}<//><${Tile} id="so-far" what="spent so far">${usd(spent)}<//>
      <${Tile} id="rented" what=${leases.leases.length === 1 ? "rented machine" : "rented machines"}>${leases.leases.length}<//>
      <${Tile} id="alive" what=${`${alive === 1 ? "worker" : "workers"}, ${idle} idle`}>${alive}<//><${Tile} id="waiting" what=${queue.length === 1 ? "queued run" : "queued runs"}>${queue.length}<//>
    </ul>
    <h2>Rented machines</h2><${Leases} leases=${leases.leases} act=${act} />
    <h2>Queue</h2><${Queue} runs=${queue} act=${act} />
    <h2>Workers</h2><${Workers} workers=${workers} />
    <h2>Stores</h2><${Stores} stores=${stores} />
  </section>`;
}
