// The parts of a card in the order every picture of legroom uses, with where each begins, in bytes.

export const PARTS = [
  { name: "weights", key: "weights_bytes" },
  { name: "activation", key: "activation_bytes" },
  { name: "graphs", key: "cuda_graph_bytes" },
  { name: "nontorch", key: "non_torch_bytes" },
  { name: "kv", key: "kv_cache_bytes" },
  { name: "outside", key: "outside_bytes" },
  { name: "others", key: "held_by_others_bytes" },
  { name: "headroom", key: "headroom_bytes" },
];

export function segments(layout, confidence = {}) {
  let start = 0;
  const rows = [];
  for (const { name, key } of PARTS) {
    const bytes = layout[key] ?? 0;
    if (name === "others" && !bytes) continue;
    const band = confidence[key] ?? null;
    rows.push({ name, key, bytes, start, drawn: Math.max(bytes, 0), band });
    start += Math.max(bytes, 0);
  }
  return rows;
}

export const scaleOf = (layout) =>
  Math.max(
    layout.total_bytes,
    segments(layout).reduce((sum, part) => sum + part.drawn, 0),
  );

export const isEstimate = (band) => band?.kind === "estimated" && band.high > band.low;

const LETTER = 7.2;
export const widthOf = (text) => LETTER * [...text].reduce((sum, letter) => sum + (letter > "\u2e80" ? 2 : 1), 0);

// Where words about a place stand beside the card's name, which begins the same line; null where there is no room.
export function labelAt(title, words, at, width, before = true) {
  const from = widthOf(title) + 12;
  const needed = widthOf(words);
  if (before && at - needed >= from) return { x: at, anchor: "end" };
  const x = Math.max(at, from);
  return x + needed <= width ? { x, anchor: "start" } : null;
}
