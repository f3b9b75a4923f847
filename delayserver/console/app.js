// The frame: who is logged in, which view is shown, and the ways between them. Views are fetched when
// they are first opened.

import { html, render, useEffect, useRef, useState } from './dom.js';
import { Dialog, Notices, ask } from './ui.js';
import { go, route, to } from './router.js';
import { logIn, logOut, may, maySee, session, start } from './session.js';
import { follow, statistics, unfollow } from './statistics.js';
import { away } from './format.js';

/** Path, title, key, who may see it, module and, for one of them, the part of the path. */
const VIEWS = [
  ['', 'Overview', 'o', () => true, () => import('./views/overview.js')],
  ['messages', 'Messages', 'm', () => maySee(), () => import('./views/messages.js')],
  ['subjects', 'Subjects', 'b', () => maySee(), () => import('./views/subjects.js')],
  ['subscriptions', 'Subscriptions', 's', () => may('consume'), () => import('./views/subscriptions.js')],
  ['dead-letters', 'Dead letters', 'd', () => may('consume'), () => import('./views/dead_letters.js')],
  ['schedules', 'Schedules', 'c', () => maySee(), () => import('./views/schedules.js')],
  ['heartbeats', 'Heartbeats', 'h', () => maySee(), () => import('./views/heartbeats.js')],
  ['sources', 'Sources', 'r', () => maySee(), () => import('./views/sources.js')],
  ['cluster', 'Shards', 'n', () => true, () => import('./views/cluster.js')],
  ['bulk', 'Bulk', 'i', () => may('admin'), () => import('./views/bulk.js')],
  ['tokens', 'Tokens', 't', () => true, () => import('./views/tokens.js')],
];

const shownViews = () => VIEWS.filter(([, , , mayOpen]) => mayOpen());

function App() {
  const { state, message } = session.use();
  useEffect(() => {
    if (state !== 'ready' || !may('observe')) return undefined;
    follow();
    return unfollow;
  }, [state]);
  if (state === 'login') return html`<${LogIn} message=${message} /><${Notices} />`;
  if (state !== 'ready') return html`<p class="starting" role="status">${message ? `${message}. Trying again…` : 'Starting…'}</p>`;
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById('main').focus(); }}>Skip to the content</a>
    <${Top} />
    <${Ways} />
    <${View} />
    <${Notices} />
    <${Dialog} />`;
}

function Top() {
  const { name } = session.use();
  return html`<header class="top">
    <a class="brand" href="#/"><img src=${new URL('icon.svg', import.meta.url).href} alt="" width="22" height="22" />Delay server</a>
    <${Find} />
    <${Pulse} />
    ${name && html`<span class="who"><span class="hidden">Token </span>${name}</span>
      <button type="button" class="small" onClick=${logOut}>Log out</button>`}
  </header>`;
}

function Find() {
  function find(event) {
    event.preventDefault();
    const input = event.target.elements.id;
    const text = input.value.trim();
    if (!text) return;
    input.value = '';
    input.blur();
    const slash = text.indexOf('/');
    if (slash > 0) go(['messages', 'by-key', text.slice(0, slash), text.slice(slash + 1)]);
    else go(['messages', text]);
  }
  if (!maySee()) return html`<span class="find"></span>`;
  return html`<form class="find" role="search" onSubmit=${find}>
    <input id="find" name="id" type="search" aria-label="Find a message: its id, or subject/key" autocomplete="off"
      placeholder="Message id, or subject/key" spellcheck=${false} />
  </form>`;
}

/** Whether what is shown is what is. */
function Pulse() {
  const { now, error } = statistics.use();
  if (error) return html`<span class="pulse bad" role="status">${error.status ? 'Refused' : 'Not reached'}</span>`;
  if (!now) return null;
  return html`<span class="pulse good" title="Version ${now.version}, started ${away(now.started_at)}">Live</span>`;
}

function Ways() {
  const { parts } = route.use();
  const here = parts[0] ?? '';
  const { now } = statistics.use();
  const list = useRef(null);
  // On a narrow screen they stand in a line that is longer than the screen.
  useEffect(() => list.current.querySelector('[aria-current]')?.scrollIntoView({ block: 'nearest', inline: 'center' }), [here]);
  return html`<nav class="ways" aria-label="Views"><ul ref=${list}>${shownViews().map(
    ([path, title]) => html`<li key=${path}>
      <a href=${to(path ? [path] : [])} aria-current=${path === here ? 'page' : undefined}>${title}${
        path === 'dead-letters' && now?.dead_letters > 0 && html`<span class="count">${now.dead_letters > 999 ? '999+' : now.dead_letters}</span>`
      }</a></li>`,
  )}</ul></nav>`;
}

function View() {
  const { parts, query } = route.use();
  const [loaded, setLoaded] = useState({});
  const main = useRef(null);
  const isFirst = useRef(true);
  const view = shownViews().find(([path]) => path === (parts[0] ?? ''));
  const where = parts.join('/');
  useEffect(() => {
    document.title = view ? `${parts[1] ?? view[1]} – Delay server` : 'Delay server';
    view?.[4]().then(
      (module) => setLoaded({ path: view[0], show: module.default }),
      () => setLoaded({ path: view[0], show: () => html`<p class="notice bad" role="alert">This part of the console could not be loaded: reload the page.</p>` }),
    );
    // Whoever does not see that the page is another one is told so: the focus moves there.
    if (isFirst.current) isFirst.current = false;
    else main.current.focus({ preventScroll: true });
    window.scrollTo(0, 0);
  }, [where]);
  const Shown = view && loaded.path === view[0] ? loaded.show : null;
  return html`<main id="main" tabindex="-1" ref=${main}>${
    view ? Shown && html`<${Shown} key=${where} parts=${parts.slice(1)} query=${query} />`
      : html`<h1>Nothing here</h1><p>There is no such view, or the token may not open it. <a href="#/">Overview</a></p>`
  }</main>`;
}

function LogIn({ message }) {
  const input = useRef(null);
  const [error, setError] = useState(message);
  useEffect(() => setError(message), [message]);
  useEffect(() => input.current.focus(), []);
  return html`<main class="login"><form onSubmit=${async (event) => {
    event.preventDefault();
    const text = input.current.value.trim();
    if (!text) return;
    setError('');
    await logIn(text);
  }}>
    <h1>Delay server</h1>
    <label class="field"><span>Token</span><input ref=${input} name="token" type="password" autocomplete="off" spellcheck=${false} required /></label>
    <button type="submit" class="primary">Log in</button>
    ${error && html`<p class="notice bad" role="alert">${error}</p>`}
    <p class="muted">It stays in this tab, until it is closed. On the server's machine: <code>delayserver token create NAME --scope admin</code></p>
  </form></main>`;
}

// ── keys ──────────────────────────────────────────────────────────────────────────────────────────

let isGoing = 0;

document.addEventListener('keydown', (event) => {
  const isTyping = event.target.closest('input, textarea, select, dialog');
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || session.get().state !== 'ready') return;
  if (event.key === '/') {
    event.preventDefault();
    document.getElementById('find')?.focus();
  } else if (event.key === '?') {
    ask({
      title: 'Keys',
      text: html`<span class="keys"><kbd>/</kbd> find a message${shownViews().map(([, title, key]) => html`<br /><kbd>g</kbd> <kbd>${key}</kbd> ${title}`)}</span>`,
      action: 'Close',
    });
  } else if (event.key === 'g') {
    isGoing = event.timeStamp + 1500;
  } else if (isGoing > event.timeStamp) {
    isGoing = 0;
    const view = shownViews().find(([, , key]) => key === event.key);
    if (view) go(view[0] ? [view[0]] : []);
  }
});

render(html`<${App} />`, document.getElementById('app'));
start();
