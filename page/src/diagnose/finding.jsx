import { useEffect, useState } from "preact/hooks";
import { callOnce } from "../engine.js";
import { CardPicture, MiniBar } from "../parts/card.jsx";
import { Command } from "../parts/controls.jsx";
import { scaleOf } from "../parts/layout.js";
import { flagsWords } from "../plan/result.jsx";
import { useText } from "../text/language.jsx";
import { commandLine, gib, percent } from "../units.js";

export function useEntry(id, language) {
  const [state, setState] = useState({ entry: null, error: null });
  useEffect(() => {
    let current = true;
    const put = (change) => current && setState({ entry: null, error: null, ...change });
    put({});
    if (id)
      callOnce("entry", { id, language }).then(
        (entry) => put({ entry }),
        (error) => put({ error }),
      );
    return () => {
      current = false;
    };
  }, [id, language]);
  return state;
}

export function Finding({ finding, first, pictures, onJump }) {
  const t = useText();
  const { entry } = useEntry(finding.entry, t.language);
  // In another language than English the story is the catalog's, as on the command line; the numbers stay beside it.
  const own = t.language === "en" ? null : entry;
  const lines = [...new Map(finding.evidence.map((piece) => [piece.line, piece])).values()];
  const body = (
    <>
      {own && <p class="why">{own.root_cause?.text}</p>}
      <p class={own ? "soft" : "why"} lang="en">
        {finding.why}
      </p>
      {own && first && <p class="soft in-english">{t("finding.in_english")}</p>}
      <p class="evidence-links">
        {t("finding.lines")}{" "}
        {lines.map(({ line }) => (
          <button type="button" class="link" key={line} onClick={() => onJump(line)}>
            {t("finding.line", { line })}
          </button>
        ))}
      </p>
      {finding.fixes.length > 0 && <h4>{t("finding.fixes")}</h4>}
      <ol class="fix-list">
        {finding.fixes.map((fix, index) => (
          <Fix key={index} fix={fix} pictures={first && index === 0 ? pictures : null} />
        ))}
      </ol>
      <DeadEnds rows={own?.dead_ends?.length ? own.dead_ends : finding.dead_ends} />
    </>
  );
  const head = (
    <>
      <span class="finding-title">{entry?.title ?? finding.cause}</span>{" "}
      <span class="soft">{t("finding.sure", { share: percent(finding.confidence) })}</span>
    </>
  );
  const link = (
    <a href={`#/catalog/${finding.entry}`} class="entry-link">
      {t("finding.entry", { id: finding.entry })}
    </a>
  );
  if (first)
    return (
      <article class="finding first">
        <h2>{head}</h2>
        {link}
        {body}
      </article>
    );
  return (
    <details class="finding">
      <summary>{head}</summary>
      {link}
      {body}
    </details>
  );
}

function Fix({ fix, pictures }) {
  const t = useText();
  const has = Object.keys(fix.flags ?? {}).length > 0;
  return (
    <li class="fix">
      {has && <code>{flagsWords(fix.flags)}</code>}
      <p>{fix.why}</p>
      {fix.steps?.length > 0 && (
        <ol class="steps">
          {fix.steps.map((step) => (
            <li key={step}>{step}</li>
          ))}
        </ol>
      )}
      {fix.trades && (
        <p class="soft">
          {t("fixes.costs")} {fix.trades}
        </p>
      )}
      {fix.layout && (pictures ? <BeforeAfter {...pictures} /> : <MiniBar layout={fix.layout} />)}
      {fix.command?.length > 0 && <Command text={commandLine(fix.command, fix.env)} />}
    </li>
  );
}

// The memory of the command that failed and of the one that will work, on one scale.
function BeforeAfter({ before, after }) {
  const t = useText();
  const scale = Math.max(scaleOf(before.layout), scaleOf(after.layout));
  return (
    <div class="before-after">
      <figure>
        <figcaption>{t("finding.before", { kv: gib(before.layout.kv_cache_bytes) })}</figcaption>
        <CardPicture plan={before} scale={scale} />
      </figure>
      <figure>
        <figcaption>{t("finding.after", { kv: gib(after.layout.kv_cache_bytes) })}</figcaption>
        <CardPicture plan={after} scale={scale} />
      </figure>
    </div>
  );
}

export function DeadEnds({ rows }) {
  const t = useText();
  if (!rows?.length) return null;
  return (
    <section class="dead-ends">
      <h4>{t("finding.dead_ends")}</h4>
      <ul>
        {rows.map((row) => (
          <li key={row.action}>
            <strong>{row.action}</strong>: {row.why_fails}
          </li>
        ))}
      </ul>
    </section>
  );
}
