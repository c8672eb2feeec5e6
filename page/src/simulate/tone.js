const VERDICT_TONE = { holds: "good", holds_with_waiting: "fair", serves_late: "fair", falls_behind: "bad", turns_away: "bad" };

// The tone of a run's badge. A load is not held without a "but" where a part of it is turned away, where it is not held
// with the slowest steps of the estimate, or would not be if it went on.
export function toneOf({ verdict, rejected, slowest, sustained }) {
  const hasBut = rejected > 0 || slowest?.holds === false || sustained === false;
  return verdict === "holds" && hasBut ? "fair" : VERDICT_TONE[verdict];
}
