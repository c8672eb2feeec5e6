import { inFieldNames } from "./limits.js";
import { translate } from "./text/language.jsx";

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

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

function checked({ status, statusText }, body) {
  if (body?.error) fail(body.error);
  if (status >= 400 || body === null) throw new EngineError(`${status} ${statusText}`.trim(), "", 3);
  return body;
}

class HttpEngine {
  edition = "served";
  mostLogBytes = 4 * 2 ** 30;

  async call(name, request, signal) {
    return this.#ask(`./api/${name}`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(request ?? {}),
      signal,
    });
  }

  // The log travels as it is read from the file: neither side ever holds it as one JSON string. Only XMLHttpRequest
  // tells how much has left.
  diagnose(log, hints, signal, onShare) {
    const query = new URLSearchParams(Object.entries(hints).filter(([, value]) => value));
    return new Promise((resolve, reject) => {
      const request = new XMLHttpRequest();
      request.open("POST", `./api/diagnose?${query}`);
      request.setRequestHeader("Content-Type", "text/plain; charset=utf-8");
      request.upload.onprogress = ({ loaded, total }) => onShare?.(total ? loaded / total : 1);
      request.upload.onload = () => onShare?.(1);
      request.onerror = () => reject(new EngineError("unreachable", "", 3));
      request.onabort = () => reject(new DOMException("given up", "AbortError"));
      request.onload = () => {
        try {
          resolve(checked(request, parsed(request.responseText)));
        } catch (error) {
          reject(error);
        }
      };
      signal?.addEventListener("abort", () => request.abort());
      request.send(log);
    });
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
    return checked(response, body);
  }
}

// One worker and what waits for it. A call at a time, so that one that was given up is never begun.
class Lane {
  #worker = null;
  #queue = [];
  #current = null;
  #listen;

  constructor(listen = () => {}) {
    this.#listen = listen;
  }

  start() {
    this.#worker = new Worker("worker.js", { type: "module" });
    this.#worker.onmessage = ({ data }) => (data.id === undefined ? this.#listen(data) : this.#end(data.response));
    this.#worker.onerror = (event) => {
      const error = { message: event.message || "the engine stopped", hint: "", exit_code: 3 };
      this.#listen({ failed: error });
      for (const waiting of this.#queue.splice(0)) waiting.settle({ error });
      this.#end({ error });
    };
  }

  call(name, request, signal) {
    if (!this.#worker) this.start();
    return new Promise((resolve, reject) => {
      const settle = (response) => {
        try {
          resolve(response.error ? fail(response.error) : response);
        } catch (error) {
          reject(error);
        }
      };
      const waiting = { name, request, settle };
      signal?.addEventListener("abort", () => {
        this.#queue = this.#queue.filter((other) => other !== waiting);
        reject(new DOMException("given up", "AbortError"));
      });
      this.#queue.push(waiting);
      this.#next();
    });
  }

  #next() {
    if (this.#current || !this.#queue.length) return;
    this.#current = this.#queue.shift();
    this.#worker.postMessage({ id: 1, name: this.#current.name, request: this.#current.request ?? {} });
  }

  #end(response) {
    this.#current?.settle(response);
    this.#current = null;
    this.#next();
  }
}

const SLOW = new Set(["size", "simulate", "diagnose", "card", "upgrade", "pack", "files", "fragments"]);

class WorkerEngine {
  edition = "static";
  // The browser's Python holds a log several times over, and has 4 GB in all.
  mostLogBytes = 128 * 2 ** 20;
  #onProgress = () => {};
  #quick = new Lane((data) =>
    this.#onProgress({ ready: Boolean(data.ready), share: data.progress ?? null, error: data.failed ?? null }),
  );
  // A search of seconds must not keep a slider waiting: it has a worker of its own, started when the first one is needed.
  #slow = new Lane();

  constructor() {
    if (WorkerEngine.works) this.#quick.start();
  }

  static get works() {
    return typeof WebAssembly === "object";
  }

  onProgress(listener) {
    this.#onProgress = listener;
    if (!WorkerEngine.works) listener({ ready: true, share: null, error: null });
  }

  call(name, request, signal) {
    if (!WorkerEngine.works) return Promise.reject(new EngineError("no-wasm", "", 3));
    const isSearch = SLOW.has(name) || (name === "plan" && request?.advice !== false);
    return (isSearch ? this.#slow : this.#quick).call(name, request, signal);
  }

  async diagnose(log, hints, signal, onShare) {
    const given = Object.fromEntries(Object.entries(hints).filter(([, value]) => value));
    const text = await log.text();
    onShare?.(1);
    return this.call("diagnose", { ...given, log: text }, signal);
  }
}

const setting = (name) => document.querySelector(`meta[name="legroom-${name}"]`)?.content ?? "";
export const version = setting("version");
export const engine = setting("edition") === "static" ? new WorkerEngine() : new HttpEngine();

// Sentences about a plan name options of the command line: here they are fields of the page. `source` keeps what was said.
const SPOKEN = ["plan", "speed", "card", "size", "upgrade", "pack", "simulate"];
const asked = engine.call.bind(engine);
engine.call = async (name, request, signal) => {
  if (!SPOKEN.includes(name)) return asked(name, request, signal);
  const t = (key, values) => translate(request.language ?? "en", key, values);
  const inRow = (row) => (row.reason ? { ...row, reason: inFieldNames(t, row.reason) } : row);
  try {
    const answer = await asked(name, request, signal);
    const tables = ["rows", "models", "too_large"].filter((table) => answer[table]).map((table) => [table, answer[table].map(inRow)]);
    return { ...answer, ...Object.fromEntries(tables), ...(answer.words && { words: inFieldNames(t, answer.words) }) };
  } catch (error) {
    if (error instanceof EngineError)
      Object.assign(error, { source: `${error.message} ${error.hint}`, message: inFieldNames(t, error.message), hint: inFieldNames(t, error.hint) });
    throw error;
  }
};

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

// Work on all items, two at a time: each keeps one core busy. The first failure ends it.
export async function inLanes(items, work) {
  const waiting = [...items];
  const lane = async () => {
    while (waiting.length) await work(waiting.shift());
  };
  try {
    await Promise.all([lane(), lane()]);
  } finally {
    waiting.length = 0;
  }
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
