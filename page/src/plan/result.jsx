import { useEffect, useState } from "preact/hooks";
import { keepStep } from "../address.js";
import { CardPicture, Legend, MiniBar } from "../parts/card.jsx";
import { Button, Command, ErrorNote, Notes, ShellText, Status, VERDICT_CLASS } from "../parts/controls.jsx";
import { PARTS } from "../parts/layout.js";
import { changedSinceMeasured, takesMoreGpus, withFix } from "../setup.js";
import { useText } from "../text/language.jsx";
import { atOnce, bytesWords, commandLine, count, flagsWords, gib, held, runsAtOnce, tokensShort } from "../units.js";
import { ToRun } from "./more.jsx";
import { useMath } from "./use_plan.js";

const dollars = (usd) => `$${usd.toFixed(2)}`;
const rate = (tokens) => count(tokens);

// The few figures that answer at one glance.
function bigFigures(t, plan, speed) {
  const { kv, layout, args, failure } = plan;
  const figures = [];
  const short = failure?.missing_bytes ?? 0;
  if (plan.verdict === "does_not_fit") {
    if (short > 0) figures.push([bytesWords(short), t("big.missing")]);
    if (plan.words.pool.length > 0) figures.push([count(kv.longest_len), t("big.longest")]);
    return figures;
  }
  const [now, first] = [kv, plan.first_start ?? kv].map((pool) => held(atOnce(plan, pool)));
  const [run, length] = [runsAtOnce(plan), tokensShort(args.max_model_len)];
  if (run < atOnce(plan)) figures.push([count(run), t("big.requests_most", { length, held: now })]);
  else if (kv.num_blocks > 0) {
    figures.push([now, t(first === now ? "big.requests" : "big.requests_first", { length, first })]);
  }
  figures.push([gib(Math.max(layout.headroom_bytes, 0), 1), t(plan.gpu.count > 1 ? "big.free_each" : "big.free")]);
  const { one_user_tokens_per_s: one, all_users_tokens_per_s: all, users, usd_per_hour: usd } = speed ?? {};
  const range = ({ low, high }) => ({ low: rate(low), high: rate(high), length: tokensShort(speed.context), users, each: rate(all?.estimate / users) });
  if (one) figures.push([t("big.rate", { rate: rate(one.estimate) }), t("big.one_user", range(one))]);
  if (all && users > 1) figures.push([t("big.rate", { rate: rate(all.estimate) }), t("big.all_users", range(all))]);
  if (usd != null) figures.push([t("big.price", { usd: dollars(usd) }), t("big.list_price", { date: speed.price_date })]);
  return figures;
}

// Where a server that fits does not hold what was wished for, that is said before anything else.
function missedWish(t, plan, setup) {
  const { kv, args, first_start, verdict, gpu } = plan;
  const { want_context, want_users } = setup;
  if (verdict !== "fits" || !want_context || !want_users || !kv.num_blocks) return null;
  if (args.max_model_len < want_context)
    return t("badge.too_short", { held: tokensShort(args.max_model_len), wanted: tokensShort(want_context) });
  if (args.max_model_len > want_context) return null;
  const [now, first] = [kv, first_start ?? kv].map((pool) => atOnce(plan, pool));
  if (now < want_users) return t("badge.too_few", { held: held(now, want_users), wanted: want_users });
  if (takesMoreGpus(setup, gpu.count)) return t("badge.more_gpus", { count: gpu.count });
  return first < want_users ? t("badge.first_start", { held: held(first, want_users), wanted: want_users }) : null;
}

export function Verdict({ plan, speed, busy, wish = {} }) {
  const t = useText();
  const missed = missedWish(t, plan, wish);
  return (
    <header class={`verdict ${missed ? "fair" : VERDICT_CLASS[plan.verdict]}`} aria-live="polite" aria-busy={busy}>
      <div class="glance">
        <h1 class={`badge large${missed ? " long" : ""}`}>{missed ?? t(`badge.${plan.verdict}`)}</h1>
        <p>{plan.words.headline}</p>
      </div>
      <dl class="big">
        {bigFigures(t, plan, speed).map(([figure, note]) => (
          <div key={note}>
            <dt>{note}</dt>
            <dd>{figure}</dd>
          </div>
        ))}
      </dl>
    </header>
  );
}

export function Result({ plan, speed, request, error, busy, scale, setup, onChange, title, children }) {
  const t = useText();
  const [hovered, setHovered] = useState(null);
  const [opened, setOpened] = useState(null);
  if (!plan)
    return (
      <section class="result">
        <h1 class="off-screen">{t("result")}</h1>
        <ErrorNote error={error} />
        {!error && <Status>{t("planning")}</Status>}
      </section>
    );
  const onApply = onChange && ((next) => {
    keepStep();
    onChange(next);
  });
  return (
    <section class={`result${error ? " stale" : ""}`} aria-label={title ?? t("result")}>
      {title && <p class="side-title">{title}</p>}
      <ErrorNote error={error} />
      <Verdict plan={plan} speed={speed} busy={busy} wish={setup} />
      {onApply && <LostMeasurement setup={setup} plan={plan} onChange={onApply} />}
      <Fixes plan={plan} busy={busy} wish={setup} onApply={onApply && ((flags) => onApply(withFix(setup, flags)))} />
      <Failure plan={plan} />
      <CardPicture plan={plan} scale={scale} active={hovered} onPart={setHovered} onOpen={(part) => setOpened(part)} />
      <div class="figures">
        <div>
          <Legend plan={plan} active={hovered} onPart={setHovered} opened={opened} onOpen={setOpened}>
            <Working request={request} plan={plan} part={opened} />
          </Legend>
          {isEstimated(plan) && <p class="soft basis">{plan.words.basis}</p>}
        </div>
        <Pool plan={plan} />
      </div>
      {plan.ranks?.length > 1 && <Ranks ranks={plan.ranks} />}
      {children}
      {plan.verdict !== "does_not_fit" && <ToRun plan={plan} request={request} />}
      <Notes notes={plan.words.notes} />
    </section>
  );
}

// The sizes of a log hold for what it ran: where that was changed, they are left out in words, and not for good.
function LostMeasurement({ setup, plan, onChange }) {
  const t = useText();
  const was = changedSinceMeasured(setup);
  const names = Object.keys(was);
  if (!names.length) return null;
  const now = { ...setup, vllm: plan.vllm };
  const said = (values) => names.map((name) => (name === "vllm" ? `vLLM ${values.vllm ?? t("measured.newest")}` : (values[name] ?? t("auto")))).join(", ");
  return (
    <div class="note fair">
      <p>{t("measured.lost", { was: said(was), now: said(now) })}</p>
      <div class="row">
        <Button kind="small" onClick={() => onChange({ ...setup, ...was })}>{t("measured.back", { was: said(was) })}</Button>
        <Button kind="small" onClick={() => onChange({ ...setup, measured: null })}>{t("measured.drop")}</Button>
      </div>
    </div>
  );
}

function Failure({ plan }) {
  const t = useText();
  const { failure, words } = plan;
  if (!failure) return null;
  return (
    <div class="failure">
      <h2>{t(plan.verdict === "tight" ? "failure.title_tight" : "failure.title")}</h2>
      <blockquote lang="en">{failure.message}</blockquote>
      {words.short && <p class="soft">{words.short}</p>}
      {words.helps && <p>{words.helps}</p>}
    </div>
  );
}

const MATH_KEYS = Object.fromEntries(PARTS.map(({ name, key }) => [name, key]));

// The formula of the part that was opened, with its numbers.
function Working({ request, plan, part }) {
  const t = useText();
  const { terms, error } = useMath(request, part !== null);
  if (part === null) return null;
  const term = terms?.find((term) => term.part === MATH_KEYS[part]);
  const { layout } = plan;
  return (
    <div class={`working part-${part}`}>
      {part === "headroom" && (
        <p class="mono">{`${gib(layout.total_bytes)} − ${gib(layout.peak_used_bytes)} = ${gib(layout.headroom_bytes)}`}</p>
      )}
      <ErrorNote error={error} />
      {term && (
        <ul class="lines">
          {term.lines.map((line) => (
            <li key={line} class="mono">{line}</li>
          ))}
        </ul>
      )}
      {part !== "headroom" && !terms && !error && <p class="soft">…</p>}
    </div>
  );
}

// What the command line says about the pool, in its own sentences.
function Pool({ plan }) {
  const { words } = plan;
  return (
    <div class="pool">
      {words.no_pool && <p>{words.no_pool}</p>}
      <dl class="facts">
        {words.pool.map(({ name, text }) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{text}</dd>
          </div>
        ))}
      </dl>
    </div>
  );
}

const isEstimated = ({ confidence }) => Object.values(confidence).some(({ kind }) => kind === "estimated");

function Ranks({ ranks }) {
  const t = useText();
  return (
    <details class="ranks">
      <summary>{t("ranks", { count: ranks.length })}</summary>
      {ranks.map((rank, index) => (
        <div class="rank" key={index}>
          <span>{t("rank.stage", { stage: rank.stage })}</span>
          <MiniBar layout={rank} />
          <span class="figure">{gib(Math.max(rank.kv_cache_bytes, 0))} KV</span>
        </div>
      ))}
    </details>
  );
}

const holdsWish = ({ length, holds }, { want_context, want_users }) =>
  !want_context || !want_users || (length >= want_context && holds >= want_users);

// The command that starts comes right under a verdict that says no; the other ways fold.
function Fixes({ plan, busy, wish, onApply }) {
  const t = useText();
  if (plan.verdict === "fits") return null;
  const { words } = plan;
  const ways = (plan.advice ?? []).map((way, index) => ({ ...way, ...words.advice[index] }));
  // Nothing "holds" that does not hold the wish.
  const holding = plan.verdict === "tight" ? ways.filter((way) => holdsWish(way, wish)) : ways;
  if (!holding.length)
    return busy || words.no_advice ? (
      <Status>{busy ? t("fixes.searching") : words.no_advice}</Status>
    ) : null;
  const fix = (each, isFirst) => (
    <li key={flagsWords(each.flags)} class="fix">
      <div class="fix-head">
        <code><ShellText text={flagsWords(each.flags)} /></code>
        {onApply && <Button kind="primary" onClick={() => onApply(each.flags)}>{t("fixes.apply")}</Button>}
      </div>
      {isFirst && <Command text={commandLine(each.command, plan.env)} />}
      <MiniBar layout={each.layout} />
      <p>
        {each.text}
        {each.is_tight ? ` (${t("badge.tight")})` : ""}
      </p>
      {each.costs && <p class="soft">{t("fixes.costs", { what: each.costs })}</p>}
    </li>
  );
  return (
    <section class="fixes" aria-label={t("fixes.title")}>
      <h2>{t(plan.verdict === "tight" ? "fixes.title_tight" : "fixes.title")}</h2>
      <ol>{fix(holding[0], true)}</ol>
      {holding.length > 1 && (
        <details>
          <summary>{t("fixes.others", { count: holding.length - 1 })}</summary>
          <ol>{holding.slice(1).map((each) => fix(each, false))}</ol>
        </details>
      )}
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
