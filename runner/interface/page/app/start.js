// A new run: a recipe, its inputs, and what would run.
import { Hooks, html } from "./lib.js";
import { json, part } from "./api.js";
import { address, go } from "./route.js";
import { readable, span, value } from "./text.js";

const { useEffect, useRef, useState } = Hooks;
const ROWS = 200;
const FIRST = 6;

/** The value of a field as its schema has it; undefined where nothing is given. */
function parsed(text, schema) {
  if (schema.type === "boolean") return text === true;
  if (Array.isArray(schema.enum)) return text === "" ? undefined : schema.enum[Number(text)];
  if (text === "") return undefined;
  const isNumeric = type => ["integer", "number"].includes(type);
  if (isNumeric(schema.type)) return Number.isFinite(Number(text)) ? Number(text) : text;
  if (schema.type === "array" || schema.type === "object") {
    try {
      return JSON.parse(text);
    } catch { /* lines */ }
    if (schema.type === "object") return text;
    const lines = text.split("\n").map(line => line.trim()).filter(Boolean);
    return lines.map(line => (isNumeric(schema.items?.type) && Number.isFinite(Number(line)) ? Number(line) : line));
  }
  return text;
}

/** A value as its field shows it. */
function typed(given, schema) {
  if (schema.type === "boolean") return given === true;
  if (given === undefined || given === null) return "";
  if (Array.isArray(schema.enum)) return String(schema.enum.indexOf(given));
  return value(given);
}

function Control({ name, schema, needed, text, set }) {
  const given = { "data-name": name, id: "input-" + name, onInput: event => set(event.target.value) };
  if (Array.isArray(schema.enum)) {
    return html`<select ...${given} value=${text}>
      ${!needed && html`<option value=""></option>`}
      ${schema.enum.map((each, n) => html`<option key=${n} value=${String(n)}>${value(each)}</option>`)}
    </select>`;
  }
  if (schema.type === "boolean") return html`<input ...${given} type="checkbox" checked=${text} onInput=${event => set(event.target.checked)} />`;
  if (["array", "object"].includes(schema.type)) {
    return html`<textarea ...${given} spellcheck="false" value=${text} placeholder=${schema.type === "array" ? "[1, 2], or one a line" : "{}"}></textarea>`;
  }
  const isNumber = ["integer", "number"].includes(schema.type), isData = /^recipe-/.test(schema.format || "");
  return html`<input ...${given} type="text" inputmode=${isNumber ? "decimal" : "text"} spellcheck="false" value=${text}
    placeholder=${isData ? "hf://…  s3://…  https://…" : ""} />`;
}

function Field({ name, schema, needed, text, set }) {
  return html`<label class="field"><b>${name}${needed && html`<span class="must" title="needed"> *</span>`}</b>
    <${Control} name=${name} schema=${schema} needed=${needed} text=${text} set=${set} />
    <small class="quiet">${schema.description || ""}</small>
  </label>`;
}

/** What is typed for a recipe with a preset. */
function begun(recipe, preset) {
  const set = recipe.presets[preset] || {};
  return Object.fromEntries(Object.entries(recipe.inputs.properties).map(([name, schema]) => [name, typed(set[name] ?? schema.default, schema)]));
}

const SEED = () => [...crypto.getRandomValues(new Uint8Array(16))].map(each => each.toString(16).padStart(2, "0")).join("");

/** A request that is sent twice is one run; one that was changed is another. */
function digest(text) {
  let found = 0;
  for (const each of text) found = (Math.imul(found, 31) + each.codePointAt(0)) | 0;
  return String(found >>> 0);
}

function Planned({ plan }) {
  const would = plan.steps.filter(each => ["run", "maybe"].includes(each.answer)).length;
  const about = (plan.seconds ? `, about ${span(plan.seconds)}` : "") + (plan.usd ? `, at most $${plan.usd.toFixed(2)}` : "");
  return html`<p>${`${would} of ${plan.steps.length} steps would run${about}.`}</p>
    <div class="scroll" tabindex="0" role="region" aria-label="plan"><table><tbody>
      ${plan.steps.slice(0, ROWS).map(each => html`<tr key=${each.id}><th scope="row">${readable(each.id)}</th><td>${each.answer}</td><td>${each.reasons.join("; ")}</td></tr>`)}
    </tbody></table></div>`;
}

/** The view of a new run; `tell` shows an error. */
export function Start({ tell }) {
  const [offered, setOffered] = useState([]), [recipe, setRecipe] = useState(null), [preset, setPreset] = useState("");
  const [texts, setTexts] = useState({}), [where, setWhere] = useState({ driver: "local", user: "", priority: "0" });
  const [plan, setPlan] = useState(null), [busy, setBusy] = useState(false);
  const wanted = useRef(""), seed = useRef("");
  const tried = async work => {
    tell(null);
    setBusy(true);
    await work().catch(tell);
    setBusy(false);
  };
  const choose = async id => {
    wanted.current = id;
    const found = await json("/recipes/" + part(id));
    if (wanted.current !== id) return; // another was chosen meanwhile
    seed.current = SEED();
    setRecipe(found);
    setPreset("");
    setTexts(begun(found, ""));
    setPlan(null);
  };
  useEffect(() => {
    document.title = "New run · recipe";
    tried(async () => {
      const { recipes } = await json("/recipes");
      setOffered(recipes);
      if (recipes.length) await choose(recipes[0].id);
    });
  }, []);
  const asked = () => {
    const set = recipe.presets[preset] || {}, inputs = {};
    for (const [name, schema] of Object.entries(recipe.inputs.properties)) {
      const given = parsed(texts[name], schema);
      if (given !== undefined && JSON.stringify(given) !== JSON.stringify(set[name] ?? schema.default)) inputs[name] = given;
    }
    return { recipe: recipe.id, inputs, ...(preset ? { preset } : {}) };
  };
  const start = event => {
    event.preventDefault();
    tried(async () => {
      const body = { ...asked(), driver: where.driver.trim() || "local", user: where.user.trim(), priority: Number(where.priority) || 0 };
      const key = `ui-${seed.current}-${digest(JSON.stringify(body))}`;
      go({ run: (await json("/runs", { body, headers: { "Idempotency-Key": key } })).id });
    });
  };
  const names = recipe ? Object.keys(recipe.inputs.properties) : [], must = new Set(recipe?.inputs.required || []);
  const needed = names.filter(name => must.has(name)), rest = names.filter(name => !must.has(name));
  const first = needed.length ? needed : rest.slice(0, FIRST), more = names.filter(name => !first.includes(name));
  const field = name => html`<${Field} key=${recipe.id + name} name=${name} schema=${recipe.inputs.properties[name]} needed=${must.has(name)}
    text=${texts[name]} set=${text => setTexts(all => ({ ...all, [name]: text }))} />`;
  const place = (name, label, mode) => html`<label class="field"><b>${label}</b>
    <input id=${name} value=${where[name]} spellcheck="false" inputmode=${mode} onInput=${event => setWhere(all => ({ ...all, [name]: event.target.value }))} /></label>`;
  return html`<section id="start"><h1>New run</h1>
    <form id="form" onSubmit=${start}>
      <label class="field"><b>Recipe</b><select id="recipe" value=${recipe?.id} onChange=${event => tried(() => choose(event.target.value))}>
        ${offered.map(each => html`<option key=${each.id} value=${each.id}>${each.id}</option>`)}
      </select><small id="summary">${recipe?.summary}</small></label>
      ${recipe && html`<div id="inputs">
        ${Object.keys(recipe.presets).length > 0 && html`<label class="field"><b>Preset</b>
          <select id="preset" value=${preset} onChange=${event => { setPreset(event.target.value); setTexts(begun(recipe, event.target.value)); }}>
            <option value="">none</option>
            ${Object.keys(recipe.presets).map(each => html`<option key=${each} value=${each}>${each}</option>`)}
          </select></label>`}
        ${first.map(field)}
        ${more.length > 0 && html`<details class="more"><summary>${more.length} more inputs</summary>${more.map(field)}</details>`}
        <details class="more"><summary>where, for whom</summary>
          ${place("driver", "Driver", "text")}${place("user", "User", "text")}${place("priority", "Priority", "numeric")}
        </details>
      </div>`}
      <p class="controls">
        <button type="submit" class="main" id="go" disabled=${busy || !recipe}>Start</button>
        <button type="button" id="plan" disabled=${busy || !recipe} onClick=${() => tried(async () => setPlan(await json("/plan", { body: asked() })))}>What would run?</button>
        <a href=${address({})}>Back</a>
      </p>
    </form>
    <div id="planned" role="status">${plan && html`<${Planned} plan=${plan} />`}</div>
  </section>`;
}
