// A chart of something over time (uPlot), with what it shows in words beneath it: at the cursor, or
// else the newest. It follows its width, and the colours of the page.

import uPlot from './vendor/uplot.js';
import { html, useEffect, useRef } from './dom.js';
import { moment } from './format.js';

const LEAST_S = 120;
const dark = matchMedia('(prefers-color-scheme: dark)');

/**
 * `atS`: seconds since the epoch, ascending; `series`: `{label, color, values}` each, `color` a
 * custom property; `show`: a value as text; `least`: what the axis shows at least; `bars`: a bar from each time on, instead of lines.
 */
export function Chart({ label, atS, series, show, height = heightHere(), bars = false, step = 3600, least = 1 }) {
  const place = useRef(null);
  const words = useRef(null);
  const plot = useRef(null);
  const shown = useRef(null);
  shown.current = { atS, series, show };
  const data = [atS, ...series.map((one) => one.values)];

  function tell(index) {
    const { atS: times, series: all, show: text } = shown.current;
    const n = index ?? (bars ? null : times.length - 1);
    if (!words.current) return;
    const at = n !== null && n >= 0 ? moment(times[n] * 1000).slice(0, bars ? 16 : 19) : '';
    words.current.querySelector('.at').textContent = at;
    words.current.querySelectorAll('.value').forEach((element, k) => {
      const value = n !== null && n >= 0 ? all[k].values[n] : null;
      element.textContent = value === null || value === undefined ? '' : text(value);
    });
  }

  useEffect(() => {
    const element = place.current;
    const width = () => Math.max(200, element.clientWidth);
    function make() {
      plot.current?.destroy();
      const style = getComputedStyle(element);
      const color = (name) => style.getPropertyValue(name).trim();
      const axis = { stroke: color('--muted'), grid: { stroke: color('--line'), width: 1 }, ticks: { show: false }, font: `11px ${style.fontFamily}` };
      plot.current = new uPlot(
        {
          width: width(),
          height,
          legend: { show: false },
          cursor: { drag: { x: false, y: false }, points: { show: !bars } },
          scales: {
            x: { range: (_, low, high) => reach(low, high, bars ? step : 0) },
            y: { range: (_, low, high) => [0, Math.max(high ?? 0, least) * 1.08] },
          },
          axes: [{ ...axis, size: 28, values: times }, { ...axis, size: 64, values: (_, splits) => splits.map((one) => shown.current.show(one)) }],
          series: [
            {},
            ...series.map((one) => ({
              label: one.label,
              stroke: color(one.color),
              fill: bars ? color(one.color) : undefined,
              width: bars ? 0 : 1.75,
              points: { show: false },
              paths: bars ? uPlot.paths.bars({ size: [0.8, 60], align: 0, radius: 0.1 }) : undefined,
              spanGaps: false,
            })),
          ],
          hooks: { setCursor: [(self) => tell(self.cursor.idx)] },
        },
        [shown.current.atS, ...shown.current.series.map((one) => one.values)],
        element,
      );
      tell(null);
    }
    make();
    const observer = new ResizeObserver(() => {
      if (plot.current.width !== width()) plot.current.setSize({ width: width(), height });
    });
    observer.observe(element);
    dark.addEventListener('change', make);
    return () => {
      observer.disconnect();
      dark.removeEventListener('change', make);
      plot.current.destroy();
    };
  }, []);
  useEffect(() => {
    plot.current.setData(data);
    tell(plot.current.cursor.idx);
  }, [atS, ...series.map((one) => one.values)]);

  return html`<figure class="chart">
    <div ref=${place} role="img" aria-label=${label}></div>
    <figcaption ref=${words}>${series.map(
      (one) => html`<span><i class="swatch" style=${{ background: `var(${one.color})` }}></i>${one.label} <b class="value"></b></span>`,
    )}<span class="at muted"></span></figcaption>
  </figure>`;
}

/** Of the axis of time: half a bar to both sides, or the last minutes at least. */
function reach(low, high, step) {
  if (step) return [low - step / 2, high + step / 2];
  const until = high ?? Date.now() / 1000;
  return [Math.min(low ?? until, until - LEAST_S), until];
}

const heightHere = () => Math.round(Math.min(340, Math.max(160, window.innerHeight / 5)));

function times(_, splits, _axis, _space, increment) {
  return splits.map((at) => {
    const text = moment(at * 1000);
    if (increment >= 86_400) return text.slice(5, 10);
    if (increment >= 60) return text.slice(11, 16) === '00:00' ? text.slice(5, 10) : text.slice(11, 16);
    return text.slice(11, 19);
  });
}
