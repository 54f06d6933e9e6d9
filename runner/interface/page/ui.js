"use strict";
// The live page: a list of runs, and one of them as it goes.  A run is read once; then its events are followed, and what they change is drawn.
(() => {
  const by = id => document.getElementById(id);
  const { el } = shown;
  const FINAL = ["COMPLETED", "FAILED", "CANCELLED"], OVER = ["FRESH", "DONE", "FAILED", "SKIPPED", "BLOCKED", "CANCELLED"];
  const ROWS = 200, LOG = 256 << 10, PICTURE = 2 << 20, PICTURES = 48, DRAW = 250, LIST = 3000, MEASURE = 1000, REFRESH = 5000;
  const IMAGE = /\.(?:png|jpe?g|webp|gif)$/i, BESIDE = /^(?:step|epoch|timestamp|time|time_.*)$/;

  // -- the server -----------------------------------------------------------------------------------------------------------------------------------
  class Refusal extends Error {
    constructor(status, fault) {
      super([fault.message, ...(fault.problems || []).slice(0, 20).map(each => "· " + each.message + (each.fix ? " — " + each.fix : "")), fault.problems?.length ? "" : fault.fix]
        .filter(Boolean).join("\n"));
      this.status = status;
    }
  }
  const parameters = () => new URLSearchParams(location.hash.slice(1));
  const given = parameters();
  if (given.has("token")) {
    sessionStorage.setItem("token", given.get("token"));
    given.delete("token");
    history.replaceState(null, "", location.pathname + (given.size ? "#" + given : ""));
  }
  const ask = async (path, { signal, headers = {}, body, method } = {}) => {
    const answer = await fetch("/v1" + path, {
      method: method || (body === undefined ? "GET" : "POST"), signal, credentials: "omit", redirect: "error", cache: "no-store",
      headers: { Authorization: "Bearer " + sessionStorage.getItem("token"), ...(body === undefined ? {} : { "Content-Type": "application/json" }), ...headers },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    if (answer.ok) return answer;
    const fault = await answer.json().then(each => each.error, () => ({ message: "the server answered " + answer.status, fix: "" }));
    if (answer.status === 401) sign();
    throw new Refusal(answer.status, fault);
  };
  const json = (path, options) => ask(path, options).then(answer => answer.json());
  const part = id => encodeURIComponent(id);
  const pause = (ms, signal) => new Promise(done => {
    const timer = setTimeout(done, ms);
    signal?.addEventListener("abort", () => { clearTimeout(timer); done(); }, { once: true });
  });
  const tell = error => {
    by("message").textContent = error ? shown.visible(error.message) : "";
    by("message").hidden = !error;
    if (error) by("message").scrollIntoView({ block: "nearest" });
  };
  const link = word => {
    by("link").textContent = word === "lost" ? "not connected, trying again" : word;
    by("link").className = "quiet " + word;
  };
  // Does `work` again and again while somebody looks; a server that is away is asked less often.
  const keep = async (signal, ms, work) => {
    for (let wait = ms; !signal.aborted; await pause(wait, signal)) {
      try {
        if (await work() === false) return;
        link("live");
        wait = ms;
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof Refusal && error.status < 500 && error.status !== 429) return;
        link("lost");
        wait = Math.min(10000, Math.max(1000, wait * 2));
      }
    }
  };
  const sign = () => {
    stop();
    document.body.dataset.view = "sign";
    by("sign").hidden = false;
    document.querySelector(".frame").hidden = true;
    link("");
  };
  by("sign").addEventListener("submit", event => {
    event.preventDefault();
    sessionStorage.setItem("token", by("token").value.trim());
    by("token").value = "";
    location.reload();
  });

  // -- drawing: at most four times a second, and only what has changed ---------------------------------------------------------------------------------
  const due = new Set();
  let drawing = 0;
  const draw = (...what) => {
    for (const each of what) due.add(each);
    drawing ||= setTimeout(() => requestAnimationFrame(() => {
      drawing = 0;
      const now = [...due];
      due.clear();
      if (run) for (const each of now) each();
    }), DRAW);
  };
  const table = (target, rows) => target.replaceChildren(...rows.map(cells => el("tr", {}, ...cells.map((cell, n) => el(n ? "td" : "th", n ? {} : { scope: "row" }, cell)))));

  // -- the list of runs --------------------------------------------------------------------------------------------------------------------------------
  let listed = new AbortController(), pages = 1, next = null;
  const runs = async () => {
    let found = [], after = "";
    for (let n = 0; n < pages; n++) {
      const page = await json(`/runs?limit=50${after ? "&after=" + part(after) : ""}`, { signal: listed.signal });
      found = found.concat(page.runs);
      after = next = page.next;
      if (!next) break;
    }
    const top = by("list").scrollTop, focused = document.activeElement?.dataset?.run;
    by("runs").replaceChildren(...found.map(each => {
      const kind = shown.state(each.word);
      return el("li", {}, el("a", { class: "row", href: "#run=" + part(each.id), "data-run": each.id, "aria-current": String(each.id === current) },
        el("span", { class: "line" }, el("b", {}, el("span", { class: "sign " + kind, "aria-hidden": "true" }, shown.sign(kind)), each.recipe),
          el("small", { title: each.created }, shown.ago(Date.parse(each.created), Date.now()))),
        el("span", { class: "line" }, el("small", {}, shown.words(each.word) + (each.request ? ", " + each.request + " asked" : "")), el("small", {}, each.user))));
    }));
    by("list").scrollTop = top;
    if (focused) document.querySelector(`[data-run="${CSS.escape(focused)}"]`)?.focus();
    by("older").hidden = !next;
    by("none").hidden = found.length > 0;
    window.ready = true;
  };
  by("older").addEventListener("click", () => { pages += 1; runs().catch(tell); });

  // -- one run -----------------------------------------------------------------------------------------------------------------------------------------
  let current = "", run = null, live = new AbortController(), logging = new AbortController();
  let steps = new Map(), series = new Map(), cursors = new Map(), pictures = new Map(), urls = [], chart = null, chosen = "", follows = "", passed = 0;
  const path = () => "/runs/" + part(current);

  const head = () => {
    const kind = shown.state(run.word), over = FINAL.includes(run.state);
    by("chip").className = "chip " + kind;
    by("chip").textContent = shown.sign(kind) + " " + shown.words(run.word) + (run.request ? ", " + run.request + " asked" : "");
    by("name").textContent = shown.visible(run.recipe);
    document.title = shown.visible(`${shown.sign(kind)} ${run.recipe} · recipe`);
    const took = ((run.ended ? Date.parse(run.ended) : Date.now()) - Date.parse(run.created)) / 1000;
    const facts = [new Date(run.created).toLocaleString(), run.state === "QUEUED" ? "waits for a worker" : (over ? "took " : "for ") + shown.span(Math.max(0, took)),
      run.provider, run.user, run.reason, run.cost ? "$" + run.cost.toFixed(2) : ""].filter(Boolean);
    by("facts").replaceChildren(el("code", {}, run.id), ...facts.map(each => shown.visible(" · " + each)));
    by("links").hidden = !run.links.length;
    by("links").replaceChildren(...run.links.flatMap(({ step, name, to }, n) => [shown.visible(`${n ? " · " : ""}${name} of ${step}: `),
      /^https?:\/\//.test(to) ? el("a", { href: to, rel: "noopener noreferrer", target: "_blank" }, shown.visible(to)) : el("code", {}, shown.visible(to))]));
    const { percent, step, total, eta } = run.progress;
    by("bar").className = "bar-of " + kind;
    by("bar").setAttribute("aria-valuenow", String(percent ?? 0));
    by("bar").firstElementChild.style.width = (percent ?? 0) + "%";
    by("tally").textContent = total === null ? "" : `${step}/${total} steps finished` + (eta && !over ? `, about ${shown.span(eta)} left` : "");
    actions(over);
  };
  const act = (label, verb, kind = "") => el("button", { type: "button", class: kind, "data-verb": verb, click: event => does(event.target, verb) }, label);
  const does = async (button, verb) => {
    if (verb === "cancel" && !button.dataset.sure) {
      button.dataset.sure = "yes";
      button.textContent = "Really cancel?";
      setTimeout(() => { if (button.isConnected) { delete button.dataset.sure; button.textContent = "Cancel"; } }, 4000);
      return;
    }
    button.disabled = true;
    tell(null);
    try {
      const done = await json(path() + "/" + verb, { body: {} });
      if (verb === "retry") location.hash = "run=" + part(done.run);
      else await refresh();
    } catch (error) { tell(error); }
    button.disabled = false;
  };
  let acted = "";
  const actions = over => {
    const state = [run.state, run.request, run.word].join("/");
    if (state === acted) return;
    acted = state;
    by("actions").replaceChildren(...over ? [act("Run again", "retry")]
      : [run.state === "PAUSED" || run.request === "pause" || run.word === "NEEDS_RECOVERY"
        ? act("Resume", "resume", "main") : act("Pause", "pause"), act("Cancel", "cancel", "stop")]);
  };

  const tallied = () => {
    const found = new Map(run.graph.map(each => [each.step, each.fresh ? { fresh: each.fresh } : {}]));
    const most = new Map(run.graph.map(each => [each.step, each.instances]));
    for (const [id, each] of ordered()) {
      const tally = found.get(shown.bare(id)) || {}, kind = shown.state(each.state), known = Object.values(tally).reduce((a, b) => a + b, 0);
      // What was fresh before the run began is counted already, whether it has a row or not.
      if (each.state !== "FRESH" || known < (most.get(shown.bare(id)) ?? Infinity)) tally[kind] = (tally[kind] || 0) + 1;
      found.set(shown.bare(id), tally);
    }
    for (const { step, instances } of run.graph) {
      const tally = found.get(step), left = instances - Object.values(tally).reduce((a, b) => a + b, 0);
      if (left > 0) tally[FINAL.includes(run.state) ? "skipped" : "waiting"] = (tally.waiting || 0) + left;
    }
    return found;
  };
  const ordered = () => [...steps].sort(([, a], [, b]) => shown.WORST.indexOf(shown.state(a.state)) - shown.WORST.indexOf(shown.state(b.state)));
  const drawSteps = () => {
    const tallies = tallied(), place = by("steps").querySelector(".scroll"), left = place.scrollLeft;
    const graph = run.graph.length ? run.graph : [...tallies.keys()].map(step => ({ step, needs: [], instances: 1 }));
    by("steps").hidden = !graph.length;
    const at = [...place.querySelectorAll("g")].indexOf(document.activeElement);
    place.replaceChildren(shown.graph(graph.slice(0, ROWS), tallies, step => follow([...steps.keys()].reverse().find(id => shown.bare(id) === step) || "")));
    place.scrollLeft = left;
    if (at >= 0) place.querySelectorAll("g")[at]?.focus();
    const all = ordered(), body = by("each").querySelector("tbody");
    table(body, all.slice(0, ROWS).map(([id, each]) => [shown.readable(id), el("span", {}, el("span", { class: "sign " + shown.state(each.state) }, shown.sign(shown.state(each.state))), shown.words(each.state)),
      String(each.attempts || ""), each.host, each.reason]));
    by("each").querySelector("p").textContent = all.length > ROWS ? `the first ${ROWS} of ${all.length}` : "";
    const failures = all.filter(([, each]) => each.state === "FAILED");
    by("failed").hidden = !failures.length;
    by("failed").lastElementChild.replaceChildren(...failures.slice(0, 20).map(([id, each]) => el("article", { class: "failure" },
      el("h3", {}, "✗ " + shown.readable(id) + " ", el("small", {}, each.reason), " ", el("button", { type: "button", click: () => follow(id) }, "its log")))));
    which();
  };

  // Curves: points of a step that was done twice stand where the later ones put them.
  const measured = async (step, attempt, after) => {
    const query = step ? `?step=${part(step)}&attempt=${attempt}&after=${after}` : "";
    const text = await (await ask(path() + "/metrics" + query, { signal: live.signal })).text();
    for (const line of text.split("\n")) {
      if (!line) continue;
      const point = JSON.parse(line), { values } = point, cursor = cursors.get(point.step);
      if (!cursor || point.attempt > cursor.attempt) cursors.set(point.step, { attempt: point.attempt, n: point.n });
      else if (point.attempt === cursor.attempt) cursor.n = Math.max(cursor.n, point.n);
      const x = [values.step, values.epoch].find(Number.isFinite) ?? point.n - 1;
      for (const [name, y] of Object.entries(values)) {
        if (!Number.isFinite(y) || BESIDE.test(name)) continue;
        if (!series.has(name)) series.set(name, new Map());
        const found = series.get(name);
        if (!found.has(point.step)) found.set(point.step, new Map());
        found.get(point.step).set(x, y);
      }
    }
    if (text) draw(drawCurves);
  };
  const measuring = new Set();
  const measure = async () => {
    for (const step of [...measuring].slice(0, 24)) {
      const over = OVER.includes(steps.get(step)?.state), cursor = cursors.get(step) || { attempt: 0, n: 0 };
      await measured(step, cursor.attempt, cursor.n);
      if (over) measuring.delete(step);
    }
    return !FINAL.includes(run.state) || measuring.size > 0;
  };
  const drawCurves = () => {
    const names = [...series].filter(([, found]) => [...found.values()].some(points => points.size > 1)).map(([name]) => name);
    names.sort((a, b) => !/loss/.test(a) - !/loss/.test(b) || (a < b ? -1 : 1));
    by("curves").hidden = !names.length;
    if (!names.length) return;
    const select = by("metric"), was = select.value;
    if (select.options.length !== names.length) {
      select.replaceChildren(...names.map(name => { const option = el("option", {}, name); option.value = name; return option; }));
      if (names.includes(was)) select.value = was;
    }
    const found = [...series.get(select.value)].filter(([, points]) => points.size > 1).slice(0, 100);
    const log = by("log").getAttribute("aria-pressed") === "true", weight = Number(by("smooth").value);
    const points = found.map(([, each]) => shown.thinned(shown.smoothed([...each].sort((a, b) => a[0] - b[0]), weight)));
    const [x, rows] = shown.aligned(points), ids = found.map(([id]) => id), key = [select.value, log, curves.dark.matches, ...ids].join("\n");
    by("chart").dataset.points = String(points.reduce((sum, each) => sum + each.length, 0));
    if (chart && chart.key === key) { chart.setData([x, ...curves.shown(rows, log)]); return; }
    chart?.destroy();
    const failed = id => steps.get(id)?.state === "FAILED";
    chart = curves.chart(by("chart"), "step", x, ids.map((id, n) => ({ label: shown.readable(id), stroke: curves.colour(n), width: 1.6, dash: failed(id) ? [5, 4] : undefined })), rows, { log });
    chart.key = key;
    curves.legend(by("legend"), ids.map(id => shown.visible(shown.readable(id))), []);
  };
  const anew = () => { chart?.destroy(); chart = null; if (run) drawCurves(); };
  by("metric").addEventListener("change", anew);
  by("smooth").addEventListener("change", anew);
  by("log").addEventListener("click", () => {
    by("log").setAttribute("aria-pressed", String(by("log").getAttribute("aria-pressed") !== "true"));
    anew();
  });
  curves.dark.addEventListener("change", anew);
  curves.fit(by("chart"), () => chart);

  // Samples: pictures among the outputs, as the steps that make them end.
  const sampled = async () => {
    const { artifacts } = await json(path() + "/artifacts", { signal: live.signal }), own = current;
    by("made").hidden = !artifacts.length;
    table(by("made").querySelector("tbody"), artifacts.slice(0, ROWS).map(each => [shown.readable(each.name), shown.bytes(each.bytes), each.folder ? each.files.length + " files" : "",
      each.stored ? each.folder ? "" : el("button", { type: "button", click: () => saved(each.name) }, "save") : "not stored here"]));
    const files = artifacts.filter(each => each.stored).flatMap(each => each.folder ? each.files.filter(file => /^[fx]/.test(file.content)).map(file => ({ name: each.name, path: file.path, bytes: file.bytes })) : [{ name: each.name, path: "", bytes: each.bytes }]);
    const images = files.filter(file => !file.path || IMAGE.test(file.path));
    for (const file of images.reverse()) { // each stands before those that came earlier
      const key = file.name + "\n" + file.path;
      if (pictures.has(key) || pictures.size >= PICTURES || file.bytes > PICTURE) continue;
      pictures.set(key, null);
      const bytes = async headers => new Uint8Array(await (await ask(`${path()}/artifacts/${part(file.name)}?path=${part(file.path)}`, { signal: live.signal, headers })).arrayBuffer());
      if (file.bytes < 12 || (!file.path && !shown.picture(await bytes({ Range: "bytes=0-15" })))) continue;
      const data = await bytes({}), type = shown.picture(data);
      if (own !== current || !type) continue;
      const url = URL.createObjectURL(new Blob([data], { type }));
      urls.push(url);
      pictures.set(key, url);
      by("samples").querySelector(".sheet").prepend(el("figure", {}, el("img", { src: url, alt: `${shown.readable(file.name)} ${file.path}`, loading: "lazy" }),
        el("figcaption", {}, shown.readable(file.name), el("br"), el("span", { class: "quiet" }, file.path))));
      by("samples").hidden = false;
    }
    by("samples").querySelector("p").textContent = pictures.size < PICTURES ? "" : "more pictures are among the outputs";
  };
  const saved = async name => {
    const url = URL.createObjectURL(await (await ask(`${path()}/artifacts/${part(name)}`)).blob());
    el("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  };

  // The log of one step: the newest that runs, or that of your choice.
  const which = () => {
    const known = ordered().filter(([, each]) => each.attempts || each.state === "RUNNING").map(([id]) => id).slice(0, ROWS);
    by("logs").hidden = !known.length;
    const select = by("which"), ids = ["", ...known];
    if ([...select.options].map(each => each.value).join("\n") !== ids.join("\n")) {
      select.replaceChildren(...ids.map(id => { const option = el("option", {}, id ? shown.readable(id) : "newest"); option.value = id; return option; }));
      select.value = known.includes(chosen) ? chosen : "";
    }
    const running = [...steps].filter(([, each]) => each.state === "RUNNING").map(([id]) => id);
    const id = chosen || running.at(-1) || (follows && steps.has(follows) ? follows : known[0]);
    if (id) read(id);
  };
  const follow = id => {
    chosen = id;
    which();
    by("which").value = id;
    by("logs").scrollIntoView({ block: "start", behavior: "smooth" });
  };
  by("which").addEventListener("change", () => { chosen = by("which").value; which(); });
  const read = id => {
    const number = steps.get(id)?.attempts || 0, key = id + "\n" + number;
    if (key === follows && !logging.signal.aborted) return;
    logging.abort();
    logging = new AbortController();
    follows = key;
    passed = 0;
    const name = shown.visible(shown.readable(id)), note = text => { by("logged").textContent = name + (text ? ": " + text : ""); };
    note("");
    by("text").textContent = "";
    let kept = "";
    const { signal } = logging;
    const show = () => {
      if (signal.aborted) return;
      const box = by("text"), end = box.scrollHeight - box.scrollTop - box.clientHeight < 30;
      box.textContent = shown.lines(kept);
      if (end) box.scrollTop = box.scrollHeight;
    };
    keep(signal, 1000, async () => {
      const query = `?step=${part(id)}&follow=true` + (passed ? "&offset=" + passed : "");
      let answer;
      try {
        answer = await ask(path() + "/logs" + query, { signal, headers: passed ? {} : { Range: "bytes=-" + LOG } });
      } catch (error) {
        if (error instanceof Refusal && [404, 409].includes(error.status)) { note(shown.visible(error.message)); return false; }
        throw error;
      }
      if (answer.status === 206) note(answer.headers.get("Content-Range")?.startsWith("bytes 0-") ? "" : "the end of its log");
      const decoder = new TextDecoder();
      for await (const chunk of pieces(answer.body, signal)) {
        passed += chunk.length;
        kept += decoder.decode(chunk, { stream: true });
        if (kept.length > LOG) { kept = kept.slice(-LOG); note("the end of its log"); }
        draw(show);
      }
      if (!passed) note("it printed nothing");
      return false;
    });
  };
  async function* pieces(stream, signal) {
    const reader = stream.getReader();
    try {
      for (;;) {
        const { done, value } = await reader.read();
        if (done || signal.aborted) return;
        yield value;
      }
    } finally { reader.cancel().catch(() => {}); }
  }

  // Events, by a stream that is resumed after the last that was seen.
  const heard = event => {
    run.seq = event.seq;
    if (event.subject === "step") {
      const known = steps.get(event.id) || { attempts: 0, host: "", state: "" };
      if (event.after === "RUNNING" && Number.isInteger(event.data.attempt) && event.data.attempt !== cursors.get(event.id)?.attempt) {
        known.attempts = event.data.attempt;
        cursors.set(event.id, { attempt: event.data.attempt, n: 0 });
      }
      steps.set(event.id, { ...known, state: event.after, reason: event.reason });
      if (event.after === "RUNNING" || OVER.includes(event.after)) measuring.add(event.id);
      if (event.after === "DONE") later(sampled);
      draw(drawSteps);
    }
    later(refresh, event.subject === "step" ? 1000 : 0);
  };
  const waits = new Map();
  const later = (work, ms = 500) => {
    if (waits.has(work)) return;
    const { signal } = live;
    waits.set(work, setTimeout(() => { waits.delete(work); if (!signal.aborted) work().catch(() => {}); }, ms));
  };
  const events = async () => {
    const answer = await ask(path() + "/events?after=" + run.seq, { signal: live.signal, headers: { Accept: "text/event-stream" } });
    link("live");
    const decoder = new TextDecoder();
    let text = "";
    for await (const chunk of pieces(answer.body, live.signal)) {
      const frames = (text + decoder.decode(chunk, { stream: true })).split("\n\n");
      text = frames.pop();
      for (const frame of frames) {
        const data = frame.split("\n").filter(line => line.startsWith("data: ")).map(line => line.slice(6)).join("\n");
        if (data) heard(JSON.parse(data));
      }
    }
    await refresh();
    return !FINAL.includes(run.state);
  };
  const refresh = async () => {
    const own = current, found = await json(path(), { signal: live.signal });
    if (own !== current) return;
    if (run && found.seq < run.seq) found.seq = run.seq;
    run = found;
    for (const { id, ...each } of found.steps) steps.set(id, each);
    draw(head, drawSteps);
  };

  const stop = () => {
    for (const each of [live, listed, logging]) each.abort();
    for (const timer of waits.values()) clearTimeout(timer);
    waits.clear();
  };
  const go = async () => {
    live = new AbortController();
    listed = new AbortController();
    const { signal } = live;
    keep(listed.signal, LIST, runs);
    if (!current) return;
    try { await refresh(); } catch (error) { if (!signal.aborted) { tell(error); by("run").hidden = true; } return; }
    if (signal.aborted) return;
    head();
    drawSteps();
    table(by("given").querySelector("tbody"), Object.entries(run.inputs).map(([name, each]) => [name, shown.value(each)]));
    by("run").hidden = false;
    for (const [id, each] of steps) if (each.state === "RUNNING") measuring.add(id);
    keep(signal, 500, events);
    keep(signal, REFRESH, async () => { if (!FINAL.includes(run.state)) await refresh(); return !FINAL.includes(run.state); });
    keep(signal, MEASURE, async () => { if (!series.size && !cursors.size) await measured(); return measure(); });
    sampled().catch(() => {});
  };

  // -- a new run ----------------------------------------------------------------------------------------------------------------------------------------
  let recipe = null, key = "";
  const field = (name, schema, must, value) => {
    const control = Array.isArray(schema.enum)
      ? el("select", {}, ...must ? [] : [el("option", { value: "" }, "")], ...schema.enum.map((each, n) => el("option", { value: String(n), selected: each === value }, shown.value(each))))
      : schema.type === "boolean" ? el("input", { type: "checkbox", checked: value === true })
      : ["array", "object"].includes(schema.type) ? el("textarea", { spellcheck: "false", placeholder: schema.type === "array" ? "[1, 2], or one a line" : "{}" })
      : el("input", { type: "text", inputmode: ["integer", "number"].includes(schema.type) ? "decimal" : undefined, spellcheck: "false",
        placeholder: /^recipe-/.test(schema.format || "") ? "hf://…  s3://…  https://…" : undefined });
    if (value !== undefined && value !== null && control.type !== "checkbox" && !Array.isArray(schema.enum)) control.value = shown.value(value);
    control.dataset.name = name;
    return el("label", { class: "field" }, el("b", {}, name, must ? el("span", { class: "must", title: "needed" }, " *") : ""), control, el("small", { class: "quiet" }, schema.description || ""));
  };
  const fields = (preset = {}) => {
    const { properties, required } = recipe.inputs, must = new Set(required), own = name => preset[name] ?? properties[name].default;
    const made = name => field(name, properties[name], must.has(name), own(name)), names = Object.keys(properties);
    const needed = names.filter(name => must.has(name)), rest = names.filter(name => !must.has(name));
    const shownFirst = needed.length ? needed : rest.slice(0, 6), more = names.filter(name => !shownFirst.includes(name));
    const presets = Object.keys(recipe.presets);
    by("inputs").replaceChildren(
      ...presets.length ? [el("label", { class: "field" }, el("b", {}, "Preset"), el("select", { id: "preset", change: () => { const chosen = by("preset").value; fields(recipe.presets[chosen] || {}); by("preset").value = chosen; } },
        el("option", { value: "" }, "none"), ...presets.map(each => el("option", { value: each }, each))))] : [],
      ...shownFirst.map(made), ...more.length ? [el("details", { class: "more" }, el("summary", {}, `${more.length} more inputs`), ...more.map(made))] : [],
      el("details", { class: "more" }, el("summary", {}, "where, for whom"), el("label", { class: "field" }, el("b", {}, "Driver"), el("input", { id: "driver", value: "local", spellcheck: "false" })),
        el("label", { class: "field" }, el("b", {}, "User"), el("input", { id: "user", spellcheck: "false" })), el("label", { class: "field" }, el("b", {}, "Priority"), el("input", { id: "priority", value: "0", inputmode: "numeric" }))));
  };
  const offered = async () => {
    const { recipes } = await json("/recipes");
    const select = by("recipe"), was = select.value;
    select.replaceChildren(...recipes.map(each => el("option", { value: each.id }, each.id)));
    if (recipes.some(each => each.id === was)) select.value = was;
    await choose();
  };
  const choose = async () => {
    const wanted = by("recipe").value, found = await json("/recipes/" + part(wanted));
    if (by("recipe").value !== wanted) return; // another was chosen meanwhile
    recipe = found;
    key = [...crypto.getRandomValues(new Uint8Array(16))].map(each => each.toString(16).padStart(2, "0")).join("");
    by("summary").textContent = shown.visible(recipe.summary);
    by("planned").replaceChildren();
    fields();
  };
  const parsed = (control, schema) => {
    if (control.type === "checkbox") return control.checked;
    const text = control.value;
    if (Array.isArray(schema.enum)) return text === "" ? undefined : schema.enum[Number(text)];
    if (text === "") return undefined;
    if (schema.type === "integer" || schema.type === "number") return Number.isFinite(Number(text)) ? Number(text) : text;
    if (schema.type === "array" || schema.type === "object") {
      try { return JSON.parse(text); } catch { /* lines */ }
      const lines = text.split("\n").map(line => line.trim()).filter(Boolean), numeric = ["integer", "number"].includes(schema.items?.type);
      return schema.type === "array" ? lines.map(line => numeric && Number.isFinite(Number(line)) ? Number(line) : line) : text;
    }
    return text;
  };
  const asked = () => {
    const { properties } = recipe.inputs, preset = by("preset")?.value || "", set = recipe.presets[preset] || {}, inputs = {};
    for (const control of by("inputs").querySelectorAll("[data-name]")) {
      const name = control.dataset.name, value = parsed(control, properties[name]);
      if (value !== undefined && JSON.stringify(value) !== JSON.stringify(set[name] ?? properties[name].default)) inputs[name] = value;
    }
    return { recipe: recipe.id, inputs, ...preset ? { preset } : {} };
  };
  const tried = async (button, work) => {
    tell(null);
    button.disabled = true;
    try { await work(); } catch (error) { tell(error); }
    button.disabled = false;
  };
  by("recipe").addEventListener("change", () => tried(by("go"), choose));
  by("new").addEventListener("click", () => { location.hash = "new"; });
  by("plan").addEventListener("click", () => tried(by("plan"), async () => {
    const found = await json("/plan", { body: asked() }), would = found.steps.filter(each => ["run", "maybe"].includes(each.answer)).length;
    const rows = found.steps.slice(0, ROWS).map(each => [shown.readable(each.id), each.answer, each.reasons.join("; ")]);
    const body = el("tbody");
    table(body, rows);
    by("planned").replaceChildren(el("p", {}, `${would} of ${found.steps.length} steps would run` + (found.seconds ? `, about ${shown.span(found.seconds)}` : "") + (found.usd ? `, at most $${found.usd.toFixed(2)}` : "") + "."),
      el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "plan" }, el("table", {}, body)));
  }));
  by("form").addEventListener("submit", event => {
    event.preventDefault();
    tried(by("go"), async () => {
      const body = { ...asked(), driver: by("driver").value.trim() || "local", user: by("user").value.trim(), priority: Number(by("priority").value) || 0 };
      const made = await json("/runs", { body, headers: { "Idempotency-Key": "ui-" + key + "-" + await digest(JSON.stringify(body)) } });
      location.hash = "run=" + part(made.id);
    });
  });
  // A request that is sent twice is one run; one that was changed is another.
  const digest = async text => {
    let found = 0;
    for (const each of text) found = (Math.imul(found, 31) + each.codePointAt(0)) | 0;
    return String(found >>> 0);
  };

  // -- where one is -------------------------------------------------------------------------------------------------------------------------------------
  const turn = () => {
    if (!sessionStorage.getItem("token")) { sign(); return; }
    stop();
    const found = parameters();
    if (found.has("token")) { sessionStorage.setItem("token", found.get("token")); found.delete("token"); history.replaceState(null, "", location.pathname + "#" + found); }
    current = found.get("run") || "";
    run = null;
    acted = chosen = follows = "";
    [steps, series, cursors, pictures] = [new Map(), new Map(), new Map(), new Map()];
    measuring.clear();
    urls.forEach(url => URL.revokeObjectURL(url));
    urls = [];
    chart?.destroy();
    chart = null;
    tell(null);
    for (const id of ["run", "start", "empty", "curves", "samples", "logs", "made", "failed", "steps"]) by(id).hidden = true;
    by("samples").querySelector(".sheet").replaceChildren();
    by("metric").replaceChildren();
    by("which").replaceChildren();
    document.title = "recipe";
    const starts = found.has("new");
    document.body.dataset.view = current ? "run" : starts ? "new" : "list";
    by("start").hidden = !starts;
    by("empty").hidden = Boolean(current) || starts;
    for (const each of document.querySelectorAll(".row")) each.setAttribute("aria-current", String(each.dataset.run === current));
    if (starts) tried(by("go"), offered);
    go();
  };
  addEventListener("hashchange", () => { turn(); scrollTo(0, 0); });
  // A tab that is not looked at holds no stream: a browser has six connections for a server.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) stop();
    else if (sessionStorage.getItem("token")) { follows = ""; go().then(() => run && draw(drawSteps)); }
  });
  setInterval(() => { if (run && !document.hidden && !FINAL.includes(run.state)) head(); }, 1000);
  turn();
})();
