// Bulk: how far an import is, and which settled hours are archived.

import { html } from '../dom.js';
import { call, path } from '../api.js';
import { bytes, number } from '../format.js';
import { useLive } from '../live.js';
import { go, to } from '../router.js';
import { Facts, Field, Head, Loading, Moment, Pager, Section, State, Table, Trouble, usePages } from '../ui.js';

const IMPORT_S = 2;
const ARCHIVES_S = 15;
const PAGE = 50;
const STATES = ['waiting', 'archived', 'all'];

export default function Bulk({ parts, query }) {
  return html`<${Head} title="Bulk" />
    <${Section} title="Imports"><form class="form" onSubmit=${(event) => {
      event.preventDefault();
      const { id, shard } = Object.fromEntries(new FormData(event.target));
      go(['bulk', id.trim()], { shard: shard.trim() });
    }}>
      <${Field} label="Import"><input name="id" required defaultValue=${parts[0] ?? ''} autocomplete="off" spellcheck=${false} /></${Field}>
      <${Field} label="Shard" hint="where there are some"><input name="shard" inputmode="numeric" defaultValue=${query.shard ?? ''} autocomplete="off" /></${Field}>
      <button type="submit" class="primary">Find</button>
    </form>${parts.length > 0 && html`<${Import} id=${parts[0]} shard=${query.shard} />`}</${Section}>
    <${Archives} state=${STATES.includes(query.state) ? query.state : 'all'} />`;
}

function Import({ id, shard }) {
  const { data, error } = useLive((signal) => call('GET', path('imports', id), { query: { shard }, signal }), IMPORT_S, [id, shard]);
  if (error) return html`<${Trouble} error=${error} />`;
  if (!data) return html`<${Loading} />`;
  const isAdopted = data.state === 'adopted';
  return html`<p><b>${data.id}</b> <${State} name=${data.state} /></p>
    ${!isAdopted && data.count > 0 && html`<progress aria-label="How far it is" value=${data.done} max=${data.count}></progress>`}
    <${Facts} of=${[
      ['Rows', number(data.count)],
      ['Done', isAdopted ? null : number(data.done)],
      ['Messages', number(data.accepted)],
      ['Left out, since their key is taken', number(data.duplicates)],
      ['Of these, with other content', number(data.conflicts)],
    ]} />`;
}

function Archives({ state }) {
  const pages = usePages([state]);
  const { data, error } = useLive((signal) => call('GET', '/v1/archives', { query: { state, limit: PAGE, cursor: pages.cursor }, signal }), ARCHIVES_S, [state, pages.cursor]);
  return html`<${Section} title="Settled hours">
    <nav class="tabs" aria-label="Which hours">${STATES.map((one) => html`<a key=${one} href=${to(['bulk'], { state: one })} aria-current=${one === state ? 'true' : undefined}>${one}</a>`)}</nav>
    <${Trouble} error=${error} />
    ${data ? html`<p class="muted">${data.archive ? 'An hour is kept until it is archived (setting archive).' : 'Hours are deleted after their retention, archived or not (setting archive).'}</p>
      <${Table} caption="Settled hours, the oldest first" rows=${data.hours} keyOf=${(one) => `${one.shard ?? ''} ${one.hour}`} empty="None."
        columns=${[
          ['Hour (UTC)', (one) => one.hour],
          ...(data.hours.some((one) => one.shard !== undefined && one.shard !== null) ? [['Shard', (one) => one.shard]] : []),
          ['State', (one) => html`<${State} name=${one.state} />`],
          ['Rows', (one) => number(one.count), 'number'],
          ['Schedule', (one) => bytes(one.schedule_bytes), 'number'],
          ['Dispatch', (one) => bytes(one.dispatch_bytes), 'number'],
          ['Settled', (one) => html`<${Moment} at=${one.retired_at} />`],
          ['Archived', (one) => html`<${Moment} at=${one.archived_at} />`],
          ['Where', (one) => one.location, 'clip'],
        ]} /><${Pager} pages=${pages} following=${data.cursor} />` : !error && html`<${Loading} />`}
  </${Section}>`;
}
