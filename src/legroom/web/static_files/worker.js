// The engine inside a browser: Python (Pyodide) with legroom in it, in a worker so that the page never waits for it.
// Asked {id, name, request} it answers {id, response}; while it loads it tells {progress: 0..1, text}, then {ready: true},
// or {failed: {message, hint}} where it cannot run here. An input error is a response {error: {message, hint, exit_code}}.

const VERSION = "__VERSION__";
const FILES = __FILES__; // what is loaded before Python starts: {name: {bytes, type}}
const HERE = new URL("engine/", self.location.href);
const DOWNLOAD_SHARE = 0.7; // of the progress; the rest is starting Python
const UNREACHABLE = 3;

const fetchFromNetwork = self.fetch.bind(self);
const loaded = {};
let pythonCall = null;

function tell(progress, text) {
  self.postMessage({ progress, text });
}

function problem(message, hint, exit_code = UNREACHABLE) {
  return { error: { message, hint, exit_code } };
}

// The Cache API is there on https and localhost only; elsewhere the browser's own cache has to do.
async function openStore() {
  try {
    return await self.caches.open(`legroom-${VERSION}`);
  } catch {
    return null;
  }
}

async function unpacked(buffer) {
  const head = new Uint8Array(buffer, 0, Math.min(2, buffer.byteLength));
  if (head[0] !== 0x1f || head[1] !== 0x8b) return buffer; // a host may have unpacked it on the way
  const stream = new Blob([buffer]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

async function download(name, onBytes) {
  const response = await fetchFromNetwork(new URL(`${name}.packed`, HERE));
  if (!response.ok) throw new Error(`${name}: the host answered ${response.status}`);
  const pieces = [];
  const reader = response.body.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    pieces.push(value);
    onBytes(value.byteLength);
  }
  return unpacked(await new Blob(pieces).arrayBuffer());
}

async function loadFile(store, name, onBytes) {
  const key = new URL(name, HERE);
  const kept = store && (await store.match(key));
  if (kept) {
    onBytes(FILES[name].bytes);
    loaded[name] = await kept.arrayBuffer();
    return;
  }
  loaded[name] = await download(name, onBytes);
  // A full disk or a private window must not stop the page.
  await store?.put(key, new Response(loaded[name].slice(0))).catch(() => {});
}

async function loadFiles(store) {
  const total = Object.values(FILES).reduce((sum, file) => sum + file.bytes, 0);
  let done = 0;
  const onBytes = (bytes) => {
    done += bytes;
    const megabytes = (amount) => (amount / 1e6).toFixed(1);
    tell(Math.min(1, done / total) * DOWNLOAD_SHARE, `loading ${megabytes(done)} of ${megabytes(total)} MB`);
  };
  await Promise.all(Object.keys(FILES).map((name) => loadFile(store, name, onBytes)));
}

// Pyodide asks for its files by fetch: it is given what is here already.
self.fetch = (input, options) => {
  const name = String(input?.url ?? input).split("/").pop();
  if (!(name in loaded)) return fetchFromNetwork(input, options);
  return Promise.resolve(new Response(loaded[name], { headers: { "content-type": FILES[name].type } }));
};

const options = () => ({ indexURL: HERE.href, lockFileContents: JSON.stringify({ info: __LOCK_INFO__, packages: {} }) });
const snapshotKey = new URL("snapshot", HERE);

// A tar in the format of 1988: a header of 512 bytes a file, its name, its size in octal, then its bytes.
function unpackTar(python, buffer) {
  const site = `/lib/python${python.runPython("'%d.%d' % __import__('sys').version_info[:2]")}/site-packages/`;
  const text = (start, length) => {
    const bytes = new Uint8Array(buffer, start, length);
    const end = bytes.indexOf(0);
    return new TextDecoder().decode(end < 0 ? bytes : bytes.subarray(0, end));
  };
  const made = new Set();
  for (let at = 0; at + 512 <= buffer.byteLength && text(at, 100); ) {
    const prefix = text(at + 345, 155);
    const path = site + (prefix ? `${prefix}/` : "") + text(at, 100);
    const size = parseInt(text(at + 124, 12), 8);
    const folder = path.slice(0, path.lastIndexOf("/"));
    if (!made.has(folder)) {
      python.FS.mkdirTree(folder);
      made.add(folder);
    }
    python.FS.writeFile(path, new Uint8Array(buffer, at + 512, size));
    at += 512 + Math.ceil(size / 512) * 512;
  }
}

// Python as it stood at the end of the first visit, memory and all: half a second instead of some.
async function startFromSnapshot(store, loadPyodide) {
  const kept = await store?.match(snapshotKey);
  if (!kept) return null;
  try {
    const python = await loadPyodide({ ...options(), _loadSnapshot: new Uint8Array(await kept.arrayBuffer()) });
    unpackTar(python, loaded["legroom.tar"]);
    return python;
  } catch (error) {
    console.warn("the kept state could not be used:", error);
    await store.delete(snapshotKey);
    return null;
  }
}

async function startAnew(store, loadPyodide) {
  const python = await loadPyodide({ ...options(), _makeSnapshot: store !== null });
  tell(0.85, "starting legroom");
  unpackTar(python, loaded["legroom.tar"]);
  python.runPython(`
import importlib
importlib.invalidate_caches()
from legroom.web.endpoints import call
call("plan", '{"model": "llama-3.1-8b", "gpu": "h100"}')
None`);
  if (store) {
    try {
      await store.put(snapshotKey, new Response(python.makeMemorySnapshot()));
    } catch (error) {
      console.warn("the state could not be kept for the next visit:", error);
    }
  }
  return python;
}

async function start() {
  if (typeof WebAssembly !== "object" || typeof DecompressionStream !== "function") {
    const message = "this browser cannot run the engine: it has no WebAssembly, or is too old";
    self.postMessage({ failed: { message, hint: "use a current Firefox, Chrome, Edge or Safari, or run `legroom ui`" } });
    return problem(message, "use a current browser, or run `legroom ui` on your machine");
  }
  try {
    tell(0, "loading");
    const store = await openStore();
    const [{ loadPyodide }] = await Promise.all([import(new URL("pyodide.mjs", HERE).href), loadFiles(store)]);
    tell(DOWNLOAD_SHARE, "starting Python");
    const python = (await startFromSnapshot(store, loadPyodide)) ?? (await startAnew(store, loadPyodide));
    pythonCall = python.runPython("from legroom.web.endpoints import call; call");
    for (const name of Object.keys(loaded)) delete loaded[name];
    tell(1, "ready");
    self.postMessage({ ready: true });
    return null;
  } catch (error) {
    const message = `the engine could not be loaded: ${error?.message ?? error}`;
    const hint = "check the connection and load the page again";
    self.postMessage({ failed: { message, hint } });
    return problem(message, hint);
  }
}

// The one look-up that leaves the page, and only when the visitor asks for a model that is not bundled.
async function askHub({ id }) {
  if (!/^[\w.-]+\/[\w.-]+$/.test(id ?? "")) return problem(`'${id}' is not a Hub id`, "a Hub id is owner/name", 2);
  const file = (name) => fetchFromNetwork(`https://huggingface.co/${id}/resolve/main/${name}`);
  try {
    const answer = await file("config.json");
    if (answer.status === 401 || answer.status === 403)
      return problem(`${id} is gated or private`, "paste its config.json instead");
    if (!answer.ok) return problem(`the Hub has no config.json of ${id}`, "check the name, or paste the config.json");
    const index = await file("model.safetensors.index.json").catch(() => null);
    const size = index?.ok ? (await index.json())?.metadata?.total_size : null;
    const source = `config.json of ${id} on the Hugging Face Hub`;
    return { id, config: await answer.json(), source, checkpoint_bytes: Number.isInteger(size) ? size : null };
  } catch {
    return problem("the Hugging Face Hub could not be reached", "paste the model's config.json instead");
  }
}

const starting = start();

self.onmessage = async ({ data: { id, name, request } }) => {
  const failure = await starting;
  if (name === "hub") {
    self.postMessage({ id, response: await askHub(request) });
    return;
  }
  let response = failure;
  if (!failure) {
    try {
      response = JSON.parse(pythonCall(name, JSON.stringify(request)));
    } catch (error) {
      const lines = String(error?.message ?? error).trim().split("\n");
      response = problem(`this is a bug in legroom, not in your input: ${lines.at(-1)}`, "please report it", 70);
    }
  }
  self.postMessage({ id, response });
};
