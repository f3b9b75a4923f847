// Subscriptions: a page of them, found by the beginning of their names; and one of them, with what
// it waits for, how it is answered, and the buttons that stop it and let it go on.

import { html, useRef, useState } from '../dom.js';
import { call, callText, path } from '../api.js';
import { away, length, number, perSecond, pretty } from '../format.js';
import { useLive } from '../live.js';
import { readMetrics } from '../metrics.js';
import { go, to } from '../router.js';
import { may } from '../session.js';
import { Button, Code, Facts, Head, Loading, Moment, Pager, Section, State, Table, Trouble, ask, attempt, usePages } from '../ui.js';

const EVERY_S = 5;
const METRICS_S = 15; // they are of all subscriptions
const PAGE = 50;
const WHY = { asked: 'somebody asked for it', gone: 'its receiver answered 410', failures: 'nothing but failures for too long' };

export default function Subscriptions({ parts, query }) {
  return parts.length ? html`<${Subscription} name=${parts[0]} />` : html`<${List} prefix=${query.prefix ?? ''} />`;
}

export const stateOf = (one) => (one.paused ? 'paused' : one.failing_since ? 'failing' : 'active');

export const targetOf = (one) =>
  one.url ? [one.url, one.stream ?? one.nats_subject ?? one.exchange].filter(Boolean).join(' ') : one.topic ? `${one.topic} on ${one.bootstrap}` : '';

function List({ prefix }) {
  const pages = usePages([prefix]);
  const { data, error, refresh } = useLive(
    (signal) => call('GET', '/v1/subscriptions', { query: { prefix, limit: PAGE, cursor: pages.cursor }, signal }), EVERY_S, [prefix, pages.cursor],
  );
  return html`<${Head} title="Subscriptions" />
    <${Section} title=${prefix ? `Those that begin with ${prefix}` : 'All subscriptions'} actions=${html`<${ByName} prefix=${prefix} />`}>
      <${Trouble} error=${error} />
      ${data ? html`<${Table} caption="Subscriptions, oldest first" rows=${data.subscriptions} keyOf=${(one) => one.name} empty=${prefix ? 'None.' : 'There are none: make one with delayserver subscribe, or PUT /v1/subscriptions/NAME.'}
        columns=${[
          ['Name', (one) => html`<a href=${to(['subscriptions', one.name])}>${one.name}</a>`, 'clip'],
          ['Subject', (one) => one.subject, 'clip'],
          ['Type', (one) => one.type],
          ['Goes to', (one) => html`<span class="muted">${targetOf(one)}</span>`, 'clip'],
          ['State', (one) => html`<${State} name=${stateOf(one)} />`],
          ['Waiting', (one) => number(one.queued), 'number'],
          ['On their way', (one) => number(one.in_flight), 'number'],
          ['', (one) => html`<${Toggle} one=${one} kind="small" done=${refresh} />`, 'acts'],
        ]} /><${Pager} pages=${pages} following=${data.cursor} />` : !error && html`<${Loading} />`}
    </${Section}>`;
}

export function ByName({ prefix }) {
  return html`<form role="search" onSubmit=${(event) => {
    event.preventDefault();
    go(['subscriptions'], { prefix: event.target.elements.prefix.value.trim() });
  }}><input name="prefix" type="search" defaultValue=${prefix} placeholder="Beginning of a name" aria-label="Beginning of a name" spellcheck=${false} /></form>`;
}

/** Pause, or resume. */
function Toggle({ one, kind, done }) {
  if (!may('consume', one.subject)) return null;
  const verb = one.paused ? 'resume' : 'pause';
  return html`<${Button} kind=${kind} label="${one.paused ? 'Resume' : 'Pause'} ${one.name}" onPress=${async () => {
    await attempt(() => call('POST', path('subscriptions', one.name, verb)), `${one.name} is ${one.paused ? 'active' : 'paused'}`);
    done();
  }}>${one.paused ? 'Resume' : 'Pause'}</${Button}>`;
}

function Subscription({ name }) {
  const where = path('subscriptions', name);
  const { data, error, refresh } = useLive((signal) => call('GET', where, { signal }), EVERY_S);
  if (!data) return html`<${Head} title=${name} />${error ? html`<${Trouble} error=${error} />` : html`<${Loading} />`}`;
  async function remove() {
    const isSure = await ask({
      title: `Delete ${name}?`, kind: 'danger', action: 'Delete it',
      text: 'What only it was to get waits for the next subscription that matches; its dead letters stay listed under its name.',
    });
    if (isSure && (await attempt(() => call('DELETE', where), `${name} is deleted`))) go(['subscriptions']);
  }
  const mayChange = may('consume', data.subject);
  async function change() {
    if (await mend(data, where)) refresh();
  }
  return html`
    <${Head} title=${name} badge=${html`<${State} name=${stateOf(data)} />`}>
      <${Toggle} one=${data} kind=${data.paused ? 'primary' : ''} done=${refresh} />
      ${mayChange && html`${data.type === 'webhook' && html`<${Button} onPress=${change}>Change…</${Button}>`}
        <a class="button" href=${to(['dead-letters', name])}>Dead letters</a><${Button} kind="danger" onPress=${remove}>Delete…</${Button}>`}
    </${Head}>
    <${Trouble} error=${error} />
    ${data.paused && html`<p>Paused: ${WHY[data.pause_reason]}. What falls due waits.</p>`}
    ${data.failing_since && !data.paused && html`<p class="notice bad">Nothing but failures, first ${away(data.failing_since)}.</p>`}
    <${Section} title="Definition">
      <${Facts} of=${[
        ['Subject', html`${data.subject}`],
        ['Type', data.type],
        ['Goes to', targetOf(data)],
        ['Waiting', number(data.queued)],
        ['On their way', number(data.in_flight)],
        ['At once, at most', data.max_in_flight && number(data.max_in_flight)],
        ['Rate, at most', data.rate ? `${data.rate.per_second} a second, ${number(data.rate.burst)} at once` : data.lease ? null : 'no limit'],
        ['Attempts, at most', number(data.retry.max_attempts)],
        ['Tried again after', data.retry.backoff.join(', ')],
        ['Time for an answer', data.timeout],
        ['Lease', data.lease],
        ['Batches', data.batch && `up to ${data.batch.max}, after ${data.batch.linger}`],
        ['Behind a pause', typeof data.catch_up === 'string' ? data.catch_up : Object.entries(data.catch_up).map(([how, long]) => `${how.replaceAll('_', ' ')} ${long}`).join()],
        ['Paused by itself after', data.disable_after],
        ['Signed', data.signed === null || data.signed === undefined ? null : data.signed ? 'yes' : 'no'],
        ['Made', html`<${Moment} at=${data.created_at} />`],
      ]} />
    </${Section}>
    ${may('observe') && html`<${Answers} name=${name} />`}
    <details class="card"><summary>As the API shows it</summary><${Code} label="The definition" text=${pretty(data)} /></details>`;
}

// What an answer shows beside the definition.
const SHOWN = new Set(['name', 'created_at', 'paused', 'pause_reason', 'queued', 'in_flight', 'failing_since', 'signed', 'headers']);

/** Ask where a webhook goes from now on, and have it so; all else stays. What answers do not show has
 * to be entered again: the secret, and the values of headers. */
async function mend(one, where) {
  const names = Object.keys(one.headers ?? {});
  const entered = await ask({
    title: `Change ${one.name}`, action: 'Change it',
    text: one.signed || names.length ? 'The server shows no secret to anybody: what requests are signed with, and the values of headers, are entered again.' : null,
    fields: [
      { name: 'url', label: 'Goes to', value: one.url },
      { name: 'timeout', label: 'Time for an answer', value: one.timeout },
      { name: 'attempts', label: 'Attempts, at most', value: one.retry.max_attempts, type: 'number' },
      ...(one.signed ? [{ name: 'secret', label: 'Secret', hint: 'whsec_…, the same or a new one', type: 'password' }] : []),
      ...names.map((name) => ({ name: `header ${name}`, label: `Header ${name}`, type: 'password' })),
    ],
  });
  if (!entered) return false;
  const body = Object.fromEntries(Object.entries(one).filter(([name, value]) => value !== null && !SHOWN.has(name)));
  body.url = entered.url.trim();
  body.timeout = entered.timeout.trim();
  body.retry = { ...one.retry, max_attempts: Number(entered.attempts) };
  if (entered.secret) body.secret = entered.secret.trim();
  if (names.length) body.headers = Object.fromEntries(names.map((name) => [name, entered[`header ${name}`]]));
  return attempt(() => call('PUT', where, { body }), `${one.name} is changed`);
}

/** How it is answered, out of /metrics: since the server started, and how much a second now. */
function Answers({ name }) {
  const before = useRef(null);
  const [rate, setRate] = useState(null);
  const { data, error } = useLive(async (signal) => {
    const found = readMetrics(await callText('/metrics', { signal }), name);
    const atMs = performance.now();
    if (before.current) {
      setRate(Math.max(0, found.delivered - before.current.delivered) / ((atMs - before.current.atMs) / 1000));
    }
    before.current = { ...found, atMs };
    return found;
  }, METRICS_S);
  if (!data) return html`<${Trouble} error=${error} />`;
  return html`<${Section} title="Deliveries since the server started">
    <${Facts} of=${[
      ['Delivered', html`${number(data.delivered)}${rate !== null && html` <span class="muted">${perSecond(rate)} a second now</span>`}`],
      ['Tried again', number(data.retried)],
      ['Given up', number(data.dead)],
      ['The oldest waits for', data.oldestS ? length(data.oldestS * 1000) : null],
      ['Lateness p50', data.p50 !== null && length(data.p50)],
      ['Lateness p99', data.p99 !== null && length(data.p99)],
    ]} />
    ${data.answers.length > 0 && html`<br /><${Table} caption="Attempts by status" rows=${data.answers} keyOf=${([status]) => status}
      columns=${[['Attempts by status', ([status]) => (status === 'none' ? 'no answer' : status)], ['Count', ([, count]) => number(count), 'number']]} />`}
  </${Section}>`;
}
