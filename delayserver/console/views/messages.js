// Messages: those of a subject that wait, by due time; one by its key or its id; what becomes of it.

import { html, useState } from '../dom.js';
import { call, path } from '../api.js';
import { away, moment, number, pretty } from '../format.js';
import { useLive } from '../live.js';
import { go, to } from '../router.js';
import { may } from '../session.js';
import { Button, Code, Facts, Field, Head, Loading, Moment, Pager, Section, State, Table, Trouble, ask, attempt, usePages } from '../ui.js';

const EVERY_S = 5;
const PAGE = 50;
const PREVIEW = 80;

export default function Messages({ parts, query }) {
  if (parts[0] === 'by-key' && parts.length === 3) return html`<${ByKey} subject=${parts[1]} name=${parts[2]} />`;
  if (parts.length) return html`<${Message} id=${parts[0]} />`;
  return html`<${Head} title="Messages" /><${Search} query=${query} />${query.subject && html`<${Pending} ...${query} />`}`;
}

function Search({ query }) {
  const subjects = useLive((signal) => call('GET', '/v1/subjects', { signal }), 0);
  function find(event) {
    event.preventDefault();
    const { subject, key, from, to: until } = Object.fromEntries(new FormData(event.target));
    if (key) go(['messages', 'by-key', subject.trim(), key]);
    else go(['messages'], { subject: subject.trim(), from: utc(from), to: utc(until) });
  }
  return html`<${Section} title="Find">
    <form class="form" key=${JSON.stringify(query)} onSubmit=${find}>
      <${Field} label="Subject"><input name="subject" required list="subjects" defaultValue=${query.subject ?? ''} autocomplete="off" spellcheck=${false} /></${Field}>
      <${Field} label="Key" hint="one message"><input name="key" autocomplete="off" spellcheck=${false} /></${Field}>
      <${Field} label="Due from"><input name="from" type="datetime-local" defaultValue=${local(query.from)} /></${Field}>
      <${Field} label="Due before"><input name="to" type="datetime-local" defaultValue=${local(query.to)} /></${Field}>
      <button type="submit" class="primary">Find</button>
    </form>
    <datalist id="subjects">${(subjects.data?.subjects ?? []).map((one) => html`<option value=${one.name}></option>`)}</datalist>
    <p class="muted">By its id: in the field at the top (<kbd>/</kbd>). What was delivered or cancelled is found by id or key as long as it is kept.</p>
  </${Section}>`;
}

const utc = (text) => (text ? new Date(text).toISOString() : '');
const local = (text) => (text ? moment(text).slice(0, 16).replace(' ', 'T') : '');

function Pending({ subject, from, to: until }) {
  const pages = usePages([subject, from, until]);
  const [selected, select] = useState(new Set());
  const { data, error, refresh } = useLive(
    (signal) => call('GET', path('subjects', subject, 'messages'), { query: { from, to: until, limit: PAGE, cursor: pages.cursor }, signal }),
    EVERY_S, [subject, from, until, pages.cursor],
  );
  const mayChange = may('publish', subject);
  async function cancel() {
    const ids = [...selected];
    if (!(await ask({ title: `Cancel ${ids.length} messages?`, text: 'They will never be delivered.', action: 'Cancel them', kind: 'danger' }))) return;
    await attempt(
      () => call('POST', '/v1/messages/cancel', { body: { ids } }),
      ({ results }) => {
        const done = results.filter((one) => one.state === 'cancelled').length;
        return done === ids.length ? `${done} cancelled` : `${done} of ${ids.length} cancelled; the others were delivered or are being delivered`;
      },
    );
    select(new Set());
    refresh();
  }
  return html`<${Section} title="Pending of ${subject}" actions=${mayChange && html`<${Button} kind="danger" disabled=${!selected.size} onPress=${cancel}>Cancel selected${selected.size ? ` (${selected.size})` : ''}</${Button}>`}>
    <${Trouble} error=${error} />
    ${data ? html`<${Table} caption="Messages that wait, in due order" rows=${data.messages} keyOf=${(one) => one.id}
      empty=${data.cursor ? 'None on this page.' : 'Nothing waits.'} select=${mayChange && select} selected=${selected}
      columns=${[
        ['Due', (one) => html`<${Moment} at=${one.deliver_at} />`],
        ['Id', (one) => html`<a class="mono" href=${to(['messages', one.id])}>${one.id}</a>`],
        ['Key', (one) => one.key, 'clip'],
        ['State', (one) => html`<${State} name=${one.state} />`],
        ['Attempts', (one) => number(one.attempts), 'number'],
        ['Body', (one) => html`<span class="mono muted">${preview(one)}</span>`, 'clip'],
      ]} /><${Pager} pages=${pages} following=${data.cursor} />` : !error && html`<${Loading} />`}
  </${Section}>`;
}

function preview(message) {
  const text = message.body_base64 ?? JSON.stringify(message.body) ?? '';
  return text.length > PREVIEW ? text.slice(0, PREVIEW) + '…' : text;
}

function debounced({ quiet, at_most, keep }) {
  return `by ${quiet} with each call${at_most ? `, ${at_most} after the first at the latest` : ''}; the ${keep} content`;
}

/** The message that a key stands for now. */
function ByKey({ subject, name }) {
  const { data, error } = useLive((signal) => call('GET', path('subjects', subject, 'keys', name), { signal }), 0);
  if (error) return html`<${Head} title="${subject}/${name}" /><${Trouble} error=${error} />`;
  return data ? html`<${Message} id=${data.id} />` : html`<${Loading} />`;
}

function Message({ id }) {
  const where = path('messages', id);
  const { data, error, refresh } = useLive((signal) => call('GET', where, { signal }), EVERY_S);
  const attempts = useLive((signal) => call('GET', `${where}/attempts`, { signal }), EVERY_S);
  if (!data) return html`<${Head} title="Message" />${error ? html`<${Trouble} error=${error} />` : html`<${Loading} />`}`;
  const again = () => {
    refresh();
    attempts.refresh();
  };
  const body = data.body_base64 ?? pretty(data.body) ?? '';
  const headers = Object.entries(data.headers);
  return html`
    <${Head} title=${data.subject} badge=${html`<${State} name=${data.state} />`}><${Deeds} message=${data} where=${where} done=${again} /></${Head}>
    <${Trouble} error=${error} />
    <${Section} title="Message">
      <${Facts} of=${[
        ['Id', html`<span class="mono">${data.id}</span>`],
        ['Key', data.key],
        ['Due', html`<${Moment} at=${data.deliver_at} />`],
        ['Attempts', number(data.attempts)],
        ['Group', data.group],
        ['Priority', data.priority],
        ['Expires', data.expires_at && html`<${Moment} at=${data.expires_at} />`],
        ['Goes to', data.to?.url],
        ['Watches', data.watch?.join(', ')],
        ['On an event', data.on_event],
        ['Debounced', data.debounce && debounced(data.debounce)],
        ['When delivered', data.on_delivered && `publishes to ${data.on_delivered.subject}`],
        ['When dead', data.on_dead && `publishes to ${data.on_dead.subject}`],
      ]} />
    </${Section}>
    <div class="columns">
      <div>
        <${Section} title="Body"><${Code} label="Body" text=${body} />${data.body_base64 !== undefined && html`<p class="muted">Not JSON: base64.</p>`}</${Section}>
        ${headers.length > 0 && html`<${Section} title="Headers"><${Table} caption="Headers" rows=${headers} keyOf=${([name]) => name} columns=${[['Name', ([name]) => name], ['Value', ([, value]) => value, 'wrap']]} /></${Section}>`}
      </div>
      <div>
        ${data.deliveries.length > 0 && html`<${Section} title="Deliveries"><${Table} caption="What became of it at each subscription" rows=${data.deliveries} keyOf=${(one) => one.subscription + one.at}
          columns=${[['Subscription', (one) => subscription(one.subscription)], ['State', (one) => html`<${State} name=${one.state} />`], ['Attempt', (one) => number(one.attempt), 'number'], ['At', (one) => html`<${Moment} at=${one.at} />`, 'wrap']]} /></${Section}>`}
        <${Section} title="Attempts"><${Trouble} error=${attempts.error} /><${Attempts} found=${attempts.data} /></${Section}>
      </div>
    </div>`;
}

function subscription(name) {
  if (!name) return html`<span class="muted">deleted</span>`;
  return name.startsWith('_') || !may('consume') ? name : html`<a href=${to(['subscriptions', name])}>${name}</a>`;
}

function Attempts({ found }) {
  if (!found) return null;
  if (!found.attempts.length) return html`<p class="empty">None yet.</p>`;
  return html`<ol class="timeline">${found.attempts.map(
    (one, n) => html`<li key=${n} class=${one.outcome === 'delivered' ? 'good' : 'bad'}>
      <b>${one.outcome === 'delivered' ? 'Delivered' : 'Failed'}</b>${one.status ? ` with status ${one.status}` : ''} · attempt ${one.attempt} · ${subscription(one.subscription)}
      <br /><${Moment} at=${one.at} />${one.duration && html`<span class="muted"> · took ${one.duration}</span>`}
      ${(one.error || one.answer) && html`<pre tabindex="0">${[one.error, one.answer].filter(Boolean).join('\n')}</pre>`}
    </li>`,
  )}</ol>${found.dropped > 0 && html`<p class="muted">${number(found.dropped)} more that failed were not kept.</p>`}`;
}

/** What may be done to a message as it is now. */
function Deeds({ message, where, done }) {
  const doIt = async (work, text) => {
    await attempt(work, text);
    done();
  };
  async function cancel() {
    const isSure = await ask({ title: 'Cancel this message?', text: 'It will never be delivered.', action: 'Cancel it', kind: 'danger' });
    if (isSure) await doIt(() => call('DELETE', where), 'Cancelled');
  }
  async function move() {
    const entered = await ask({
      title: 'Move this message', action: 'Move', fields: [{ name: 'when', label: 'New due time', hint: 'a length from now, or a time in RFC 3339', placeholder: '30m, or 2030-01-31T09:00:00+01:00' }],
    });
    if (!entered) return;
    const when = entered.when.trim();
    const body = /^\d{4}-/.test(when) ? { deliver_at: when } : { delay: when };
    await doIt(() => call('PATCH', where, { body }), (moved) => `It is due ${away(moved.deliver_at)} now`);
  }
  const lost = message.deliveries.filter((one) => one.state === 'dead' && one.subscription);
  const redrive = () => doIt(async () => {
    for (const one of lost) await call('POST', path('subscriptions', one.subscription, 'dead-letters', 'redrive'), { body: { ids: [message.id] } });
  }, 'It will be delivered again');
  const fire = () => doIt(() => call('PATCH', where, { body: { delay: 0 } }), 'It is due now');
  const replay = () => doIt(() => call('POST', `${where}/replay`), ({ subscriptions }) => `Delivered again to ${subscriptions.join(', ') || 'nobody'}`);
  const mayChange = may('publish', message.subject);
  return html`
    ${lost.length > 0 && may('consume', message.subject) && html`<${Button} kind="primary" onPress=${redrive}>Redrive</${Button}>`}
    ${mayChange && message.state === 'scheduled' && html`
      <${Button} onPress=${fire}>Fire now</${Button}>
      <${Button} onPress=${move}>Move…</${Button}>
      <${Button} kind="danger" onPress=${cancel}>Cancel…</${Button}>`}
    ${mayChange && message.state === 'delivered' && html`<${Button} onPress=${replay}>Replay</${Button}>`}`;
}
