// Overview: what the server does now, what it will have to do, and what wants somebody's attention.

import { html } from '../dom.js';
import { call } from '../api.js';
import { Chart } from '../chart.js';
import { away, bytes, length, moment, number, perSecond } from '../format.js';
import { useLive } from '../live.js';
import { to } from '../router.js';
import { may } from '../session.js';
import { quantile, statistics } from '../statistics.js';
import { Badge, Head, Loading, Section, Table, Trouble } from '../ui.js';

const FORECAST_S = 60; // it makes a checkpoint
const CLUSTER_S = 15;
const HOURS = 48;
const HOUR_MS = 3_600_000;
const QUEUED_LONG_MS = 60_000;
const LAG_LONG_MS = 10_000;
const DISK_LOW_BYTES = 2 * 1024 ** 3;

export default function Overview() {
  if (!may('observe')) {
    return html`<${Head} title="Overview" />
      <p>This token may not see the figures of the server: that takes the scope <code>observe</code>. What it may see stands beside.</p>`;
  }
  return html`<${Figures} />`;
}

function Figures() {
  const { now, error, history } = statistics.use();
  // Asked for at once, not when the figures are there.
  const cluster = useLive((signal) => call('GET', '/v1/cluster', { signal }), CLUSTER_S);
  const forecast = useLive((signal) => call('GET', '/v1/forecast', { signal }), FORECAST_S);
  if (!now) return html`<${Head} title="Overview" />${error ? html`<${Trouble} error=${error} />` : html`<${Loading} />`}`;
  const newest = (column) => column.at(-1) ?? null;
  const late = (part, column) => newest(column) ?? quantile(now.lateness, part);
  const isRecent = newest(history.p50) !== null;
  const show = (ms) => (ms === null ? '–' : length(ms));
  return html`
    <${Head} title="Overview"><span class="muted">Version ${now.version} · counted since ${moment(now.started_at)}</span></${Head}>
    <${Trouble} error=${error} />
    <div class="tiles">
      <${Tile} name="Pending" value=${number(now.pending_loaded + now.pending_later)} below="${number(now.pending_loaded)} of them due soon" />
      <${Tile} name="Accepted" value=${rate(newest(history.accepted))} below="${number(now.accepted)} in all" />
      <${Tile} name="Delivered" value=${rate(newest(history.delivered))} below="${number(now.delivered)} in all" />
      <${Tile} name="Lateness p50" value=${show(late(0.5, history.p50))} below=${isRecent ? 'in the last minute' : 'since the start'} />
      <${Tile} name="Lateness p99" value=${show(late(0.99, history.p99))} below=${isRecent ? 'in the last minute' : 'since the start'} />
      <${Tile} name="Due and waiting" value=${number(now.queued)} below="${number(now.in_flight)} on their way" />
      <${Tile} name="Dead letters" value=${number(now.dead_letters)} below="${number(now.retried)} retries so far" />
      <${Tile} name="Free on the disk" value=${bytes(now.disk_free_bytes)} below="${bytes(now.unfiled_bytes)} not filed" />
    </div>
    <div class="columns even">
      <${Attention} now=${now} cluster=${cluster.data} />
      <${Forecast} ...${forecast} />
    </div>
    <div class="columns">
      <${Section} title="Messages per second">
        <${Chart} label="Messages accepted and delivered per second, since this tab was opened" atS=${history.atS} show=${perSecond} least=${1}
          series=${[{ label: 'accepted', color: '--series-1', values: history.accepted }, { label: 'delivered', color: '--series-2', values: history.delivered }]} />
      </${Section}>
      <${Section} title="Lateness">
        <${Chart} label="How late deliveries were, since this tab was opened" atS=${history.atS} show=${length} least=${1}
          series=${[{ label: 'p50', color: '--series-1', values: history.p50 }, { label: 'p99', color: '--series-3', values: history.p99 }]} />
      </${Section}>
    </div>`;
}

const rate = (value) => (value === null ? '–' : html`${perSecond(value)} <small>/s</small>`);

const Tile = ({ name, value, below }) => html`<dl class="tile"><dt>${name}</dt><dd>${value}</dd><dd>${below}</dd></dl>`;

function Attention({ now, cluster }) {
  const found = attentionTo(now, cluster);
  return html`<${Section} title="Needs attention">
    ${found.length
      ? html`<ul class="attention">${found.map(([kind, what, text], n) => html`<li key=${n}><${Badge} kind=${kind}>${what}</${Badge}><span>${text}</span></li>`)}</ul>`
      : html`<p class="empty">Nothing. Receivers answer, nothing waits too long, and there is room on the disk.</p>`}
  </${Section}>`;
}

function attentionTo(now, cluster) {
  const found = [];
  const mayLook = may('consume');
  for (const { subscription, since } of now.failing) {
    const name = mayLook ? html`<a href=${to(['subscriptions', subscription])}>${subscription}</a>` : subscription;
    found.push(['bad', 'Receiver down', html`${name}: nothing but failures, first ${away(since)}`]);
  }
  for (const one of cluster?.shards ?? []) {
    if (one.state !== 'serving') found.push(['bad', 'Shard away', html`<a href="#/cluster">Shard ${one.shard}</a> answers nobody just now`]);
  }
  for (const one of cluster?.nodes ?? []) {
    if (one.state !== 'serving') found.push(['bad', 'Node away', html`<a href="#/cluster">${one.node}</a> was seen last ${away(one.last_seen_at)}`]);
  }
  if (now.disk_free_bytes < DISK_LOW_BYTES) found.push(['bad', 'Disk', `Only ${bytes(now.disk_free_bytes)} are free: when it is nearly full, nothing is accepted any more`]);
  if (now.replay_lag_ms > LAG_LONG_MS) found.push(['bad', 'Replay lag', `The oldest message that is not filed waits for ${length(now.replay_lag_ms)}`]);
  if (now.dead_letters) found.push(['warn', 'Dead letters', html`${mayLook ? html`<a href="#/dead-letters">${number(now.dead_letters)}</a>` : number(now.dead_letters)} given up, until somebody redrives or deletes them`]);
  if (now.unmatched) found.push(['warn', 'No subscription', `${number(now.unmatched)} due, with a subject that no subscription matches`]);
  if (now.oldest_due_at && Date.now() - Date.parse(now.oldest_due_at) > QUEUED_LONG_MS) found.push(['warn', 'Waiting', `The oldest that is due and not on its way: ${away(now.oldest_due_at)}`]);
  if (now.paused) found.push(['warn', 'Paused', html`${number(now.paused)} of ${number(now.subscriptions)} ${mayLook ? html`<a href="#/subscriptions">subscriptions</a>` : 'subscriptions'}`]);
  if (now.archive_waiting_hours) found.push(['info', 'Archive', html`${number(now.archive_waiting_hours)} settled hours (${bytes(now.archive_waiting_bytes)}) wait to be archived`]);
  return found;
}

function Forecast({ data, error }) {
  const nowMs = Date.now();
  const first = Math.floor(nowMs / HOUR_MS) * HOUR_MS;
  const counts = new Map((data?.buckets ?? []).map((one) => [Date.parse(one.from), one.count]));
  const hours = Array.from({ length: HOURS }, (_, n) => first + n * HOUR_MS);
  const values = hours.map((at) => counts.get(at) ?? 0);
  const before = sum(counts, (at) => at < first);
  const behind = sum(counts, (at) => at >= first + HOURS * HOUR_MS);
  const busy = hours.map((at, n) => ({ at, count: values[n] })).filter((one) => one.count);
  return html`<${Section} title="Due in the next ${HOURS} hours">
    <${Trouble} error=${error} />
    ${data && html`<${Chart} label="How many messages fall due in each of the next ${HOURS} hours" bars atS=${hours.map((at) => at / 1000)} show=${number}
      series=${[{ label: 'by hour', color: '--series-1', values }]} />
    <p class="muted">${number(values.reduce((all, one) => all + one, 0))} in these hours, ${number(behind)} later${before ? `, ${number(before)} overdue` : ''}.</p>
    <details><summary>As a table</summary><${Table} caption="Messages that fall due, by hour" rows=${busy} keyOf=${(one) => one.at} empty="Nothing falls due in these hours."
      columns=${[['Hour', (one) => moment(one.at).slice(0, 16)], ['Messages', (one) => number(one.count), 'number']]} /></details>`}
  </${Section}>`;
}

const sum = (counts, belongs) => [...counts].reduce((all, [at, count]) => all + (belongs(at) ? count : 0), 0);
