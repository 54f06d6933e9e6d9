// Samples of one run or of several side by side: pictures, sound and text, with one slider over the steps at which they were made.
import { Hooks, html } from "./lib.js";
import { change, route } from "./route.js";
import { Feed } from "./feed.js";
import { fileAt, isStepped, samplesOf, stepsOf } from "./files.js";
import { useLoaded } from "./loaded.js";
import { Media } from "./media.js";
import { readable } from "./text.js";

const { useEffect, useMemo, useRef, useState } = Hooks;
const [SMALL, LARGE] = [384, 1600];
const [MOST, FEW] = [60, 8];

function Picture({ media, file, title, open }) {
  const { value, error } = useLoaded(wanted => media.picture(file, SMALL, wanted), [media, file.key]);
  if (error) return html`<p class="quiet">${error.message}</p>`;
  return html`<button type="button" class="shot" aria-label=${`enlarge ${title}`} onClick=${() => open(file)}>
    ${value ? html`<img src=${value} alt=${title} />` : html`<span class="hold" aria-hidden="true"></span>`}
  </button>`;
}

function Sound({ media, file, title }) {
  const { value, error } = useLoaded(wanted => media.sound(file, wanted), [media, file.key]);
  if (error) return html`<p class="quiet">${error.message}</p>`;
  return html`<audio controls aria-label=${title} src=${value || undefined}></audio>`;
}

function Words({ media, file, title }) {
  const { value, error } = useLoaded(wanted => media.preview(file, wanted), [media, file.key]);
  if (error) return html`<p class="quiet">${error.message}</p>`;
  return html`<pre tabindex="0" role="region" aria-label=${title}>${value ? value.text || value.words : ""}</pre>`;
}

const SHOWN = { picture: Picture, audio: Sound, text: Words };

/** A sample of one run at a step. */
function Shot({ media, sample, step, label, open }) {
  const file = sample && fileAt(sample, step);
  if (!file) return html`<p class="quiet">${sample ? "not created yet" : "not created by this run"}</p>`;
  const View = SHOWN[sample.kind], title = `${sample.title}${file.step === null ? "" : ` at step ${file.step}`}${label && " of " + label}`;
  return html`<${View} media=${media} file=${file} title=${title} open=${each => open({ media, file: each, title })} />`;
}

/** One picture as large as the window takes it. */
function Enlarged({ shown, close }) {
  const box = useRef(null);
  const { value, error } = useLoaded(wanted => shown.media.picture(shown.file, LARGE, wanted), [shown.file.key]);
  useEffect(() => box.current.showModal(), []);
  return html`<dialog ref=${box} class="enlarged" aria-label=${shown.title} onClose=${close} onClick=${event => event.target === box.current && box.current.close()}>
    <p class="controls"><b>${shown.title}</b><button type="button" onClick=${() => box.current.close()}>Close</button></p>
    ${error ? html`<p>${error.message}</p>` : value && html`<img src=${value} alt=${shown.title} />`}
  </dialog>`;
}

function Slider({ steps, step }) {
  const place = Math.max(0, steps.indexOf(step));
  const set = n => change({ at: n === steps.length - 1 ? null : String(steps[n]) });
  if (steps.length < 2) return steps.length ? html`<p class="quiet">${`at step ${step}`}</p>` : null;
  return html`<div class="controls slider">
    <label>step <input id="at" type="range" min="0" max=${steps.length - 1} step="1" value=${place} aria-valuetext=${`step ${step}`} onInput=${event => set(Number(event.target.value))} /></label>
    <output id="at-step" for="at">${step}</output><span class="quiet">${`${place + 1} of ${steps.length} steps`}</span>
  </div>`;
}

/** The step that the address names, else the last. */
function stepIn(steps, parameters) {
  const asked = parameters.get("at");
  return asked !== null && steps.includes(Number(asked)) ? Number(asked) : steps[steps.length - 1] ?? null;
}

/** The samples of sources by what they are: {id, title, kind, of: one or none for each source}. */
function rowsOf(found) {
  const rows = new Map();
  found.forEach((samples, n) => {
    for (const sample of samples) {
      if (!rows.has(sample.id)) rows.set(sample.id, { ...sample, of: found.map(() => null) });
      rows.get(sample.id).of[n] = sample;
    }
  });
  return [...rows.values()];
}

function Sheet({ rows, sources, step, open }) {
  return html`<div class=${sources.length > 1 ? "shots beside" : "shots"}>
    ${rows.map(row => html`<figure key=${row.id} class=${row.kind}>
      <figcaption title=${row.title}><b>${row.title.split("/").pop()}</b> ${row.title.split("/").slice(0, -1).join("/")}</figcaption>
      <div class="pair">${sources.map((source, n) => html`<div key=${source.key}>
        ${sources.length > 1 && html`<b class="of">${source.label}</b>`}
        <${Shot} media=${source.media} sample=${row.of[n]} step=${step} label=${source.label} open=${open} />
      </div>`)}</div>
    </figure>`)}
  </div>`;
}

/** Many pictures of one folder, such as a data set: fetched once they are opened. */
function Album({ folder, rows, given }) {
  const [isOpen, open] = useState(false), [isWhole, show] = useState(false);
  return html`<details class="album" onToggle=${event => open(event.target.open)}><summary>${`${folder}: ${rows.length} files`}</summary>
    ${isOpen && html`<${Sheet} rows=${isWhole ? rows : rows.slice(0, MOST)} ...${given} />`}
    ${isOpen && !isWhole && rows.length > MOST && html`<p><button type="button" onClick=${() => show(true)}>Show all ${rows.length}</button></p>`}
  </details>`;
}

/** Samples with steps and their neighbours; others; and folders of many others, by name. */
function parted(rows) {
  const isMade = row => row.of.some(sample => sample && isStepped(sample));
  const beside = new Set(rows.filter(isMade).map(row => row.folder)), others = rows.filter(row => !beside.has(row.folder));
  const byFolder = Map.groupBy(others, row => row.folder), isLarge = row => byFolder.get(row.folder).length > FEW;
  return {
    stepped: rows.filter(row => beside.has(row.folder)),
    few: others.filter(row => !isLarge(row)),
    albums: [...byFolder].filter(([, each]) => each.length > FEW),
  };
}

/**
 * Samples with one slider.
 * @param {{key: string, label: string, feed: Feed, outputs: object[], name: Function}[]} sources one, or several side by side
 */
export function SampleSheets({ sources, empty, controls = null }) {
  const [shown, open] = useState(null), [isWhole, show] = useState(false);
  const keys = sources.map(each => each.key).join(" ");
  const media = useMemo(() => sources.map(each => new Media(each.feed.path)), [keys]);
  useEffect(() => () => media.forEach(each => each.close()), [media]);
  const found = sources.map(each => samplesOf(each.outputs, each.name));
  const rows = rowsOf(found), steps = stepsOf(found.flat()), step = stepIn(steps, route.value);
  if (!rows.length) return empty;
  const { stepped, few, albums } = parted(rows);
  const given = { sources: sources.map((each, n) => ({ ...each, media: media[n] })), step, open };
  return html`<section id="samples"><h2>Samples</h2>
    ${controls && html`<div class="controls">${controls}</div>`}
    <${Slider} steps=${steps} step=${step} />
    ${stepped.length > 0 && html`<${Sheet} rows=${isWhole ? stepped : stepped.slice(0, MOST)} ...${given} />`}
    ${!isWhole && stepped.length > MOST && html`<p><button type="button" onClick=${() => show(true)}>Show all ${stepped.length}</button></p>`}
    ${few.length + albums.length > 0 && html`<h3>${stepped.length ? "Other images and audio" : "Images and audio"}</h3>`}
    ${few.length > 0 && html`<${Sheet} rows=${few.slice(0, MOST)} ...${given} />`}
    ${few.length > MOST && html`<p class="quiet">The first ${MOST} of ${few.length}; all of them are in the outputs.</p>`}
    ${albums.map(([folder, each]) => html`<${Album} key=${folder} folder=${folder} rows=${each} given=${given} />`)}
    ${shown && html`<${Enlarged} shown=${shown} close=${() => open(null)} />`}
  </section>`;
}

/** The tab. */
export function Samples({ feed }) {
  const outputs = feed.artifacts.value;
  const empty = html`<p class="quiet empty">This run has no samples. Samples are images, audio, and text files with a step in their name, such as <code>step-100.txt</code>.</p>`;
  return html`<${SampleSheets} sources=${[{ key: feed.id, label: "", feed, outputs }]} empty=${empty} />`;
}

/** Of one that is compared: its outputs once they are known, those of a trial without the trial's name. */
function useSource(member) {
  const feed = useMemo(() => new Feed(member.row.id), [member.row.id]), isTrial = member.leaf !== member.row;
  useEffect(() => {
    feed.list().catch(() => {});
    return () => feed.stop();
  }, [feed]);
  const all = feed.artifacts.value, head = isTrial ? member.leaf.id : "";
  const outputs = useMemo(() => all.filter(each => each.name.startsWith(head)), [all, head]);
  return { key: member.key, label: member.label, feed, outputs, name: name => readable(name.slice(head.length).replace(/^\//, "")) };
}

/** The samples of two side by side, with one slider; `controls` choose others. */
export function SideBySide({ one, other, controls }) {
  const sources = [useSource(one), useSource(other)];
  return html`<${SampleSheets} sources=${sources} controls=${controls} empty=${controls && html`<section id="samples"><h2>Samples</h2><div class="controls">${controls}</div><p class="quiet">Neither run has samples.</p></section>`} />`;
}
