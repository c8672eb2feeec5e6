import { useEffect, useState } from "preact/hooks";
import { addressOf, keepStep } from "../address.js";
import { engine, inLanes } from "../engine.js";
import { ErrorNote, NumberField, Status, VerdictBadge, reveal, useFold } from "../parts/controls.jsx";
import { SortableTable, figureColumn, nameColumn, useColumn } from "../parts/table.jsx";
import { LIMITS, faultIn } from "../limits.js";
import { sizeRequestOf, toParams, withFound, withGpus } from "../setup.js";
import { useText } from "../text/language.jsx";
import { readCommand } from "./source.jsx";
import { count, heldOf, rateRange } from "../units.js";

// Which GPUs hold the model, and how many of each: a search, so it runs when it is opened.
export function Holders({ asked, cards, setup, plan, onChange }) {
  const t = useText();
  const fold = useFold(asked);
  const [state, setState] = useState({ rows: [], done: 0, error: null });
  // The length that vLLM would take here, so that the table answers the same question as the plan above it; without one, none.
  const request = { ...sizeRequestOf(setup, plan), language: t.language };
  const { context, concurrency } = request;
  const key = JSON.stringify(request);
  const budget = setup.budget ?? "";
  const most = Number(budget) || Infinity;
  // A card that holds the model only with another checkpoint has that row alone; what is above the budget has none.
  const holds = new Set(state.rows.map((row) => row.count > 0 && row.gpu));
  const isShown = (row) => (row.count ? most === Infinity || (row.usd_per_hour ?? Infinity) <= most : !holds.has(row.gpu));
  const use = async (row) => {
    try {
      const { flags } = await readCommand(row.command);
      const other = row.model === plan?.model ? {} : { model: row.model, config: null, checkpoint_bytes: null };
      keepStep();
      onChange(withGpus(withFound(setup, { gpu: row.gpu, gpus: row.count, gpu_memory: null, flags, ...other }), row.count));
      reveal(".sides");
    } catch (error) {
      setState((now) => ({ ...now, error }));
    }
  };
  useEffect(() => {
    if (!fold.open || !context || faultIn(t, { ...setup, gpu: setup.gpu || "any" })) return undefined;
    const abort = new AbortController();
    const timer = setTimeout(async () => {
      setState({ rows: [], done: 0, error: null });
      try {
        await inLanes(cards, async (card) => {
          const { rows } = await engine.call("size", { ...JSON.parse(key), cards: [card] }, abort.signal);
          if (!abort.signal.aborted)
            setState((now) => ({ ...now, rows: [...now.rows, ...rows].sort(cheapestFirst), done: now.done + 1 }));
        });
      } catch (error) {
        if (error.name !== "AbortError") setState({ rows: [], done: 0, error });
      }
    }, 300);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [fold.open, key, cards]);
  return (
    <details {...fold} class={`holders ${fold.class}`}>
      <summary>{t("holders.title")}</summary>
      {context && <p class="soft">{t(concurrency > 1 ? "holders.for_users" : "holders.for", { tokens: count(context), users: count(concurrency ?? 1) })}</p>}
      <p class="hint"><a href={addressOf("simulate", toParams(setup))}>{t("holders.rate")}</a></p>
      <ErrorNote error={state.error} />
      {state.done < cards.length && !state.error && <Status>{t("fleet.busy", { done: state.done, all: cards.length })}</Status>}
      <div class="grid-fields">{state.rows.length > 0 && <NumberField label={t("holders.budget")} value={budget} isOptional limits={LIMITS.budget} placeholder={t("holders.no_limit")} onChange={(usd) => onChange({ ...setup, budget: usd === "" ? null : String(usd) })} />}</div>
      {context && state.rows.length > 0 && <HolderTable rows={state.rows.filter(isShown)} users={concurrency ?? 1} model={plan?.model} onUse={use} />}
    </details>
  );
}

// Cards without a price come after those with one, misfits last.
const cost = (row) => (row.count > 0 ? (row.usd_per_hour ?? 1e9) : 2e9);
const cheapestFirst = (a, b) => cost(a) - cost(b);

// No line ends inside a flag, which has hyphens of its own.
const flagsOf = (command) =>
  command.slice(3).map((word) => [" ", <span key={word} class="unbroken">{word}</span>]);

function HolderTable({ rows, users, model, onUse }) {
  const t = useText();
  const speed = (name, title) => figureColumn(name, title, (row) => row[name]?.estimate, (_, row) => rateRange(row[name]));
  const columns = [
    nameColumn("gpu", t("gpu"), (row) => (
      <>
        {row.gpu} {row.verdict !== "fits" && <VerdictBadge verdict={row.verdict} />}
        {row.count > 0 && model && row.model !== model && <span class="soft gives-up">{row.model}</span>}
        {row.gives_up?.length > 0 && (
          <span class="soft gives-up">{t("holders.gives_up", { losses: row.gives_up.join(t.language === "zh" ? "，" : ", ") })}</span>
        )}
        {[row.reason, ...(row.notes ?? [])].map((text) => text && <span key={text} class="soft gives-up">{text}</span>)}
        {row.command && <code class="soft gives-up">{flagsOf(row.command)}</code>}
      </>
    )),
    figureColumn("count", t("holders.count"), (row) => row.count || null, (number) => `${number} ×`),
    figureColumn("holds", t("holders.concurrency"), (row) => (row.count ? row.max_concurrency : null), (requests, row) =>
      <span class="aside">{heldOf(t, requests, row.first_start_concurrency, users)}</span>,
    ),
    figureColumn("price", t("holders.price"), (row) => row.usd_per_hour, (usd) => `$${usd.toFixed(2)}`),
    figureColumn("per_usd", t("holders.per_usd"), (row) => row.held_per_usd, (held) => held.toFixed(1)),
    speed("tokens_per_s", t("holders.alone")),
    ...(users > 1 ? [speed("each_user_tokens_per_s", t("holders.each", { users: count(users) }))] : []),
    useColumn(t("holders.use"), (row) => row.count > 0, onUse),
  ];
  return (
    <>
      <SortableTable label={t("holders.title")} columns={columns} rows={rows} rowKey={(row) => row.gpu + row.model + row.count} />
      <p class="hint">{t("holders.note_alone")} {users > 1 && t("holders.note_each", { users: count(users) })}</p>
    </>
  );
}
