// A link to one run for people who may only read it, and the links that work.
import { Hooks, html } from "./lib.js";
import { json, ask } from "./api.js";

const { useEffect, useRef, useState } = Hooks;
const DAYS = [1, 7, 30, 90];

/** The address that opens a run with a token: what stands behind # is sent to no server. */
function linkTo(run, token) {
  return `${location.origin}${location.pathname}#token=${encodeURIComponent(token)}&run=${encodeURIComponent(run)}`;
}

function Made({ link }) {
  const box = useRef(null), [copied, copy] = useState(false);
  useEffect(() => {
    copy(false);
    box.current.focus();
    box.current.select();
  }, [link]);
  const take = () => navigator.clipboard.writeText(link).then(() => copy(true), () => box.current.select());
  return html`<p class="controls"><input ref=${box} id="share-link" aria-label="the link" readonly value=${link} />
    <button type="button" class="main" onClick=${take}>${copied ? "Copied" : "Copy"}</button></p>
    <p class="quiet">Copy the link now. It is shown only once.</p>`;
}

function Links({ links, end }) {
  if (!links.length) return null;
  return html`<h3>Active links</h3><ul class="links">${links.map(each => html`<li key=${each.id}>
    <span>created ${new Date(each.created).toLocaleString()}, expires ${new Date(each.expires).toLocaleString()}</span>
    <button type="button" aria-label=${"revoke the link of " + new Date(each.created).toLocaleString()} onClick=${() => end(each)}>End</button>
  </li>`)}</ul>`;
}

/** The form, as a dialog above the page. */
export function Sharing({ run, close, tell }) {
  const box = useRef(null), [days, setDays] = useState(7), [link, setLink] = useState(""), [links, setLinks] = useState([]);
  const path = `/runs/${encodeURIComponent(run.id)}/shares`;
  const read = async () => setLinks((await json(path)).shares);
  const failed = error => {
    box.current.close();
    tell(error);
  };
  useEffect(() => {
    box.current.showModal();
    read().catch(failed);
  }, []);
  const make = async event => {
    event.preventDefault();
    try {
      setLink(linkTo(run.id, (await json(path, { body: { days } })).token));
      await read();
    } catch (error) {
      failed(error);
    }
  };
  const end = each => ask(`${path}/${each.id}`, { method: "DELETE" }).then(read).catch(failed);
  return html`<dialog ref=${box} class="sharing" aria-label="share this run" onClose=${close}>
    <h2>Share this run</h2>
    <p>The link gives read access to this run only, including its log, outputs and code changes. Readers must be able to reach this server at <code>${location.host}</code>.</p>
    <form class="controls" onSubmit=${make}>
      <label>valid for <select id="share-days" value=${String(days)} onChange=${event => setDays(Number(event.target.value))}>${DAYS.map(each => html`<option key=${each} value=${String(each)}>${each === 1 ? "1 day" : each + " days"}</option>`)}</select></label>
      <button class="main" id="share-make">Create a link</button>
      <button type="button" onClick=${() => box.current.close()}>Close</button>
    </form>
    ${link && html`<${Made} link=${link} />`}
    <${Links} links=${links} end=${end} />
  </dialog>`;
}
