import { useEffect, useId, useRef, useState } from "preact/hooks";
import { Newest, engine } from "../engine.js";
import { Command, ErrorNote, Prose, Status } from "../parts/controls.jsx";
import { useEntry } from "../diagnose/finding.jsx";
import { useText } from "../text/language.jsx";

export function CatalogArea({ item }) {
  const t = useText();
  const id = useId();
  const [query, setQuery] = useState("");
  const [state, setState] = useState({ entries: null, error: null });
  const newest = useRef(null);
  newest.current ??= new Newest();
  useEffect(() => {
    newest.current.run(
      (signal) => engine.call("catalog", { language: t.language, query: query.trim() }, signal),
      ({ entries }) => setState({ entries, error: null }),
      (error) => setState({ entries: null, error }),
    );
  }, [query, t.language]);
  return (
    <div class={`catalog-area${item ? " reading" : ""}`}>
      <section class="panel entries" aria-label={t("catalog.title")}>
        <h1>{t("catalog.title")}</h1>
        <div class="field">
          <label for={id}>{t("catalog.search")}</label>
          <input
            id={id}
            type="search"
            value={query}
            placeholder={t("catalog.placeholder")}
            onInput={(event) => setQuery(event.target.value.slice(0, 2000))}
          />
        </div>
        <ErrorNote error={state.error} />
        {state.entries?.length === 0 && <Status>{t("catalog.none")}</Status>}
        <EntryList entries={state.entries ?? []} current={item} grouped={!query.trim()} />
      </section>
      <Entry id={item} />
    </div>
  );
}

function EntryList({ entries, current, grouped }) {
  const t = useText();
  const link = (entry) => (
    <li key={entry.id}>
      <a href={`#/catalog/${entry.id}`} aria-current={entry.id === current ? "page" : undefined}>
        <code>{entry.id}</code> <span>{entry.title}</span>
      </a>
    </li>
  );
  if (!grouped) return <ul class="entry-list">{entries.map(link)}</ul>;
  const phaseOf = (entry) => entry.phase || "any";
  const phases = [...new Set(entries.map(phaseOf))];
  return phases.map((phase) => (
    <section key={phase} aria-label={t(`phase.${phase}`)}>
      <h2 class="phase">{t(`phase.${phase}`)}</h2>
      <ul class="entry-list">{entries.filter((entry) => phaseOf(entry) === phase).map(link)}</ul>
    </section>
  ));
}

function Entry({ id }) {
  const t = useText();
  const { entry, error } = useEntry(id, t.language);
  const top = useRef(null);
  useEffect(() => {
    if (entry) top.current?.scrollIntoView({ block: "nearest" });
  }, [entry]);
  if (!id)
    return (
      <section class="entry empty"><p class="soft">{t("catalog.pick")}</p></section>
    );
  if (error)
    return (
      <section class="entry">
        <ErrorNote error={error} />
        <a href="#/catalog">{t("catalog.back")}</a>
      </section>
    );
  if (!entry)
    return (
      <section class="entry"><Status>…</Status></section>
    );
  const { story = {} } = entry;
  return (
    <article class="entry" ref={top} aria-label={entry.title}>
      <a class="back" href="#/catalog">{t("catalog.back")}</a>
      <p class="soft"><code>{entry.id}</code> · {t(`phase.${entry.phase || "any"}`)} · <code>{entry.cause}</code></p>
      <h2>{entry.title}</h2>
      {entry.root_cause && <p><Prose text={entry.root_cause.text} /></p>}
      {entry.signatures?.length > 0 && (
        <Part title={t("entry.signatures")}>
          <ul class="signatures">
            {entry.signatures.map((mark) => (
              <li key={mark.text} class="mono">{mark.text}</li>
            ))}
          </ul>
        </Part>
      )}
      {["what", "why", "arithmetic"].map((key) => (
        <Story key={key} name={key} text={story[key]} />
      ))}
      <Story name="example" text={entry.example} />
      <Part title={t("entry.workarounds")}>
        <ol>
          {entry.workarounds?.map((row) => (
            <li key={row.action}>
              <strong>{row.action}</strong>
              {row.how && (
                <>
                  {" "}
                  <span class="mono">{row.how}</span>
                </>
              )}
              {row.condition && <span class="soft"> ({row.condition})</span>}
              <Counted counted={row.counted} />
            </li>
          ))}
        </ol>
      </Part>
      <Part title={t("finding.dead_ends")}>
        <ul>
          {entry.dead_ends?.map((row) => (
            <li key={row.action}>
              <strong>{row.action}</strong>: {row.why_fails}
              <Counted counted={row.counted} />
            </li>
          ))}
        </ul>
      </Part>
      <Story name="verify" text={story.verify} />
      <Story name="otherwise" text={story.otherwise} />
      {entry.versions?.length > 0 && (
        <Part title={t("entry.versions")}>
          <ul>
            {entry.versions.map((row) => (
              <li key={row.version + row.change}><strong>{row.version}</strong>: {row.change}</li>
            ))}
          </ul>
        </Part>
      )}
      {["confused_with", "leads_to", "preceded_by"].map((name) => (
        <Related key={name} label={t(`entry.${name}`)} ids={entry[name]} />
      ))}
      {isWeb(entry.documentation) && (
        <p><a href={entry.documentation} rel="noreferrer noopener" target="_blank">{entry.documentation}</a></p>
      )}
      <Command text={`legroom explain ${entry.id}`} />
    </article>
  );
}

const isWeb = (address) => typeof address === "string" && address.startsWith("https://");

const Part = ({ title, children }) => (
  <section class="entry-part">
    <h3>{title}</h3>
    {children}
  </section>
);

function Story({ name, text }) {
  const t = useText();
  return text ? <Part title={t(`entry.${name}`)}><p><Prose text={text} /></p></Part> : null;
}

function Counted({ counted }) {
  const t = useText();
  return counted?.tried ? <span class="soft"> {t("entry.counted", counted)}</span> : null;
}

const Related = ({ label, ids }) =>
  ids?.length ? (
    <p class="related">
      {label}{" "}
      {ids.map((id) => (
        <a key={id} href={`#/catalog/${id}`}>{id}</a>
      ))}
    </p>
  ) : null;
