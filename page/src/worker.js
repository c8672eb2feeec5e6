// The engine of the static edition: legroom itself, in Pyodide, off the page's thread.
// Beside this file: pyodide/, the wheel, and engine.json = {"wheel": name, "size_bytes": all that is downloaded}.

const say = (stage, done = 0, total = 0) => postMessage({ progress: { stage, done, total } });

async function download(address, onBytes) {
  const response = await fetch(address);
  if (!response.ok) throw new Error(`${address}: ${response.status}`);
  const pieces = [];
  for (const reader = response.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) break;
    pieces.push(value);
    onBytes(value.length);
  }
  return new Blob(pieces).arrayBuffer();
}

async function start() {
  say("engine");
  const about = await (await fetch("./engine.json")).json();
  let bytes = 0;
  const count = (more) => say("engine", (bytes += more), about.size_bytes);
  const wheel = download(`./${about.wheel}`, count);
  const { loadPyodide } = await import("./pyodide/pyodide.mjs");
  const python = await loadPyodide({ indexURL: new URL("./pyodide/", self.location).href });
  python.unpackArchive(await wheel, "wheel");
  say("starting");
  const call = python.pyimport("legroom.web.endpoints").call;
  say("ready");
  return call;
}

const cancelled = new Set();
const engine = start();
engine.catch(() => {});

onmessage = async ({ data }) => {
  if (data.cancel) {
    cancelled.add(data.cancel);
    return;
  }
  try {
    const call = await engine;
    // Lets a cancel that is already queued arrive before the work begins.
    await new Promise((resolve) => setTimeout(resolve));
    if (cancelled.delete(data.id)) return;
    postMessage({ id: data.id, response: call(data.name, data.request) });
  } catch (error) {
    postMessage({ id: data.id, failed: String(error.message ?? error) });
  }
};
