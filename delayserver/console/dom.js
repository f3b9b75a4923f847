// What views are written with: Preact and its hooks, templates (htm) instead of a build, and stores,
// which are values that views share and follow.

import { h } from './vendor/preact.js';
import { useEffect, useState } from './vendor/hooks.js';
import htm from './vendor/htm.js';

export { render } from './vendor/preact.js';
export { useEffect, useRef, useState } from './vendor/hooks.js';
export const html = htm.bind(h);

export function makeStore(value) {
  const followers = new Set();
  return {
    get: () => value,
    set(next) {
      value = next;
      for (const follow of [...followers]) follow(next);
    },
    /** The value, in a view that is drawn anew when it changes. */
    use() {
      const [seen, setSeen] = useState({ value });
      useEffect(() => {
        const follow = (next) => setSeen({ value: next });
        followers.add(follow);
        if (seen.value !== value) follow(value);
        return () => followers.delete(follow);
      }, []);
      return seen.value;
    },
  };
}
