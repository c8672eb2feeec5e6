// What a plan is asked for: the model, the machine, the release and the flags that were set. Plain values, in the address too.
import { tokensShort } from "./units.js";

export const EMPTY = {
  model: "meta-llama/Llama-3.1-8B-Instruct",
  config: null,
  checkpoint_bytes: null,
  gpu: "h100",
  gpus: null,
  gpu_memory: null,
  gpu_used: null,
  host_memory: null,
  vllm: null,
  cold: false,
  // The sizes that a log of this server printed, with what it ran.
  measured: null,
  env: {},
  flags: {},
  want_context: null,
  want_users: null,
  // What is asked beside the plan: the most that GPUs may cost an hour, and the servers to pack, a command in each line.
  budget: null,
  pack: null,
  // The flags (and "gpus") that a search chose and nobody typed, and what it replaced beside them.
  found: [],
  before: null,
};

const OWN = ["model", "gpu", "gpus", "gpu_memory", "gpu_used", "host_memory", "vllm", "checkpoint_bytes", "want_context", "want_users", "budget", "pack"];
const MOST = { gpus: 4096, checkpoint_bytes: 2 ** 50, want_context: 100_000_000, want_users: 1_000_000 };
const NEVER_LEFT_OUT = ["model", "gpu"];

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
  // No model and no card are said too: a link without one has the example's.
  for (const name of OWN)
    if (setup[name] != null && (setup[name] !== "" || NEVER_LEFT_OUT.includes(name))) params.set(prefix + name, setup[name]);
  if (setup.config) params.set(`${prefix}config`, JSON.stringify(setup.config));
  if (Object.keys(setup.env).length) params.set(`${prefix}env`, JSON.stringify(setup.env));
  if (setup.cold) params.set(`${prefix}cold`, "1");
  if (setup.measured) params.set(`${prefix}measured`, JSON.stringify(setup.measured));
  if (setup.found?.length) params.set(`${prefix}found`, setup.found.join());
  for (const [name, value] of Object.entries(setup.flags)) params.set(prefix + name, written(value));
  return params;
}

// What Plan shows before anybody asked is nobody's.
export const isExample = (setup) => toParams(setup).toString() === toParams(EMPTY).toString();

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
    if (name in MOST) keep(wholeNumber(text, MOST[name]));
    else if (name === "found") setup.found = text.split(",");
    else if (OWN.includes(name)) setup[name] = text;
    else if (name === "cold") setup.cold = text === "1";
    else if (name === "env" || name === "config" || name === "measured") keep(objectOrNull(text));
    else if (/^[a-z][a-z0-9_]*$/.test(name) && text !== "") setup.flags[name] = readValue(text);
    else unread.push(`${key}=${text}`);
  }
  if (unread.length) setup.unread = unread;
  return any ? setup : null;
}

const SCALES = { "": 1, k: 1e3, K: 2 ** 10, m: 1e6, M: 2 ** 20, g: 1e9, G: 2 ** 30 };

// The value of a flag, as vLLM reads it: "32k" is 32,000 and "32K" is 32,768.
export function readCount(text) {
  const [, digits, unit] = /^\s*(-?\d+(?:\.\d+)?)\s*([kKmMgG]?)\s*$/.exec(text) ?? [];
  return digits === undefined ? null : Number(digits) * SCALES[unit];
}

// A wished length: "32k" is 32,768 tokens, as on the command line.
export function readLength(text) {
  const [, digits, unit] = /^\s*(\d+|\d+\.\d+(?=\s*[kKmM]))\s*([kKmM]?)\s*$/.exec(text) ?? [];
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

const SIZES = ["weights_bytes", "activation_bytes", "non_torch_bytes", "graph_estimate_bytes", "derived"];
const MEASURED_ON = ["model", "gpu", "gpu_memory", "vllm"];

// A setup with the sizes that its log printed.
export const withMeasured = (setup, sizes) => ({
  ...setup,
  measured: sizes && { on: MEASURED_ON.map((name) => setup[name] ?? null), flags: setup.flags, ...picked(sizes, SIZES) },
});

// Sizes are those of one model, card and release: what was changed since, and what it was.
export function changedSinceMeasured(setup) {
  const on = setup.measured?.on ?? [];
  const was = Object.fromEntries(MEASURED_ON.map((name, index) => [name, on[index] ?? null]));
  return on.length ? Object.fromEntries(Object.entries(was).filter(([name, value]) => value !== (setup[name] ?? null))) : {};
}

const measuredOf = (setup) =>
  setup.measured?.on && !Object.keys(changedSinceMeasured(setup)).length ? { flags: setup.measured.flags, ...picked(setup.measured, SIZES) } : null;

export const requestOf = (setup) => ({ ...planRequestOf(setup), measured: measuredOf(setup) });

// A size is written with its unit; a plain number is GiB, as the field's label says.
export const withUnit = (text) => (/^\s*\d+(\.\d+)?\s*$/.test(text) && Number(text) ? `${text.trim()}GiB` : text.trim());
const sizeOf = (text) => (text ? withUnit(String(text)) : null);

const planRequestOf = ({ model, config, checkpoint_bytes, gpu, gpus, gpu_memory, gpu_used, host_memory, vllm, cold, env, flags }) => ({
  model: model || null,
  config,
  checkpoint_bytes: config ? checkpoint_bytes : null,
  gpu,
  gpus,
  gpu_memory: sizeOf(gpu_memory),
  gpu_used: sizeOf(gpu_used),
  host_memory: sizeOf(host_memory),
  vllm,
  cold,
  env,
  flags,
});

// The same without the machine: what `size` looks for a home for.
export const modelRequestOf = (setup) => {
  const { gpu, gpus, gpu_memory, gpu_used, host_memory, cold, ...request } = planRequestOf(setup);
  return request;
};

export function withFlag(setup, name, value) {
  const flags = { ...setup.flags };
  if (value === undefined || value === null || value === "") delete flags[name];
  else flags[name] = value;
  return { ...setup, flags, found: (setup.found ?? []).filter((each) => each !== name) };
}

const REPLACED = ["model", "config", "checkpoint_bytes", "gpus"];
const picked = (setup, names) => Object.fromEntries(names.map((name) => [name, setup[name]]));

// The setup as it was typed: without what a search chose, unless that was changed by hand since.
export function typed(setup) {
  const { before, found = [] } = setup;
  const flags = Object.fromEntries(Object.entries(setup.flags).filter(([name]) => !found.includes(name)));
  const back = {};
  if (before && setup.model === before.to.model) Object.assign(back, picked(before.from, REPLACED.slice(0, 3)));
  if (before && setup.gpus === before.to.gpus) back.gpus = before.from.gpus;
  if (!before && found.includes("gpus")) back.gpus = null;
  return { ...setup, ...back, flags, found: [], before: null };
}

export const undone = (setup) => ({ ...typed(setup), flags: {} });

// A setup after a search: what it chose is known as such.
export function withFound(setup, change) {
  const base = typed(setup);
  const next = { ...setup, ...change };
  const isFound = ([name, value]) => !(name in base.flags) || written(base.flags[name]) !== written(value);
  const found = Object.entries(next.flags).filter(isFound).map(([name]) => name);
  if (next.gpus !== base.gpus) found.push("gpus");
  return { ...next, found, before: { from: picked(base, REPLACED), to: picked(next, REPLACED) } };
}

// What "which GPUs hold it" is asked: for the wish where there is one, and never bound by flags that a search chose. How
// many GPUs there are, and how the model is split over them, is the answer.
export function sizeRequestOf(setup, plan) {
  const { want_context, want_users } = setup;
  const { tensor_parallel_size, pipeline_parallel_size, data_parallel_size, ...flags } = typed(setup).flags;
  const { max_model_len, max_num_seqs, gpu_memory_utilization, ...rest } = flags;
  if (want_context && want_users)
    return { ...modelRequestOf({ ...setup, flags: rest }), context: want_context, concurrency: want_users };
  return { ...modelRequestOf({ ...setup, flags }), context: plan?.args.max_model_len ?? null };
}

// What Models is asked after a plan: its card and its wish, as people write them.
export function cardQuestionOf(setup) {
  const { gpu, gpus, gpu_used, want_context, want_users } = typed(setup);
  const context = want_context && tokensShort(want_context).replaceAll(",", "");
  const asked = Object.entries({ gpu, gpus, gpu_used, context, users: want_users });
  return Object.fromEntries(asked.filter(([, value]) => value).map(([name, value]) => [name, String(value)]));
}

// Another number of GPUs takes back what a search chose for its own; the same number, said by hand, is given.
export function withGpus(setup, gpus) {
  if (gpus && gpus === setup.gpus) return { ...setup, found: (setup.found ?? []).filter((name) => name !== "gpus") };
  const isSplit = setup.found?.some((name) => name === "gpus" || name.endsWith("_parallel_size"));
  return { ...(isSplit ? typed(setup) : setup), gpus };
}

const gpusOf = (flags) =>
  ["tensor", "pipeline", "data"].reduce((count, kind) => count * (Number(flags[`${kind}_parallel_size`]) || 1), 1);

// Whether a search took more GPUs than anybody named.
export function takesMoreGpus(setup, count) {
  const { gpus, flags } = typed(setup);
  return !gpus && setup.found.includes("gpus") && count > gpusOf(flags);
}

// A fix names flags as plan does, and sometimes another checkpoint. More GPUs than were given come with it.
export function withFix(setup, flags) {
  const { model, ...others } = flags;
  let next = setup;
  for (const [name, value] of Object.entries(others)) next = withFlag(next, name, value);
  if (model) next = { ...next, model, config: null };
  const needed = gpusOf(next.flags);
  if (next.gpus && next.gpus < needed) next = { ...next, gpus: needed };
  return withFound(setup, next);
}
