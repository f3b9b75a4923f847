// What is live: asked for again and again, one call at a time, while the tab is seen; after an error
// less and less often. A tab that nobody looks at costs the server nothing.

import { useEffect, useRef, useState } from './dom.js';

const SLOWEST_S = 30;

/** Calls `load` at once and every `everyS`; a function that ends it, and one that asks at once. */
export function poll(load, everyS, tell) {
  const end = new AbortController();
  let timer = 0;
  let errors = 0;
  let isRunning = false;
  let isWanted = false;

  async function run() {
    clearTimeout(timer);
    if (isRunning) {
      isWanted = true;
      return;
    }
    isRunning = true;
    isWanted = false;
    try {
      const data = await load(end.signal);
      errors = 0;
      if (!end.signal.aborted) tell({ data, error: null });
    } catch (error) {
      errors += 1;
      if (!end.signal.aborted) tell({ error });
    }
    isRunning = false;
    if (isWanted) run();
    else wait();
  }

  function wait() {
    if (end.signal.aborted || document.hidden || !everyS) return;
    timer = setTimeout(run, Math.min(SLOWEST_S, everyS * 2 ** Math.min(errors, 5)) * 1000);
  }

  document.addEventListener('visibilitychange', () => (document.hidden ? clearTimeout(timer) : run()), {
    signal: end.signal,
  });
  run();
  return {
    refresh: run,
    end() {
      end.abort();
      clearTimeout(timer);
    },
  };
}

/** `{data, error, refresh}` of what `load(signal)` returns, anew when one of `inputs` changes. */
export function useLive(load, everyS, inputs = []) {
  const [seen, setSeen] = useState({ data: null, error: null });
  const running = useRef(null);
  useEffect(() => {
    const one = poll(load, everyS, (next) => setSeen((before) => ({ ...before, ...next })));
    running.current = one;
    return one.end;
  }, inputs);
  return { ...seen, refresh: () => running.current?.refresh() };
}
