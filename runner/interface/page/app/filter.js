// The filter of the table: words, `lr>0.01`, `loss<2`, `status:failed`, `-word`, `/regex/`.
import { finder, wordsOf } from "./find.js";
import { value } from "./text.js";

const COMPARED = /^([^\s:<>=!]+)(>=|<=|!=|:|=|>|<)(.*)$/;
const haystacks = new WeakMap();

/** Everything of a row that a word can be found in. */
function haystack(row) {
  let found = haystacks.get(row);
  if (found === undefined) {
    const inputs = Object.entries(row.inputs).map(([name, each]) => `${name}=${value(each)}`);
    const tags = row.tags.map(each => "#" + each);
    const trials = row.trials.map(each => each.id);
    const all = [row.id, row.recipe, row.name, row.note, row.user, row.word, row.reason, row.preset, row.driver, ...tags, ...inputs, ...trials];
    found = all.filter(Boolean).join("\n").toLowerCase();
    haystacks.set(row, found);
  }
  return found;
}

const OWN = {
  status: row => [row.word, row.state],
  state: row => [row.word, row.state],
  recipe: row => [row.recipe],
  name: row => [row.name],
  id: row => [row.id],
  user: row => [row.user],
  tag: row => row.tags,
  note: row => [row.note],
  preset: row => [row.preset || ""],
  driver: row => [row.driver],
};

/** The values of a row under a name: its own, an input, or the best of a metric; a sweep has those of its trials. */
function valuesOf(row, name) {
  if (Object.hasOwn(OWN, name)) return OWN[name](row);
  const one = each => {
    if (Object.hasOwn(each.inputs, name)) return [each.inputs[name]];
    const metric = Object.hasOwn(each.metrics, name) ? each.metrics[name] : null;
    return metric ? [metric.best ?? metric.last] : [];
  };
  const found = one(row);
  return found.length ? found : row.trials.flatMap(one);
}

function numbers(name, operator, bound) {
  const compare = {
    ">": a => a > bound, "<": a => a < bound, ">=": a => a >= bound, "<=": a => a <= bound,
    "=": a => a === bound, "!=": a => a !== bound,
  }[operator];
  return row => valuesOf(row, name).some(each => typeof each === "number" && compare(each));
}

function texts(name, operator, given) {
  const wanted = given.toLowerCase();
  const fits = each => {
    const text = value(each).toLowerCase();
    if (operator === ":") return name === "status" || name === "state" ? text.startsWith(wanted) : text.includes(wanted);
    return operator === "!=" ? text !== wanted : text === wanted;
  };
  return row => valuesOf(row, name).some(fits);
}

/** What one word of the filter asks for.  Raises SyntaxError for a bad /regex/. */
function term(word) {
  if (word.startsWith("-") && word.length > 1) {
    const wanted = term(word.slice(1));
    return row => !wanted(row);
  }
  const found = word.startsWith("/") && word.endsWith("/") ? null : COMPARED.exec(word);
  if (found) {
    const [, name, operator, quoted] = found, given = quoted.replace(/^"(.*)"$/, "$1");
    if (name === "is") return given === "archived" ? row => row.archived : row => row.trials.length > 0;
    const bound = Number(given);
    if (given !== "" && operator !== ":" && Number.isFinite(bound)) return numbers(name, operator, bound);
    if (given === "") return () => true; // it is still being typed
    if (operator === "<" || operator === ">" || operator === "<=" || operator === ">=") return () => false;
    return texts(name, operator, given);
  }
  const has = finder(word);
  return row => has(haystack(row));
}

/**
 * The rows that a filter lets through, and what is wrong with it.
 * Runs that are put away are shown where the filter says `is:archived`.
 * @param {object[]} rows
 * @param {string} text
 * @returns {{rows: object[], error: string}}
 */
export function matching(rows, text) {
  let terms;
  try {
    terms = wordsOf(text).map(term);
  } catch (error) {
    return { rows, error: error.message };
  }
  const archived = /(?:^|\s)is:archived(?:\s|$)/.test(text);
  return { rows: rows.filter(row => (archived || !row.archived) && terms.every(each => each(row))), error: "" };
}
