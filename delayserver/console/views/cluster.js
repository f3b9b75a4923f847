// Shards and nodes: who has what, how far replicas are behind, and what has changed hands since the
// view was opened.

import { html, useRef, useState } from '../dom.js';
import { call } from '../api.js';
import { number, timeOfDay } from '../format.js';
import { useLive } from '../live.js';
import { Head, Loading, Moment, Section, State, Table, Trouble } from '../ui.js';

const EVERY_S = 3;
const KEPT = 50;

export default function Cluster() {
  const before = useRef(null);
  const [events, setEvents] = useState([]);
  const { data, error } = useLive(async (signal) => {
    const found = await call('GET', '/v1/cluster', { signal });
    const new_ = before.current ? changes(before.current, found) : [];
    before.current = found;
    if (new_.length) setEvents((seen) => [...new_, ...seen].slice(0, KEPT));
    return found;
  }, EVERY_S);
  if (!data) return html`<${Head} title="Shards" />${error ? html`<${Trouble} error=${error} />` : html`<${Loading} />`}`;
  const isCluster = data.shards.some((one) => one.epoch > 0);
  return html`<${Head} title="Shards" />
    <${Trouble} error=${error} />
    <${Section} title="Shards"><${Table} caption="Shards" rows=${data.shards} keyOf=${(one) => one.shard} empty="None."
      columns=${[
        ['Shard', (one) => one.shard],
        ['State', (one) => html`<${State} name=${one.state} />`],
        ['Owner', (one) => one.owner ?? html`<span class="muted">nobody just now</span>`],
        ...(isCluster ? [
          ['Owners so far', (one) => number(one.epoch), 'number'],
          ['Replicas, and how far they are behind', (one) => one.replicas.map((replica) => html`<div key=${replica.node}>${replica.node} <span class="muted">${replica.lag_records ? `${number(replica.lag_records)} records` : 'in step'}</span></div>`), 'wrap'],
        ] : []),
        ['Address', (one) => html`<span class="mono muted">${one.url}</span>`],
      ]} /></${Section}>
    ${isCluster && html`<${Section} title="Nodes"><${Table} caption="Nodes" rows=${data.nodes} keyOf=${(one) => one.node}
      columns=${[
        ['Node', (one) => one.node],
        ['State', (one) => html`<${State} name=${one.state} />`],
        ['Owns', (one) => data.shards.filter((shard) => shard.owner === one.node).map((shard) => shard.shard).join(', ')],
        ['Seen last', (one) => html`<${Moment} at=${one.last_seen_at} />`],
        ['Address', (one) => html`<span class="mono muted">${one.url}</span>`],
      ]} /><p class="muted">Shards are moved and nodes drained by the command line: <code>delayserver cluster move</code>, <code>delayserver cluster drain</code>.</p></${Section}>`}
    <${Section} title="Take-overs since this view was opened">${events.length
      ? html`<ol class="timeline" aria-live="polite">${events.map(([at, kind, text]) => html`<li key=${at + text} class=${kind}><span class="muted">${timeOfDay(at)}</span> ${text}</li>`)}</ol>`
      : html`<p class="empty">None.</p>`}</${Section}>`;
}

/** What is different, newest first: moment, kind and words. */
function changes(before, now) {
  const at = Date.now();
  const found = [];
  for (const one of now.shards) {
    const was = before.shards.find((other) => other.shard === one.shard);
    if (!was) continue;
    if (was.owner !== one.owner) found.push([at, one.owner ? 'good' : 'bad', one.owner ? `Shard ${one.shard} went from ${was.owner ?? 'nobody'} to ${one.owner}` : `Shard ${one.shard} has no owner: ${was.owner} had it`]);
    else if (was.state !== one.state) found.push([at, one.state === 'serving' ? 'good' : 'bad', `Shard ${one.shard} is ${one.state}`]);
  }
  for (const one of now.nodes) {
    const was = before.nodes.find((other) => other.node === one.node);
    if (was && was.state !== one.state) found.push([at, one.state === 'serving' ? 'good' : 'bad', `Node ${one.node} is ${one.state}`]);
  }
  return found;
}
