// The tab of outputs: everything that the steps made, with previews, and the checkpoints that they keep.
import { Hooks, html } from "./lib.js";
import { json, part } from "./api.js";
import { change, route } from "./route.js";
import { bytes, readable } from "./text.js";
import { isOver } from "./feed.js";
import { filesOf } from "./files.js";
import { matcher } from "./find.js";
import { Checkpoints } from "./checkpoints.js";
import { fetched } from "./media.js";
import { Preview } from "./preview.js";

const { useState } = Hooks;
const [ROWS, FILES, PAGE] = [200, 20, 1000];
const LATER = 10000;

async function save(feed, file) {
  const url = URL.createObjectURL(await (await fetched(feed.path, file)).blob());
  const link = document.createElement("a");
  link.href = url;
  link.download = (file.path || file.name).split("/").pop();
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), LATER);
}

const WORDS = { "application/octet-stream": "", "text/plain": "text", "image/svg+xml": "svg", "audio/mpeg": "mp3", "text/tab-separated-values": "tsv" };

/** A media type in a word: png, parquet. */
function word(type) {
  return WORDS[type] ?? type.split(/[/.]/).pop();
}

/** Show or hide what the address names. */
function turn(isOpen, name, path) {
  change(isOpen ? { output: path ? name : null, path: null } : { output: name, path: path || null });
}

function FileRow({ feed, file, title, isOpen, tell }) {
  return html`<li class=${isOpen ? "open" : ""}>
    <div class="file"><button type="button" class="plain" aria-expanded=${String(isOpen)} onClick=${() => turn(isOpen, file.name, file.path)}>${title}</button>
      <span class="quiet">${word(file.type)}${file.step === null ? "" : ` · step ${file.step}`}</span><span class="number">${bytes(file.bytes)}</span>
      <button type="button" aria-label=${`save ${title}`} onClick=${() => save(feed, file).catch(tell)}>Save</button></div>
    ${isOpen && html`<${Preview} key=${file.key} feed=${feed} file=${file} />`}
  </li>`;
}

/** What is in a folder; more of it is asked for when it is wanted. */
function Folder({ feed, output, tell }) {
  const [wanted, want] = useState(""), [isWhole, show] = useState(false), [more, add] = useState([]);
  const listed = [...output.files, ...more], all = filesOf({ ...output, files: listed });
  const others = listed.length - all.length, path = route.value.get("path") || "";
  const fits = matcher(wanted), chosen = all.filter(file => fits(file.path));
  const shown = isWhole || wanted ? chosen.slice(0, PAGE) : chosen.filter((file, n) => n < FILES || file.path === path);
  const next = async () => {
    const last = listed[listed.length - 1].path;
    const found = await json(`${feed.path}/artifacts?name=${part(output.name)}&after=${part(last)}`);
    add([...more, ...found.artifacts[0].files]);
    show(true);
  };
  return html`<div class="folder">
    ${all.length > FILES && html`<p class="controls"><label>files <input type="search" placeholder="all" aria-label=${"files of " + output.name} value=${wanted} onInput=${event => want(event.target.value)} /></label></p>`}
    <ul>${shown.map(file => html`<${FileRow} key=${file.key} feed=${feed} file=${file} title=${file.path} isOpen=${path === file.path} tell=${tell} />`)}</ul>
    ${others > 0 && html`<p class="quiet">${others === 1 ? "One entry is a link or an empty folder, and is" : `${others} entries are links or empty folders, and are`} not shown.</p>`}
    ${shown.length < chosen.length && html`<p><button type="button" onClick=${() => show(true)}>Show all ${chosen.length}</button></p>`}
    ${shown.length === chosen.length && listed.length % PAGE === 0 && html`<p><button type="button" onClick=${() => next().catch(tell)}>Show more</button></p>`}
  </div>`;
}

function FolderRow({ feed, output, isOpen, tell }) {
  const count = output.files.length, files = `${count}${count === PAGE ? " or more" : ""} file${count === 1 ? "" : "s"}`;
  return html`<li class=${isOpen ? "open" : ""}>
    <div class="file"><button type="button" class="plain" aria-expanded=${String(isOpen)} onClick=${() => turn(isOpen, output.name, "")}>${readable(output.name)}/</button>
      <span class="quiet">${files}</span><span class="number">${bytes(output.bytes)}</span></div>
    ${isOpen && html`<${Folder} feed=${feed} output=${output} tell=${tell} />`}
  </li>`;
}

function Output({ feed, output, tell }) {
  const isOpen = route.value.get("output") === output.name;
  if (!output.stored) {
    return html`<li><div class="file"><span>${readable(output.name)}</span><span class="quiet">no longer stored here</span><span class="number">${bytes(output.bytes)}</span></div></li>`;
  }
  if (output.folder) return html`<${FolderRow} feed=${feed} output=${output} isOpen=${isOpen} tell=${tell} />`;
  return html`<${FileRow} feed=${feed} file=${filesOf(output)[0]} title=${readable(output.name)} isOpen=${isOpen} tell=${tell} />`;
}

/** The tab. */
export function Outputs({ feed, run, tell }) {
  const outputs = feed.artifacts.value;
  return html`<section id="made"><h2>Outputs</h2>
    ${outputs.length ? html`<ul class="outputs">${outputs.slice(0, ROWS).map(each => html`<${Output} key=${each.name} feed=${feed} output=${each} tell=${tell} />`)}</ul>`
      : html`<p class="quiet">${isOver(run) ? "This run produced no outputs." : "This run has no outputs yet."}</p>`}
    ${outputs.length > ROWS && html`<p class="quiet">The first ${ROWS} of ${outputs.length} outputs.</p>`}
  </section>
  <${Checkpoints} feed=${feed} run=${run} tell=${tell} />`;
}
