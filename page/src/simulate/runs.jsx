import { useId, useMemo, useState } from "preact/hooks";
import { useText } from "../text/language.jsx";
import { count, percent, seconds } from "../units.js";
import { Chart, joined } from "./chart.jsx";

// One run, or two on the same axes: totals, a moment to look at, and the curves.
export function Runs({ runs }) {
  const t = useText();
  const [at, setAt] = useState(null);
  const inSeconds = runs.every(({ answer }) => answer.timeline.time_s);
  const xLabel = t(inSeconds ? "simulate.seconds" : "simulate.steps");
  const xs = ({ answer }) => answer.timeline[inSeconds ? "time_s" : "step"];
  const table = (names) => joined(runs.map((run) => [xs(run), ...names.map((name) => run.answer.timeline[name])]));
  const tables = useMemo(
    () => ({
      pool: table(["blocks_in_use"]),
      queue: table(["running", "waiting"]),
      preemptions: table(["preemptions"]),
    }),
    [runs],
  );
  const series = (rows) =>
    runs.flatMap((_, index) =>
      rows.map((row) => ({
        ...row,
        label: runs.length > 1 ? `${row.label} ${"AB"[index]}` : row.label,
        dashed: index === 1,
        filled: row.filled && index === 0 && runs.length === 1,
      })),
    );
  const most = Math.max(...runs.map(({ answer }) => answer.usable_blocks ?? answer.peak_blocks));
  return (
    <>
      <Totals runs={runs} />
      {runs.length > 1 && <p class="soft">{t("simulate.dashed")}</p>}
      <Scrub length={tables.pool[0].length} at={at} setAt={setAt} tables={tables} xLabel={xLabel} />
      <Chart
        title={t("simulate.blocks_in_use")}
        xLabel={xLabel}
        data={tables.pool}
        top={most}
        cursor={at}
        series={series([{ label: t("simulate.blocks_in_use"), ink: "--part-kv", filled: true }])}
      />
      <Chart
        title={t("simulate.queue")}
        xLabel={xLabel}
        data={tables.queue}
        cursor={at}
        note={
          <>
            <span class="key part-weights" /> {t("simulate.running")} <span class="key part-activation" />{" "}
            {t("simulate.waiting")}
          </>
        }
        series={series([
          { label: t("simulate.running"), ink: "--part-weights" },
          { label: t("simulate.waiting"), ink: "--part-activation" },
        ])}
      />
      <Chart
        title={t("simulate.preemptions")}
        xLabel={xLabel}
        data={tables.preemptions}
        cursor={at}
        series={series([{ label: t("simulate.preemptions"), ink: "--part-outside", bars: runs.length === 1 }])}
      />
    </>
  );
}

function Scrub({ length, at, setAt, tables, xLabel }) {
  const t = useText();
  const id = useId();
  const shown = at ?? length - 1;
  const runs = tables.pool.length - 1;
  // Two runs have points at different moments: what holds is the newest before this one, until the run has ended.
  const newest = (column) =>
    column.findLastIndex((value) => value != null) < shown
      ? null
      : column[column.findLastIndex((value, index) => index <= shown && value != null)];
  const values = (table, place, width) =>
    Array.from({ length: runs }, (_, run) => newest(table[1 + run * width + place]) ?? "–").join(" / ");
  const x = tables.pool[0][shown];
  return (
    <div class="scrub">
      <label for={id}>{t("simulate.scrub")}</label>
      <input
        id={id}
        type="range"
        min="0"
        max={length - 1}
        value={shown}
        onInput={(event) => setAt(Number(event.target.value))}
        aria-valuetext={`${xLabel} ${x}`}
      />
      <output for={id} class="mono">
        {[
          `${xLabel} ${typeof x === "number" ? Number(x.toFixed(1)) : x}`,
          `${t("simulate.blocks_in_use")} ${values(tables.pool, 0, 1)}`,
          `${t("simulate.running")} ${values(tables.queue, 0, 2)}`,
          `${t("simulate.waiting")} ${values(tables.queue, 1, 2)}`,
        ].join(" · ")}
      </output>
    </div>
  );
}

function Totals({ runs }) {
  const t = useText();
  const rows = [
    ["simulate.finished", ({ answer }) => `${count(answer.finished)} / ${count(answer.requests ?? answer.finished)}`],
    ["simulate.preemptions", ({ answer }) => count(answer.preemptions)],
    ["simulate.recomputed", ({ answer }) => count(answer.recomputed_tokens)],
    [
      "simulate.peak",
      ({ answer }) =>
        `${count(answer.peak_blocks)}${answer.usable_blocks ? ` (${percent(answer.peak_blocks / answer.usable_blocks)})` : ""}`,
    ],
    ["simulate.peak_running", ({ answer }) => count(answer.peak_running)],
    ["simulate.rejected", ({ answer }) => count(answer.rejected)],
    [
      "simulate.first_token",
      ({ answer }) =>
        answer.seconds
          ? seconds(answer.seconds.first_token_s.p99)
          : t("simulate.n_steps", { count: count(answer.first_token?.p99_steps ?? answer.queue.p99_steps) }),
    ],
    [
      "simulate.throughput",
      ({ answer }) => (answer.seconds ? `${count(answer.seconds.output_tokens_per_s)} tok/s` : "–"),
    ],
  ];
  return (
    <div class="scroll-x" tabIndex={0} role="region" aria-label={t("simulate.totals")}>
      <table class="totals">
        <thead>
          <tr>
            <td />
            <th class="figure">
              {runs.length > 1 ? "A" : ""} <span class="soft">{runs[0].label}</span>
            </th>
            {runs[1] && (
              <th class="figure">
                B <span class="soft">{runs[1].label}</span>
              </th>
            )}
          </tr>
        </thead>
        <tbody>
          {rows.map(([key, cell]) => (
            <tr key={key}>
              <th scope="row">{t(key)}</th>
              {runs.map((run, index) => (
                <td key={index} class="figure">
                  {cell(run)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
