// What people say of a run: its name, tags and note, and whether it is put away.
import { Hooks, html } from "./lib.js";
import { json, part } from "./api.js";
import { mayOperate } from "./me.js";
import { Sharing } from "./sharing.js";

const { useEffect, useRef, useState } = Hooks;

/** Store what people say of runs.  Raises Refusal. */
export function describe(id, changes) {
  return json("/runs/" + part(id), { method: "PATCH", body: changes });
}

/** Tags out of a text: words, each with or without #. */
export function tagsOf(text) {
  return [...new Set(text.split(/[\s,]+/).map(each => each.replace(/^#/, "")).filter(Boolean))];
}

function Form({ run, close, changed, tell }) {
  const [name, setName] = useState(run.name), [tags, setTags] = useState(run.tags.join(" ")), [note, setNote] = useState(run.note);
  const first = useRef(null);
  useEffect(() => first.current.focus(), []);
  const save = async event => {
    event.preventDefault();
    try {
      await describe(run.id, { name: name.trim(), tags: tagsOf(tags), note: note.trim() });
      await changed();
      close();
    } catch (error) {
      tell(error);
    }
  };
  const typed = set => event => set(event.target.value);
  return html`<form class="about-form" onSubmit=${save} onKeyDown=${event => event.key === "Escape" && close()}>
    <label class="field"><b>Name</b><input ref=${first} id="about-name" value=${name} maxlength="100" onInput=${typed(setName)} /></label>
    <label class="field"><b>Tags</b><input id="about-tags" value=${tags} placeholder="baseline lr-study" onInput=${typed(setTags)} /></label>
    <label class="field"><b>Note</b><textarea id="about-note" maxlength="4000" value=${note} onInput=${typed(setNote)}></textarea></label>
    <p class="controls"><button class="main">Save</button><button type="button" onClick=${close}>Cancel</button></p>
  </form>`;
}

/** Name, tags and note of a run, with a form to change them. */
export function About({ run, changed, tell }) {
  const [open, setOpen] = useState(false), [shares, setShares] = useState(false);
  const archive = async () => {
    try {
      await describe(run.id, { archived: !run.archived });
      await changed();
    } catch (error) {
      tell(error);
    }
  };
  if (open) return html`<${Form} run=${run} close=${() => setOpen(false)} changed=${changed} tell=${tell} />`;
  return html`<div class="about">
    ${run.archived && html`<span class="tag">archived</span>`}
    ${run.tags.map(each => html`<span class="tag" key=${each}>#${each}</span>`)}
    ${run.note && html`<span class="note">${run.note}</span>`}
    ${mayOperate() && html`<button type="button" class="plain" id="describe" onClick=${() => setOpen(true)}>${run.name || run.tags.length || run.note ? "Edit" : "Name, tags, note"}</button>
    <button type="button" class="plain" id="archive" onClick=${archive}>${run.archived ? "Unarchive" : "Archive"}</button>
    <button type="button" class="plain" id="share" onClick=${() => setShares(true)}>Share</button>`}
    ${shares && html`<${Sharing} run=${run} close=${() => setShares(false)} tell=${tell} />`}
  </div>`;
}
