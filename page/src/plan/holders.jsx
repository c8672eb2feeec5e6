import { useEffect, useState } from "preact/hooks";
import { engine } from "../engine.js";
import { ErrorNote } from "../parts/controls.jsx";
import { sizeRequestOf, withFound } from "../setup.js";
import { useText } from "../text/language.jsx";
import { VERDICT_CLASS } from "./result.jsx";
import { readCommand } from "./source.jsx";
import { count, gib, rateRange } from "../units.js";

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
      <ErrorNote error={state.error} />
      {!state.rows && !state.error && (
        <p class="soft" role="status">
          {t("holders.busy")}
        </p>
      )}
      {state.rows && <HolderTable rows={state.rows} onUse={use} />}
    </details>
  );
}

function HolderTable({ rows, onUse }) {
  const t = useText();
  return (
    <div class="scroll-x" tabIndex={0} role="region" aria-label={t("holders.title")}>
      <table>
        <thead>
          <tr>
            <th>{t("gpu")}</th>
            <th class="figure">{t("holders.count")}</th>
            <th>{t("holders.verdict")}</th>
            <th class="figure">{t("holders.concurrency")}</th>
            <th class="figure">{t("holders.price")}</th>
            <th class="figure">{t("models.speed")}</th>
            <th>
              <span class="off-screen">{t("holders.use")}</span>
            </th>
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr key={row.gpu + row.model}>
              <td>
                {row.gpu} <span class="soft">{gib(row.total_bytes, 0)}</span>
              </td>
              <td class="figure">{row.count ? `${row.count} ×` : "–"}</td>
              <td>
                <span class={`badge small ${VERDICT_CLASS[row.verdict]}`}>{t(`badge.${row.verdict}`)}</span>
                {row.gives_up?.length > 0 && (
                  <span class="soft gives-up">{t("holders.gives_up", { losses: row.gives_up.join(", ") })}</span>
                )}
              </td>
              <td class="figure">{row.count ? row.max_concurrency?.toFixed(1) : ""}</td>
              <td class="figure">{row.usd_per_hour == null ? "–" : `$${row.usd_per_hour.toFixed(2)}`}</td>
              <td class="figure">{rateRange(row.tokens_per_s)}</td>
              <td>
                {row.count ? (
                  <button
                    type="button"
                    class="button small"
                    onClick={() => onUse(row)}
                    aria-label={`${t("holders.use")}: ${row.gpu}`}
                  >
                    {t("holders.use")}
                  </button>
                ) : null}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
