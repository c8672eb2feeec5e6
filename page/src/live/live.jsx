import { useEffect, useId, useRef, useState } from "preact/hooks";
import { engine } from "../engine.js";
import { Command } from "../parts/controls.jsx";
import { useText } from "../text/language.jsx";
import { count, gib, percent, seconds } from "../units.js";
import { PlanComparison } from "./plan_comparison.jsx";
import { HISTORY, Servers } from "./servers.js";

// However often looks arrive, the page is drawn at most this often.
const REDRAW_MS = 250;

function useLive() {
  const servers = useRef(null);
  servers.current ??= new Servers();
  const [, redraw] = useState(0);
  const [link, setLink] = useState("connecting");
  useEffect(() => {
    if (!engine.events) return undefined;
    let timer = 0;
    const later = () => {
      timer ||= setTimeout(() => {
        timer = 0;
        redraw((now) => now + 1);
      }, REDRAW_MS);
    };
    const source = engine.events();
    const listen =
      (take) =>
      ({ data }) => {
        take(JSON.parse(data));
        later();
      };
    source.onopen = () => setLink("open");
    source.onmessage = listen((look) => servers.current.take(look));
    source.addEventListener(
      "history",
      listen((curves) => servers.current.takeHistory(curves)),
    );
    source.addEventListener(
      "incidents",
      listen((changes) => servers.current.takeIncidents(changes)),
    );
    source.addEventListener(
      "plan",
      listen((comparison) => servers.current.takeComparison(comparison)),
    );
    source.onerror = () => setLink(source.readyState === EventSource.CLOSED ? "closed" : "lost");
    return () => {
      clearTimeout(timer);
      source.close();
    };
  }, []);
  return [servers.current, link];
}

export function LiveArea() {
  const t = useText();
  if (!engine.events)
    return (
      <section class="panel lone">
        <h1>{t("live.title")}</h1>
        <p>{t("live.static")}</p>
        <Command text="legroom ui --watch http://localhost:8000" />
      </section>
    );
  return <Fleet />;
}

function Fleet() {
  const t = useText();
  const id = useId();
  const [servers, link] = useLive();
  const [filter, setFilter] = useState("");
  const [open, setOpen] = useState(null);
  if (link === "closed" && !servers.views.size)
    return (
      <section class="panel lone">
        <h1>{t("live.title")}</h1>
        <p>{t("live.none")}</p>
        <Command text="legroom ui --watch http://localhost:8000" />
      </section>
    );
  const rows = servers.sorted(filter);
  return (
    <div class="live-area">
      <header class="live-head">
        <h1>{t("live.title")}</h1>
        <Counts counts={servers.counts()} />
        <span class={`connection ${link}`} role="status">
          {t(`live.${link}`)}
        </span>
        <div class="field">
          <label for={id} class="off-screen">
            {t("live.filter")}
          </label>
          <input
            id={id}
            type="search"
            placeholder={t("live.filter")}
            value={filter}
            onInput={(event) => setFilter(event.target.value)}
          />
        </div>
      </header>
      <div class={`live-body${link === "open" ? "" : " stale"}`}>
        <ul class="servers" aria-label={t("live.servers")}>
          {rows.map((view) => (
            <Server
              key={view.server}
              view={view}
              past={servers.history.get(view.server)}
              comparison={servers.comparisons.get(view.server)}
              open={open === view.server}
              onOpen={() => setOpen(open === view.server ? null : view.server)}
            />
          ))}
          {!rows.length && (
            <li class="soft">
              {t(link === "connecting" || !servers.views.size ? "live.waiting_for" : "live.no_match")}
            </li>
          )}
        </ul>
        <Incidents incidents={servers.incidents} />
      </div>
    </div>
  );
}

function Counts({ counts }) {
  const t = useText();
  const states = ["critical", "unreachable", "warning", "healthy", "idle"].filter((state) => counts[state]);
  return (
    <p class="counts">
      {states.map((state) => (
        <span key={state} class={`state ${state}`}>
          {counts[state]} {t(`state.${state}`)}
        </span>
      ))}
    </p>
  );
}

function Server({ view, past, comparison, open, onOpen }) {
  const t = useText();
  return (
    <li class={`server ${view.state}`}>
      <button type="button" class="server-row" aria-expanded={open} onClick={onOpen}>
        <span class={`state ${view.state}`}>{t(`state.${view.state}`)}</span>
        <span class="server-name">{view.server}</span>
        <span class="server-sentence">{view.sentence}</span>
        <Sparkline past={past} />
        <span class="figure kv">{view.kv_use == null ? "–" : percent(view.kv_use)}</span>
      </button>
      {open && <ServerDetails view={view} past={past} comparison={comparison} />}
    </li>
  );
}

// KV use of the last looks, 0 to 100%.
function Sparkline({ past, width = 120, height = 24 }) {
  const span = Math.min(Math.max(past.length, 30), HISTORY);
  const points = past
    .map((look, index) =>
      look.kv_use == null
        ? null
        : `${((index + span - past.length) / (span - 1)) * width},${(1 - look.kv_use) * (height - 2) + 1}`,
    )
    .filter(Boolean);
  return (
    <svg class="sparkline" viewBox={`0 0 ${width} ${height}`} preserveAspectRatio="none" aria-hidden="true">
      <line x1="0" x2={width} y1="1" y2="1" />
      <line x1="0" x2={width} y1={height - 1} y2={height - 1} />
      {points.length > 1 && <polyline points={points.join(" ")} />}
    </svg>
  );
}

// How long the curve is.
const lookedFor = (past) => seconds(past.at(-1).time_s - past[0].time_s);

function ServerDetails({ view, past, comparison }) {
  const t = useText();
  const rate = (value) => (value == null ? "–" : `${count(value)} tok/s`);
  const facts = [
    ["live.models", (view.models ?? []).join(", ") || "–"],
    ["live.running", view.running ?? "–"],
    ["live.waiting", view.waiting ?? "–"],
    ["live.preemptions", view.preemptions_per_s == null ? "–" : `${view.preemptions_per_s.toFixed(2)}/s`],
    ["live.hit_rate", view.hit_rate == null ? "–" : percent(view.hit_rate)],
    ["live.prompt_rate", rate(view.prompt_tokens_per_s)],
    ["live.generation_rate", rate(view.generation_tokens_per_s)],
    ["live.first_token", `${seconds(view.first_token_p50_s)} / ${seconds(view.first_token_p99_s)}`],
    ["live.latency", `${seconds(view.latency_p50_s)} / ${seconds(view.latency_p99_s)}`],
    ["live.memory", view.memory_used_bytes == null ? "–" : gib(view.memory_used_bytes)],
    ["live.blocks", view.num_blocks == null ? "–" : count(view.num_blocks)],
  ];
  return (
    <div class="server-details">
      <figure class="curve">
        <figcaption>
          {t("live.kv_curve")} <span class="soft">{past.length > 1 && t("live.lately", { span: lookedFor(past) })}</span>
        </figcaption>
        <Sparkline past={past} width={600} height={80} />
      </figure>
      {view.forecast?.text && <p>{view.forecast.text}</p>}
      <dl class="facts">
        {facts.map(([key, figure]) => (
          <div key={key}>
            <dt>{t(key)}</dt>
            <dd>
              <strong>{figure}</strong>
            </dd>
          </div>
        ))}
      </dl>
      {comparison && <PlanComparison comparison={comparison} />}
      {(view.findings ?? []).map((finding) => (
        <FindingNote key={finding.kind} finding={finding} />
      ))}
      {(view.notes ?? []).map((note) => (
        <p key={note} class="soft">
          {note}
        </p>
      ))}
    </div>
  );
}

function FindingNote({ finding }) {
  const t = useText();
  const drift = finding.kind === "plan_drift" ? <strong>{t("live.plan_drift")} </strong> : null;
  return (
    <p class={`note ${finding.severity === "critical" ? "bad" : "fair"}`}>
      {drift}
      <strong>{finding.title}</strong>: {finding.reason}{" "}
      {finding.entry && <a href={`#/catalog/${finding.entry}`}>{finding.entry}</a>}
    </p>
  );
}

const clock = (time_s) => new Date(time_s * 1000).toLocaleTimeString();

function Incidents({ incidents }) {
  const t = useText();
  return (
    <section class="incidents" aria-label={t("live.incidents")}>
      <h2>{t("live.incidents")}</h2>
      {t.language !== "en" && <p class="soft">{t("live.in_english")}</p>}
      {!incidents.length && <p class="soft">{t("live.no_incidents")}</p>}
      <ol aria-live="polite">
        {incidents.slice(0, 60).map((incident) => (
          <li key={incident.key} class={`incident ${incident.severity}${incident.is_over ? " over" : ""}`}>
            <span class="when">
              {clock(incident.opened_s)}
              {incident.is_over ? ` – ${clock(incident.time_s)}` : ""}
            </span>
            <strong>{incident.title}</strong> <span class="soft">{incident.server}</span>
            <p>
              {incident.reason} {incident.entry && <a href={`#/catalog/${incident.entry}`}>{incident.entry}</a>}
            </p>
          </li>
        ))}
      </ol>
    </section>
  );
}
