// What is typed into the form of a new run, and the request that it makes.
import { parsed, severalOf, severalTyped, shaped, typed } from "./fields.js";

const KEPT = "recipe.form";

function same(a, b) {
  return JSON.stringify(a) === JSON.stringify(b);
}

function seed() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map(each => each.toString(16).padStart(2, "0")).join("");
}

/** The value of an input before anything is typed: that of the run that this one is like, of the preset, or the default. */
function before(form, name) {
  const schema = form.recipe.inputs.properties[name];
  if (form.like) return form.like.inputs[name] ?? undefined;
  return form.recipe.presets[form.preset]?.[name] ?? schema.default;
}

function fresh(form, name) {
  const schema = form.recipe.inputs.properties[name];
  const was = typed(before(form, name), schema), axis = form.like?.axes[name];
  if (axis) return { text: severalTyped(axis, schema), was, several: true, touched: false };
  return { text: was, was, several: false, touched: false };
}

/** A recipe with the schemas of its fields. */
function withFields(recipe) {
  const properties = Object.entries(recipe.inputs.properties).map(([name, schema]) => [name, shaped(schema)]);
  return { ...recipe, inputs: { ...recipe.inputs, properties: Object.fromEntries(properties) } };
}

function firstMetric(recipe) {
  return Object.keys(recipe.metrics || {})[0] || "";
}

/** Which way a metric of a recipe is better: "min" or "max". */
export function betterOf(recipe, metric) {
  return recipe.metrics?.[metric]?.better || "min";
}

/** A form for a recipe; `like` is {id, inputs, axes, preset, driver} of the run whose values it begins with, or null. */
export function begin(given, like) {
  const recipe = withFields(given);
  const form = { recipe, like, preset: like?.preset || "", driver: like?.driver || "local", cost: "", user: "", priority: "0", search: { trials: "30", metric: firstMetric(recipe), better: betterOf(recipe, firstMetric(recipe)) }, seed: seed(), fields: {} };
  const names = Object.keys(recipe.inputs.properties);
  return { ...form, fields: Object.fromEntries(names.map(name => [name, fresh(form, name)])) };
}

/** The form with another preset: fields that were not touched have its values. */
export function preset(form, name) {
  const next = { ...form, preset: name };
  const fields = Object.entries(form.fields).map(([each, state]) => {
    const now = fresh(next, each);
    return [each, state.touched ? { ...state, was: now.was } : now];
  });
  return { ...next, fields: Object.fromEntries(fields) };
}

/** The form with another text in a field. */
export function type(form, name, text) {
  return { ...form, fields: { ...form.fields, [name]: { ...form.fields[name], text, touched: true } } };
}

/** The form with a field as it was. */
export function reset(form, name) {
  return { ...form, fields: { ...form.fields, [name]: { ...form.fields[name], text: form.fields[name].was, several: false, touched: false } } };
}

/** The form with a field that has several values, or one again. */
export function toggle(form, name) {
  const schema = form.recipe.inputs.properties[name], state = form.fields[name];
  if (state.several) {
    const first = severalOf(state.text, schema)[0];
    const text = first === undefined ? state.was : typed(first, schema);
    return { ...form, fields: { ...form.fields, [name]: { ...state, several: false, text, touched: true } } };
  }
  const one = parsed(state.text, schema);
  const text = severalTyped(one === undefined ? [] : [one], schema);
  return { ...form, fields: { ...form.fields, [name]: { ...state, several: true, text, touched: true } } };
}

/** The fields that have several values, with these. */
export function axesOf(form) {
  const found = Object.entries(form.fields).filter(([, state]) => state.several);
  return Object.fromEntries(found.map(([name, state]) => [name, severalOf(state.text, form.recipe.inputs.properties[name])]));
}

/** The numbers among these that are a range, LOW..HIGH or LOW..HIGH:log, from which only a search takes values. */
export function rangesOf(form) {
  return Object.entries(axesOf(form)).filter(([, values]) => values.length === 1 && String(values[0]).includes("..")).map(([name]) => name);
}

/** What a search is asked for; null while a field of it is empty, and of a sweep. */
function searched(form) {
  const { trials, metric, better } = form.search;
  if (!rangesOf(form).length || !metric.trim() || !trials.trim()) return null;
  return { trials: Number.isFinite(Number(trials)) ? Number(trials) : trials, metric: metric.trim(), better };
}

/** The value of a field that was changed: one that was emptied has its default again, and of a text nothing is a text, too. */
function givenBy(state, schema) {
  const given = parsed(state.text, schema);
  if (given !== undefined) return given;
  return schema.type === "string" && !schema.enum ? "" : schema.default ?? null;
}

/** Whether the fields with several values are those of the run that this one is like; the server has them whole, also paths. */
function keepsAxes(form) {
  if (!form.like) return false;
  return Object.entries(form.fields).every(([name, state]) => state.several === name in form.like.axes && !(state.several && state.touched));
}

/** What is asked of POST /v1/plan, and with `ticket` of POST /v1/runs. */
export function asked(form) {
  const inputs = {};
  for (const [name, state] of Object.entries(form.fields)) {
    if (state.several) continue;
    const changed = state.text !== state.was || name in (form.like?.axes || {});
    if (changed) inputs[name] = givenBy(state, form.recipe.inputs.properties[name]);
    if (changed && !form.like && same(inputs[name], before(form, name))) delete inputs[name];
  }
  const axes = Object.fromEntries(Object.entries(axesOf(form)).filter(([, values]) => values.length));
  const what = form.like ? { like: form.like.id } : { recipe: form.recipe.id, ...(form.preset ? { preset: form.preset } : {}) };
  const cost = Number(form.cost), search = searched(form);
  return {
    ...what, inputs, ...(keepsAxes(form) ? {} : { sweep: axes }), ...(search ? { search } : {}), driver: form.driver.trim() || "local",
    ...(form.cost.trim() ? { limits: { cost: Number.isFinite(cost) ? cost : form.cost } } : {}),
  };
}

/** What is asked beside it where the run is stored. */
export function ticket(form) {
  return { user: form.user.trim(), priority: Number(form.priority) || 0 };
}

/** The Idempotency-Key of a request: sent twice it is one run, and a changed one is another. */
export function keyOf(form, body) {
  let found = 0;
  for (const each of JSON.stringify(body)) found = (Math.imul(found, 31) + each.codePointAt(0)) | 0;
  return `ui-${form.seed}-${found >>> 0}`;
}

/** Fields that are needed and empty. */
export function missing(form) {
  return (form.recipe.inputs.required || []).filter(name => {
    const state = form.fields[name], schema = form.recipe.inputs.properties[name];
    return state && (state.several ? !severalOf(state.text, schema).length : parsed(state.text, schema) === undefined);
  });
}

/** Keep what is typed for a reload of this tab. */
export function keep(form) {
  const { fields, preset: chosen, driver, cost, user, priority, search, seed: own } = form;
  try {
    sessionStorage.setItem(KEPT, JSON.stringify({ of: placeOf(form), fields, preset: chosen, driver, cost, user, priority, search, seed: own }));
  } catch { /* more than the browser keeps */ }
}

/** The form with what was typed before a reload. */
export function restored(form) {
  try {
    const found = JSON.parse(sessionStorage.getItem(KEPT));
    if (found?.of !== placeOf(form) || !same(Object.keys(found.fields), Object.keys(form.fields))) return form;
    const { of, ...typedBefore } = found;
    return { ...form, ...typedBefore };
  } catch {
    return form;
  }
}

/** Forget what was typed. */
export function forget() {
  sessionStorage.removeItem(KEPT);
}

function placeOf(form) {
  return form.recipe.id + " " + (form.like?.id || "");
}
