// What came out of a run: pictures among its outputs, and all of them by name.
import { Hooks, html } from "./lib.js";
import { bytes, readable } from "./text.js";

const { useEffect, useState } = Hooks;
const IMAGE = /\.(?:png|jpe?g|webp|gif)$/i;
const [LARGEST, MOST, ROWS] = [2 << 20, 48, 200];

/** What a file is by its first bytes; null where it is no picture. */
function pictureType(data) {
  const head = String.fromCharCode(...data.slice(0, 12));
  if (head.startsWith("\x89PNG\r\n\x1a\n")) return "image/png";
  if (head.startsWith("\xff\xd8\xff")) return "image/jpeg";
  if (head.startsWith("GIF8")) return "image/gif";
  return head.startsWith("RIFF") && head.endsWith("WEBP") ? "image/webp" : null;
}

/** Files that may be pictures: those of a folder by their names, others by their first bytes. */
function candidates(artifacts) {
  const files = artifacts.filter(each => each.stored).flatMap(each => (each.folder
    ? each.files.filter(file => /^[fx]/.test(file.content)).map(file => ({ name: each.name, path: file.path, bytes: file.bytes }))
    : [{ name: each.name, path: "", bytes: each.bytes }]));
  return files.filter(file => (!file.path || IMAGE.test(file.path)) && !(file.bytes > LARGEST));
}

/** The address of a picture in this page; null where it is none. */
async function pictured(feed, file) {
  const read = async headers => new Uint8Array(await (await feed.file(file.name, file.path, headers)).arrayBuffer());
  if (file.bytes < 12 || (!file.path && !pictureType(await read({ Range: "bytes=0-15" })))) return null;
  const data = await read({}), type = pictureType(data);
  return type && URL.createObjectURL(new Blob([data], { type }));
}

/** Pictures among the outputs, as the steps that make them end; the latest first. */
export function Samples({ feed, artifacts = feed.artifacts.value }) {
  const [seen] = useState(() => new Map()), [pictures, setPictures] = useState([]);
  useEffect(() => () => {
    for (const url of seen.values()) if (url) URL.revokeObjectURL(url);
  }, []);
  useEffect(() => {
    let stopped = false;
    (async () => {
      for (const file of candidates(artifacts).reverse()) {
        const key = file.name + "\n" + file.path;
        if (stopped || seen.size >= MOST) return;
        if (seen.has(key)) continue;
        seen.set(key, null);
        const url = await pictured(feed, file).catch(() => null);
        if (!url) continue;
        seen.set(key, url);
        setPictures(known => [{ ...file, url }, ...known]);
      }
    })();
    return () => { stopped = true; };
  }, [feed, artifacts]);
  if (!pictures.length) return null;
  return html`<section id="samples"><h2>Samples</h2>
    <div class="scroll" tabindex="0" role="region" aria-label="samples"><div class="sheet">
      ${pictures.map(each => html`<figure key=${each.url}>
        <img src=${each.url} alt=${`${readable(each.name)} ${each.path}`} loading="lazy" />
        <figcaption>${readable(each.name)}<br /><span class="quiet">${each.path}</span></figcaption>
      </figure>`)}
    </div></div>
    ${seen.size >= MOST && html`<p class="quiet">more pictures are among the outputs</p>`}
  </section>`;
}

async function save(feed, name) {
  const url = URL.createObjectURL(await (await feed.file(name)).blob());
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** All outputs. */
export function Outputs({ feed, tell }) {
  const artifacts = feed.artifacts.value;
  if (!artifacts.length) return html`<p class="quiet empty">This run has no outputs yet.</p>`;
  const saved = each => {
    if (!each.stored) return "not stored here";
    if (each.folder) return "";
    return html`<button type="button" aria-label=${"save " + each.name} onClick=${() => save(feed, each.name).catch(tell)}>save</button>`;
  };
  return html`<section id="made"><h2>Outputs</h2>
    <div class="scroll" tabindex="0" role="region" aria-label="outputs"><table><tbody>
      ${artifacts.slice(0, ROWS).map(each => html`<tr key=${each.name}>
        <th scope="row">${readable(each.name)}</th><td class="number">${bytes(each.bytes)}</td>
        <td>${each.folder ? each.files.length + " files" : ""}</td><td>${saved(each)}</td>
      </tr>`)}
    </tbody></table></div>
    ${artifacts.length > ROWS && html`<p class="quiet">the first ${ROWS} of ${artifacts.length}</p>`}
  </section>`;
}
