// A kind of things that have a name and can be paused (schedules, sources): a page of them, and one.

import { html } from './dom.js';
import { call, path } from './api.js';
import { pretty } from './format.js';
import { useLive } from './live.js';
import { go, to } from './router.js';
import { may } from './session.js';
import { Button, Code, Facts, Head, Loading, Pager, Section, State, Table, Trouble, ask, attempt, usePages } from './ui.js';

const EVERY_S = 5;
const PAGE = 50;

/** `kind`: as the API has it; `stateOf`, `columns` and `facts` of one; `empty`; `Deeds`: more that may
 * be done; `ended`: what stays when one is deleted. */
export function NamedView({ parts, ...what }) {
  return parts.length ? html`<${One} name=${parts[0]} ...${what} />` : html`<${List} ...${what} />`;
}

const titleOf = (kind) => kind[0].toUpperCase() + kind.slice(1);

function List({ kind, stateOf, columns, empty }) {
  const pages = usePages();
  const { data, error, refresh } = useLive((signal) => call('GET', path(kind), { query: { limit: PAGE, cursor: pages.cursor }, signal }), EVERY_S, [pages.cursor]);
  return html`<${Head} title=${titleOf(kind)} />
    <${Section} title="All ${kind}"><${Trouble} error=${error} />
      ${data ? html`<${Table} caption="${titleOf(kind)} in the order of their names" rows=${data[kind]} keyOf=${(one) => one.name} empty=${empty}
        columns=${[
          ['Name', (one) => html`<a href=${to([kind, one.name])}>${one.name}</a>`, 'clip'],
          ['Subject', (one) => one.subject, 'clip'],
          ['State', (one) => html`<${State} name=${stateOf(one)} />`],
          ...columns,
          ['', (one) => html`<${Toggle} kind=${kind} one=${one} look="small" done=${refresh} />`, 'acts'],
        ]} /><${Pager} pages=${pages} following=${data.cursor} />` : !error && html`<${Loading} />`}
    </${Section}>`;
}

function Toggle({ kind, one, look, done }) {
  if (!may('publish', one.subject)) return null;
  const verb = one.paused ? 'resume' : 'pause';
  return html`<${Button} kind=${look} label="${one.paused ? 'Resume' : 'Pause'} ${one.name}" onPress=${async () => {
    await attempt(() => call('POST', path(kind, one.name, verb)), `${one.name} is ${one.paused ? 'active' : 'paused'}`);
    done();
  }}>${one.paused ? 'Resume' : 'Pause'}</${Button}>`;
}

function One({ kind, name, stateOf, facts, Deeds, ended, More }) {
  const where = path(kind, name);
  const { data, error, refresh } = useLive((signal) => call('GET', where, { signal }), EVERY_S);
  if (!data) return html`<${Head} title=${name} />${error ? html`<${Trouble} error=${error} />` : html`<${Loading} />`}`;
  async function remove() {
    const isSure = await ask({ title: `Delete ${name}?`, text: ended, action: 'Delete it', kind: 'danger' });
    if (isSure && (await attempt(() => call('DELETE', where), `${name} is deleted`))) go([kind]);
  }
  return html`
    <${Head} title=${name} badge=${html`<${State} name=${stateOf(data)} />`}>
      ${may('publish', data.subject) && html`
        ${Deeds && html`<${Deeds} one=${data} where=${where} done=${refresh} />`}
        <${Toggle} kind=${kind} one=${data} look=${data.paused ? 'primary' : ''} done=${refresh} />
        <${Button} kind="danger" onPress=${remove}>Delete…</${Button}>`}
    </${Head}>
    <${Trouble} error=${error} />
    <${Section} title="Definition"><${Facts} of=${facts(data)} /></${Section}>
    ${More && html`<${More} one=${data} />`}
    <details class="card"><summary>As the API shows it</summary><${Code} label="The definition" text=${pretty(data)} /></details>`;
}
