// A new run: a recipe, or another run with changes; its inputs, and what would run before anything does.
import { Hooks, html } from "./lib.js";
import { Refusal, json, part } from "./api.js";
import { address, go, route } from "./route.js";
import { matcher } from "./find.js";
import { mayOperate } from "./me.js";
import { Field } from "./fields.js";
import { asked, axesOf, begin, betterOf, forget, keep, keyOf, missing, preset, rangesOf, reset, restored, ticket, toggle, type } from "./form.js";
import { useLoaded } from "./loaded.js";
import { Offered } from "./offered.js";
import { Offers, Plan } from "./planned.js";
import { Typed } from "./typed.js";

const { useEffect, useRef, useState } = Hooks;
const AFTER = 400;
const FIRST = 12;

/** The form for what the address says. */
async function opened(id, like) {
  if (!like) return begin(await json("/recipes/" + part(id)), null);
  const run = await json("/runs/" + part(like));
  const recipe = await json("/recipes/" + part(run.sweep?.recipe || run.recipe));
  return begin(recipe, { id: run.id, name: run.name || run.recipe, inputs: run.inputs, axes: run.sweep?.axes || {}, preset: run.preset, driver: run.driver });
}

/** What would run, asked a moment after the last key; {plan, problems, busy}. */
function usePlan(form) {
  const [found, setFound] = useState({ plan: null, problems: [], busy: true });
  const text = form ? JSON.stringify(asked(form)) : "", first = useRef(true);
  useEffect(() => {
    if (!text) return undefined;
    const control = new AbortController();
    setFound(before => ({ ...before, busy: true }));
    const timer = setTimeout(async () => {
      try {
        const plan = await json("/plan", { body: JSON.parse(text), signal: control.signal });
        setFound({ plan, problems: [], busy: false, of: text });
      } catch (error) {
        if (control.signal.aborted) return;
        const own = error instanceof Refusal ? error.problems : [];
        setFound({ plan: null, problems: own.length ? own : [{ message: error.message, fix: "", input: "", code: "" }], busy: false, of: text });
      }
    }, first.current ? 0 : AFTER);
    first.current = false;
    return () => {
      clearTimeout(timer);
      control.abort();
    };
  }, [text]);
  return { ...found, fits: found.of === text };
}

function Presets({ form, set }) {
  const names = Object.keys(form.recipe.presets);
  if (!names.length) return null;
  if (form.like) return form.preset ? html`<p class="quiet">Preset ${form.preset}, from that run.</p>` : null;
  return html`<fieldset class="presets"><legend>Preset</legend>
    ${["", ...names].map(name => html`<label key=${name} class=${name === form.preset ? "on" : ""}>
      <input type="radio" name="preset" value=${name} checked=${name === form.preset} onChange=${() => set(preset(form, name))} /> ${name || "none"}</label>`)}
  </fieldset>`;
}

/** Fields: those that are needed or changed first, then all others. */
function Inputs({ form, set, wrong }) {
  const [query, setQuery] = useState(""), names = Object.keys(form.recipe.inputs.properties);
  const must = new Set(form.recipe.inputs.required || []);
  const above = useRef(null);
  above.current ||= names.filter(name => must.has(name) || form.fields[name].several || form.fields[name].text !== form.fields[name].was);
  const first = names.length <= FIRST ? names : above.current, more = names.filter(name => !first.includes(name));
  const fits = matcher(query), hit = name => fits(name + " " + (form.recipe.inputs.properties[name].description || ""));
  const field = name => html`<${Field} key=${name} name=${name} schema=${form.recipe.inputs.properties[name]} needed=${must.has(name)} state=${form.fields[name]}
    wrong=${wrong(name)} like=${form.like !== null} set=${text => set(type(form, name, text))} reset=${() => set(reset(form, name))} several=${() => set(toggle(form, name))} />`;
  const open = query !== "" || more.some(name => wrong(name) || form.fields[name].touched) || !first.length;
  return html`<div id="inputs">
    ${first.filter(hit).map(field)}
    ${more.length > 0 && html`<div class="find-input"><input id="find-input" type="search" aria-label="find an input" placeholder="Find an input" spellcheck="false" value=${query} onInput=${event => setQuery(event.target.value)} /></div>
      <details class="more" open=${open}><summary>${more.length} more inputs</summary>${more.filter(hit).map(field)}
        ${!more.some(hit) && html`<p class="quiet">No input matches.</p>`}</details>`}
  </div>`;
}

/** What a search over ranges tries, and what of it is better. */
function Search({ form, set }) {
  const { search } = form, known = Object.keys(form.recipe.metrics || {});
  const change = changes => set({ ...form, search: { ...search, ...changes } });
  return html`<fieldset id="search"><legend>A search over ${rangesOf(form).join(", ")}</legend>
    <label>trials <input id="search-trials" inputmode="numeric" value=${search.trials} onInput=${event => change({ trials: event.target.value })} /></label>
    <label>goal <select id="search-better" value=${search.better} onChange=${event => change({ better: event.target.value })}><option value="min">lowest</option><option value="max">highest</option></select></label>
    <label>metric <input id="search-metric" list="search-metrics" placeholder="eval_loss" spellcheck="false" value=${search.metric} onInput=${event => change({ metric: event.target.value, ...(known.includes(event.target.value) ? { better: betterOf(form.recipe, event.target.value) } : {}) })} /></label>
    <datalist id="search-metrics">${known.map(name => html`<option key=${name} value=${name} />`)}</datalist>
  </fieldset>`;
}

/** How many runs the several values make. */
function Count({ form, set }) {
  const axes = Object.entries(axesOf(form));
  if (!axes.length) return null;
  if (rangesOf(form).length) return html`<${Search} form=${form} set=${set} />`;
  const count = axes.reduce((product, [, values]) => product * values.length, 1);
  return html`<p id="count" role="status"><b>A sweep:</b> ${axes.map(([name, values]) => `${values.length} of ${name}`).join(" × ")} = ${count} ${count === 1 ? "combination" : "combinations"}</p>`;
}

/** The command that does the same, to copy. */
function Command({ plan }) {
  const [done, setDone] = useState(false);
  if (!plan) return null;
  if (plan.command === null) return html`<p class="quiet">No command line can express this request.</p>`;
  const copy = () => navigator.clipboard.writeText(plan.command).then(() => {
    setDone(true);
    setTimeout(() => setDone(false), 2000);
  }, () => getSelection().selectAllChildren(document.getElementById("command")));
  return html`<div class="command"><h2>Command line</h2><pre id="command" tabindex="0">${plan.command}</pre>
    <button type="button" id="copy" onClick=${copy}>${done ? "Copied" : "Copy"}</button></div>`;
}

/** The driver: of those that the server knows, the ones that can be used. */
function Driver({ chosen, choose }) {
  const { value: found } = useLoaded(() => json("/drivers").then(all => all.drivers), []);
  const known = found || [], usable = known.filter(each => !each.lacks || each.name === chosen);
  const names = usable.some(each => each.name === chosen) ? usable : [{ name: chosen }, ...usable];
  const option = each => html`<option key=${each.name} value=${each.name}>${each.name}${each.configured ? " (in settings)" : ""}</option>`;
  const others = known.filter(each => !names.includes(each)), picked = names.find(each => each.name === chosen);
  return html`<label class="field"><b>Driver</b>
    <select id="driver" value=${chosen} onChange=${event => choose(event.target.value)}>
      ${names.map(option)}
      ${others.length > 0 && html`<optgroup label="Not set up">${others.map(each => html`<option key=${each.name} value=${each.name} disabled title=${each.lacks}>${each.name}</option>`)}</optgroup>`}
    </select>
    ${picked.lacks && html`<small class="worse"><${Typed} text=${picked.lacks} /></small>`}</label>`;
}

function Where({ form, set, body, fits, tell }) {
  const place = (name, label, more = {}) => html`<label class="field"><b>${label}</b>
    <input id=${name} value=${form[name]} spellcheck="false" autocomplete="off" ...${more} onInput=${event => set({ ...form, [name]: event.target.value })} /></label>`;
  const needs = Object.entries(form.recipe.resources[form.preset] || form.recipe.resources[""] || {}).filter(([, each]) => each !== 0);
  const secrets = Object.values(form.recipe.secrets);
  return html`<section><h2>Execution</h2>
    ${needs.length > 0 && html`<p class="quiet">Requires ${needs.map(([name, each]) => `${name.replaceAll("_", " ")} ${each}`).join(", ")}.</p>`}
    ${secrets.length > 0 && html`<p class="quiet">Secrets, from the worker's environment: ${secrets.join(", ")}.</p>`}
    <${Driver} chosen=${form.driver} choose=${driver => set({ ...form, driver })} />
    <${Offers} body=${body} stale=${!fits} take=${driver => set({ ...form, driver })} tell=${tell} />
    ${place("cost", "Cost limit, US $", { inputmode: "decimal", placeholder: "no limit" })}
    <details class="more"><summary>User and priority</summary>${place("user", "User")}${place("priority", "Priority", { inputmode: "numeric" })}</details>
  </section>`;
}

function Title({ form }) {
  const about = form.recipe.doc?.trim();
  return html`<p class="back-row"><a class="back" href=${address({ new: "list" })}>‹ all recipes</a></p>
    <h1>${form.recipe.id}${form.like && html` <small>like <a href=${address({ run: form.like.id })}>${form.like.name}</a></small>`}</h1>
    <p id="summary">${form.recipe.summary}</p>
    ${about && html`<details class="more"><summary>Description</summary><p class="doc">${about}</p></details>`}`;
}

/** What is wrong with a field; that something is missing is said of one that was touched, or once all was asked for. */
function faults(problems, form, pressed) {
  const known = form.recipe.inputs.properties;
  const empty = new Set(missing(form));
  const loud = each => each.code !== "missing-input" || (empty.has(each.input) && (pressed || form.fields[each.input].touched));
  const own = new Map(problems.filter(each => each.input in known && loud(each)).map(each => [each.input, each]));
  const general = problems.filter(each => !(each.input in known));
  return { wrong: name => own.get(name), general };
}

function Form({ form, set, tell }) {
  const [busy, setBusy] = useState(false), [pressed, setPressed] = useState(false);
  const found = usePlan(form), { plan, busy: planning } = found;
  const isSearch = rangesOf(form).length > 0, isUnnamed = isSearch && !form.search.metric.trim();
  const problems = isUnnamed ? [] : found.problems, fits = found.fits && !isUnnamed, { wrong, general } = faults(problems, form, pressed);
  const open = missing(form), empty = Object.entries(axesOf(form)).filter(([, values]) => !values.length).map(([name]) => name);
  const start = async event => {
    event.preventDefault();
    setPressed(true);
    tell(null);
    if (isSearch) return;
    const name = open[0] || empty[0] || problems.find(each => each.input)?.input;
    if (name) {
      document.getElementById("input-" + name)?.focus();
      return;
    }
    setBusy(true);
    const body = { ...asked(form), ...ticket(form) };
    try {
      const run = await json("/runs", { body, headers: { "Idempotency-Key": keyOf(form, body) } });
      forget();
      go({ run: run.id });
    } catch (error) {
      tell(error);
    }
    setBusy(false);
  };
  const count = plan ? plan.instances : 1;
  return html`<form id="form" class="start" onSubmit=${start}>
    <div class="start-inputs"><${Title} form=${form} /><${Presets} form=${form} set=${set} /><${Count} form=${form} set=${set} /><${Inputs} form=${form} set=${set} wrong=${wrong} /></div>
    <aside class="start-plan" aria-label="plan">
      <${Plan} plan=${fits ? plan : null} busy=${planning} missing=${isUnnamed ? [...open, "metric of the search"] : open} general=${general} instances=${count} isSearch=${isSearch} />
      <${Where} form=${form} set=${set} body=${() => asked(form)} fits=${fits && plan !== null} tell=${tell} />
      <${Command} plan=${fits ? plan : null} />
      <div class="start-go">${isSearch ? html`<p class="quiet" id="in-terminal">A search runs in a terminal, in rounds that use the results so far. Copy its command above.</p>` : mayOperate()
        ? html`<button type="submit" class="main wide" id="go" disabled=${busy}>${count > 1 ? `Start ${count} combinations` : "Start"}</button>`
        : html`<p class="quiet">This token is read-only.</p>`}</div>
    </aside>
  </form>`;
}

/** The view of a new run; `tell` shows an error. */
export function Start({ tell }) {
  const [form, setForm] = useState(null), parameters = route.value;
  const like = parameters.get("like") || "", id = parameters.get("new") || "";
  const chosen = like !== "" || (id !== "" && id !== "list");
  useEffect(() => {
    let gone = false;
    setForm(null);
    if (!chosen) return undefined;
    document.title = "New run · recipe";
    opened(id, like).then(found => !gone && setForm(restored(found)), error => !gone && tell(error));
    return () => { gone = true; };
  }, [id, like]);
  if (!chosen) return html`<${Offered} tell=${tell} />`;
  if (!form) return html`<section><h1>New run</h1><p class="quiet" role="status">Loading the recipe…</p></section>`;
  const set = next => {
    keep(next);
    setForm(next);
  };
  return html`<${Form} key=${form.seed} form=${form} set=${set} tell=${tell} />`;
}
