import { useEffect, useMemo, useState } from "preact/hooks";
import { callOnce } from "../engine.js";
import { Choice, Picker, Slider, TextField, Toggle, problemWith } from "../parts/controls.jsx";
import { readCount, readValue, undone, withFlag } from "../setup.js";
import { useText } from "../text/language.jsx";
import { count, tokensShort } from "../units.js";

const range = (from, to, step) =>
  Array.from({ length: Math.round((to - from) / step) + 1 }, (_, index) => Number((from + index * step).toFixed(4)));

// Four stops an octave: even travel, round numbers.
function octaves(from, to) {
  const stops = new Set();
  for (let base = from; base <= to; base *= 2)
    for (const part of [1, 1.25, 1.5, 1.75]) stops.add(Math.min(Math.round(base * part), to));
  stops.add(to);
  return [...stops];
}

const UTILIZATION = range(0.3, 1, 0.01);
const SEQUENCES = octaves(1, 2048);
const BATCHED = octaves(256, 131072);
const SIZES = [1, 2, 4, 8, 16];
// The few that most people move; the rest folds.
const FEW = ["gpu_memory_utilization", "max_model_len", "max_num_seqs", "tensor_parallel_size", "kv_cache_dtype"];
const SHOWN = [
  "gpu_memory_utilization",
  "max_model_len",
  "max_num_seqs",
  "max_num_batched_tokens",
  "tensor_parallel_size",
  "pipeline_parallel_size",
  "data_parallel_size",
  "enable_expert_parallel",
  "kv_cache_dtype",
  "quantization",
  "dtype",
  "enforce_eager",
  "enable_prefix_caching",
  "enable_chunked_prefill",
];

export function useFlags(vllm) {
  const [flags, setFlags] = useState([]);
  useEffect(() => {
    let current = true;
    callOnce("flags", { vllm }).then(
      (answer) => current && setFlags(answer.flags),
      () => {},
    );
    return () => {
      current = false;
    };
  }, [vllm]);
  return flags;
}

export function Flags({ setup, plan, error, onChange }) {
  const t = useText();
  const flags = useFlags(setup.vllm);
  const about = useMemo(() => new Map(flags.map((flag) => [flag.name, flag])), [flags]);
  // What another release resolved is no default of this one.
  const args = (!setup.vllm || plan?.vllm === setup.vllm) && plan ? plan.args : {};
  const longest = Math.max(plan?.args?.max_model_len ?? 0, plan?.kv?.longest_len ?? 0, 131072);
  const lengths = useMemo(() => octaves(1024, 2 ** Math.ceil(Math.log2(longest))), [longest]);
  const set = (name) => (value) => onChange(withFlag(setup, name, value));
  const common = (name) => ({
    label: flagOf(name),
    problem: problemWith(error, flagOf(name)),
    value: setup.flags[name] ?? args[name] ?? about.get(name)?.default ?? "",
    onReset: name in setup.flags ? () => onChange(withFlag(setup, name, undefined)) : undefined,
  });
  const changed = Object.keys(setup.flags);
  const undo = undone(setup);
  const undoes = changed.length + (undo.gpus !== setup.gpus) + (undo.model !== setup.model);
  const [open, setOpen] = useState(false);
  const onToggle = (event) => setOpen(event.currentTarget.open);
  const size = (kind) => (
    <Choice
      {...common(`${kind}_parallel_size`)}
      choices={sizesWith(setup.flags[`${kind}_parallel_size`])}
      onPick={(value) => onChange(withFlag(setup, `${kind}_parallel_size`, Number(value)))}
    />
  );
  return (
    <section class="panel flags" aria-label={t("flags.title")}>
      <div class="row spread">
        <h2>{t("flags.title")}</h2>
        {undoes > 0 && (
          <button type="button" class="link" onClick={() => onChange(undo)}>{t("flags.reset", { count: undoes })}</button>
        )}
      </div>
      <p class="hint">{t("flags.muted")}</p>
      <p class="hint">{t("read.flag")}</p>
      <Slider {...common("gpu_memory_utilization")} stops={UTILIZATION} onMove={set("gpu_memory_utilization")} />
      <Slider {...common("max_model_len")} stops={lengths} format={tokensShort} unit={t("unit.tokens")} onMove={set("max_model_len")} />
      <Slider {...common("max_num_seqs")} stops={SEQUENCES} format={count} onMove={set("max_num_seqs")} />
      <div class="sizes">
        {size("tensor")}
        <Choice
          {...common("kv_cache_dtype")}
          choices={choicesOf(about.get("kv_cache_dtype"), ["auto", "fp8"])}
          onPick={set("kv_cache_dtype")}
        />
      </div>
      <details class="more-flags" open={open || changed.some((name) => !FEW.includes(name))} onToggle={onToggle}>
        <summary>{t("flags.rest")}</summary>
        <Slider
          {...common("max_num_batched_tokens")}
          stops={BATCHED}
          format={count}
          unit={t("unit.tokens")}
          onMove={set("max_num_batched_tokens")}
        />
        <div class="sizes">
          {size("pipeline")}
          {size("data")}
          <Choice
            {...common("quantization")}
            choices={[
              { value: "", label: t("flag.none") },
              ...choicesOf(about.get("quantization"), ["fp8", "bitsandbytes"]),
            ]}
            onPick={set("quantization")}
          />
          <Choice {...common("dtype")} choices={choicesOf(about.get("dtype"), ["auto", "bfloat16", "float16"])} onPick={set("dtype")} />
        </div>
        {plan?.moe && <Toggle {...common("enable_expert_parallel")} onPick={set("enable_expert_parallel")} />}
        <Toggle {...common("enforce_eager")} onPick={set("enforce_eager")} />
        <Toggle {...common("enable_prefix_caching")} onPick={set("enable_prefix_caching")} />
        <OtherFlags setup={setup} flags={flags} error={error} onChange={onChange} />
        <Toggle plain label={t("cold")} value={setup.cold} onPick={(cold) => onChange({ ...setup, cold })} />
      </details>
    </section>
  );
}

const flagOf = (name) => `--${name.replaceAll("_", "-")}`;

const sizesWith = (value) =>
  [...new Set([...SIZES, ...(Number(value) > 0 ? [Number(value)] : [])])]
    .sort((a, b) => a - b)
    .map((size) => ({ value: size }));

function choicesOf(flag, fallback) {
  const choices = flag?.choices?.length ? flag.choices : fallback;
  return choices.filter((value) => value !== null && value !== "").map((value) => ({ value }));
}

// Every other flag of the release that memory depends on: pick its name, then its value.
function OtherFlags({ setup, flags, error, onChange }) {
  const t = useText();
  const given = Object.keys(setup.flags).filter((name) => !SHOWN.includes(name));
  const options = useMemo(
    () =>
      flags
        .filter((flag) => !SHOWN.includes(flag.name) && !given.includes(flag.name) && flag.name !== "model")
        .map((flag) => ({
          value: flagOf(flag.name),
          search: flag.name,
          note: flag.default == null ? "" : String(flag.default),
        })),
    [flags, given.join()],
  );
  const add = (written) => {
    const flag = flags.find((flag) => flagOf(flag.name) === written);
    if (flag)
      onChange(
        withFlag(setup, flag.name, flag.type === "boolean" ? !flag.default : (flag.default ?? flag.choices?.[0] ?? 0)),
      );
  };
  return (
    <div class="other-flags">
      {given.map((name) => (
        <OtherFlag
          key={name}
          name={name}
          flag={flags.find((flag) => flag.name === name)}
          value={setup.flags[name]}
          problem={problemWith(error, flagOf(name))}
          onChange={(value) => onChange(withFlag(setup, name, value))}
        />
      ))}
      <Picker isClosed label={t("flags.more")} value="" options={options} placeholder={t("flags.search")} onPick={add} />
    </div>
  );
}

function OtherFlag({ name, flag, value, problem, onChange }) {
  const common = { label: flagOf(name), problem, onReset: () => onChange(undefined) };
  if (typeof value === "boolean") return <Toggle {...common} value={value} onPick={onChange} />;
  if (flag?.choices?.length)
    return <Choice {...common} value={value} choices={choicesOf(flag, [value])} onPick={(text) => onChange(readValue(text))} />;
  const shown = typeof value === "object" ? JSON.stringify(value) : value;
  return <TextField {...common} value={shown} onChange={(text) => onChange(readCount(text) ?? readValue(text.trim()))} />;
}
