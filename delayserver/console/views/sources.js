// Sources: topics whose records are published; how far each is, and why it does not go on.

import { html } from '../dom.js';
import { number } from '../format.js';
import { NamedView } from '../named.js';
import { Moment } from '../ui.js';

const lines = (pairs) => pairs.map(([name, value]) => html`<div key=${name}>${name}: ${number(value)}</div>`);

export default function Sources({ parts }) {
  return html`<${NamedView} kind="sources" parts=${parts}
    stateOf=${(one) => (one.paused ? 'paused' : one.error ? 'failing' : 'active')}
    empty="There are none: make one with delayserver source, or PUT /v1/sources/NAME."
    ended="It takes nothing more. Its messages stay."
    columns=${[
      ['Topic', (one) => one.topic, 'clip'],
      ['Published', (one) => number(one.published), 'number'],
      ['Left out', (one) => number(one.skipped), 'number'],
      ['Error', (one) => one.error, 'clip'],
    ]}
    facts=${(one) => [
      ['Subject', one.subject],
      ['Topic', `${one.topic} on ${one.bootstrap}`],
      ['Group', one.group],
      ['Due time in the header', one.due_header],
      ['With a bad record', one.on_error === 'stop' ? 'it stops' : 'it is left out'],
      ['Published', number(one.published)],
      ['Left out', number(one.skipped)],
      ['Next offsets, by partition', lines(Object.entries(one.positions))],
      ['Paused, since', one.paused && (one.pause_reason === 'error' ? 'a record cannot be published' : 'somebody asked for it')],
      ['Error', one.error],
      ['Left out last', one.last_skipped && `partition ${one.last_skipped.partition}, offset ${one.last_skipped.offset}: ${one.last_skipped.reason}`],
      ['Changed', html`<${Moment} at=${one.changed_at} />`],
    ]} />`;
}
