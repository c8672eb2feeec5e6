// What the stream has told so far: the newest look at every server, a short history, and the incidents lately.

export const HISTORY = 120;
const MOST_INCIDENTS = 200;
const GRAVITY = { critical: 0, unreachable: 1, warning: 2, healthy: 3, idle: 4 };

export class Servers {
  views = new Map();
  history = new Map();
  incidents = [];
  comparisons = new Map();

  take(view) {
    this.views.set(view.server, view);
    const past = this.history.get(view.server) ?? [];
    past.push({ time_s: view.time_s, kv_use: view.kv_use, waiting: view.waiting });
    if (past.length > HISTORY) past.shift();
    this.history.set(view.server, past);
  }

  // How it has been before this page was opened.
  takeHistory(curves) {
    for (const [server, points] of Object.entries(curves)) this.history.set(server, points.slice(-HISTORY));
  }

  // A server beside its plan.
  takeComparison(comparison) {
    this.comparisons.set(comparison.server, comparison);
  }

  // Those that began or ended lately, the newest first: an end replaces its beginning.
  takeIncidents(changes) {
    const newest = new Map();
    for (const change of changes) {
      const key = `${change.server} ${change.kind} ${change.opened_s}`;
      if (!newest.has(key)) newest.set(key, { ...change, key });
    }
    this.incidents = [...newest.values()].slice(0, MOST_INCIDENTS);
  }

  // The gravest first, then by name: a row does not move while its state stays.
  sorted(filter) {
    const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
    return [...this.views.values()]
      .filter((view) =>
        words.every((word) =>
          `${view.server} ${view.state} ${(view.models ?? []).join(" ")}`.toLowerCase().includes(word),
        ),
      )
      .sort((a, b) => (GRAVITY[a.state] ?? 9) - (GRAVITY[b.state] ?? 9) || (a.server < b.server ? -1 : 1));
  }

  counts() {
    const counts = {};
    for (const view of this.views.values()) counts[view.state] = (counts[view.state] ?? 0) + 1;
    return counts;
  }
}
