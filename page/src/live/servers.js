// What the stream has told so far: the newest look at every server, a short history, and the incidents as they began.

export const HISTORY = 120;
const MOST_INCIDENTS = 200;
const GRAVITY = { critical: 0, unreachable: 1, warning: 2, healthy: 3, idle: 4 };

export class Servers {
  views = new Map();
  history = new Map();
  incidents = [];
  #open = new Map();

  take(data) {
    const looks = Array.isArray(data) ? data : (data.servers ?? [data]);
    for (const view of looks) if (typeof view?.server === "string") this.#takeOne(view);
  }

  #takeOne(view) {
    this.views.set(view.server, view);
    const past = this.history.get(view.server) ?? [];
    past.push({ time_s: view.time_s, kv_use: view.kv_use, waiting: view.waiting });
    if (past.length > HISTORY) past.shift();
    this.history.set(view.server, past);
    const seen = new Set();
    for (const finding of view.findings ?? []) {
      const key = `${view.server} ${finding.kind} ${finding.engine ?? ""}`;
      seen.add(key);
      if (this.#open.has(key)) continue;
      const incident = { ...finding, server: view.server, key: `${key} ${finding.since_s}`, ended_s: null };
      this.#open.set(key, incident);
      this.incidents.unshift(incident);
    }
    for (const [key, incident] of this.#open) {
      if (incident.server !== view.server || seen.has(key)) continue;
      incident.ended_s = view.time_s;
      this.#open.delete(key);
    }
    this.incidents.length = Math.min(this.incidents.length, MOST_INCIDENTS);
  }

  // The gravest first, then by name: a row does not move while its state stays.
  sorted(filter) {
    const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
    return [...this.views.values()]
      .filter((view) => words.every((word) => `${view.server} ${view.state} ${(view.models ?? []).join(" ")}`.toLowerCase().includes(word)))
      .sort((a, b) => (GRAVITY[a.state] ?? 9) - (GRAVITY[b.state] ?? 9) || (a.server < b.server ? -1 : 1));
  }

  counts() {
    const counts = {};
    for (const view of this.views.values()) counts[view.state] = (counts[view.state] ?? 0) + 1;
    return counts;
  }
}
