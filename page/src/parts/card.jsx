import { useEffect, useRef, useState } from "preact/hooks";
import { useText } from "../text/language.jsx";
import { GIB, bytesWords, gib, percent, tokensShort } from "../units.js";
import { isEstimate, labelAt, scaleOf, segments, widthOf } from "./layout.js";

// Labels inside the bar are drawn at their real size, so the picture must know how wide it is.
export function useWidth(initial = 720) {
  const ref = useRef(null);
  const [width, setWidth] = useState(initial);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.max(Math.round(entry.contentRect.width), 200)));
    observer.observe(ref.current);
    return () => observer.disconnect();
  }, []);
  return [ref, width];
}

const BAR = 64;
const TOP = 26;

export function CardPicture({ plan, scale, active, onPart, onOpen, label }) {
  const t = useText();
  const [ref, width] = useWidth();
  const { layout, confidence, gpu, args } = plan;
  const rows = segments(layout, confidence);
  const span = scale ?? scaleOf(layout);
  const x = (bytes) => (Math.min(Math.max(bytes, 0), span) / span) * width;
  const total = x(layout.total_bytes);
  const over = span > layout.total_bytes;
  const size = gib(layout.total_bytes);
  const title = gpu.name.startsWith(size) ? gpu.name : `${gpu.name} · ${size}`;
  const end = over ? labelAt(title, t("card.end"), total, width) : null;
  return (
    <div class="card-picture" ref={ref} onPointerLeave={() => onPart?.(null)}>
      <svg
        class="card-svg"
        viewBox={`0 0 ${width} 132`}
        width={width}
        height={132}
        role="img"
        aria-label={label ?? pictureLabel(t, plan, rows)}
      >
        <Hatch />
        <text class="svg-soft" x="0" y="14">{title}</text>
        <rect class="svg-card" x="0.5" y={TOP} width={Math.max(total - 1, 1)} height={BAR} rx="4" />
        {rows.map((part) => (
          <Segment
            key={part.name}
            part={part}
            x={x(part.start)}
            width={x(part.start + part.drawn) - x(part.start)}
            active={active}
            onPart={onPart}
            onOpen={onOpen}
          />
        ))}
        {over && <rect class="svg-over" x={total} y={TOP} width={width - total} height={BAR} />}
        {rows
          .filter((part) => isEstimate(part.band))
          .map((part) => (
            <Band key={part.name} part={part} x={x} active={active === part.name} />
          ))}
        <Need
          plan={plan}
          rows={rows}
          x={x}
          title={title}
          width={width}
          after={end?.anchor === "start" ? end.x + widthOf(t("card.end")) + 12 : 0}
          room={end?.anchor === "end" ? total - widthOf(t("card.end")) - 12 : width}
        />
        <Budget layout={layout} args={args} x={x} width={width} />
        {over && <line class="svg-edge" x1={total} x2={total} y1={TOP - 6} y2={TOP + BAR + 16} />}
        {end && (
          <text class="svg-bad" x={end.x} y="14" text-anchor={end.anchor}>{t("card.end")}</text>
        )}
      </svg>
    </div>
  );
}

const Hatch = () => (
  <defs>
    <pattern id="hatch" width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
      <line class="svg-hatch" x1="0" y1="0" x2="0" y2="8" stroke-width="3" />
    </pattern>
  </defs>
);

function Segment({ part, x, width, active, onPart, onOpen }) {
  const t = useText();
  if (part.name === "headroom" && part.bytes <= 0) return null;
  const name = t(`part.${part.name}`);
  const room = width > 14 + widthOf(name);
  const dim = active && active !== part.name ? " dim" : "";
  return (
    <g
      class={`segment part-${part.name}${dim}`}
      data-part={part.name}
      onPointerEnter={() => onPart?.(part.name)}
      onClick={() => onOpen?.(part.name)}
    >
      <title>{`${name}, ${gib(part.drawn)}: ${t(`part.${part.name}.what`)}`}</title>
      <rect x={x} y={TOP} width={part.drawn > 0 ? Math.max(width, 1) : 0} height={BAR} />
      {room && width > 64 && (
        <text class="svg-name" x={x + 8} y={TOP + 27}>{name}</text>
      )}
      {room && width > 64 && (
        <text class="svg-figure" x={x + 8} y={TOP + 46}>{gib(part.bytes, 1)}</text>
      )}
    </g>
  );
}

// The range that holds the true figure nine times in ten, measured from where the part begins.
function Band({ part, x, active }) {
  const low = x(part.start + Math.max(part.band.low, 0));
  const high = x(part.start + Math.max(part.band.high, 0));
  const y = TOP + BAR + 7;
  return (
    <g class={`band part-${part.name}${active ? " active" : ""}`}>
      <line x1={low} x2={Math.max(high, low + 1)} y1={y} y2={y} />
      <line x1={low} x2={low} y1={y - 3} y2={y + 3} />
      <line x1={high} x2={high} y1={y - 3} y2={y + 3} />
    </g>
  );
}

// What one request of the full length takes of the pool: a line over the bar from where the pool begins.
function Need({ plan, rows, x, title, width, after, room }) {
  const t = useText();
  const needed = plan.kv?.needed_bytes;
  const pool = rows.find((part) => part.name === "kv");
  if (!needed || pool.bytes <= 0) return null;
  const from = x(pool.start);
  const to = x(pool.start + needed);
  const words = t(plan.gpu?.count > 1 ? "card.need_each" : "card.need", { length: tokensShort(plan.args.max_model_len), gib: gib(needed, 1) });
  const before = to > width * 0.55 && Math.min(to, room) - widthOf(words) >= after;
  const label = labelAt(title, words, Math.max(Math.min(to, room), after), room, before);
  return (
    <g class={`need${needed > pool.bytes ? " short" : ""}`}>
      <path d={`M${from + 0.5} ${TOP - 1} V${TOP - 6} H${to - 0.5}${to < width ? ` V${TOP - 1}` : ""}`} />
      {label && (
        <text x={label.x} y="14" text-anchor={label.anchor}>{words}</text>
      )}
    </g>
  );
}

function Budget({ layout, args, x, width }) {
  const t = useText();
  const at = x(layout.budget_bytes);
  const y = TOP + BAR + 18;
  const words = t("card.budget", {
    gib: gib(layout.budget_bytes),
    ratio: args?.gpu_memory_utilization ?? percent(layout.budget_bytes / layout.total_bytes),
  });
  return (
    <g class="budget">
      <line x1={at} x2={at} y1={TOP - 5} y2={y + 2} />
      <path d={`M1 ${y - 4} V${y + 2} H${at}`} />
      <text x={Math.min(Math.max(at - 4, Math.min(width, 260)), width)} y={y + 18} text-anchor="end">{words}</text>
    </g>
  );
}

export const pictureLabel = (t, plan, rows) =>
  `${plan.gpu.name}: ${rows.map((part) => `${t(`part.${part.name}`)} ${gib(part.drawn)}`).join(", ")}`;

// The same bar without words, for lists and for the top of a narrow screen.
export function MiniBar({ layout, scale }) {
  const span = scale ?? scaleOf(layout);
  const at = (bytes) => (Math.min(bytes, span) / span) * 100;
  return (
    <svg class="mini-bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">
      <rect class="svg-card" x="0" y="0" width={at(layout.total_bytes)} height="10" />
      {segments(layout)
        .filter((part) => part.drawn > 0)
        .map((part) => (
          <g key={part.name} class={`segment part-${part.name}`}><rect x={at(part.start)} y="0" width={at(part.drawn)} height="10" /></g>
        ))}
      {span > layout.total_bytes && (
        <line class="svg-edge" x1={at(layout.total_bytes)} x2={at(layout.total_bytes)} y1="0" y2="10" />
      )}
    </svg>
  );
}

// No part is below nothing: what a part lacks is said in words, as the command line says it.
export const partFigure = (t, part) => (part.bytes < 0 && part.name !== "outside" ? t("part.none") : bytesWords(part.bytes));
export const partShare = (part, layout) => (part.bytes < 0 ? "" : percent(part.bytes / layout.total_bytes, 1));

// A shortfall is counted once, in the verdict.
export function certainty(t, part, plan) {
  const { name, bytes, band } = part;
  const lacks = plan.words?.short ? "part.lacks" : "part.lacks_bytes";
  if (bytes < 0 && (name === "headroom" || name === "kv")) return t(`${lacks}.${name}`, { gib: gib(-bytes) });
  if (name === "headroom") return t("sure.headroom");
  if (!band) return "";
  if (!isEstimate(band)) return t(`sure.${band.kind}`);
  const low = band.low / GIB;
  const high = band.high / GIB;
  const digits = high - low >= 0.02 ? 2 : 3;
  return t("sure.estimated", { low: low.toFixed(digits), high: high.toFixed(digits) });
}

// Every part says what it is; a click shows how its figure comes about.
export function Legend({ plan, active, onPart, opened, onOpen, children }) {
  const t = useText();
  const { layout, confidence } = plan;
  return (
    <ul class="legend" onPointerLeave={() => onPart(null)}>
      {segments(layout, confidence).map((part) => (
        <li key={part.name}>
          <button
            type="button"
            class={`legend-row part-${part.name}${active === part.name ? " active" : ""}${part.bytes < 0 ? " lacks" : ""}`}
            aria-expanded={opened === part.name}
            onPointerEnter={() => onPart(part.name)}
            onClick={() => onOpen(opened === part.name ? null : part.name)}
          >
            <span class="swatch" aria-hidden="true" />
            <span class="legend-name">{t(`part.${part.name}`)}</span>
            <span class="figure">{partFigure(t, part)}</span>
            <span class="share">{partShare(part, layout)}</span>
            <span class="sure">{certainty(t, part, plan)}</span>
            <span class="what">{t(`part.${part.name}.what`)}</span>
          </button>
          {opened === part.name && children}
        </li>
      ))}
    </ul>
  );
}
