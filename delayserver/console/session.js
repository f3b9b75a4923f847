// Who looks at the console, and what the token allows: what it does not, no view shows.
//
//     starting ──▶ ready ◀──▶ login        unreachable: asked again until somebody answers

import { call, token, whenRefused } from './api.js';
import { makeStore } from './dom.js';

const AGAIN_MS = 3000;

export const session = makeStore({ state: 'starting' });

export async function start() {
  try {
    const own = await call('GET', '/v1/tokens/self');
    session.set({ state: 'ready', name: own.name, scopes: own.scopes, expiresAt: own.expires_at });
  } catch (error) {
    if (error.status === 401) return;
    session.set({ state: 'unreachable', message: error.message });
    setTimeout(start, AGAIN_MS);
  }
}

export async function logIn(text) {
  token.set(text);
  await start();
}

export function logOut() {
  token.forget();
  session.set({ state: 'login', message: '' });
}

whenRefused((message) => {
  const had = token.get() !== null;
  token.forget();
  session.set({ state: 'login', message: had ? `Please log in again: ${message}.` : '' });
});

/** Whether a scope allows an action, with a subject or a pattern of subjects; without: with any. */
export function may(action, subject) {
  return (session.get().scopes ?? []).some((scope) => {
    const [allowed, pattern = '*'] = split(scope);
    if (allowed === 'admin') return true;
    return allowed === action && (subject === undefined || matches(pattern, subject));
  });
}

export const maySee = (subject) => may('publish', subject) || may('consume', subject);

function split(scope) {
  const colon = scope.indexOf(':');
  return colon < 0 ? [scope] : [scope.slice(0, colon), scope.slice(colon + 1)];
}

function matches(pattern, subject) {
  if (pattern === '*' || pattern === subject) return true;
  return pattern.endsWith('.*') && subject.startsWith(pattern.slice(0, -1));
}
