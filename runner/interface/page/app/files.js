// The files among the outputs of a run, and those of them that are samples: the same thing, made at several steps of a training.
import { readable } from "./text.js";

const TEXTS = ["text/plain", "text/markdown", "application/json"];
const LONGEST_TEXT = 64 << 10;
const STEP = /(global[-_]?step|steps?|iter(?:ation)?|checkpoint|ckpt|epoch|samples?)([-_ =]*)\d+/gi;

/** Whether something can be fetched of a file. */
function isPlain(file) {
  return /^[fx]:/.test(file.content);
}

/** One file of a run: the output that it is or is in, its path there, and what tells it apart. */
function fileOf(output, file, path) {
  const { type, step, bytes } = file;
  return { name: output.name, path, type, step, bytes, key: output.name + "\n" + path };
}

/** The files of an output that are stored. */
export function filesOf(output) {
  if (!output.stored) return [];
  return output.folder ? output.files.filter(isPlain).map(file => fileOf(output, file, file.path)) : [fileOf(output, output, "")];
}

/** Of which kind a sample is: picture, audio or text; else empty. */
export function kindOf(file) {
  if (/^image\/(png|jpeg|gif|webp)$/.test(file.type)) return "picture";
  if (file.type.startsWith("audio/")) return "audio";
  return TEXTS.includes(file.type) && file.step !== null && file.bytes <= LONGEST_TEXT ? "text" : "";
}

/** The folder of a file, by its output and the path in it; of an output that is a file itself. */
function folderOf(name, path) {
  return [name, ...path.split("/").slice(0, -1)].filter(Boolean).join("/");
}

/**
 * The samples among outputs, each with its files by step: what differs in its step alone is one sample.
 * @returns {{id: string, title: string, folder: string, kind: string, files: {step: number | null}[]}[]} those with steps first
 */
export function samplesOf(outputs, label = readable) {
  const found = new Map();
  for (const file of outputs.flatMap(filesOf)) {
    const kind = kindOf(file);
    if (!kind) continue;
    const path = file.path.replace(STEP, (all, word, mark) => word + mark + "…"), id = `${kind} ${label(file.name)}\n${path}`;
    if (!found.has(id)) found.set(id, { id, title: [label(file.name), path].filter(Boolean).join("/"), folder: folderOf(label(file.name), path), kind, files: [] });
    found.get(id).files.push(file);
  }
  const all = [...found.values()];
  for (const each of all) each.files.sort((a, b) => (a.step ?? -1) - (b.step ?? -1));
  return [...all.filter(isStepped), ...all.filter(each => !isStepped(each))];
}

/** Whether a sample was made at steps. */
export function isStepped(sample) {
  return sample.files.some(file => file.step !== null);
}

/** The steps at which samples were made, in order. */
export function stepsOf(samples) {
  const steps = samples.flatMap(each => each.files.map(file => file.step)).filter(step => step !== null);
  return [...new Set(steps)].sort((a, b) => a - b);
}

/** The file of a sample at a step: the last that was made by then; undefined before the first. */
export function fileAt(sample, step) {
  return sample.files.filter(file => file.step === null || file.step <= step).pop();
}
