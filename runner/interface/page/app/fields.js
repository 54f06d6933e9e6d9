// One input of a recipe as a field: what may be typed, what is wrong with it, and what it was.
import { html } from "./lib.js";
import { value } from "./text.js";
import { Typed } from "./typed.js";

const NUMERIC = ["integer", "number"];
const NUMBER = /^[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?$/i;
const LONG = 60;

function isNumber(schema) {
  return NUMERIC.includes(schema.type);
}

/** The schema of a field: a truth value that may be left open is a choice. */
export function shaped(schema) {
  return schema.type === "boolean" && typeof schema.default !== "boolean" ? { ...schema, enum: [true, false] } : schema;
}

/** A value as its field shows it. */
export function typed(given, schema) {
  if (given === undefined || given === null) return schema.type === "boolean" && !schema.enum ? false : "";
  if (Array.isArray(schema.enum)) return schema.enum.includes(given) ? String(schema.enum.indexOf(given)) : "";
  if (schema.type === "boolean") return given === true;
  return value(given);
}

/** The value of a field as its schema has it; undefined where nothing is given. */
export function parsed(text, schema) {
  if (Array.isArray(schema.enum)) return text === "" ? undefined : schema.enum[Number(text)];
  if (schema.type === "boolean") return text === true;
  if (text.trim() === "" && schema.type !== "string") return undefined;
  if (text === "") return undefined;
  if (isNumber(schema)) return number(text);
  if (schema.type === "array" || schema.type === "object") return structured(text, schema);
  return text;
}

/** A number; a text that is none, or more than this language has, stays a text for the server. */
function number(text) {
  const each = text.trim(), found = Number(each);
  if (!NUMBER.test(each) || !Number.isFinite(found)) return text;
  return Number.isInteger(found) && !Number.isSafeInteger(found) ? each : found;
}

/** JSON, or of a list its items line by line. */
function structured(text, schema) {
  try {
    return JSON.parse(text);
  } catch { /* lines */ }
  if (schema.type === "object") return text;
  const items = text.split("\n").map(line => line.trim()).filter(Boolean);
  return isNumber(schema.items || {}) ? items.map(number) : items;
}

/** The values of a field that has several: one a line; numbers also behind commas, choices ticked. */
export function severalOf(text, schema) {
  if (Array.isArray(text)) return text;
  const parts = isNumber(schema) ? text.split(/[\s,;]+/) : text.split("\n").map(line => line.trim());
  return parts.filter(Boolean).map(each => parsed(each, schema));
}

/** Several values as their field shows them. */
export function severalTyped(values, schema) {
  return Array.isArray(schema.enum) || schema.type === "boolean" ? values : values.map(each => value(each)).join("\n");
}

/** What an input takes, in words. */
export function range(schema) {
  if (Array.isArray(schema.enum) || schema.type === "boolean") return "";
  const of = schema.type === "array" && schema.items ? schema.items : schema;
  const least = of.minimum ?? of.exclusiveMinimum, most = of.maximum ?? of.exclusiveMaximum;
  const above = of.exclusiveMinimum !== undefined, below = of.exclusiveMaximum !== undefined;
  const limits = [
    least !== undefined && `${above ? "more than" : "at least"} ${least}`,
    most !== undefined && `${below ? "less than" : "at most"} ${most}`,
    of.maxLength !== undefined && `at most ${of.maxLength} characters`,
    of.pattern !== undefined && `like ${of.pattern}`,
    schema.minItems !== undefined && `${schema.minItems} or more`,
    schema.maxItems !== undefined && `at most ${schema.maxItems} of them`,
  ].filter(Boolean);
  const kind = (schema.format || "").replace("recipe-", "");
  const noun = kind || { integer: "whole number", number: "number", string: "text", array: "list", object: "mapping" }[schema.type] || "";
  return [schema.type === "array" && schema.items ? `list of ${schema.items.type}s` : noun, ...limits].filter(Boolean).join(", ");
}

/** Ticks for the values of a choice that a sweep tries. */
function Ticks({ name, schema, values, set }) {
  const known = schema.enum || [true, false];
  const tick = each => set(values.includes(each) ? values.filter(other => other !== each) : known.filter(other => other === each || values.includes(other)));
  return html`<span class="ticks" role="group" aria-label=${name + ", several values"}>
    ${known.map((each, n) => html`<label key=${n}><input type="checkbox" data-name=${name} checked=${values.includes(each)} onChange=${() => tick(each)} /> ${value(each)}</label>`)}
  </span>`;
}

function Control({ name, schema, needed, state, wrong, set }) {
  const given = {
    "data-name": name, id: "input-" + name, onInput: event => set(event.target.value),
    "aria-describedby": "about-" + name, "aria-invalid": wrong ? "true" : undefined, spellcheck: false,
  };
  if (state.several) {
    if (Array.isArray(state.text)) return html`<${Ticks} name=${name} schema=${schema} values=${state.text} set=${set} />`;
    return html`<textarea ...${given} value=${state.text} rows="3" placeholder=${isNumber(schema) ? "1e-4, 3e-4, 1e-3, or a range to search: 1e-5..1e-2:log" : "one value per line"}></textarea>`;
  }
  if (Array.isArray(schema.enum)) {
    return html`<select ...${given} value=${state.text}>
      ${!(needed && state.text !== "") && html`<option value=""></option>`}
      ${schema.enum.map((each, n) => html`<option key=${n} value=${String(n)}>${value(each)}</option>`)}
    </select>`;
  }
  if (schema.type === "boolean") {
    return html`<input ...${given} type="checkbox" checked=${state.text} onInput=${event => set(event.target.checked)} />`;
  }
  if (["array", "object"].includes(schema.type) || String(state.text).includes("\n")) {
    return html`<textarea ...${given} value=${state.text} placeholder=${schema.type === "array" ? "[1, 2], or one per line" : schema.type === "object" ? "{}" : ""}></textarea>`;
  }
  const isData = /^recipe-/.test(schema.format || ""), usual = schema.default ?? null;
  return html`<input ...${given} type="text" inputmode=${isNumber(schema) ? "decimal" : "text"} autocomplete="off" value=${state.text}
    placeholder=${usual !== null && schema.type !== "string" ? `default ${value(usual)}` : isData ? "hf://…  s3://…  https://…  ./file" : ""} />`;
}

/** What the value was before it was changed, with a way back. */
function Was({ schema, was, like, reset, name }) {
  const text = Array.isArray(schema.enum) ? (was === "" ? "" : value(schema.enum[Number(was)])) : String(was);
  const short = text.length > LONG ? text.slice(0, LONG) + "…" : text;
  return html`<span class="was">${`${like ? "was" : "default"} ${short === "" ? "empty" : short}`}
    <button type="button" class="plain" aria-label=${`reset ${name} to ${short || "empty"}`} title="reset" onClick=${reset}>↺</button></span>`;
}

/** A field; `state` is {text, several, was, touched}, `wrong` the problem of its value. */
export function Field({ name, schema, needed, state, wrong, like, set, reset, several }) {
  const changed = state.several || state.text !== state.was;
  const about = [range(schema), schema.description].filter(Boolean).join(". ");
  return html`<div class=${"field" + (changed ? " changed" : "")}>
    <div class="field-head"><label for=${"input-" + name}><b>${name}</b>${needed && html`<span class="must" title="required">*</span>`}</label>
      ${changed && !state.several && (like || state.was !== "") && html`<${Was} schema=${schema} was=${state.was} like=${like} reset=${reset} name=${name} />`}
      <button type="button" class="plain several" data-several=${name} aria-pressed=${state.several ? "true" : "false"} aria-label=${`${state.several ? "single value" : "sweep"} for ${name}`}
        title="sweep over several values" onClick=${several}>${state.several ? "single value" : "sweep"}</button></div>
    <${Control} name=${name} schema=${schema} needed=${needed} state=${state} wrong=${wrong} set=${set} />
    ${wrong && html`<p class="worse" data-wrong=${name}>✗ ${wrong.message}${wrong.fix && wrong.code !== "missing-input" ? html` — <${Typed} text=${wrong.fix} />` : ""}</p>`}
    <small id=${"about-" + name}>${about}</small>
  </div>`;
}
