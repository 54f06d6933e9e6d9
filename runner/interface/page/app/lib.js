// Preact, htm and signals, whose scripts make globals; elements show every text with nothing hidden in it.
import { visible } from "./text.js";

const { h: element, render, Fragment, Component } = globalThis.preact;
const { useState, useEffect, useLayoutEffect, useRef, useMemo, useCallback, useErrorBoundary } = globalThis.preactHooks;
const { signal, computed, effect, batch, untracked } = globalThis.preactSignals;
const SHOWN = ["title", "aria-label", "alt", "placeholder"];

/** An element whose texts are those of strangers, too. */
function h(type, props, ...children) {
  if (props) {
    for (const name of SHOWN) if (typeof props[name] === "string") props[name] = visible(props[name]);
  }
  return element(type, props, ...children.map(shown));
}

function shown(child) {
  if (typeof child === "string") return visible(child);
  return Array.isArray(child) ? child.map(shown) : child;
}

export const html = globalThis.htm.bind(h);
export const Signals = { signal, computed, effect, batch, untracked };
export const Hooks = { useState, useEffect, useLayoutEffect, useRef, useMemo, useCallback, useErrorBoundary };
export const View = { render, Fragment, Component };
