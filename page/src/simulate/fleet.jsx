import { useEffect, useRef, useState } from "preact/hooks";
import { engine } from "../engine.js";
import { LIMITS, LONGEST, fieldName, readField } from "../limits.js";
import { ErrorNote, NumberField, TextField } from "../parts/controls.jsx";
import { SortableTable, nameColumn, useColumn } from "../parts/table.jsx";
import { modelRequestOf } from "../setup.js";
import { useText } from "../text/language.jsx";

const GOALS = ["first_token_s", "time_per_token_ms", "budget"];
// How the model is split and how long its requests may be is what the count chooses.
const CHOSEN = ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "max_model_len", "gpu_memory_utilization"];

// How many GPUs of each kind serve the load, and their price: a replay for each card, so it runs when its button is pressed.
export function Fleet({ load, asked, change, setup, isReady, onUse }) {
  const t = useText();
  const { mix, trace } = load;
  const flags = Object.fromEntries(Object.entries(setup.flags).filter(([name]) => !CHOSEN.includes(name)));
  const request = {
    ...modelRequestOf({ ...setup, flags }),
    mix,
    trace,
    first_token_s: Number(asked.first_token_s) || null,
    time_per_token_ms: Number(asked.time_per_token_ms) || null,
    budget: Number(asked.budget) || null,
    language: t.language,
  };
  const cards = asked.cards.split(",").map((name) => name.trim()).filter(Boolean);
  const key = JSON.stringify([request, cards]);
  const [state, setState] = useState({ key: "", rows: [], busy: false, error: null });
  const newest = useRef("");
  // A link to a count that was made brings its answer.
  useEffect(() => void (asked.counted === "yes" && isRead && run()), []);
  const run = async () => {
    newest.current = key;
    change("counted")("yes");
    const put = (change) => newest.current === key && setState((now) => ({ ...now, ...change(now) }));
    setState({ key, rows: [], busy: true, error: null });
    try {
      for (const card of cards) {
        if (newest.current !== key) return;
        const { rows, words } = await engine.call("size", { ...request, cards: [card] });
        const at = Math.max(rows.findIndex(({ holds }) => holds), 0);
        const row = { ...rows[at], reason: words.reasons[at], smaller: words.smaller };
        put((now) => ({ rows: [...now.rows, row].sort(cheapestFirst) }));
      }
      put(() => ({ busy: false }));
    } catch (error) {
      put(() => ({ busy: false, error, rows: [] }));
    }
  };
  const { rows, busy, error } = state.key === key ? state : { rows: [] };
  const field = (name) => (
    <NumberField isOptional label={t(`fleet.${name}`)} value={asked[name]} limits={LIMITS[name]} placeholder={t("holders.no_limit")} onChange={change(name)} />
  );
  const isRead = isReady && GOALS.every((name) => asked[name] === "" || readField("number", asked[name], LIMITS[name]) !== null);
  const isLong = cards.some((name) => name.length > LONGEST.gpu);
  return (
    <details class="fold" open={asked.counted === "yes"}>
      <summary>{t("fleet.title")}</summary>
      <div class="grid-fields">{GOALS.map(field)}</div>
      <TextField label={t("fleet.cards")} value={asked.cards} problem={isLong ? t("unread.long", { name: fieldName(t, "gpu"), most: LONGEST.gpu }) : ""} onInput={change("cards")} />
      <button type="button" class="button" disabled={busy || !isRead || isLong || !cards.length || !(mix || trace)} onClick={run}>
        {busy ? t("fleet.busy", { done: rows.length, all: cards.length }) : t("fleet.go")}
      </button>
      <ErrorNote error={error} />
      {rows.length > 0 && <FleetTable rows={rows} byUsers={Boolean(mix?.users)} onUse={onUse} />}
    </details>
  );
}

const serversWords = (t, { replicas, gpus }) => {
  const [servers, all] = [replicas, gpus].map(({ high, middle }) => high ?? middle);
  return t("fleet.servers", { servers, each: all / servers });
};

const cost = ({ holds, usd_per_hour: usd }) => (holds ? (usd?.high ?? usd?.middle ?? 1e9) : 2e9);
const cheapestFirst = (a, b) => cost(a) - cost(b);

function FleetTable({ rows, byUsers, onUse }) {
  const t = useText();
  const band = (values, write) => {
    if (values?.middle == null) return "–";
    const { low, middle, high } = values;
    const range = <span class="soft gives-up">{`${write(low ?? middle)} – ${high == null ? "?" : write(high)}`}</span>;
    return low === high ? write(high) : <>{`${high == null ? "≥ " : ""}${write(high ?? middle)}`} {range}</>;
  };
  const figure = (name, digits, scale = 1) => ({
    name,
    title: t(`fleet.${name}`),
    by: (row) => (row.holds ? row[name]?.high ?? row[name]?.middle ?? row[name] : null),
    cell: (row) =>
      !row.holds ? "–" : typeof row[name] === "number" ? (scale * row[name]).toFixed(digits) : band(row[name], (value) => value.toFixed(digits)),
  });
  const columns = [
    nameColumn("gpu", t("gpu"), (row) => (
      <>
        {row.gpu} {!row.holds && <span class="badge small bad">{t("fleet.no")}</span>}
        {!row.within_budget && <span class="badge small fair">{t("fleet.over")}</span>}
        {row.holds && <span class="soft gives-up">{serversWords(t, row)}</span>}
        {row.basis === "data_sheet" && <span class="soft gives-up">{t("fleet.band", row.step_time_band)}</span>}
        {row.reason && <span class="soft gives-up">{row.reason}</span>}
        {byUsers && row.holds && <span class="soft gives-up">{t("fleet.asks", { rate: row.requests_per_s.toPrecision(2), at_once: Math.round(row.requests_at_once) })}</span>}
      </>
    )),
    figure("gpus", 0),
    figure("usd_per_hour", 2),
    figure("first_token_p99_s", 2),
    ...(byUsers
      ? [figure("users_per_usd", 1), figure("tokens_per_s_each", 0), figure("answer_p50_s", 0)]
      : [figure("time_per_token_p99_s", 0, 1000), figure("usd_per_million_tokens", 2)]),
    useColumn(t("holders.use"), (row) => row.holds, onUse),
  ];
  return (
    <>
      <SortableTable label={t("fleet.title")} columns={columns} rows={rows} rowKey={(row) => row.gpu} />
      <p class="soft">{t("fleet.notes")} {byUsers && t("fleet.note_each")}</p>
      {rows[0].smaller && <p class="soft">{rows[0].smaller}</p>}
    </>
  );
}
