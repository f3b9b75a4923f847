// Calls of the API. Answers are documents; what is refused is an ApiError in the server's own words.
// The token is kept for this tab alone (sessionStorage) and sent with each call.

const BASE = new URL('..', import.meta.url);
const TIMEOUT_MS = 30_000;
const TOKEN = 'delayserver.token';

export class ApiError extends Error {
  /** `status`: of HTTP; 0: nobody answered. */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const token = {
  get: () => sessionStorage.getItem(TOKEN),
  set: (text) => sessionStorage.setItem(TOKEN, text),
  forget: () => sessionStorage.removeItem(TOKEN),
};

let onRefused = () => {};
/** Have `tell` called with what the server says when it takes the token no more. */
export function whenRefused(tell) {
  onRefused = tell;
}

/** A path of the API: parts are escaped. */
export const path = (...parts) => '/v1/' + parts.map(encodeURIComponent).join('/');

/** One call; the document of the answer, null if it has none. */
export async function call(method, where, { query = {}, body, signal } = {}) {
  const response = await send(method, where, { query, body, signal });
  const text = await response.text();
  return text ? parse(text) : null;
}

/** The text of an answer that is no document. */
export async function callText(where, { signal } = {}) {
  return (await send('GET', where, { signal })).text();
}

async function send(method, where, { query = {}, body, signal }) {
  const url = new URL(where.slice(1), BASE);
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== '') url.searchParams.set(name, value);
  }
  const shown = token.get();
  const late = AbortSignal.timeout(TIMEOUT_MS);
  let response;
  try {
    response = await fetch(url, {
      method,
      headers: {
        ...(shown ? { authorization: `Bearer ${shown}` } : {}),
        ...(body === undefined ? {} : { 'content-type': 'application/json' }),
      },
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: signal ? AbortSignal.any([signal, late]) : late,
      cache: 'no-store',
      credentials: 'omit',
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, late.aborted ? 'The server did not answer in time' : 'The server cannot be reached');
  }
  if (response.ok) return response;
  const refused = new ApiError(response.status, await detail(response));
  // Only of the token that is in use: another one may have been entered meanwhile.
  if (response.status === 401 && shown === token.get()) onRefused(refused.message);
  throw refused;
}

async function detail(response) {
  try {
    const problem = await response.json();
    return problem.detail || problem.title;
  } catch {
    return `The server answered with status ${response.status}`;
  }
}

/** JSON whose long numbers stay as they were written, where the browser can keep them. */
function parse(text) {
  return JSON.parse(text, (_key, value, context) => {
    const source = typeof value === 'number' ? context?.source : undefined;
    return source && source.length > 15 && String(value) !== source && JSON.rawJSON
      ? JSON.rawJSON(source)
      : value;
  });
}
