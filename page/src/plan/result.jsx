import { useEffect, useState } from "preact/hooks";
import { CardPicture, Legend, MiniBar } from "../parts/card.jsx";
import { Command, ErrorNote, Notes } from "../parts/controls.jsx";
import { withFix } from "../setup.js";
import { useText } from "../text/language.jsx";
import { bytesWords, commandLine, count, gib, percent, tokensShort } from "../units.js";
import { useMath } from "./use_plan.js";

export const VERDICT_CLASS = { fits: "good", tight: "fair", does_not_fit: "bad" };

export function verdictSentence(t, plan) {
  const { gpu, layout, args } = plan;
  const used = args.tensor_parallel_size * args.pipeline_parallel_size * args.data_parallel_size;
  const where = `${used < gpu.count ? t("some_of", { used, count: gpu.count }) : gpu.count} × ${gpu.name}`;
  const values = {
    model: plan.model,
    where,
    vllm: plan.vllm,
    free: gib(Math.max(layout.headroom_bytes, 0), 1),
    reason: plan.reason,
  };
  if (plan.verdict === "does_not_fit") return t("verdict.no", values);
  if (plan.verdict === "tight") return t(plan.reason ? "verdict.tight" : "verdict.tight_plain", values);
  return t(gpu.count === 1 ? "verdict.fits" : "verdict.fits_each", values);
}

export function Verdict({ plan, busy }) {
  const t = useText();
  return (
    <header class={`verdict ${VERDICT_CLASS[plan.verdict]}`} aria-live="polite" aria-busy={busy}>
      <span class="badge">{t(`badge.${plan.verdict}`)}</span>
      <p>{verdictSentence(t, plan)}</p>
    </header>
  );
}

export function Result({ plan, request, error, busy, scale, setup, onChange, title, children }) {
  const t = useText();
  const [part, setPart] = useState(null);
  if (!plan)
    return (
      <section class="result">
        <ErrorNote error={error} />
        {!error && (
          <p class="soft" role="status">
            {t("planning")}
          </p>
        )}
      </section>
    );
  return (
    <section class={`result${error ? " stale" : ""}`} aria-label={title ?? t("result")}>
      {title && <h2 class="side-title">{title}</h2>}
      <ErrorNote error={error} />
      <Verdict plan={plan} busy={busy} />
      <Failure failure={plan.failure} />
      <CardPicture plan={plan} scale={scale} active={part} onPart={setPart} />
      <div class="figures">
        <Legend plan={plan} active={part} onPart={setPart} />
        <Working request={request} plan={plan} part={part} />
      </div>
      <Pool plan={plan} />
      {children}
      <Fixes plan={plan} busy={busy} onApply={(flags) => onChange(withFix(setup, flags))} />
      <h3>{t("command.title")}</h3>
      <Command text={commandLine(plan.command, plan.env)} />
      <Notes notes={plan.notes} />
    </section>
  );
}

function Failure({ failure }) {
  const t = useText();
  if (!failure) return null;
  const { needed_bytes: needed, available_bytes: available } = failure;
  return (
    <div class="failure">
      <h3>{t("failure.title")}</h3>
      <blockquote>{failure.message}</blockquote>
      {needed > 0 && available != null && (
        <p class="soft">
          {t("failure.short", {
            needed: bytesWords(needed),
            available: bytesWords(available),
            short: bytesWords(needed - available),
          })}
        </p>
      )}
    </div>
  );
}

// The formula of the part under the pointer or the focus, with its numbers.
function Working({ request, plan, part }) {
  const t = useText();
  const { terms, error } = useMath(request, part !== null);
  if (part === null) return <p class="hint working-hint">{t("working.hint")}</p>;
  const key = {
    weights: "weights_bytes",
    activation: "activation_bytes",
    graphs: "cuda_graph_bytes",
    nontorch: "non_torch_bytes",
    kv: "kv_cache_bytes",
    outside: "outside_bytes",
  }[part];
  const term = terms?.find((term) => term.part === key);
  const { layout } = plan;
  return (
    <div class={`working part-${part}`}>
      <h3>
        <span class="swatch" aria-hidden="true" /> {t(`part.${part}`)}
      </h3>
      <p class="soft">{t(`part.${part}.what`)}</p>
      {part === "headroom" && (
        <p class="mono">{`${gib(layout.total_bytes)} − ${gib(layout.peak_used_bytes)} = ${gib(layout.headroom_bytes)}`}</p>
      )}
      <ErrorNote error={error} />
      {term && (
        <ul class="lines">
          {term.lines.map((line) => (
            <li key={line} class="mono">
              {line}
            </li>
          ))}
        </ul>
      )}
      {key && !term && !error && <p class="soft">…</p>}
    </div>
  );
}

function Pool({ plan }) {
  const t = useText();
  const { kv, args, first_start: cold, host } = plan;
  if (!kv) return null;
  const facts = [
    ["kv.blocks", count(kv.num_blocks), t("kv.blocks.of", { size: kv.block_size })],
    ["kv.tokens", count(kv.tokens), t("kv.per_token", { bytes: bytesWords(kv.bytes_per_token) })],
    [
      "kv.concurrency",
      kv.max_concurrency.toFixed(2),
      t("kv.concurrency.of", { length: tokensShort(args.max_model_len) }),
    ],
    ["kv.longest", count(kv.longest_len), t("kv.longest.of")],
  ];
  if (cold && cold.num_blocks !== kv.num_blocks)
    facts.push(["kv.first_start", count(cold.num_blocks), t("kv.first_start.of")]);
  if (host?.held_bytes) facts.push(["host", gib(host.held_bytes, 1), t("host.of")]);
  return (
    <>
      <dl class="facts">
        {facts.map(([key, figure, note]) => (
          <div key={key}>
            <dt>{t(key)}</dt>
            <dd>
              <strong>{figure}</strong> <span class="soft">{note}</span>
            </dd>
          </div>
        ))}
      </dl>
      <Users users={kv.context_by_users} />
      {plan.basis && (
        <p class="soft basis">
          {t(plan.basis.kind === "measured" ? "basis.measured" : "basis.read", {
            share: percent(plan.basis.coverage),
            records: plan.basis.records,
          })}
        </p>
      )}
      {plan.ranks?.length > 1 && <Ranks ranks={plan.ranks} />}
    </>
  );
}

function Users({ users }) {
  const t = useText();
  const rows = Object.entries(users ?? {});
  if (!rows.length) return null;
  return (
    <p class="users soft">
      {t("users")} {rows.map(([number, tokens]) => t("users.row", { number, tokens: count(tokens) })).join(" · ")}
    </p>
  );
}

function Ranks({ ranks }) {
  const t = useText();
  return (
    <details class="ranks">
      <summary>{t("ranks", { count: ranks.length })}</summary>
      {ranks.map((rank, index) => (
        <div class="rank" key={index}>
          <span>{t("rank.stage", { stage: rank.stage })}</span>
          <MiniBar layout={rank} />
          <span class="figure">{gib(rank.kv_cache_bytes)} KV</span>
        </div>
      ))}
    </details>
  );
}

const written = (value) => (typeof value === "object" ? JSON.stringify(value) : String(value));
export const flagsWords = (flags) =>
  Object.entries(flags)
    .map(([name, value]) =>
      value === true ? `--${name.replaceAll("_", "-")}` : `--${name.replaceAll("_", "-")} ${written(value)}`,
    )
    .join(" ");

function Fixes({ plan, busy, onApply }) {
  const t = useText();
  if (plan.verdict === "fits") return null;
  if (!plan.advice?.length)
    return (
      <p class="soft" role="status">
        {busy ? t("fixes.searching") : t("fixes.none")}
      </p>
    );
  return (
    <section class="fixes" aria-label={t("fixes.title")}>
      <h3>{t("fixes.title")}</h3>
      {t.language !== "en" && <p class="soft">{t("fixes.in_english")}</p>}
      <ol>
        {plan.advice.map((fix) => (
          <li key={flagsWords(fix.flags)} class="fix">
            <div class="fix-head">
              <code>{flagsWords(fix.flags)}</code>
              <button type="button" class="button primary" onClick={() => onApply(fix.flags)}>
                {t("fixes.apply")}
              </button>
            </div>
            <MiniBar layout={fix.layout} />
            <p>{fix.why}</p>
            {fix.trades && (
              <p class="soft">
                {t("fixes.costs")} {fix.trades}
              </p>
            )}
          </li>
        ))}
      </ol>
    </section>
  );
}

// What a narrow screen keeps in sight while the sliders below are moved.
export function Strip({ plan }) {
  const t = useText();
  const [stuck, setStuck] = useState(false);
  useEffect(() => {
    const look = () => setStuck(scrollY > 420);
    addEventListener("scroll", look, { passive: true });
    return () => removeEventListener("scroll", look);
  }, []);
  if (!plan) return null;
  return (
    <div class={`strip ${VERDICT_CLASS[plan.verdict]}${stuck ? " stuck" : ""}`} aria-hidden="true">
      <span class="badge">{t(`badge.${plan.verdict}`)}</span>
      <MiniBar layout={plan.layout} />
      <span class="figure">KV {gib(Math.max(plan.layout.kv_cache_bytes, 0), 1)}</span>
    </div>
  );
}
