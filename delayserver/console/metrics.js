// What /metrics says of one subscription, of all shards together.

import { quantile } from './statistics.js';

const LINE = /^delayserver_(\w+)\{([^}]*)\} (\S+)$/;

/** Counts, `answers` as pairs of a status class and how many, and quantiles of the lateness in ms. */
export function readMetrics(text, name) {
  const wanted = `subscription="${name}"`;
  const sums = new Map();
  const answers = new Map();
  const buckets = new Map();
  for (const line of text.split('\n')) {
    if (!line.includes(wanted)) continue;
    const [, metric, labels, value] = LINE.exec(line) ?? [];
    if (!metric) continue;
    const label = (key) => new RegExp(`${key}="([^"]*)"`).exec(labels)?.[1];
    const add = (map, key) => map.set(key, (map.get(key) ?? 0) + Number(value));
    if (metric === 'webhook_answers_total') add(answers, label('status'));
    else if (metric === 'sink_results_total') add(answers, label('result'));
    else if (metric === 'subscription_lateness_seconds_bucket') add(buckets, label('le'));
    else add(sums, metric);
  }
  const bounds = [...buckets.keys()].filter((one) => one !== '+Inf').map(Number).sort((a, b) => a - b);
  const upTo = [...bounds.map((bound) => at(buckets, bound)), buckets.get('+Inf') ?? 0];
  const late = { bounds_ms: bounds.map((bound) => bound * 1000), counts: upTo.map((count, n) => count - (upTo[n - 1] ?? 0)) };
  return {
    delivered: sums.get('subscription_delivered_total') ?? 0,
    retried: sums.get('subscription_retried_total') ?? 0,
    dead: sums.get('subscription_dead_total') ?? 0,
    oldestS: sums.get('subscription_oldest_due_age_seconds') ?? 0,
    answers: [...answers].sort(),
    p50: bounds.length ? quantile(late, 0.5) : null,
    p99: bounds.length ? quantile(late, 0.99) : null,
  };
}

/** Bounds are texts there, such as 1.0. */
const at = (buckets, bound) => [...buckets].find(([key]) => Number(key) === bound)?.[1] ?? 0;
