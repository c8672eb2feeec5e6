// Every process of a server may print the same line: it is shown once, where it comes first.
const PREFIX = /^(\([^)]*\)\s*)*((DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+[\d-]+\s+[\d:.,]+\s+)?(\[[^\]]*\]\s*)?/;

export function distinctLines(rows) {
  const kept = new Map();
  for (const piece of rows) {
    const said = piece.text?.replace(PREFIX, "").trim() || `line ${piece.line}`;
    if (!kept.has(said)) kept.set(said, piece);
  }
  return [...new Map([...kept.values()].map((piece) => [piece.line, piece])).values()];
}
