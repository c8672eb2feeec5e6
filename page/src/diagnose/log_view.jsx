import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { useText } from "../text/language.jsx";
import { count } from "../units.js";

const ROW = 20;
// Browsers end an element's height somewhere above this; a longer log scrolls in proportion.
const TALLEST = 8_000_000;

export function LogView({ lines, marks, jump }) {
  const t = useText();
  const box = useRef(null);
  const [view, setView] = useState({ top: 0, height: 420 });
  const height = Math.min(lines.count * ROW, TALLEST);
  const visible = Math.ceil(view.height / ROW);
  const furthest = Math.max(height - view.height, 1);
  const first =
    lines.count * ROW <= TALLEST
      ? Math.floor(view.top / ROW)
      : Math.round((view.top / furthest) * Math.max(lines.count - visible, 0));
  const from = Math.max(0, first - 5);
  const to = Math.min(lines.count, first + visible + 5);
  const offset = lines.count * ROW <= TALLEST ? from * ROW : view.top - (first - from) * ROW;
  const scrolled = () => setView({ top: box.current.scrollTop, height: box.current.clientHeight });
  useLayoutEffect(scrolled, [lines]);
  useEffect(() => {
    if (!jump) return;
    const index = Math.max(jump.line - 1 - Math.floor(visible / 2), 0);
    box.current.scrollTop =
      lines.count * ROW <= TALLEST ? index * ROW : (index / Math.max(lines.count - visible, 1)) * furthest;
    box.current.scrollLeft = 0;
    scrolled();
  }, [jump, lines]);
  const rows = [];
  for (let index = from; index < to; index++)
    rows.push(<Row key={index} index={index} lines={lines} mark={marks.get(index + 1)} />);
  return (
    <div
      class="log"
      ref={(node) => {
        box.current = node;
        node?.style.setProperty("--lines", lines.count + 1);
      }}
      onScroll={scrolled}
      tabIndex={0}
      role="region"
      aria-label={t(lines.count === 1 ? "log.label_one" : "log.label", { lines: count(lines.count) })}
    >
      <div class="log-length" ref={(node) => node?.style.setProperty("--height", `${height}px`)}>
        <div class="log-rows" ref={(node) => node?.style.setProperty("--offset", `${Math.max(offset, 0)}px`)}>{rows}</div></div></div>
  );
}

function Row({ index, lines, mark }) {
  const t = useText();
  return (
    <div class={`log-row${mark ? ` marked${mark.first ? " decisive" : ""}` : ""}`} data-line={index + 1}>
      <span class="log-number">{index + 1}</span>
      {mark && <span class="off-screen">{t("log.decisive")} </span>}
      <span class="log-text">{lines.text(index)}</span>
    </div>
  );
}
