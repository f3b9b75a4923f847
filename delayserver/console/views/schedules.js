// Schedules: when each runs next; paused, resumed, triggered.

import { html } from '../dom.js';
import { call } from '../api.js';
import { number, pretty } from '../format.js';
import { NamedView } from '../named.js';
import { to } from '../router.js';
import { Button, Code, Moment, Section, attempt } from '../ui.js';

const when = (one) => (one.cron ? `${one.cron} (${one.timezone})` : `every ${one.every}`);
const run = (one) => one.last_id && html`<a href=${to(['messages', one.last_id])}><${Moment} at=${one.last_at} plain /></a>`;

export default function Schedules({ parts }) {
  return html`<${NamedView} kind="schedules" parts=${parts} Deeds=${Trigger} More=${More}
    stateOf=${(one) => (one.paused ? 'paused' : one.next_at.length ? 'active' : 'ended')}
    empty="There are none: make one with delayserver schedule, or PUT /v1/schedules/NAME."
    ended="It never runs again. Its messages stay."
    columns=${[
      ['When', when, 'clip'],
      ['Next run', (one) => html`<${Moment} at=${one.paused ? null : one.next_at[0]} />`],
      ['Last run', run],
      ['Runs', (one) => number(one.runs), 'number'],
      ['Left out', (one) => number(one.skipped), 'number'],
    ]}
    facts=${(one) => [
      ['Subject', html`<a href=${to(['messages'], { subject: one.subject })}>${one.subject}</a>`],
      ['When', when(one)],
      ['Last run', run(one)],
      ['Runs', number(one.runs) + (one.max_runs ? ` of ${number(one.max_runs)}` : '')],
      ['Left out', number(one.skipped)],
      ['Missed runs', one.catch_up],
      ['While the last is not settled', one.overlap],
      ['Spread over', one.jitter],
      ['From', one.start_at && html`<${Moment} at=${one.start_at} plain />`],
      ['Until', one.end_at && html`<${Moment} at=${one.end_at} plain />`],
    ]} />`;
}

function Trigger({ one, where, done }) {
  return html`<${Button} onPress=${async () => {
    await attempt(() => call('POST', `${where}/trigger`), `A run of ${one.name} is published`);
    done();
  }}>Trigger</${Button}>`;
}

function More({ one }) {
  const body = one.body_base64 ?? pretty(one.body);
  return html`<div class="columns">
    <${Section} title="Next runs">${one.paused ? html`<p class="empty">It is paused.</p>` : html`<ol>${one.next_at.map((at) => html`<li key=${at}><${Moment} at=${at} /></li>`)}</ol>`}</${Section}>
    <${Section} title="Body"><${Code} label="Body" text=${body ?? ''} /></${Section}>
  </div>`;
}
