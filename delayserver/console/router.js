// Where one is: the part of the address behind #, as path and query, so that a reload, a bookmark
// and the browser's own buttons work, and no server has to know these addresses.

import { makeStore } from './dom.js';

export const route = makeStore(read());

window.addEventListener('hashchange', () => route.set(read()));

function read() {
  const [before, query = ''] = location.hash.replace(/^#\/?/, '').split('?', 2);
  return {
    parts: before.split('/').filter(Boolean).map(decode),
    query: Object.fromEntries(new URLSearchParams(query)),
  };
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** The address of a view; what is empty in `query` is left out. */
export function to(parts, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== '' && value !== null);
  const text = new URLSearchParams(given).toString();
  return '#/' + parts.map(encodeURIComponent).join('/') + (text ? '?' + text : '');
}

export const go = (parts, query) => {
  location.hash = to(parts, query);
};
