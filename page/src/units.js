export const GIB = 2 ** 30;

const minus = (text) => text.replace("-", "−");

export const gib = (bytes, digits = 2) => minus(`${(bytes / GIB).toFixed(digits)} GiB`);

const whole = new Intl.NumberFormat("en-US");
export const count = (value) => whole.format(Math.round(value));

export function bytesWords(bytes) {
  const size = Math.abs(bytes);
  if (size >= 0.1 * GIB) return gib(bytes);
  if (size >= 2 ** 20) return `${(bytes / 2 ** 20).toFixed(1)} MiB`;
  if (size >= 2 ** 10) return `${(bytes / 2 ** 10).toFixed(1)} KiB`;
  return `${bytes} B`;
}

export const signed = (bytes) => `${bytes >= 0 ? "+" : "−"}${bytesWords(Math.abs(bytes))}`;

export const percent = (ratio, digits = 0) => minus(`${(100 * ratio).toFixed(digits)}%`);

// How sure a finding is, in the words of the command line.
const certain = (share) => (share >= 0.9 ? "sure" : share >= 0.6 ? "likely" : "possible");
export const sureOf = (t, share) => t("finding.sure", { word: t(`sure.${certain(share)}`), share: percent(share) });

// 131072 -> 128k, as people say context lengths; other numbers stay as they are.
export const tokensShort = (tokens) => (tokens >= 1024 && tokens % 1024 === 0 ? `${tokens / 1024}k` : count(tokens));

export function seconds(value) {
  if (value == null) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 0)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
}

// As a shell needs it.
export const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${String(word).replaceAll("'", `'"'"'`)}'`);
export const commandLine = (words, env = {}) =>
  [...Object.entries(env).map(([name, value]) => `${name}=${quoted(value)}`), ...words.map(quoted)].join(" ");

const written = (value) => (value === true ? "" : ` ${typeof value === "object" ? JSON.stringify(value) : value}`);
export const flagsWords = (flags) =>
  Object.entries(flags)
    .map(([name, value]) => `--${name.replaceAll("_", "-")}${written(value)}`)
    .join(" ");

// What the chosen card has, as it would be written.
export function memoryOf(gpus, name) {
  const bare = (text) => String(text ?? "").toLowerCase().replace(/[\s-]/g, "");
  const wanted = bare(name);
  const card = gpus.find((gpu) => [gpu.name, ...(gpu.write ?? [])].some((each) => bare(each) === wanted));
  return card ? gib(card.total_bytes).replace(" ", "") : /^[\d.]+[gm]i?b$/.test(wanted) ? name : "";
}

// Requests at once as vLLM prints them; what is below a wish is never rounded up to it.
export const held = (requests, below = Infinity) => Math.min(requests, below - 0.01).toFixed(2);

// Over all data-parallel engines; vLLM prints what one of them holds.
export const atOnce = ({ kv, args }, pool = kv) => pool.max_concurrency * (args.data_parallel_size ?? 1);

// As many of them run as --max-num-seqs of each engine allows.
export const runsAtOnce = (plan, pool) => Math.min(atOnce(plan, pool), plan.args.max_num_seqs * (plan.args.data_parallel_size ?? 1));

export const heldOf = (t, later, first, wanted) =>
  first < wanted && later >= wanted ? t("models.first_start", { held: held(later), first: held(first, wanted) }) : held(later);

export const rateRange = (rate) => (rate ? `${count(rate.estimate)} (${count(rate.low)}–${count(rate.high)})` : "–");

// What one card holds of a wish, as its sentence says last: "8 requests of 3,072 tokens", or "8 requests of that length or
// 16 of 16,384 tokens".
export function heldByOne(text) {
  const [, users, context] = [...(text ?? "").matchAll(/([\d,]+) (?:requests? of|of|个) ([\d,]+) token/g)].at(-1) ?? [];
  const number = (digits) => Number(digits.replaceAll(",", ""));
  return users ? { users: number(users), context: number(context) } : null;
}
