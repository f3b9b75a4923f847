// Subjects: what was counted of each, a page at a time.

import { html } from '../dom.js';
import { call } from '../api.js';
import { number } from '../format.js';
import { useLive } from '../live.js';
import { to } from '../router.js';
import { Head, Loading, Pager, Section, Table, Trouble, usePages } from '../ui.js';

const EVERY_S = 10;
const PAGE = 50;

export default function Subjects() {
  const pages = usePages();
  const { data, error } = useLive((signal) => call('GET', '/v1/subjects', { query: { limit: PAGE, cursor: pages.cursor }, signal }), EVERY_S, [pages.cursor]);
  const count = (field) => (one) => number(one[field]);
  return html`<${Head} title="Subjects"><span class="muted">Counted since the server started</span></${Head}>
    <${Section} title="All subjects"><${Trouble} error=${error} />
      ${data ? html`<${Table} caption="Subjects in the order of their names" rows=${data.subjects} keyOf=${(one) => one.name} empty="There are none yet: the first message of a subject makes it."
        columns=${[
          ['Subject', (one) => html`<a href=${to(['messages'], { subject: one.name })}>${one.name}</a>`, 'clip'],
          ['Accepted', count('accepted'), 'number'],
          ['Cancelled', count('cancelled'), 'number'],
          ['Delivered', count('delivered'), 'number'],
          ['Retried', count('retried'), 'number'],
          ['Given up', count('dead'), 'number'],
        ]} /><${Pager} pages=${pages} following=${data.cursor} />` : !error && html`<${Loading} />`}
    </${Section}>`;
}
