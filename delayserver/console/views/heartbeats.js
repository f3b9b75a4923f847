// Heartbeats: one of them by its key. There is no list of them: they come and go by the thousand.

import { html } from '../dom.js';
import { call, path } from '../api.js';
import { pretty } from '../format.js';
import { useLive } from '../live.js';
import { go } from '../router.js';
import { may } from '../session.js';
import { Button, Code, Facts, Field, Head, Loading, Moment, Section, Trouble, ask, attempt } from '../ui.js';

const EVERY_S = 2;

export default function Heartbeats({ parts }) {
  const name = parts[0];
  return html`<${Head} title="Heartbeats" />
    <${Section} title="Find"><form class="form" onSubmit=${(event) => {
      event.preventDefault();
      go(['heartbeats', event.target.elements.key.value]);
    }}>
      <${Field} label="Key"><input name="key" required defaultValue=${name ?? ''} autocomplete="off" spellcheck=${false} /></${Field}>
      <button type="submit" class="primary">Find</button>
    </form>
    <p class="muted">A heartbeat publishes its message unless its key is renewed in time: <code>PUT /v1/heartbeats/KEY</code>.</p></${Section}>
    ${name !== undefined && html`<${Heartbeat} name=${name} />`}`;
}

function Heartbeat({ name }) {
  const where = path('heartbeats', name);
  const { data, error, refresh } = useLive((signal) => call('GET', where, { signal }), EVERY_S);
  if (error) return html`<${Trouble} error=${error} />`;
  if (!data) return html`<${Loading} />`;
  async function remove() {
    const isSure = await ask({ title: `End the heartbeat ${name}?`, text: 'It will never publish its message.', action: 'End it', kind: 'danger' });
    if (!isSure) return;
    await attempt(() => call('DELETE', where), 'Ended');
    refresh();
  }
  return html`<${Section} title=${data.key} actions=${may('publish', data.subject) && html`<${Button} kind="danger" onPress=${remove}>End…</${Button}>`}>
    <${Facts} of=${[['Subject', data.subject], ['Timeout', data.timeout], ['Expires unless renewed', html`<${Moment} at=${data.expires_at} />`]]} />
    <br /><${Code} label="Body" text=${data.body_base64 ?? pretty(data.body) ?? ''} />
  </${Section}>`;
}
