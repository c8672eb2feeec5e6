import { useEffect, useRef, useState } from "preact/hooks";
import { addressOf, keepAddress } from "../address.js";
import { engine, inLanes } from "../engine.js";
import { Button, ErrorNote, Picker, SizeField, TextField, VerdictBadge, problemWith } from "../parts/controls.jsx";
import { SortableTable, figureColumn, nameColumn } from "../parts/table.jsx";
import { gpuOptions, useLists } from "../plan/source.jsx";
import { lastSetup } from "../last_setup.js";
import { LIMITS, cardsOffered, faultOf, nameFault, readField, sizeFault } from "../limits.js";
import { cardQuestionOf, isExample, withUnit } from "../setup.js";
import { useText } from "../text/language.jsx";
import { GIB, count, gib, heldOf, memoryOf, rateRange } from "../units.js";
import { generates, isSpecial } from "./special.js";

const ASKED = { gpu: "", gpus: "1", gpu_used: "", context: "8k", users: "1", words: "" };
const READ = { context: ["length", "want_context"], users: ["whole", "want_users"], gpus: ["whole", "gpus"] };
const BATCH = 12;
// As long as a pause in typing: every question plans hundreds of models.
const REST_MS = 900;
const SHOWN_MISSING = 8;

// Whole families go together, so that each answer knows the best checkpoint of its models; the largest come first, and
// those whose weights in 4 bits are above the memory (room, in GiB) last, so that rows come at once.
function families(models, words, room) {
  const named = words.toLowerCase().split(/\s+/).filter(Boolean);
  const groups = new Map();
  for (const model of models) {
    const text = [model.name, ...model.ids].join(" ").toLowerCase();
    if (!named.every((word) => text.includes(word))) continue;
    const family = model.quantized_from ?? model.name;
    groups.set(family, [...(groups.get(family) ?? []), model.name]);
  }
  const size = new Map(models.map((model) => [model.name, model.parameters ?? 0]));
  const sizeOf = ([name]) => size.get(name) ?? 0;
  const isLarge = (group) => sizeOf(group) / 2 > room * GIB;
  return [...groups].sort((a, b) => isLarge(a) - isLarge(b) || sizeOf(b) - sizeOf(a)).map(([, names]) => names);
}

function batches(groups) {
  const all = [];
  for (const names of groups) {
    if (!all.length || all.at(-1).length + names.length > BATCH) all.push([]);
    all.at(-1).push(...names.slice(0, 60));
  }
  return all;
}

const askedBy = (params) => ({
  ...ASKED,
  ...Object.fromEntries([...(params ?? [])].filter(([name]) => name in ASKED)),
});

const isSize = (gpu) => /^\s*[\d.]+\s*[gm]i?b\s*$/i.test(gpu);

const sameQuestion = (a, b) => JSON.stringify(a) === JSON.stringify(b);

export function ModelsArea({ params, active }) {
  const t = useText();
  const lists = useLists();
  const [asked, setAsked] = useState(() => askedBy(params));
  const carried = useRef(null);
  // A link says all that is asked; from a plan, its card and its wish come along.
  useEffect(() => {
    if (!active) return;
    const setup = lastSetup.current;
    if (params?.size) setAsked((now) => (sameQuestion(now, askedBy(params)) ? now : askedBy(params)));
    else if (setup && setup !== carried.current && !isExample(setup)) setAsked((now) => ({ ...now, ...cardQuestionOf(setup) }));
    carried.current = setup;
  }, [params, active]);
  const [state, setState] = useState({ rows: [], missing: [], done: 0, all: 0, models: 0, error: null, for: null });
  const abort = useRef(null);
  const [context, users, gpus] = Object.entries(READ).map(([name, [kind, limits]]) => readField(kind, asked[name], LIMITS[limits]));
  const nameProblem = nameFault(t, "gpu", asked.gpu) || nameFault(t, "words", asked.words);
  const isRead = Boolean(context && users && gpus) && !nameProblem && !sizeFault(t, "gpu_used", asked.gpu_used);
  const ready = asked.gpu && isRead && lists.models.length > 0 && lists.gpus.length > 0;
  useEffect(() => {
    if (active && isRead) keepAddress(addressOf("models", new URLSearchParams(Object.entries(asked).filter(([, text]) => text))));
  }, [asked, active, isRead]);
  const stop = () => abort.current?.abort();
  const run = async () => {
    const mine = (abort.current = new AbortController());
    const groups = families(lists.models, asked.words, gpus * (parseFloat(memoryOf(lists.gpus, asked.gpu)) || Infinity));
    const order = new Map(groups.flat().map((name, at) => [name, at]));
    const question = { gpu: asked.gpu, gpus, gpu_used: withUnit(asked.gpu_used) || null, context, users, words: asked.words || null, language: t.language };
    // Each row of the last answer for this card stays in sight, greyed, until its model is planned again.
    const isKept = (row) => row.asked.gpu === asked.gpu && row.asked.gpus === asked.gpus && order.has(row.name);
    const begun = { missing: [], done: 0, all: order.size, models: groups.length, error: null, for: asked };
    setState((now) => ({ ...begun, rows: now.rows.filter(isKept) }));
    try {
      await inLanes(batches(groups), async (names) => {
        const answer = await engine.call("card", { ...question, names }, mine.signal);
        if (mine.signal.aborted) return;
        const planned = answer.models.map((row) => ({ ...row, asked }));
        setState((now) => ({
          ...now,
          rows: [...now.rows.filter(({ name }) => !names.includes(name)), ...planned].sort(
            (a, b) => order.get(a.name) - order.get(b.name),
          ),
          missing: [...now.missing, ...answer.too_large].sort((a, b) => a.short_bytes - b.short_bytes),
          done: now.done + names.length,
        }));
      });
    } catch (error) {
      if (error.name === "AbortError") return;
      mine.abort();
      setState((now) => ({ ...now, rows: [], missing: [], error, all: now.done }));
    }
    answered.current = key;
  };
  // The answer follows the fields while the area is in sight; one that was left half done is begun again.
  const key = ready && active ? JSON.stringify([asked, t.language]) : "";
  const answered = useRef("");
  useEffect(() => {
    if (!key || key === answered.current) return undefined;
    const timer = setTimeout(run, REST_MS);
    return () => {
      clearTimeout(timer);
      stop();
    };
  }, [key]);
  const stopped = () => {
    stop();
    answered.current = key;
    setState((now) => ({ ...now, all: now.done }));
  };
  const rows = isRead ? state.rows : [];
  const fitting = rows.filter((row) => !isSpecial(row));
  const special = rows.filter(isSpecial);
  const busy = ready && state.done < state.all;
  const offered = cardsOffered(state.error);
  const field = (name, label) => (
    <TextField
      label={t(label)}
      value={asked[name]}
      problem={READ[name] ? faultOf(t, READ[name][0], asked[name], LIMITS[READ[name][1]]) : nameFault(t, "words", asked[name])}
      onInput={(text) => setAsked({ ...asked, [name]: text })}
    />
  );
  return (
    <div class="models-area">
      <form class="panel" aria-label={t("models.title")} onSubmit={(event) => event.preventDefault()}>
        <h1>{t("models.title")}</h1>
        <p class="soft">{t("models.what")}</p>
        <ErrorNote error={lists.error} />
        <div class="grid-fields">
          <Picker
            label={t("gpu")}
            value={asked.gpu}
            options={gpuOptions(lists.gpus)}
            placeholder="rtx4090, 24GiB"
            problem={nameFault(t, "gpu", asked.gpu) || problemWith(state.error, `'${asked.gpu}'`) || (offered && state.error.message)}
            onPick={(gpu) => setAsked({ ...asked, gpu })}
          />
          {field("gpus", "gpus")}
          <SizeField
            name="gpu_used"
            value={asked.gpu_used}
            placeholder="0, 2GiB"
            problem={problemWith(state.error, "--gpu-used")}
            onChange={(gpu_used) => setAsked({ ...asked, gpu_used: gpu_used ?? "" })}
          />
          {field("context", "models.context")}
          {field("users", "models.users")}
          {field("words", "models.filter")}
        </div>
        {busy && (
          <div class="row">
            <progress max={state.all} value={state.done} aria-label={t("models.title")} />
            <span class="soft" role="status">
              {t("models.progress", { done: state.done, all: state.all })}
            </span>
            <Button kind="small" onClick={stopped}>{t("models.stop")}</Button>
          </div>
        )}
        <p class="hint">{t("read.length")}</p>
        <ErrorNote error={state.error} />
        {offered && (
          <Button kind="small" onClick={() => setAsked({ ...asked, gpu: offered.gpu, gpus: String(offered.gpus) })}>{t("gpu.take", offered)}</Button>
        )}
        {!asked.gpu && <p class="note">{t("models.choose")}</p>}
        {!busy && state.for === asked && state.rows.length > 0 && (
          <p role="status">{t("models.count", { fit: state.rows.length, all: state.models })}</p>
        )}
      </form>
      {isSize(asked.gpu) && <p class="note">{t("models.no_speed")}</p>}
      {fitting.length > 0 && <Fitting rows={fitting} asked={asked} label={t("models.title")} />}
      {special.length > 0 && (
        <section>
          <h2>{t("models.special")}</h2>
          <Fitting rows={special} asked={asked} label={t("models.special")} />
        </section>
      )}
      {rows.some((row) => row.weights_assumed) && <p class="hint">{t("models.assumed")}</p>}
      {!busy && state.for === asked && !state.error && !state.rows.length && <p class="note">{t(state.models ? "models.none" : "models.no_name")}</p>}
      {!busy && state.for === asked && state.missing.length > 0 && <Missing rows={state.missing.slice(0, SHOWN_MISSING)} asked={state.for} />}
    </div>
  );
}

// Who looks for `coder` finds Qwen2.5-Coder-7B by that name, not as the model that is built alike.
const shownName = ({ name, ids }, { words }) =>
  !ids[0] || words.toLowerCase().split(/\s+/).every((word) => name.includes(word)) ? name : ids[0].split("/").pop();

const planOf = (row, { gpu, gpus, gpu_used, context, users }) => {
  const length = readField("length", context, LIMITS.want_context);
  const wish = { want_context: length, want_users: users.trim() };
  const params = new URLSearchParams({ model: row.ids[0] ?? row.name, gpu, ...wish });
  params.set("gpus", gpus);
  if (gpu_used) params.set("gpu_used", gpu_used);
  const words = row.command?.slice(3) ?? [`--max-model-len`, String(length)];
  const found = words.filter((word) => word.startsWith("--")).map((word) => word.slice(2).replaceAll("-", "_"));
  if (found.length) params.set("found", found.join());
  words.forEach((word, at) => {
    if (!word.startsWith("--")) return;
    const value = words[at + 1];
    params.set(word.slice(2).replaceAll("-", "_"), value === undefined || value.startsWith("--") ? "true" : value);
  });
  return addressOf("plan", params);
};

function Fitting({ rows, asked, label }) {
  const t = useText();
  const users = Number(rows[0].asked.users);
  const rate = (name, title) =>
    figureColumn(name, title, (row) => (generates(row) ? row[name]?.estimate : null), (_, row) => rateRange(row[name]));
  const losses = (row) => row.gives_up.map((loss) => loss.split(/[:：]/)[0]).join(t.language === "zh" ? "；" : ", ");
  const givesUp = (row) => row.gives_up.length > 0 && t("models.gives_up", { losses: losses(row) });
  const holds = (requests, row) =>
    requests < row.max_concurrency ? (
      count(requests)
    ) : (
      <span class="aside">{heldOf(t, requests, row.first_start_concurrency, Number(row.asked.users))}</span>
    );
  const columns = [
    nameColumn("name", t("models.model"), (row) => (
      <>
        <a href={planOf(row, row.asked)}>{shownName(row, row.asked)}</a> {row.asked.words && <span class="soft gives-up">{row.ids[0]}</span>} {row.verdict !== "fits" && <VerdictBadge verdict={row.verdict} />}
        {[row.reason, givesUp(row)].map((text) => text && <span key={text} class="soft gives-up">{text}</span>)}
      </>
    )),
    figureColumn("parameters", t("models.parameters"), (row) => row.parameters, (number) => `${(number / 1e9).toFixed(1)}B`),
    figureColumn("weights", t(Number(rows[0].asked.gpus) > 1 ? "models.weights_each" : "models.weights"), (row) => row.weights_bytes, (bytes, row) => `${row.weights_assumed ? "~" : ""}${gib(bytes, 1)}`),
    figureColumn("users", t("models.holds"), (row) => row.runs_at_once || null, holds),
    figureColumn("context", t("models.longest"), (row) => row.longest_len, count),
    rate("tokens_per_s", t("models.speed")),
    ...(users > 1 ? [rate("all_users_tokens_per_s", t("models.speed_all", { users }))] : []),
  ];
  const rowClass = (row) => (row.asked === asked ? undefined : "soft");
  return <SortableTable label={label} columns={columns} rows={rows} rowKey={(row) => row.name} rowClass={rowClass} />;
}

function Missing({ rows, asked }) {
  const t = useText();
  return (
    <section aria-label={t("models.next")}>
      <h2>{t("models.next")}</h2>
      <ul>
        {rows.map((row) => (
          <li key={row.name}>
            <a href={planOf(row, asked)}>{shownName(row, asked)}</a> <span class="soft">{t(Number(asked.gpus) > 1 ? "models.lacks_each" : "models.lacks", { gib: gib(row.short_bytes) })}</span>
          </li>
        ))}
      </ul>
    </section>
  );
}
