// Dead letters: who has some; those of one subscription, with the reason; redriven one by one, the
// chosen ones, or all of them, a page after the other, so that it shows how far it is and can be
// stopped.

import { html, useRef, useState } from '../dom.js';
import { call, path } from '../api.js';
import { number } from '../format.js';
import { useLive } from '../live.js';
import { to } from '../router.js';
import { Button, Head, Loading, Moment, Pager, Section, Table, Trouble, ask, attempt, notify, usePages } from '../ui.js';

const EVERY_S = 10; // each page makes a checkpoint
const COUNTED = 1000;
const PAGE = 50;
const AT_ONCE = 200;

export default function DeadLetters({ parts }) {
  return parts.length ? html`<${Of} name=${parts[0]} />` : html`<${Owners} />`;
}

function Owners() {
  const pages = usePages();
  const { data, error } = useLive((signal) => call('GET', '/v1/dead-letters', { query: { limit: PAGE, cursor: pages.cursor }, signal }), EVERY_S, [pages.cursor]);
  return html`<${Head} title="Dead letters" />
    <${Section} title="Who has some"><${Trouble} error=${error} />
      ${data ? html`<${Table} caption="Subscriptions that have dead letters" rows=${data.subscriptions} keyOf=${(one) => one.name} empty="None: every message was delivered, or is still being tried."
        columns=${[
          ['Subscription', (one) => html`<a href=${to(['dead-letters', one.name])}>${one.name === '_to' ? 'Messages that say where they go (_to)' : one.name}</a>`],
          ['Dead letters', (one) => number(one.count) + (one.count >= COUNTED ? ' or more' : ''), 'number'],
        ]} /><${Pager} pages=${pages} following=${data.cursor} />` : !error && html`<${Loading} />`}
    </${Section}>`;
}

function Of({ name }) {
  const where = path('subscriptions', name, 'dead-letters');
  const pages = usePages();
  const [selected, select] = useState(new Set());
  const [progress, setProgress] = useState(null);
  const isStopped = useRef(false);
  const { data, error, refresh } = useLive((signal) => call('GET', where, { query: { limit: PAGE, cursor: pages.cursor }, signal }), EVERY_S, [pages.cursor]);

  const redrive = (ids) => call('POST', `${where}/redrive`, { body: { ids } });
  const redriven = ({ redriven: count }) => `${number(count)} will be delivered again`;

  async function some(ids) {
    await attempt(() => redrive(ids), redriven);
    select(new Set());
    refresh();
  }

  async function all() {
    const isSure = await ask({ title: 'Redrive all?', text: `Every dead letter of ${name} is delivered again, once, with all attempts anew.`, action: 'Redrive all' });
    if (!isSure) return;
    isStopped.current = false;
    // What dies again while this goes on stands in the list once more, behind all others (in the
    // list of several shards: behind those of its shard). It is passed over, and ends nothing.
    const taken = new Set();
    let [done, cursor] = [0, null];
    setProgress(done);
    const isDone = await attempt(async () => {
      do {
        const page = await call('GET', where, { query: { limit: AT_ONCE, cursor } });
        const ids = page.dead_letters.map((one) => one.id).filter((id) => !taken.has(id));
        for (const id of ids) taken.add(id);
        if (ids.length) done += (await redrive(ids)).redriven;
        setProgress(done);
        cursor = page.cursor;
      } while (cursor && !isStopped.current);
      return { redriven: done };
    }, redriven);
    if (!isDone && done) notify(`${number(done)} of them will be delivered again`);
    setProgress(null);
    refresh();
  }

  async function discard(one) {
    const isSure = await ask({ title: 'Delete this dead letter?', text: 'It will never be delivered.', action: 'Delete it', kind: 'danger' });
    if (!isSure) return;
    await attempt(() => call('DELETE', path('subscriptions', name, 'dead-letters', one.id)), 'Deleted');
    refresh();
  }

  return html`
    <${Head} title="Dead letters of ${name}">
      <${Button} disabled=${!selected.size || progress !== null} onPress=${() => some([...selected])}>Redrive selected${selected.size ? ` (${selected.size})` : ''}</${Button}>
      <${Button} kind="primary" disabled=${progress !== null || !data?.dead_letters.length} onPress=${all}>Redrive all…</${Button}>
    </${Head}>
    ${progress !== null && html`<div class="card" role="status"><p>${number(progress)} redriven so far</p><progress aria-label="Redriving"></progress>
      <div class="actions end"><button type="button" onClick=${() => { isStopped.current = true; }}>Stop</button></div></div>`}
    <${Section} title="Given up"><${Trouble} error=${error} />
      ${data ? html`<${Table} caption="Dead letters, in the order in which their last attempts were scheduled" rows=${data.dead_letters} keyOf=${(one) => one.id} empty="None." select=${select} selected=${selected}
        columns=${[
          ['Given up', (one) => html`<${Moment} at=${one.died_at} plain />`],
          ['Message', (one) => html`<a class="mono" href=${to(['messages', one.id])}>${one.id}</a>`],
          ['Subject', (one) => one.subject, 'clip'],
          ['Key', (one) => one.key, 'clip'],
          ['Attempts', (one) => number(one.attempts), 'number'],
          ['Reason', (one) => one.reason, 'wrap'],
          ['', (one) => html`<${Button} kind="small" label="Redrive ${one.id}" onPress=${() => some([one.id])}>Redrive</${Button}>
            <${Button} kind="small danger" label="Delete ${one.id}" onPress=${() => discard(one)}>Delete…</${Button}>`, 'acts'],
        ]} /><${Pager} pages=${pages} following=${data.cursor} />` : !error && html`<${Loading} />`}
    </${Section}>`;
}
