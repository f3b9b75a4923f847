// What views are made of: buttons that call, tables, pages, moments, dialogs, notices.

import { html, makeStore, useEffect, useRef, useState } from './dom.js';
import { away, moment } from './format.js';

// ── notices ───────────────────────────────────────────────────────────────────────────────────────

const notices = makeStore([]);
const NOTICE_MS = 6000;
let nextNotice = 0;

export function notify(text, kind = 'good') {
  const one = { number: (nextNotice += 1), text, kind };
  notices.set([...notices.get().slice(-3), one]);
  const shownMs = kind === 'bad' ? 2 * NOTICE_MS : NOTICE_MS;
  setTimeout(() => drop(one), shownMs);
}

const drop = (one) => notices.set(notices.get().filter((other) => other !== one));

export function Notices() {
  return html`<div class="notices" role="status" aria-live="polite">
    ${notices.use().map(
      (one) => html`<p key=${one.number} class="notice ${one.kind}">
        <span>${one.text}</span>
        <button type="button" class="plain" aria-label="Dismiss" onClick=${() => drop(one)}>×</button>
      </p>`,
    )}
  </div>`;
}

/** Do something that somebody asked for, and say what came of it; whether it was done. */
export async function attempt(work, done) {
  try {
    const result = await work();
    const text = typeof done === 'function' ? done(result) : done;
    if (text) notify(text);
    return true;
  } catch (error) {
    notify(error.message, 'bad');
    return false;
  }
}

// ── buttons and dialogs ───────────────────────────────────────────────────────────────────────────

/** A button; while what it does is being done, it cannot be pressed again. */
export function Button({ onPress, kind = '', label, disabled, children, ...more }) {
  const [isBusy, setBusy] = useState(false);
  async function press() {
    setBusy(true);
    try {
      await onPress();
    } finally {
      setBusy(false);
    }
  }
  return html`<button type="button" class=${kind} aria-label=${label} aria-busy=${isBusy}
    disabled=${disabled || isBusy} onClick=${press} ...${more}>${children}</button>`;
}

const dialog = makeStore(null);

/** Ask before something is done; `fields`: what is to be entered, by name. Null: it was left. */
export function ask({ title, text, action, kind = 'primary', fields = [] }) {
  return new Promise((resolve) => dialog.set({ title, text, action, kind, fields, resolve }));
}

export function Dialog() {
  const asked = dialog.use();
  const element = useRef(null);
  useEffect(() => {
    if (asked && !element.current.open) element.current.showModal();
  }, [asked]);
  function end(result) {
    asked?.resolve(result);
    dialog.set(null);
    element.current?.close();
  }
  function submit(event) {
    event.preventDefault();
    end(Object.fromEntries(new FormData(event.target)));
  }
  return html`<dialog ref=${element} aria-labelledby="dialog-title" onCancel=${() => end(null)}>
    ${asked && html`<form key=${asked.title} onSubmit=${submit}>
      <h2 id="dialog-title">${asked.title}</h2>
      ${asked.text && html`<p>${asked.text}</p>`}
      ${asked.fields.map(
        (one) => html`<${Field} label=${one.label} hint=${one.hint}>
          <input name=${one.name} type=${one.type ?? 'text'} defaultValue=${one.value ?? ''} placeholder=${one.placeholder}
            required=${one.required !== false} autocomplete="off" /></${Field}>`,
      )}
      <div class="actions end">
        <button type="button" onClick=${() => end(null)}>Leave it</button>
        <button type="submit" class=${asked.kind} autofocus=${!asked.fields.length}>${asked.action}</button>
      </div>
    </form>`}
  </dialog>`;
}

/** A label above what it names. */
export function Field({ label, hint, children }) {
  return html`<label class="field"><span>${label}${hint && html` <small>${hint}</small>`}</span>${children}</label>`;
}

// ── text ──────────────────────────────────────────────────────────────────────────────────────────

export const Badge = ({ kind, children }) => html`<span class="badge ${kind}">${children}</span>`;

const STATES = {
  scheduled: 'info', delivering: 'warn', delivered: 'good', cancelled: 'off', dead: 'bad',
  serving: 'good', away: 'bad', active: 'good', paused: 'warn', failing: 'bad', failed: 'bad',
  waiting: 'warn', archived: 'good', adopted: 'good',
};

export const State = ({ name }) => html`<${Badge} kind=${STATES[name] ?? 'info'}>${name}</${Badge}>`;

export function Moment({ at, plain }) {
  if (!at) return html`<span class="muted">–</span>`;
  return html`<time datetime=${at} title="${at} (UTC)">${moment(at)}${!plain &&
    html` <span class="muted">${away(at)}</span>`}</time>`;
}

/** Facts: pairs of a name and what it is; those of nothing are left out. */
export function Facts({ of }) {
  return html`<dl class="facts">${of
    .filter(([, value]) => value !== null && value !== undefined && value !== '')
    .map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

export function Code({ text, label }) {
  return html`<div class="code">
    <button type="button" class="small" onClick=${() =>
      attempt(() => navigator.clipboard.writeText(text), 'Copied')}>Copy</button>
    <pre tabindex="0" role="region" aria-label=${label}>${text}</pre>
  </div>`;
}

/** What the server said instead of an answer; what was seen before stays. */
export const Trouble = ({ error }) =>
  error && html`<p class="notice bad" role="alert">${error.message}</p>`;

export const Loading = () => html`<p class="muted">Loading…</p>`;

export function Section({ title, actions, children, kind = '' }) {
  return html`<section class="card ${kind}"><header><h2>${title}</h2>${actions}</header>${children}</section>`;
}

export function Head({ title, badge, children }) {
  return html`<div class="head"><h1>${title}</h1>${badge}<div class="actions">${children}</div></div>`;
}

// ── tables and pages ──────────────────────────────────────────────────────────────────────────────

/** A table: `columns` are pairs of a title and what a row shows there; a third `number` aligns. */
export function Table({ caption, columns, rows, keyOf, empty, select, selected }) {
  if (!rows.length) return html`<p class="empty">${empty}</p>`;
  const all = select && rows.every((row) => selected.has(keyOf(row)));
  function toggle(keys, on) {
    const next = new Set(selected);
    for (const key of keys) on ? next.add(key) : next.delete(key);
    select(next);
  }
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}><table>
    <caption class="hidden">${caption}</caption>
    <thead><tr>
      ${select && html`<th class="tick"><input type="checkbox" aria-label="Select all of this page" checked=${all}
        onChange=${(event) => toggle(rows.map(keyOf), event.target.checked)} /></th>`}
      ${columns.map(([title, , kind]) => html`<th scope="col" class=${kind}>${title || html`<span class="hidden">Actions</span>`}</th>`)}
    </tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${keyOf(row)}>
      ${select && html`<td class="tick"><input type="checkbox" aria-label="Select ${keyOf(row)}"
        checked=${selected.has(keyOf(row))} onChange=${(event) => toggle([keyOf(row)], event.target.checked)} /></td>`}
      ${columns.map(([, show, kind]) => html`<td class=${kind}>${show(row)}</td>`)}
    </tr>`)}</tbody>
  </table></div>`;
}

/** Where in a list one is: the cursors of the pages before this one, and of this one. */
export function usePages(inputs = []) {
  const [cursors, setCursors] = useState([null]);
  const first = useRef(true);
  useEffect(() => {
    if (first.current) first.current = false;
    else setCursors([null]);
  }, inputs);
  return { cursors, setCursors, cursor: cursors.at(-1) };
}

export function Pager({ pages, following }) {
  const { cursors, setCursors } = pages;
  if (cursors.length === 1 && !following) return null;
  return html`<nav class="pager" aria-label="Pages">
    <button type="button" disabled=${cursors.length === 1} onClick=${() => setCursors(cursors.slice(0, -1))}>Back</button>
    <span>Page ${cursors.length}</span>
    <button type="button" disabled=${!following} onClick=${() => setCursors([...cursors, following])}>Next</button>
  </nav>`;
}
