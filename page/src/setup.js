// What a plan is asked for: the model, the machine, the release and the flags that were set. Plain values, in the address too.

export const EMPTY = {
  model: "meta-llama/Llama-3.1-8B-Instruct",
  config: null,
  checkpoint_bytes: null,
  gpu: "h100",
  gpus: null,
  gpu_memory: null,
  vllm: null,
  cold: false,
  env: {},
  flags: {},
};

const OWN = ["model", "gpu", "gpus", "gpu_memory", "vllm", "checkpoint_bytes"];

const written = (value) => (typeof value === "object" ? JSON.stringify(value) : String(value));

export function readValue(text) {
  if (text === "true") return true;
  if (text === "false") return false;
  if (/^-?\d+(\.\d+)?$/.test(text)) return Number(text);
  if (/^[[{]/.test(text)) {
    try {
      return JSON.parse(text);
    } catch {
      return text;
    }
  }
  return text;
}

export function toParams(setup, prefix = "", params = new URLSearchParams()) {
  for (const name of OWN) if (setup[name] != null && setup[name] !== "") params.set(prefix + name, setup[name]);
  if (setup.config) params.set(`${prefix}config`, JSON.stringify(setup.config));
  if (Object.keys(setup.env).length) params.set(`${prefix}env`, JSON.stringify(setup.env));
  if (setup.cold) params.set(`${prefix}cold`, "1");
  for (const [name, value] of Object.entries(setup.flags)) params.set(prefix + name, written(value));
  return params;
}

const wholeNumber = (text, most) =>
  /^\d+$/.test(text) && Number(text) >= 1 && Number(text) <= most ? Number(text) : null;

// What cannot be read is never dropped in silence: `unread` holds it as it was written.
export function fromParams(params, prefix = "") {
  const setup = { ...EMPTY, env: {}, flags: {} };
  const unread = [];
  let any = false;
  for (const [key, text] of params) {
    if (!key.startsWith(prefix) || (!prefix && /^b\./.test(key)) || key.startsWith("s.")) continue;
    const name = key.slice(prefix.length).replaceAll("-", "_");
    const keep = (value) => (value == null ? unread.push(`${key}=${text}`) : (setup[name] = value));
    any = true;
    if (name === "gpus") keep(wholeNumber(text, 4096));
    else if (name === "checkpoint_bytes") keep(wholeNumber(text, 2 ** 50));
    else if (OWN.includes(name)) setup[name] = text;
    else if (name === "cold") setup.cold = text === "1";
    else if (name === "env" || name === "config") keep(objectOrNull(text));
    else if (/^[a-z][a-z0-9_]*$/.test(name) && text !== "") setup.flags[name] = readValue(text);
    else unread.push(`${key}=${text}`);
  }
  if (unread.length) setup.unread = unread;
  return any ? setup : null;
}

// "32k" is 32,768 tokens, as on the command line.
export function readLength(text) {
  const [, digits, unit] = /^\s*(\d+(?:\.\d+)?)\s*([kKmM]?)\s*$/.exec(text) ?? [];
  const tokens = Math.round(Number(digits) * { "": 1, k: 1024, m: 1024 ** 2 }[(unit ?? "").toLowerCase()]);
  return tokens >= 1 ? tokens : null;
}

function objectOrNull(text) {
  try {
    const value = JSON.parse(text);
    return value && typeof value === "object" && !Array.isArray(value) ? value : null;
  } catch {
    return null;
  }
}

export const requestOf = ({ model, config, checkpoint_bytes, gpu, gpus, gpu_memory, vllm, cold, env, flags }) => ({
  model: model || null,
  config,
  checkpoint_bytes: config ? checkpoint_bytes : null,
  gpu,
  gpus,
  gpu_memory: gpu_memory || null,
  vllm,
  cold,
  env,
  flags,
});

// The same without the machine: what `size` looks for a home for.
export const modelRequestOf = (setup) => {
  const { gpu, gpus, gpu_memory, cold, ...request } = requestOf(setup);
  return request;
};

export function withFlag(setup, name, value) {
  const flags = { ...setup.flags };
  if (value === undefined || value === null || value === "") delete flags[name];
  else flags[name] = value;
  return { ...setup, flags };
}

// A fix names flags as plan does, and sometimes another checkpoint. More GPUs than were given come with it.
export function withFix(setup, flags) {
  const { model, ...others } = flags;
  let next = setup;
  for (const [name, value] of Object.entries(others)) next = withFlag(next, name, value);
  if (model) next = { ...next, model, config: null };
  const size = (name) => Number(next.flags[name]) || 1;
  const needed = size("tensor_parallel_size") * size("pipeline_parallel_size") * size("data_parallel_size");
  if (next.gpus && next.gpus < needed) next = { ...next, gpus: needed };
  return next;
}
