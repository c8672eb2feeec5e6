// What the engine takes of each field, from least to most; a test compares them with the schemas of its requests.
import { readCount, readLength } from "./setup.js";

export const LIMITS = {
  gpus: [1, 4096],
  packed_gpus: [1, 16],
  want_context: [1, 100_000_000],
  want_users: [1, 1_000_000],
  requests: [1, 50_000],
  rate_per_s: [0.001, 100_000],
  users: [1, 1_000_000],
  think_s: [0.1, 86_399],
  prompt_tokens: [1, 10_000_000],
  output_tokens: [1, 1_000_000],
  blocks: [2, 2 ** 40],
  step_ms: [0.001, 1_000_000],
  max_num_seqs: [1, 1_000_000],
  max_num_batched_tokens: [1, 100_000_000],
  block_size: [1, 65_536],
  first_token_s: [0.001, 86_400],
  time_per_token_ms: [0.001, 1_000_000],
  budget: [0.01, 1_000_000],
};
// Letters of a name.
export const LONGEST = { model: 200, gpu: 100, words: 200 };

const written = (text, pattern) => (pattern.test(text) ? Number(text) : null);
const READ = {
  number: (text) => written(text, /^\s*\d+(\.\d+)?\s*$/),
  whole: (text) => written(text, /^\s*\d+\s*$/),
  flag: readCount,
  length: readLength,
};

// A number, a flag of vLLM or a length, as the command line reads it: null where it is none or beyond its limits.
export function readField(kind, text, [least, most] = [-Infinity, Infinity]) {
  const value = READ[kind](String(text));
  return value === null || value < least || value > most ? null : value;
}

const figure = new Intl.NumberFormat("en-US", { maximumFractionDigits: 3 });

// What is wrong with a written number: empty where nothing is.
export function faultOf(t, kind, text, limits) {
  if (readField(kind, text, limits) !== null) return "";
  if (!limits) return t("unread.flag_alone");
  const [least, most] = limits.map((limit) => figure.format(limit));
  return t(`unread.${kind}`, { least, most });
}

const SIZE = /^\s*\d{1,40}(\.\d+)?\s*([kmgt](i?b)?|b)?\s*$/i;

export const sizeFault = (t, name, text) => (!text || SIZE.test(text) ? "" : t("unread.size", { name: fieldName(t, name) }));

// A field's label without its unit.
export const fieldName = (t, name) => t(name).split(/[,，]/)[0];

export const nameFault = (t, name, text) => (text?.length > LONGEST[name] ? t("unread.long", { name: fieldName(t, name), most: LONGEST[name] }) : "");

const named = (name, fault) => fault && `${name}: ${fault}`;

// Why no plan can be asked of a setup, and of which field.
export function faultIn(t, setup) {
  const { model, config, gpu, gpus } = setup;
  const faults = {
    model: !model && !config ? t("model.which") : config ? "" : nameFault(t, "model", model),
    gpu: !gpu ? t("gpu.which") : nameFault(t, "gpu", gpu),
    gpus: gpus == null ? "" : named(fieldName(t, "gpus"), faultOf(t, "whole", gpus, LIMITS.gpus)),
  };
  for (const name of ["gpu_used", "gpu_memory", "host_memory"]) faults[name] = sizeFault(t, name, setup[name]);
  const name = Object.keys(faults).find((each) => faults[each]);
  return name ? { field: name, message: faults[name] } : null;
}

// The engine's sentences name the options of the command line; on the page these are fields.
const OPTIONS = { "--gpu": "gpu", "--gpus": "gpus", "--gpu-used": "gpu_used", "--gpu-memory": "gpu_memory", "--host-memory": "host_memory" };
const OPTION = /(--(?:gpus?|gpu-used|gpu-memory|host-memory))(?![\w-])(?: ('[^']*'|(?=[\w.-]*\d)[\w-]+(?:\.\w+)*))?( (?=--gpu))?/g;
const inFields = (t, text) =>
  text.replace(OPTION, (_, option, value, more) =>
    t(value ? "field.set" : "field.named", { name: fieldName(t, OPTIONS[option]), value }) + (more ? t("field.and") : ""),
  );

// The same in every sentence of an answer.
export const inFieldNames = (t, words) =>
  typeof words === "string"
    ? inFields(t, words)
    : Array.isArray(words)
      ? words.map((each) => inFieldNames(t, each))
      : words && typeof words === "object"
        ? Object.fromEntries(Object.entries(words).map(([name, each]) => [name, inFieldNames(t, each)]))
        : words;

// Several cards in one field: the smaller one, as often as there are cards.
export function cardsOffered(error) {
  const [, gpu, gpus] = /--gpu (\S+) --gpus (\d+)/.exec(error?.source ?? "") ?? [];
  return gpu ? { gpu, gpus: Number(gpus) } : null;
}
