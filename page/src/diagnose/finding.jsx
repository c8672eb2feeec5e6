import { useEffect, useState } from "preact/hooks";
import { callOnce } from "../engine.js";
import { CardPicture, MiniBar } from "../parts/card.jsx";
import { ToRun } from "../plan/more.jsx";
import { Prose } from "../parts/controls.jsx";
import { scaleOf } from "../parts/layout.js";
import { useText } from "../text/language.jsx";
import { distinctLines } from "./evidence.js";
import { flagsWords, gib, sureOf } from "../units.js";

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

// The cause in the largest letters, the command second, the quoted line third; then why, and what else there is.
export function Finding({ finding, first, tone, kind, where, pictures, onJump }) {
  const t = useText();
  const { entry } = useEntry(finding.has_story === false ? null : finding.entry, t.language);
  const title = (finding.title ?? entry?.title ?? finding.cause).replace(/^[a-z](?=[a-z]*[ ,;:])/, (letter) => letter.toUpperCase());
  const sure = sureOf(t, finding.confidence);
  const [fix, ...others] = finding.fixes;
  const link = finding.has_story !== false && (
    <a href={`#/catalog/${finding.entry}`} class="entry-link">{t("finding.entry", { id: finding.entry })}</a>
  );
  const body = (
    <>
      {fix && <Fix fix={fix} pictures={pictures} />}
      <Evidence rows={finding.evidence} onJump={onJump} />
      <section>
        <h3>{t("finding.why")}</h3>
        <p class="why">{finding.why}</p>
      </section>
      {others.length > 0 && (
        <details>
          <summary>{t("fixes.others", { count: others.length })}</summary>
          <ol class="fix-list">
            {others.map((each, index) => (
              <li key={index}><Fix fix={each} /></li>
            ))}
          </ol>
        </details>
      )}
      <DeadEnds rows={finding.dead_ends} />
      {first && finding.verify && (
        <section>
          <h3>{t("entry.verify")}</h3>
          <p><Prose text={finding.verify} /></p>
        </section>
      )}
      {link}
    </>
  );
  if (first)
    return (
      <article class="finding first">
        <header class={`verdict ${tone}`}>
          <h2 class="cause">{title}</h2>
          <p>
            {t("finding.kind", { kind: t(`diagnosis.${kind}`), sure })}
            {where ? ` · ${where}` : ""}
          </p>
        </header>
        {body}
      </article>
    );
  return (
    <details class="finding">
      <summary><span class="finding-title">{title}</span> <span class="soft">{sure}</span></summary>
      {body}
    </details>
  );
}

// The lines that decide, as the log has them; a report that came by a link has their numbers alone.
function Evidence({ rows, onJump }) {
  const t = useText();
  const lines = distinctLines(rows);
  if (!lines.length) return null;
  return (
    <section class="evidence" aria-label={t("finding.lines")}>
      <h3>{t("finding.lines")}</h3>
      {lines.slice(0, 4).map(({ line, text }) => (
        <blockquote key={line}>
          {onJump ? (
            <button type="button" class="link" onClick={() => onJump(line)}>{t("finding.line", { line })}</button>
          ) : (
            <span class="soft">{t("finding.line", { line })}</span>
          )}{" "}
          <span class="mono" lang="en">{text}</span>
        </blockquote>
      ))}
    </section>
  );
}

function Fix({ fix, pictures }) {
  const t = useText();
  const has = Object.keys(fix.flags ?? {}).length > 0;
  // Where the log does not name the model, there is no command to copy: the comment says what to change in one's own.
  const isCommand = fix.command?.length > 0 && !fix.command.includes("MODEL") && (has || Object.keys(fix.env ?? {}).length > 0);
  return (
    <div class="fix">
      {fix.comment && <p class="note fair"><Prose text={fix.comment} /></p>}
      {isCommand ? <ToRun plan={{ ...fix, verdict: pictures?.after.verdict, env: fix.command[0].includes("=") ? {} : fix.env }} request={pictures?.request} /> : has && !fix.comment?.includes(flagsWords(fix.flags)) && <code>{flagsWords(fix.flags)}</code>}
      <p>{fix.why}</p>
      {fix.steps?.length > 0 && (
        <ol class="steps">
          {fix.steps.map((step) => (
            <li key={step}>{step}</li>
          ))}
        </ol>
      )}
      {fix.trades && (
        <p class="soft">{t("fixes.costs", { what: fix.trades })}</p>
      )}
      {fix.layout && (pictures ? <BeforeAfter {...pictures} /> : <MiniBar layout={fix.layout} />)}
    </div>
  );
}

// The memory of the command that failed and of the one that will work, on one scale.
function BeforeAfter({ before, after }) {
  const t = useText();
  const kv = ({ layout }) => (layout.kv_cache_bytes > 0 ? gib(layout.kv_cache_bytes) : t("part.none"));
  const scale = Math.max(scaleOf(before.layout), scaleOf(after.layout));
  return (
    <div class="before-after">
      <figure>
        <figcaption>{t("finding.before", { kv: kv(before) })}</figcaption>
        <CardPicture plan={before} scale={scale} />
      </figure>
      <figure>
        <figcaption>{t("finding.after", { kv: kv(after) })}</figcaption>
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
      <h3>{t("finding.dead_ends")}</h3>
      <ul>
        {rows.map((row) => (
          <li key={row.action}><strong>{row.action}</strong>: {row.why_fails}</li>
        ))}
      </ul>
    </section>
  );
}
