import { useText } from "../text/language.jsx";
import { commandLine, count, gib } from "../units.js";

const SHOWN = {
  num_blocks: count,
  pool_tokens: count,
  max_concurrency: (value) => value.toFixed(2),
  memory_used_bytes: (value) => gib(value),
};

// What was planned beside what the server shows, a row a figure.
export function PlanComparison({ comparison }) {
  const t = useText();
  const { plan, figures } = comparison;
  return (
    <section class="plan-comparison" aria-label={t("live.plan")}>
      <h2>{t("live.plan")}</h2>
      <p class="soft">{t("live.plan_of", { model: plan.model, gpus: plan.gpus, gpu: plan.gpu, vllm: plan.vllm })}</p>
      <ul>
        {figures.map((figure) => (
          <Compared key={figure.name} figure={figure} />
        ))}
      </ul>
      <p class="soft"><code>{commandLine(plan.command)}</code></p>
    </section>
  );
}

function Compared({ figure }) {
  const t = useText();
  const { name, planned, actual, is_as_planned: asPlanned } = figure;
  const shown = SHOWN[name];
  const off = actual == null ? null : actual / planned - 1;
  const change = off == null ? "" : `${off < 0 ? "−" : "+"}${Math.abs(100 * off).toFixed(1)}%`;
  return (
    <li class={asPlanned === false ? "off" : ""}>
      <span class="compared-name">{t(`planned.${name}`)}</span>
      <Band figure={figure} />
      <span class="compared-figures">
        {t("live.planned")} <strong>{shown(planned)}</strong>,{" "}
        {actual == null ? (
          t("live.not_shown")
        ) : (
          <>
            {t("live.seen")} <strong>{shown(actual)}</strong> ({change})
          </>
        )}
      </span>
      {asPlanned != null && <span class="compared-word">{t(asPlanned ? "live.as_planned" : "live.not_as_planned")}</span>}
    </li>
  );
}

const WIDTH = 200;

// The range that counts as planned, the planned figure in it, and where the server is.
function Band({ figure: { planned, low, high, actual } }) {
  const span = 1.15 * Math.max(planned, high, actual ?? 0) || 1;
  const x = (value) => (WIDTH * value) / span;
  return (
    <svg class="band" viewBox={`0 0 ${WIDTH} 20`} preserveAspectRatio="none" aria-hidden="true">
      <line class="track" x1="0" x2={WIDTH} y1="10" y2="10" />
      <rect class="range" x={x(low)} width={Math.max(x(high) - x(low), 1)} y="5" height="10" />
      <line class="planned" x1={x(planned)} x2={x(planned)} y1="3" y2="17" />
      {actual != null && <rect class="seen" x="0" width={x(actual)} y="8.5" height="3" />}
      {actual != null && <line class="seen-end" x1={x(actual)} x2={x(actual)} y1="0" y2="20" />}
    </svg>
  );
}
