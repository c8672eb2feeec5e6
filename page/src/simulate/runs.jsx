import { useMemo, useState } from "preact/hooks";
import { Notes } from "../parts/controls.jsx";
import { useText } from "../text/language.jsx";
import { count } from "../units.js";
import { Chart, joined } from "./chart.jsx";
import { toneOf } from "./tone.js";

// One run, or two on the same axes: the verdict, what belongs to it, the curves, and the figures.
export function Runs({ runs, children }) {
  const t = useText();
  return (
    <>
      {runs.map((run, index) => (
        <header key={index} class={`verdict ${toneOf(run.answer)}`}>
          <div class="glance">
            <h2 class="badge large">{t(`load.${run.answer.verdict}`)}</h2>
            <p>
              {runs.length > 1 && <strong>{"AB"[index]} </strong>}
              {run.label}
            </p>
          </div>
          {/* The badge is what its sentence begins with. */}
          <p class="headline">{run.answer.words.headline.replace(/^[^:：]*[:：]\s*/, "")}</p>
          <Notes notes={run.answer.words.notes} />
        </header>
      ))}
      {children}
      {runs.length > 0 && <Curves runs={runs} />}
      {runs.length > 0 && <Totals runs={runs} />}
    </>
  );
}

// What holds at the moment under the pointer, and the curves of the pool and the queue.
function Curves({ runs }) {
  const t = useText();
  const [at, setAt] = useState(null);
  const inSeconds = runs.every(({ answer }) => answer.timeline.time_s);
  const xLabel = t(inSeconds ? "simulate.seconds" : "simulate.steps");
  const xs = ({ answer }) => answer.timeline[inSeconds ? "time_s" : "step"];
  const table = (names) => joined(runs.map((run) => [xs(run), ...names.map((name) => run.answer.timeline[name])]));
  const ceiling = ({ answer }) => xs({ answer }).map(() => answer.usable_blocks);
  const tables = useMemo(
    () => ({
      pool: joined(runs.map((run) => [xs(run), run.answer.timeline.blocks_in_use, ceiling(run)])),
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
        dashed: row.dashed || index === 1,
        filled: row.filled && index === 0 && runs.length === 1,
      })),
    );
  const most = Math.max(...runs.map(({ answer }) => answer.usable_blocks ?? answer.peak_blocks));
  const keys = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!step) return;
    event.preventDefault();
    const end = tables.pool[0].length - 1;
    const jump = Number.isFinite(step) ? step * Math.max(1, Math.round(end / 100)) : step;
    setAt((now) => Math.min(Math.max((now ?? end) + jump, 0), end));
  };
  const shared = { xLabel, cursor: at, onMoment: setAt };
  return (
    <>
      {runs.length > 1 && <p class="soft">{t("simulate.dashed")}</p>}
      {/* The arrow keys move the moment, as the pointer does. */}
      <div class="charts" tabIndex={0} role="group" aria-label={t("simulate.moment")} onKeyDown={keys}>
        <Moment at={at} tables={tables} xLabel={xLabel} runs={runs} />
        <Chart
          {...shared}
          title={t("simulate.blocks_in_use")}
          data={tables.pool}
          top={most}
          note={
            <>
              <span class="key part-outside" /> {t("simulate.ceiling", { count: count(most) })}
            </>
          }
          series={series([
            { label: t("simulate.blocks_in_use"), ink: "--part-kv", filled: true },
            { label: t("simulate.pool"), ink: "--part-outside", dashed: true },
          ])}
        />
        <Chart
          {...shared}
          title={t("simulate.queue")}
          data={tables.queue}
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
        {runs.some(({ answer }) => answer.preemptions > 0) && (
          <Chart
            {...shared}
            title={t("simulate.preemptions")}
            data={tables.preemptions}
            series={series([{ label: t("simulate.preemptions"), ink: "--part-outside", bars: runs.length === 1 }])}
          />
        )}
      </div>
    </>
  );
}

function Moment({ at, tables, xLabel, runs }) {
  const t = useText();
  if (at === null) return <p class="moment soft">{t("simulate.point")}</p>;
  const shown = Math.min(at, tables.pool[0].length - 1);
  // Two runs have points at different moments: what holds is the newest before this one, until the run has ended.
  const newest = (column) =>
    column.findLastIndex((value) => value != null) < shown
      ? null
      : column[column.findLastIndex((value, index) => index <= shown && value != null)];
  const values = (table, place) =>
    runs
      .map((_, run) => newest(table[1 + run * 2 + place]))
      .map((value) => (value == null ? "–" : count(value)))
      .join(" / ");
  const x = tables.pool[0][shown];
  return (
    <output class="moment mono">
      {[
        `${xLabel} ${typeof x === "number" ? Number(x.toFixed(1)) : x}`,
        `${t("simulate.blocks_in_use")} ${values(tables.pool, 0)}`,
        `${t("simulate.running")} ${values(tables.queue, 0)}`,
        `${t("simulate.waiting")} ${values(tables.queue, 1)}`,
      ].join(" · ")}
    </output>
  );
}

// The figures of the command line, in its own words.
function Totals({ runs }) {
  const t = useText();
  const names = runs[0].answer.words.figures.map(({ name }) => name);
  const text = ({ answer }, name) => answer.words.figures.find((row) => row.name === name)?.text ?? "–";
  return (
    <div class="scroll-x" tabIndex={0} role="region" aria-label={t("simulate.totals")}>
      <table class="totals">
        {runs.length > 1 && (
          <thead>
            <tr>
              <td />
              <th>A</th>
              <th>B</th>
            </tr>
          </thead>
        )}
        <tbody>
          {names.map((name) => (
            <tr key={name}>
              <th scope="row">{name}</th>
              {runs.map((run, index) => (
                <td key={index}>{text(run, name)}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
