// What /v1/stats says, asked for every few seconds while the tab is seen, and what follows from two
// answers: rates, and how late deliveries were in between. All views share it. Nothing is stored:
// the history is that of this tab, since it was opened.

import { call } from './api.js';
import { makeStore } from './dom.js';
import { poll } from './live.js';

const EVERY_S = 5;
const KEPT = 720; // an hour
const WINDOW = 12; // a minute

/** `now`: the last answer; `history`: columns of what was reckoned, newest last. */
export const statistics = makeStore({ now: null, error: null, history: emptyHistory() });

function emptyHistory() {
  return { atS: [], accepted: [], delivered: [], p50: [], p99: [] };
}

let samples = [];
let running = null;

export function follow() {
  running?.end();
  samples = [];
  running = poll((signal) => call('GET', '/v1/stats', { signal }), EVERY_S, tell);
}

export function unfollow() {
  running?.end();
  running = null;
  statistics.set({ now: null, error: null, history: emptyHistory() });
}

function tell({ data, error }) {
  const { now, history } = statistics.get();
  if (error) {
    statistics.set({ now, history, error });
    return;
  }
  const sample = { atMs: performance.now(), ...data };
  const before = samples.at(-1);
  // Another process counts from nought.
  if (before && before.started_at !== data.started_at) samples = [];
  samples = [...samples.slice(-WINDOW), sample];
  statistics.set({ now: data, history: before ? extended(history, samples) : history, error: null });
}

function extended(history, seen) {
  const [last, before] = [seen.at(-1), seen.at(-2)];
  if (!before) return history;
  const seconds = (last.atMs - before.atMs) / 1000;
  const late = latenessBetween(seen[0], last);
  const next = {
    atS: Date.now() / 1000,
    accepted: Math.max(0, last.accepted - before.accepted) / seconds,
    delivered: Math.max(0, last.delivered - before.delivered) / seconds,
    p50: quantile(late, 0.5),
    p99: quantile(late, 0.99),
  };
  return Object.fromEntries(
    Object.entries(history).map(([name, column]) => [name, [...column.slice(1 - KEPT), next[name]]]),
  );
}

const latenessBetween = (from, until) => ({
  bounds_ms: until.lateness.bounds_ms,
  counts: until.lateness.counts.map((count, n) => count - from.lateness.counts[n]),
});

/** How late all but the latest of deliveries were, in ms; null: there were none. Between two bounds
 * they count as spread evenly. */
export function quantile({ bounds_ms: bounds, counts }, part) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (total <= 0) return null;
  let rank = part * total;
  for (let n = 0; n < bounds.length; n += 1) {
    if (rank <= counts[n]) {
      const lower = n ? bounds[n - 1] : 0;
      return lower + ((bounds[n] - lower) * rank) / counts[n];
    }
    rank -= counts[n];
  }
  return bounds.at(-1);
}
