// Tokens: what one's own allows, and, for who may do everything, which others there are. They are
// made and revoked beside the server, where nothing but a login to the machine helps.

import { html } from '../dom.js';
import { call } from '../api.js';
import { useLive } from '../live.js';
import { may, session } from '../session.js';
import { Badge, Facts, Head, Loading, Moment, Pager, Section, Table, Trouble, usePages } from '../ui.js';

const EVERY_S = 15;
const PAGE = 50;

const scopes = (one) => one.scopes.map((scope) => html`<${Badge} key=${scope} kind=${scope === 'admin' ? 'warn' : 'info'}>${scope}</${Badge}> `);

export default function Tokens() {
  const { name, scopes: own, expiresAt } = session.use();
  return html`<${Head} title="Tokens" />
    <${Section} title="Your own">${name
      ? html`<${Facts} of=${[['Name', name], ['Scopes', scopes({ scopes: own })], ['Expires', expiresAt ? html`<${Moment} at=${expiresAt} />` : 'never']]} />`
      : html`<p class="empty">Nobody is asked for a token: everybody on this machine may do everything, until the first token is made.</p>`}</${Section}>
    ${may('admin') && html`<${List} />`}`;
}

function List() {
  const pages = usePages();
  const { data, error } = useLive((signal) => call('GET', '/v1/tokens', { query: { limit: PAGE, cursor: pages.cursor }, signal }), EVERY_S, [pages.cursor]);
  return html`<${Section} title="All that are valid"><${Trouble} error=${error} />
    ${data ? html`<${Table} caption="Tokens in the order of their names" rows=${data.tokens} keyOf=${(one) => one.name} empty="None."
      columns=${[
        ['Name', (one) => one.name, 'clip'],
        ['Scopes', scopes, 'wrap'],
        ['A second, at most', (one) => one.rate, 'number'],
        ['Made', (one) => html`<${Moment} at=${one.created_at} plain />`],
        ['Expires', (one) => (one.expires_at ? html`<${Moment} at=${one.expires_at} />` : html`<span class="muted">never</span>`)],
      ]} /><${Pager} pages=${pages} following=${data.cursor} />` : !error && html`<${Loading} />`}
    <p class="muted">On the server's machine: <code>delayserver token create NAME --scope SCOPE</code>, <code>delayserver token revoke NAME</code>. Only digests are stored.</p>
  </${Section}>`;
}
