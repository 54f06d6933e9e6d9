// The live page: all runs, one of them, or the form for a new one; by the address.
import { Hooks, Signals, View, html } from "./lib.js";
import { link, setToken, takeToken, unknown } from "./api.js";
import { Guard } from "./guard.js";
import { mayOperate, onlyRun } from "./me.js";
import { go, route } from "./route.js";
import { Runs } from "./runs.js";
import { Run } from "./run.js";
import { Start } from "./start.js";
import { Compare } from "./compare.js";
import { Machines } from "./machines.js";

const { useEffect, useRef, useState } = Hooks;
const THEME = "recipe.theme";

function Theme() {
  const [theme, setTheme] = useState(document.documentElement.dataset.theme || "");
  const turn = () => {
    const dark = theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    const next = dark ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    localStorage.setItem(THEME, next);
    setTheme(next);
  };
  return html`<button type="button" class="plain" id="theme" aria-label="light or dark" title="light or dark" onClick=${turn}>◐</button>`;
}

function Views({ view }) {
  const link = (name, to, label, of = "") => html`<a class=${of} href=${to} aria-current=${view === name ? "page" : undefined}>${label}</a>`;
  return html`<nav aria-label="views">${link("runs", "#", "Runs", "wide-only")}${view === "compare" && link("compare", location.hash, "Compare", "wide-only")}${link("machines", "#machines", "Machines")}</nav>`;
}

function Top({ view }) {
  const word = link.value;
  return html`<header class="top">
    <a class="mark" href="#">recipe</a>
    ${onlyRun() ? html`<span class="quiet shared">read-only, one run</span>` : html`<${Views} view=${view} />`}
    <span id="link" role="status" class=${"quiet " + word}>${word === "lost" ? "disconnected, reconnecting" : word}</span>
    <${Theme} />
    ${mayOperate() && html`<a class="button main" id="new" href="#new">New run</a>`}
  </header>`;
}

function Sign() {
  const [token, set] = useState("");
  const open = event => {
    event.preventDefault();
    setToken(token.trim());
    location.reload();
  };
  return html`<main id="main" tabindex="-1"><form id="sign" class="sheet-form" onSubmit=${open}><h1>Enter a token</h1>
    <p class="quiet">Open the URL printed by <code>recipe ui</code>, or enter a token from <code>recipe serve</code>. The token stays in this tab.</p>
    <label class="field"><b>Token</b><input id="token" type="password" autocomplete="off" spellcheck="false" value=${token} onInput=${event => set(event.target.value)} /></label>
    <button class="main">Open</button>
  </form></main>`;
}

/** What went wrong last, above the view. */
function Message({ error }) {
  const box = useRef(null);
  useEffect(() => box.current?.scrollIntoView({ block: "nearest" }), [error]);
  return error && html`<p id="message" ref=${box} class="failure" role="alert">${error.message}</p>`;
}

function App() {
  const [error, tell] = useState(null), parameters = route.value, run = parameters.get("run") || "";
  const view = run ? "run" : parameters.has("new") ? "new" : parameters.has("compare") ? "compare" : parameters.has("machines") ? "machines" : "runs";
  const seen = useRef("");
  useEffect(() => {
    tell(null);
    if (seen.current && seen.current !== view + run) {
      scrollTo(0, 0);
      document.getElementById("main").focus({ preventScroll: true });
    }
    seen.current = view + run;
  }, [view, run]);
  const only = unknown.value ? "" : onlyRun();
  useEffect(() => {
    if (only && run !== only) go({ run: only });
  }, [only, run]);
  if (unknown.value) return html`<${Sign} />`;
  return html`<a class="skip" href="#main" onClick=${event => { event.preventDefault(); document.getElementById("main").focus(); }}>Skip to content</a>
    <${Top} view=${view} />
    <main id="main" tabindex="-1" data-view=${view}>
      <${Message} error=${error} />
      <${Guard} key=${view + run}>
        ${view === "run" ? html`<${Run} id=${run} tell=${tell} />` : view === "new" ? html`<${Start} tell=${tell} />` : view === "compare" ? html`<${Compare} />` : view === "machines" ? html`<${Machines} tell=${tell} />` : html`<${Runs} tell=${tell} />`}
      <//>
    </main>`;
}

const theme = localStorage.getItem(THEME);
if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
takeToken();
Signals.effect(() => {
  route.value;
  if (location.hash.includes("token=")) {
    takeToken();
    route.value = new URLSearchParams(location.hash.slice(1));
  }
});
route.value = new URLSearchParams(location.hash.slice(1));
View.render(html`<${App} />`, document.getElementById("app"));
