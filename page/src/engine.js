// One way to ask legroom, whichever edition this page is: over HTTP, or in a worker that runs the same Python.

export class EngineError extends Error {
  constructor(message, hint = "", exitCode = 2) {
    super(message);
    this.hint = hint;
    this.exitCode = exitCode;
  }
}

const fail = (error) => {
  throw new EngineError(error.message ?? String(error), error.hint ?? "", error.exit_code ?? 2);
};

class HttpEngine {
  edition = "served";

  async call(name, request, signal) {
    return this.#ask(`./api/${name}`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(request ?? {}),
      signal,
    });
  }

  // The log travels as it is read from the file: neither side ever holds it as one JSON string.
  async diagnose(log, { command, gpu }, signal) {
    const query = new URLSearchParams();
    if (command) query.set("command", command);
    if (gpu) query.set("gpu", gpu);
    const headers = { "Content-Type": "text/plain; charset=utf-8" };
    return this.#ask(`./api/diagnose?${query}`, { method: "POST", headers, body: log, signal });
  }

  events() {
    return new EventSource("./api/live");
  }

  async #ask(address, options) {
    let response;
    try {
      response = await fetch(address, options);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new EngineError("unreachable", "", 3);
    }
    let body = null;
    try {
      body = await response.json();
    } catch (error) {
      if (error.name === "AbortError") throw error;
    }
    if (body?.error) fail(body.error);
    if (!response.ok || body === null) throw new EngineError(`${response.status} ${response.statusText}`.trim(), "", 3);
    return body;
  }
}

class WorkerEngine {
  edition = "static";
  #worker;
  #waiting = new Map();
  #next = 1;
  #onProgress = () => {};

  constructor() {
    if (typeof WebAssembly !== "object") return;
    this.#worker = new Worker("./worker.js", { type: "module" });
    this.#worker.onmessage = ({ data }) => this.#take(data);
    this.#worker.onerror = (event) => {
      for (const { reject } of this.#waiting.values()) reject(new EngineError(event.message || "the engine stopped", "", 3));
      this.#waiting.clear();
    };
  }

  onProgress(listener) {
    this.#onProgress = listener;
  }

  call(name, request, signal) {
    if (!this.#worker) return Promise.reject(new EngineError("no-wasm", "", 3));
    const id = this.#next++;
    return new Promise((resolve, reject) => {
      signal?.addEventListener("abort", () => {
        this.#waiting.delete(id);
        this.#worker.postMessage({ cancel: id });
        reject(new DOMException("a newer request", "AbortError"));
      });
      this.#waiting.set(id, { resolve, reject });
      this.#worker.postMessage({ id, name, request: JSON.stringify(request ?? {}) });
    });
  }

  async diagnose(log, { command, gpu }, signal) {
    return this.call("diagnose", { log: await log.text(), command: command || null, gpu: gpu || null }, signal);
  }

  #take(data) {
    if (data.progress) {
      this.#onProgress(data.progress);
      return;
    }
    const waiting = this.#waiting.get(data.id);
    this.#waiting.delete(data.id);
    if (!waiting) return;
    try {
      if (data.failed) throw new EngineError(data.failed, "", 3);
      const body = JSON.parse(data.response);
      if (body.error) fail(body.error);
      waiting.resolve(body);
    } catch (error) {
      waiting.reject(error);
    }
  }
}

const setting = (name) => document.querySelector(`meta[name="legroom-${name}"]`)?.content ?? "";
export const version = setting("version");
export const engine = setting("edition") === "static" ? new WorkerEngine() : new HttpEngine();

// Lists that do not change while the page is open are asked for once.
const kept = new Map();
export function callOnce(name, request = {}) {
  const key = `${name} ${JSON.stringify(request)}`;
  if (!kept.has(key)) {
    const answer = engine.call(name, request);
    kept.set(key, answer);
    answer.catch(() => kept.delete(key));
  }
  return kept.get(key);
}

// Of many requests in a row the newest wins. One is under way at a time, so that a drag redraws at the engine's pace;
// one that takes long is aborted as soon as a newer one is there.
export class Newest {
  #patience_ms;
  #underWay = null;
  #next = null;

  constructor(patience_ms = 120) {
    this.#patience_ms = patience_ms;
  }

  // ask(signal) -> Promise; done(answer) and failed(error) only ever hear of the newest that came to an end.
  run(ask, done, failed) {
    this.#next = { ask, done, failed };
    if (!this.#underWay) this.#start();
    else if (performance.now() - this.#underWay.since > this.#patience_ms) this.#underWay.abort.abort();
  }

  cancel() {
    this.#next = null;
    this.#underWay?.abort.abort();
  }

  async #start() {
    const { ask, done, failed } = this.#next;
    this.#next = null;
    this.#underWay = { abort: new AbortController(), since: performance.now() };
    const { signal } = this.#underWay.abort;
    try {
      const answer = await ask(signal);
      if (!signal.aborted) done(answer);
    } catch (error) {
      if (error.name !== "AbortError" && !this.#next) failed(error);
    } finally {
      this.#underWay = null;
      if (this.#next) this.#start();
    }
  }
}
