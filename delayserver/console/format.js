// Numbers, lengths of time and moments as people read them. Moments are shown in the time zone of
// the browser; where one stands over them, the title has UTC.

const integers = new Intl.NumberFormat('en');
const UNITS = [['d', 86_400], ['h', 3600], ['min', 60], ['s', 1]];
const BYTES = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];

export const number = (value) => integers.format(value);

export function perSecond(value) {
  return value >= 100 || Number.isInteger(value) ? integers.format(Math.round(value)) : String(Number(value.toPrecision(2)));
}

export function bytes(value) {
  let unit = 0;
  while (value >= 1024 && unit < BYTES.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${BYTES[unit]}`;
}

/** A length of time in milliseconds, to two figures or so. */
export function length(ms) {
  if (ms === 0) return '0 ms';
  if (ms < 1) return `${ms.toPrecision(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 10_000) return `${(ms / 1000).toFixed(1)} s`;
  let left = Math.round(ms / 1000);
  const words = [];
  for (const [name, seconds] of UNITS) {
    if (left >= seconds) {
      words.push(`${Math.floor(left / seconds)} ${name}`);
      left %= seconds;
    }
    if (words.length === 2) break;
  }
  return words.join(' ');
}

/** How far away a moment is. */
export function away(text, nowMs = Date.now()) {
  const ms = Date.parse(text) - nowMs;
  if (Math.abs(ms) < 1000) return 'now';
  return ms > 0 ? `in ${length(ms)}` : `${length(-ms)} ago`;
}

const two = (value) => String(value).padStart(2, '0');

export function moment(text) {
  const at = new Date(text);
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${clock(at)}`;
}

const clock = (at) => `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;

export const timeOfDay = (text) => clock(new Date(text));

export const pretty = (value) => JSON.stringify(value, null, 2);
