import { useEffect, useId, useRef, useState } from "preact/hooks";
import { addressOf, keepAddress, keepStep } from "../address.js";
import { engine } from "../engine.js";
import { Button, DropArea, ErrorNote, NumberField, Picker, ShellText, Status, Tabs, Toggle, problemWith, reveal } from "../parts/controls.jsx";
import { gpuOptions, modelOptions, useLists } from "../plan/source.jsx";
import { LIMITS, faultIn, inFieldNames, readField } from "../limits.js";
import { EMPTY, fromParams, isExample, requestOf, toParams, withFlag } from "../setup.js";
import { lastSetup } from "../last_setup.js";
import { useText } from "../text/language.jsx";
import { commandLine, count, flagsWords } from "../units.js";
import { Fleet } from "./fleet.jsx";
import { Runs } from "./runs.jsx";

const LOAD = {
  load: "mix",
  requests: 300,
  rate_per_s: 8,
  users: 200,
  think_s: 30,
  prompt_tokens: 1000,
  output_tokens: 300,
  spread: "no",
  pool: "plan",
  blocks: 4000,
  step_ms: 30,
  max_num_seqs: "",
  max_num_batched_tokens: "",
  block_size: "",
  // Of the count of GPUs: as on the command line, no limit but that no queue grows.
  cards: "b200, mi300x, h200, h100, a100-80gb, l40s, rtx5090, rtx4090, l4",
  first_token_s: "",
  time_per_token_ms: "",
  budget: "",
  counted: "no",
};
// Loads to begin with. Chat: the medians of Azure's public conversation trace of 2023; agents: the means of Mooncake's
// public tool-and-agent trace; RAG: a question with some pages of text; batch: everything at once.
const PRESETS = {
  chat: { requests: 300, rate_per_s: 8, prompt_tokens: 1020, output_tokens: 129 },
  rag: { requests: 200, rate_per_s: 3, prompt_tokens: 4000, output_tokens: 300 },
  agents: { requests: 200, rate_per_s: 2, prompt_tokens: 8600, output_tokens: 180 },
  batch: { requests: 500, rate_per_s: 1000, prompt_tokens: 1000, output_tokens: 300 },
};
const NUMBERS = Object.keys(LOAD).filter((name) => !["load", "pool", "spread", "cards", "counted"].includes(name));

function readLoad(params) {
  const load = { ...LOAD };
  for (const name of Object.keys(LOAD)) {
    const text = params.get(`s.${name}`);
    if (text === null) continue;
    load[name] = NUMBERS.includes(name) && /^-?\d+(\.\d+)?$/.test(text) ? Number(text) : text;
  }
  return load;
}

function loadParams(load, setup) {
  const params = toParams(setup);
  for (const [name, value] of Object.entries(load)) if (value !== LOAD[name]) params.set(`s.${name}`, value);
  return params;
}

// A wish of Plan is a load: its users, whose prompt and answer take the wished length.
const wishOf = ({ want_context, want_users }) =>
  want_context && want_users ? { load: "users", users: want_users, prompt_tokens: Math.max(want_context - LOAD.output_tokens, 1) } : {};

const given = (value) => (value === "" ? null : value);

function requestFor(load, setup, trace) {
  // Flags of a plan are planned with it, which refuses what Plan refuses.
  const own = load.pool === "plan" ? { plan: requestOf(withSchedulerFlags(setup, load)), blocks: null } : blocksOf(load);
  const { requests, rate_per_s, users, think_s, prompt_tokens, output_tokens } = load;
  const spread = load.spread === "yes";
  // Each user asks some times, so that the replay sees how they wait.
  const arrivals = load.load === "users" ? { users, think_s, requests: Math.min(Math.max(1000, 3 * users), 5000) } : { requests, rate_per_s };
  return {
    trace: load.load === "trace" ? trace : null,
    mix: load.load === "trace" ? null : { ...arrivals, prompt_tokens, output_tokens, spread },
    ...own,
  };
}

const SCHEDULER = ["max_num_seqs", "max_num_batched_tokens"];
const withSchedulerFlags = (setup, load) => SCHEDULER.reduce((now, name) => (load[name] === "" ? now : withFlag(now, name, load[name])), setup);
const blocksOf = (load) => ({
  plan: null,
  ...Object.fromEntries(BLOCKS.map((name) => [name, given(load[name])])),
});
const BLOCKS = ["blocks", "step_ms", ...SCHEDULER, "block_size"];

// The fields of a load, each with how it is read; `isOptional` may be empty.
const KINDS = { requests: "whole", users: "whole", prompt_tokens: "length", output_tokens: "length", blocks: "whole" };
const shownFields = (load) => [
  ...({ trace: [], users: ["users", "think_s", "prompt_tokens", "output_tokens"] }[load.load] ?? ["requests", "rate_per_s", "prompt_tokens", "output_tokens"]),
  ...(load.pool === "plan" ? SCHEDULER : BLOCKS),
];
const fieldOf = (name, pool) =>
  SCHEDULER.includes(name) || name === "block_size"
    ? { kind: "flag", isOptional: true, limits: pool === "plan" ? undefined : LIMITS[name] }
    : { kind: KINDS[name] ?? "number", limits: LIMITS[name] };
const isReadable = (load) =>
  shownFields(load).every((name) => {
    const { kind, limits, isOptional } = fieldOf(name, load.pool);
    return (isOptional && load[name] === "") || readField(kind, load[name], limits) !== null;
  });

export function SimulateArea({ params, active }) {
  const t = useText();
  const lists = useLists();
  const [load, setLoad] = useState(() => ({ ...readLoad(params ?? new URLSearchParams()), ...wishOf(lastSetup.current ?? EMPTY) }));
  const [setup, setSetup] = useState(
    () => (params && fromParams(params)) ?? lastSetup.current ?? withFlag(EMPTY, "max_model_len", 32768),
  );
  // A link says what is meant; whoever changed the plan and comes back means the changed one.
  const carried = useRef(lastSetup.current);
  useEffect(() => {
    const newest = lastSetup.current;
    if (active && params?.size) {
      setSetup((now) => fromParams(params) ?? now);
      if ([...params.keys()].some((name) => name.startsWith("s."))) setLoad(readLoad(params));
    } else if (active && newest && newest !== carried.current && !isExample(newest)) {
      setSetup(newest);
      setLoad((now) => ({ ...now, ...wishOf(newest) }));
    }
    carried.current = newest;
  }, [params, active]);
  const [trace, setTrace] = useState({ text: "", name: "" });
  const [runs, setRuns] = useState([]);
  const [state, setState] = useState({ busy: false, error: null });
  const abort = useRef(null);
  useEffect(() => {
    if (active) keepAddress(addressOf("simulate", loadParams(load, setup)));
  }, [load, setup, active]);
  const fault = load.pool === "plan" ? faultIn(t, setup) : null;
  // A second setting is laid over the first.
  const run = async (asked = load, beside = false) => {
    if (fault || !isReadable(asked)) return;
    abort.current?.abort();
    const mine = (abort.current = new AbortController());
    setState({ busy: true, error: null });
    try {
      const question = requestFor(asked, setup, trace.text);
      const request = { ...question, language: t.language };
      const answer = await engine.call("simulate", request, mine.signal);
      const done = { answer, label: words(asked, setup, answer), request, asked: JSON.stringify(question) };
      setRuns((now) => (beside && now.length ? [now[0], done] : [done]));
      setState({ busy: false, error: null });
      reveal(".simulation");
    } catch (error) {
      if (error.name === "AbortError") return;
      setRuns((now) => (beside ? now.slice(0, 1) : []));
      setState({ busy: false, error });
    }
  };
  // What was refused of other fields is not wrong with these.
  useEffect(() => setState((now) => (now.error ? { ...now, error: null } : now)), [load, setup]);
  const stop = () => {
    abort.current.abort();
    setState({ busy: false, error: null });
  };
  const isChanged = runs.length > 0 && JSON.stringify(requestFor(load, setup, trace.text)) !== runs.at(-1).asked;
  // The sentences come from the engine: another language asks again, also for a run that was under way as it changed.
  useEffect(() => {
    if (runs.every(({ request }) => request.language === t.language)) return;
    const mine = (abort.current = new AbortController());
    setState({ busy: true, error: null });
    const again = (run) => {
      const request = { ...run.request, language: t.language };
      return engine.call("simulate", request, mine.signal).then((answer) => ({ ...run, request, answer }));
    };
    const shown = (now) => {
      if (mine.signal.aborted) return;
      setRuns(now);
      setState({ busy: false, error: null });
    };
    Promise.all(runs.map(again)).then(shown, () => shown([]));
    return () => mine.abort();
  }, [t.language, runs]);
  const preset = (name) => {
    const { prompt_tokens, output_tokens } = PRESETS[name];
    const byUsers = load.load === "users" && name !== "batch";
    const next = { ...load, spread: "yes", ...(byUsers ? { prompt_tokens, output_tokens } : { load: "mix", ...PRESETS[name] }) };
    setLoad(next);
    run(next);
  };
  const change = (name) => (value) => setLoad((now) => ({ ...now, [name]: value }));
  const takeTrace = async (file) => {
    if (file.size > 32 * 2 ** 20) setState({ busy: false, error: { message: t("trace.too_big") } });
    else setTrace({ text: await file.text(), name: file.name });
  };
  const isRead = isReadable(load) && !fault && FIELDS.every((name) => typeof (setup.flags[name] ?? 0) === "number");
  const ready = isRead && (load.load !== "trace" || Boolean(trace.text.trim()));
  return (
    <div class="simulate-area">
      <section class="panel load" aria-label={t("simulate.title")}>
        <h1>{t("simulate.title")}</h1>
        <p class="soft">{t("simulate.what")}</p>
        <Tabs
          label={t("simulate.load")}
          value={load.load}
          onPick={change("load")}
          tabs={[
            { value: "mix", label: t("simulate.mix") },
            { value: "users", label: t("simulate.users") },
            { value: "trace", label: t("simulate.trace") },
          ]}
        />
        {runs.length > 0 && (
          <div class="row presets" role="group" aria-label={t("simulate.presets")}>
            {Object.keys(PRESETS).map((name) => (
              <Button kind="small" key={name} onClick={() => preset(name)}>{t(`preset.${name}`)}</Button>
            ))}
          </div>
        )}
        {load.load === "trace" ? (
          <TraceField trace={trace} setTrace={setTrace} onFile={takeTrace} />
        ) : (
          <MixFields load={load} change={change} />
        )}
        <Tabs
          label={t("simulate.pool")}
          value={load.pool}
          onPick={change("pool")}
          tabs={[
            { value: "plan", label: t("simulate.pool.plan") },
            { value: "blocks", label: t("simulate.pool.blocks") },
          ]}
        />
        {load.pool === "plan" ? (
          <PoolOfPlan setup={setup} onChange={setSetup} lists={lists} error={fault ?? state.error} />
        ) : (
          <div class="grid-fields">
            {["blocks", "step_ms"].map((name) => (
              <NumberField key={name} {...fieldOf(name, load.pool)} label={t(`simulate.${name}`)} value={load[name]} onChange={change(name)} />
            ))}
          </div>
        )}
        <div class="grid-fields">
          {["max_num_seqs", "max_num_batched_tokens", ...(load.pool === "plan" ? [] : ["block_size"])].map((name) => (
            <NumberField
              key={name}
              {...fieldOf(name, load.pool)}
              label={`--${name.replaceAll("_", "-")}`}
              problem={problemWith(state.error, `--${name.replaceAll("_", "-")}`)}
              value={load[name]}
              placeholder={(load.pool === "plan" && setup.flags[name]) || t("flag.default")}
              onChange={change(name)}
            />
          ))}
        </div>
        <p class="hint">{t("read.k")}</p>
        {fault && !["model", "gpu"].includes(fault.field) && <p class="problem">{fault.message}</p>}
        <div class="row">
          <Button kind="primary" disabled={!ready} onClick={() => run()}>{t(state.busy ? "simulate.busy" : "simulate.run")}</Button>
          {state.busy && <Button onClick={stop}>{t("models.stop")}</Button>}
          {runs.length > 0 && (
            <Button disabled={!ready} onClick={() => run(load, true)}>{t("simulate.beside")}</Button>
          )}
        </div>
      </section>
      <div class="simulation" aria-busy={state.busy}>
        <ErrorNote error={state.error} />
        {runs.length === 0 && !state.error && !state.busy && <Examples onPick={preset} />}
        {state.busy && <Status>{t("simulate.busy")}</Status>}
        {isChanged && !state.busy && <Status kind="note fair">{t("simulate.changed")}</Status>}
        <Runs runs={runs}>
          <Fleet
            load={requestFor(load, setup, trace.text)}
            asked={load}
            change={change}
            setup={setup}
            isReady={ready}
            onUse={(row) => {
              keepStep();
              setSetup({ ...withFlag(setup, "tensor_parallel_size", row.tensor_parallel_size), gpu: row.gpu, gpus: null });
              reveal(".load");
            }}
          />
        </Runs>
      </div>
    </div>
  );
}

function Examples({ onPick }) {
  const t = useText();
  return (
    <section class="examples" aria-label={t("simulate.presets")}>
      <h2>{t("simulate.presets")}</h2>
      <ul class="cards">
        {Object.entries(PRESETS).map(([name, load]) => (
          <li key={name}>
            <button type="button" class="button wide" onClick={() => onPick(name)}>
              <strong>{t(`preset.${name}`)}</strong>
              <span class="soft">
                {t(name === "batch" ? "preset.at_once" : "preset.what", {
                  requests: count(load.requests),
                  rate: load.rate_per_s,
                  prompt: count(load.prompt_tokens),
                  output: count(load.output_tokens),
                })}
              </span>
            </button>
          </li>
        ))}
      </ul>
    </section>
  );
}

const gpusOf = ({ gpus, flags }) =>
  gpus ?? ["tensor", "pipeline", "data"].reduce((all, kind) => all * (Number(flags[`${kind}_parallel_size`]) || 1), 1);

const words = (load, setup, answer) =>
  [
    load.pool === "plan" ? `${setup.model.split("/").pop()} · ${gpusOf(setup)} × ${setup.gpu}` : `${count(load.blocks)}`,
    `max_num_seqs ${answer.settings?.max_num_seqs ?? load.max_num_seqs}`,
  ].join(" · ");

function MixFields({ load, change }) {
  const t = useText();
  return (
    <div class="grid-fields">
      {[...(load.load === "users" ? ["users", "think_s"] : ["requests", "rate_per_s"]), "prompt_tokens", "output_tokens"].map((name) => (
        <NumberField key={name} {...fieldOf(name, load.pool)} label={t(`mix.${name}`)} value={load[name]} onChange={change(name)} />
      ))}
      {load.load === "users" && <p class="hint">{t("mix.users_hint")}</p>}
      <Toggle plain label={t("mix.spread")} value={load.spread === "yes"} onPick={(on) => change("spread")(on ? "yes" : "no")} />
    </div>
  );
}

function TraceField({ trace, setTrace, onFile }) {
  const t = useText();
  const id = useId();
  const large = trace.text.length > 200_000;
  return (
    <div class="field">
      <label for={id}>{t("trace.label")}</label>
      <DropArea label={t("choose_file")} onFile={onFile}>
        {large ? (
          <p id={id} class="mono">{trace.name} · {count(trace.text.length)}</p>
        ) : (
          <textarea
            id={id}
            rows={6}
            spellcheck={false}
            value={trace.text}
            placeholder={'{"arrival": 0.0, "prompt_len": 812, "output_len": 140}'}
            onInput={(event) => setTrace({ text: event.target.value, name: "" })}
          />
        )}
      </DropArea>
      <p class="hint">{t("trace.hint")}</p>
    </div>
  );
}

const FIELDS = ["tensor_parallel_size", "max_model_len"];
const MACHINE = ["gpus", "gpu_memory", "gpu_used", "host_memory", "vllm"];

// What else a plan brought along: no field here shows it, and the replay uses it.
function Carried({ setup, onChange }) {
  const t = useText();
  const flags = Object.fromEntries(Object.entries(setup.flags).filter(([name]) => !FIELDS.includes(name)));
  const machine = Object.fromEntries(MACHINE.filter((name) => setup[name]).map((name) => [name, setup[name]]));
  const words = commandLine([flagsWords({ ...flags, ...machine, ...(setup.cold && { cold: true }) })].filter(Boolean), setup.env);
  if (!words) return null;
  const kept = Object.fromEntries(FIELDS.filter((name) => name in setup.flags).map((name) => [name, setup.flags[name]]));
  const cleared = { ...EMPTY, model: setup.model, config: setup.config, checkpoint_bytes: setup.checkpoint_bytes, gpu: setup.gpu, flags: kept };
  return (
    <div class="note">
      <p>
        {t("simulate.carried")}{" "}
        <code><ShellText text={inFieldNames(t, words.replaceAll("'", ""))} /></code>
      </p>
      <Button kind="small" onClick={() => onChange(cleared)}>{t("simulate.clear")}</Button>
    </div>
  );
}

function PoolOfPlan({ setup, onChange, lists, error }) {
  const t = useText();
  return (
    <>
      <Picker
        label={t("model")}
        value={setup.model ?? ""}
        options={modelOptions(lists.models)}
        problem={problemWith(error, `'${setup.model}'`, "model")}
        onPick={(model) => onChange({ ...setup, model, config: null })}
      />
      <div class="grid-fields">
        <Picker label={t("gpu")} value={setup.gpu} options={gpuOptions(lists.gpus)} problem={problemWith(error, `'${setup.gpu}'`, "gpu")} onPick={(gpu) => onChange({ ...setup, gpu })} />
        {FIELDS.map((name) => (
          <NumberField
            key={name}
            isOptional
            kind="flag"
            label={`--${name.replaceAll("_", "-")}`}
            problem={problemWith(error, `--${name.replaceAll("_", "-")}`)}
            value={setup.flags[name] ?? ""}
            placeholder={t("flag.default")}
            onChange={(value) => onChange(withFlag(setup, name, value))}
          />
        ))}
      </div>
      <Carried setup={setup} onChange={onChange} />
      <p class="hint"><a href={addressOf("plan", toParams(setup))}>{t("simulate.open_plan")}</a></p>
    </>
  );
}
