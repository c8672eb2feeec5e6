import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const HEIGHT = 190;
// Blocks, requests and preemptions come whole.
const WHOLE_STEPS = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((step) => step * 10 ** power)).flat();

// Series of one or two runs over a shared axis; canvases of one page move their cursors together. `onMoment` hears where
// the pointer is.
export function Chart({ title, note, xLabel, data, series, top, cursor, onMoment }) {
  const box = useRef(null);
  const plot = useRef(null);
  const listener = useRef(null);
  listener.current = onMoment;
  useEffect(() => {
    const make = () => {
      plot.current?.destroy();
      const hooks = {
        setCursor: [({ cursor: { idx, event } }) => event && idx != null && listener.current?.(idx)],
      };
      const drawn = { ...options(box.current.clientWidth, { title, xLabel, series, top }), hooks };
      plot.current = new uPlot(drawn, data, box.current);
    };
    make();
    const observer = new ResizeObserver(() => plot.current.setSize({ width: box.current.clientWidth, height: HEIGHT }));
    observer.observe(box.current);
    addEventListener("legroom-theme", make);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", make);
    return () => {
      observer.disconnect();
      removeEventListener("legroom-theme", make);
      dark.removeEventListener("change", make);
      plot.current.destroy();
      plot.current = null;
    };
  }, [data, title, xLabel, top]);
  useEffect(() => {
    if (!plot.current || cursor == null) return;
    plot.current.setCursor({ left: plot.current.valToPos(data[0][cursor], "x"), top: HEIGHT / 3 }, false);
  }, [cursor, data]);
  return (
    <figure class="chart">
      <figcaption>
        {title} {note && <span class="chart-key">{note}</span>}
      </figcaption>
      <div ref={box} role="img" aria-label={`${title}: ${summary(data, series)}`} />
    </figure>
  );
}

const summary = (data, series) =>
  series
    .map(({ label }, index) => `${label} ≤ ${Math.max(...data[index + 1].filter((value) => value != null), 0)}`)
    .join(", ");

function options(width, { xLabel, series, top }) {
  const axis = {
    stroke: colour("--soft"),
    grid: { stroke: colour("--line"), width: 1 },
    ticks: { stroke: colour("--line"), width: 1 },
    font: "12px system-ui, sans-serif",
    labelFont: "12px system-ui, sans-serif",
  };
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { sync: { key: "legroom-load" }, drag: { x: true, y: false }, y: false },
    scales: { x: { time: false }, y: { range: (_, low, high) => [0, Math.max(high, top ?? 0, 1) * 1.05] } },
    axes: [
      { ...axis, label: xLabel, labelSize: 18, size: 34 },
      { ...axis, size: 58, incrs: WHOLE_STEPS },
    ],
    series: [
      {},
      ...series.map(({ label, ink, dashed, filled, bars }) => ({
        label,
        stroke: colour(ink),
        width: 1.6,
        dash: dashed ? [6, 4] : undefined,
        spanGaps: true,
        points: { show: false },
        fill: filled ? `${colour(ink)}22` : undefined,
        paths: bars ? uPlot.paths.bars({ size: [1, 8, 2] }) : undefined,
      })),
    ],
  };
}

// Two runs on one axis: where one has no point, the line goes on.
export const joined = (tables) => (tables.length === 1 ? tables[0] : uPlot.join(tables));
