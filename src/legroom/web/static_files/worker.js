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

async function loadFiles() {
  const store = await openStore();
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

async function start() {
  if (typeof WebAssembly !== "object" || typeof DecompressionStream !== "function") {
    const message = "this browser cannot run the engine: it has no WebAssembly, or is too old";
    self.postMessage({ failed: { message, hint: "use a current Firefox, Chrome, Edge or Safari, or run `legroom ui`" } });
    return problem(message, "use a current browser, or run `legroom ui` on your machine");
  }
  try {
    tell(0, "loading");
    const [{ loadPyodide }] = await Promise.all([import(new URL("pyodide.mjs", HERE).href), loadFiles()]);
    tell(DOWNLOAD_SHARE, "starting Python");
    const lockFileContents = JSON.stringify({ info: __LOCK_INFO__, packages: {} });
    const python = await loadPyodide({ indexURL: HERE.href, lockFileContents });
    tell(0.85, "starting legroom");
    python.unpackArchive(loaded["legroom.whl"], "wheel");
    for (const name of Object.keys(loaded)) delete loaded[name];
    pythonCall = python.runPython("from legroom.web.endpoints import call; call");
    pythonCall("plan", '{"model": "llama-3.1-8b", "gpu": "h100"}'); // what every visitor needs is loaded now
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
