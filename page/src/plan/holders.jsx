import { useEffect, useState } from "preact/hooks";
import { addressOf } from "../address.js";
import { engine } from "../engine.js";
import { ErrorNote, VerdictBadge } from "../parts/controls.jsx";
import { SortableTable, figureColumn, nameColumn, useColumn } from "../parts/table.jsx";
import { sizeRequestOf, toParams, withFound } from "../setup.js";
import { useText } from "../text/language.jsx";
import { readCommand } from "./source.jsx";
import { count, gib, heldOf, rateRange } from "../units.js";

// Which GPUs hold the model, and how many of each: a search, so it runs when it is opened.
export function Holders({ setup, plan, onChange }) {
  const t = useText();
  const [open, setOpen] = useState(false);
  const [state, setState] = useState({ rows: null, error: null });
  // The length that vLLM would take here, so that the table answers the same question as the plan above it.
  const request = { ...sizeRequestOf(setup, plan), language: t.language };
  const { context, concurrency } = request;
  const key = JSON.stringify(request);
  const use = async (row) => {
    try {
      const { flags } = await readCommand(row.command);
      const other = row.model === plan?.model ? {} : { model: row.model, config: null, checkpoint_bytes: null };
      onChange(withFound(setup, { gpu: row.gpu, gpus: row.count, gpu_memory: null, flags, ...other }));
    } catch (error) {
      setState((now) => ({ ...now, error }));
    }
  };
  useEffect(() => {
    if (!open) return undefined;
    const abort = new AbortController();
    const timer = setTimeout(() => {
      setState({ rows: null, error: null });
      engine.call("size", JSON.parse(key), abort.signal).then(
        ({ rows }) => setState({ rows, error: null }),
        (error) => error.name !== "AbortError" && setState({ rows: null, error }),
      );
    }, 300);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [open, key]);
  return (
    <details class="holders fold" open={open} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>{t("holders.title")}</summary>
      {context && <p class="soft">{t(concurrency > 1 ? "holders.for_users" : "holders.for", { tokens: count(context), users: count(concurrency ?? 1) })}</p>}
      <p class="hint">
        <a href={addressOf("simulate", toParams(setup))}>{t("holders.rate")}</a>
      </p>
      <ErrorNote error={state.error} />
      {!state.rows && !state.error && (
        <p class="soft" role="status">
          {t("holders.busy")}
        </p>
      )}
      {state.rows && <HolderTable rows={state.rows} users={concurrency ?? 1} onUse={use} />}
    </details>
  );
}

function HolderTable({ rows, users, onUse }) {
  const t = useText();
  const columns = [
    nameColumn("gpu", t("gpu"), (row) => (
      <>
        {row.gpu} <span class="soft">{gib(row.total_bytes, 0)}</span>
      </>
    )),
    figureColumn("count", t("holders.count"), (row) => row.count || null, (number) => `${number} ×`),
    {
      name: "verdict",
      title: t("holders.verdict"),
      isText: true,
      cell: (row) => (
        <>
          <VerdictBadge verdict={row.verdict} />
          {row.gives_up?.length > 0 && (
            <span class="soft gives-up">{t("holders.gives_up", { losses: row.gives_up.join(", ") })}</span>
          )}
        </>
      ),
    },
    figureColumn("holds", t("holders.concurrency"), (row) => (row.count ? row.max_concurrency : null), (requests, row) =>
      heldOf(t, requests, row.first_start_concurrency, users),
    ),
    figureColumn("price", t("holders.price"), (row) => row.usd_per_hour, (usd) => `$${usd.toFixed(2)}`),
    figureColumn("speed", t("models.speed"), (row) => row.tokens_per_s?.estimate, (_, row) => rateRange(row.tokens_per_s)),
    useColumn(t("holders.use"), (row) => row.count > 0, onUse),
  ];
  return <SortableTable label={t("holders.title")} columns={columns} rows={rows} rowKey={(row) => row.gpu + row.model} />;
}
