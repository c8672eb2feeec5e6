import { useEffect, useId, useRef, useState } from "preact/hooks";
import { addressOf, isLoopback } from "../address.js";
import { engine } from "../engine.js";
import { Button, CopyButton, DropArea, ErrorNote, Notes, NumberField, Picker, Status, TextField, reveal } from "../parts/controls.jsx";
import { ReleaseField, gpuOptions, modelOptions, useLists, versionOf } from "../plan/source.jsx";
import { LIMITS, faultOf, nameFault } from "../limits.js";
import { EMPTY, requestOf, toParams, withFix, withMeasured } from "../setup.js";
import { useText } from "../text/language.jsx";
import { bytesWords, commandLine, count } from "../units.js";
import { Finding } from "./finding.jsx";
import { NotALog, openLog } from "./log_file.js";
import { LogView } from "./log_view.jsx";
import { packed, reportText, serverWords, unpacked } from "./report_link.js";
import { SAMPLES } from "./sample.js";

const KEPT = "legroom.log";
const MOST_KEPT = 2_000_000;
const MOST_TYPED = 200_000;

// A reload in the middle keeps what was pasted: in this tab alone, until it is closed.
function keepText(text) {
  try {
    if (text && text.length <= MOST_KEPT) sessionStorage.setItem(KEPT, text);
    else sessionStorage.removeItem(KEPT);
  } catch {
    // Storage may be full or forbidden.
  }
}

function keptText() {
  try {
    return sessionStorage.getItem(KEPT) ?? "";
  } catch {
    return "";
  }
}

// A longer one travels as the log does, not beside it.
const MOST_OF_COMMAND = 16_000;

const NOTHING = { shared: false, stale: false, log: null, answer: null, pictures: null, error: null, busy: false, stage: null };

export function DiagnoseArea({ params }) {
  const t = useText();
  const lists = useLists();
  const [text, setText] = useState("");
  // The file that was chosen in place of a text.
  const [file, setFile] = useState(null);
  const [hints, setHints] = useState({ command: "", gpu: "", gpus: "", model: "", vllm: null });
  const [state, setState] = useState(NOTHING);
  const [jump, setJump] = useState(null);
  const round = useRef(0);
  const abort = useRef(null);
  const last = useRef(null);
  const newest = useRef("");
  newest.current = versionOf(lists.releases[0]);
  const show = () => reveal(".diagnosis");

  const read = async (file, name, known = hints, isAsked = true) => {
    const mine = ++round.current;
    abort.current?.abort();
    const { signal } = (abort.current = new AbortController());
    const put = (change) => mine === round.current && setState((now) => ({ ...now, ...change }));
    const onStage = (stage) => put({ stage });
    last.current = { file, name, known };
    setState({ ...NOTHING, busy: true, stage: { name: "open", share: 0, size: file.size } });
    try {
      const log = await openLog(file, name, engine.mostLogBytes, { signal, onShare: (share) => onStage({ name: "open", share, size: file.size }) });
      put({ log });
      const answer = await engine.diagnose(log.blob, { ...known, language: t.language }, signal, (share) =>
        onStage({ name: share < 1 ? "send" : "judge", share, size: log.size }),
      );
      put({ answer, busy: false, stage: null });
      if (isAsked) show();
      const line = answer.findings?.[0]?.evidence?.[0]?.line;
      if (line && mine === round.current) setJump({ line });
      put({ pictures: await beforeAndAfter(answer, known, newest.current) });
    } catch (error) {
      if (error.name === "AbortError") put(NOTHING);
      else
        put({
          error: error instanceof NotALog ? { message: t(`log.${error.message}`, { name: name || t("log.pasted") }) } : error,
          busy: false,
          stage: null,
        });
      if (isAsked) show();
    }
  };
  const readText = (written, known, isAsked = true) => {
    keepText(written);
    read(new Blob([written]), "", known, isAsked);
  };
  const readSample = ({ log, gpu }) => {
    const known = { ...hints, gpu: gpu ?? "" };
    setText(log);
    setHints(known);
    readText(log, known);
  };
  // A link to a diagnosis brings the answer and no line of the log.
  useEffect(() => {
    const report = params?.get("report");
    if (report) {
      unpacked(report).then(
        (answer) => {
          setState({ ...NOTHING, answer, shared: true });
          show();
        },
        () => setState({ ...NOTHING, error: { message: t("report.broken") } }),
      );
      return;
    }
    const kept = keptText();
    if (kept && !state.answer) {
      setText(kept.length <= MOST_TYPED ? kept : "");
      readText(kept, undefined, false);
    }
  }, [params]);
  // The sentences come from the engine: another language asks again.
  const spoken = useRef(t.language);
  useEffect(() => {
    if (spoken.current === t.language) return;
    spoken.current = t.language;
    if (last.current && state.answer) read(last.current.file, last.current.name, last.current.known, false);
  }, [t.language]);
  // What is in the fields now is not what was read.
  const edited = (put) => (value) => {
    put(value);
    setState((now) => ({ ...now, stale: Boolean(now.answer || now.error) && !now.shared }));
  };
  const isRead = hints.command.length <= MOST_OF_COMMAND && !nameFault(t, "model", hints.model) && !nameFault(t, "gpu", hints.gpu) && !(hints.gpus && faultOf(t, "whole", hints.gpus, LIMITS.gpus));
  const paste = (event) => {
    const pasted = event.clipboardData?.getData("text") ?? "";
    setFile(null);
    if (pasted.length <= MOST_TYPED) return;
    // A text field with megabytes in it freezes the page; the view below does not.
    event.preventDefault();
    setText("");
    readText(pasted);
  };
  return (
    <div class="diagnose-area">
      <section class="panel log-input" aria-label={t("diagnose.title")}>
        <h1>{t("diagnose.title")}</h1>
        <p class="private">{t(privacy, { host: location.host })}</p>
        <LogInput
          text={text}
          setText={edited(setText)}
          onPaste={paste}
          onRead={() => text.trim() && !state.busy && isRead && readText(text)}
          onFile={(chosen) => {
            keepText("");
            setText("");
            setFile(chosen);
            read(chosen, chosen.name);
          }}
          chosen={file?.name}
        />
        <div class="hints">
          <p class="soft">{t("diagnose.hints")}</p>
          <HintFields hints={hints} setHints={edited(setHints)} lists={lists} />
        </div>
        <div class="row">
          <button
            type="button"
            class="button primary"
            disabled={!(text.trim() || file) || state.busy || !isRead}
            onClick={() => (text.trim() ? readText(text) : read(file, file.name))}
          >
            {t("diagnose.read")}
          </button>
          {(state.answer || state.error) && <Button onClick={() => readSample(SAMPLES[0])}>{t("diagnose.sample")}</Button>}
        </div>
      </section>
      <div class={`diagnosis${state.stale ? " stale" : ""}`} aria-live="polite">
        {state.shared && <Status kind="note">{t("report.opened")}</Status>}
        {state.stale && <Status kind="note fair">{t("diagnose.stale")}</Status>}
        {state.stage && <Stage stage={state.stage} onCancel={() => abort.current?.abort()} />}
        <ErrorNote error={state.error} />
        {!state.busy && !state.answer && !state.error && <Examples onPick={readSample} />}
        {state.answer && (
          <Answer answer={state.answer} hints={hints} newest={newest.current} pictures={state.pictures} onJump={state.log ? (line) => setJump({ line }) : null} />
        )}
      </div>
      {state.log && <LogPanel log={state.log} answer={state.answer} jump={jump} onJump={(line) => setJump({ line })} />}
    </div>
  );
}

function Stage({ stage, onCancel }) {
  const t = useText();
  return (
    <div class="row" role="status">
      <span>{t(`diagnose.stage.${stage.name}`, { size: bytesWords(stage.size) })}</span>
      <progress
        max={1}
        value={stage.name === "judge" ? undefined : stage.share}
        aria-label={t(`diagnose.stage.${stage.name}`, { size: "" })}
      />
      <Button kind="small" onClick={onCancel}>{t("cancel")}</Button>
    </div>
  );
}

// What an empty page teaches: logs to click on, and the causes behind most of them.
function Examples({ onPick }) {
  const t = useText();
  return (
    <section class="examples" aria-label={t("examples.title")}>
      <h2>{t("examples.title")}</h2>
      <ul class="cards">
        {SAMPLES.map((sample) => (
          <li key={sample.name}>
            <button type="button" class="button wide" onClick={() => onPick(sample)}>
              <strong>{t(`sample.${sample.name}`)}</strong>
              <span class="soft mono" lang="en">{sample.shown}</span>
            </button>
          </li>
        ))}
      </ul>
      <h2>{t("examples.causes")}</h2>
      <ul>
        {SAMPLES.map(({ name, entry }) => (
          <li key={name}><a href={`#/catalog/${entry}`}>{t(`cause.${name}`)}</a></li>
        ))}
      </ul>
    </section>
  );
}

const SERVED = isLoopback() ? "diagnose.private" : "diagnose.private_elsewhere";
const privacy = engine.edition === "static" ? "diagnose.private_static" : SERVED;

const inGib = (bytes) => (bytes ? `${Number((bytes / 2 ** 30).toFixed(4))}GiB` : null);

// What others hold of the card: of an allocation that failed, or by the check of free memory at the start.
function usedByOthers({ findings, ledger, memory: { gpu_total_bytes: total, free_at_start_bytes: free } = {} }) {
  const atStart = findings?.[0]?.cause === "gpu_shared_or_not_free" && total && free ? total - free : null;
  return ledger?.seen?.other_processes_bytes ?? atStart;
}

// What failed, as a setup of Plan: on the card of the user or of the log, with the total that the log prints.
// The release is said, too, where it is not the newest one for want of any other.
function failedSetup(answer, hints, newest) {
  const { model, gpu, release, release_from, args = {}, gpu_total_bytes, host_limit_bytes } = answer.deployment ?? {};
  const planned = answer.findings?.flatMap(({ fixes }) => fixes).find(({ layout }) => layout);
  const printed = planned?.layout.total_bytes ?? (hints.gpu ? null : (gpu_total_bytes ?? answer.ledger?.seen?.total_bytes));
  const [card, total] = [hints.gpu || gpu, inGib(printed)];
  if (!model || !(card || total)) return null;
  const given = Object.entries(args).filter(([name, value]) => name !== "env" && value !== null && value !== "");
  const machine = { gpu: card || total, gpu_memory: card ? total : null, gpu_used: inGib(usedByOthers(answer)), host_memory: inGib(host_limit_bytes) };
  const vllm = release_from === "assumed" && release === newest ? null : (release ?? null);
  return { ...EMPTY, ...machine, gpus: Number(hints.gpus) || null, model, vllm, env: {}, flags: Object.fromEntries(given) };
}

// The setup with the flags of the command, not with all that the log resolved.
async function asCommanded(setup, command) {
  if (!command?.length || command.includes("MODEL")) return setup;
  const { servers } = await engine.call("read", { text: commandLine(command, {}), vllm: setup.vllm });
  return { ...setup, flags: servers[0].flags };
}

// The card of the command that failed and of the first fix, where the log (or the user) tells enough to draw them.
async function beforeAndAfter(answer, hints, newest) {
  const failed = failedSetup(answer, hints, newest);
  const fix = answer.findings?.[0]?.fixes?.[0];
  if (!fix?.layout || !failed) return null;
  const planOf = (setup) => engine.call("plan", { ...requestOf(setup), advice: false });
  try {
    const fixed = withMeasured(await asCommanded(withFix(failed, fix.flags), fix.command), fix.measured);
    const [before, after] = await Promise.all([planOf(failed), planOf(fixed)]);
    // With the pool that the log prints, as the fix has it.
    const drawn = (plan, layout) => ({ ...plan, layout: layout ?? plan.layout, confidence: {} });
    return { before: drawn(before, fix.before), after: drawn(after, fix.layout), request: requestOf(fixed), fixed };
  } catch {
    return null;
  }
}

function LogInput({ text, setText, onPaste, onRead, onFile, chosen }) {
  const t = useText();
  const id = useId();
  return (
    <div class="field">
      <label for={id}>{t("diagnose.label")}</label>
      <DropArea label={t("choose_file")} onFile={onFile}>
        <textarea
          id={id}
          rows={8}
          spellcheck={false}
          value={text}
          placeholder={chosen ? t("diagnose.chosen", { name: chosen }) : t("diagnose.placeholder")}
          onPaste={onPaste}
          onKeyDown={(event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && onRead()}
          onInput={(event) => setText(event.target.value)}
        />
      </DropArea>
    </div>
  );
}

function HintFields({ hints, setHints, lists }) {
  const t = useText();
  return (
    <>
      <Picker
        label={t("model")}
        value={hints.model}
        problem={nameFault(t, "model", hints.model)}
        options={modelOptions(lists.models)}
        placeholder="org/name"
        onPick={(model) => setHints({ ...hints, model })}
      />
      <Picker
        label={t("gpu")}
        value={hints.gpu}
        problem={nameFault(t, "gpu", hints.gpu)}
        options={gpuOptions(lists.gpus)}
        placeholder="h100, 24GiB"
        onPick={(gpu) => setHints({ ...hints, gpu })}
      />
      <NumberField isOptional kind="whole" label={t("gpus")} limits={LIMITS.gpus} value={hints.gpus} placeholder={t("auto")} onChange={(gpus) => setHints({ ...hints, gpus })} />
      <ReleaseField value={hints.vllm} releases={lists.releases} unset={t("diagnose.vllm")} onPick={(vllm) => setHints({ ...hints, vllm })} />
      <TextField
        rows={3}
        label={t("diagnose.command")}
        value={hints.command}
        problem={hints.command.length > MOST_OF_COMMAND && t("unread.long", { name: t("diagnose.command"), most: count(MOST_OF_COMMAND) })}
        placeholder={"vllm serve ...\ndocker run vllm/vllm-openai:v0.11.0 ...\nkind: Deployment"}
        onInput={(command) => setHints({ ...hints, command })}
      />
    </>
  );
}

// The failed server as a plan to look at and to change: with its first fix, where that changes flags and was planned.
function planLink(answer, hints, newest, pictures) {
  const failed = failedSetup(answer, hints, newest);
  if (!failed) return null;
  const fix = answer.findings?.[0]?.fixes?.[0];
  const isChanged = fix?.layout && Object.keys(fix.flags).length > 0;
  const { found, before, ...setup } = (isChanged && pictures?.fixed) || (isChanged ? withFix(failed, fix.flags) : failed);
  return { label: isChanged ? "finding.open_plan" : "finding.open_failed", href: addressOf("plan", toParams(setup)) };
}

// As on the command line: a cause that is less likely than one in twenty is not mentioned.
const isMentioned = ({ confidence }) => confidence >= 0.05;

function Answer({ answer, hints, newest, pictures, onJump }) {
  const t = useText();
  const { deployment = {} } = answer;
  const about = serverWords(answer);
  const kind = answer.verdict.replaceAll(" ", "_");
  const tone = { cause_found: "bad", no_problem_found: "good" }[kind] ?? "fair";
  const where = [about, answer.phase && t(`phase.${answer.phase}`)].filter(Boolean).join(" — ");
  const [first, ...rest] = answer.findings;
  const others = kind === "cause_above" ? answer.findings : rest.filter(isMentioned).slice(0, 3);
  const plan = planLink(answer, hints, newest, pictures);
  const link = async () => `${location.href.split("#")[0]}${addressOf("diagnose", new URLSearchParams({ report: await packed(answer) }))}`;
  return (
    <>
      {first && kind !== "cause_above" ? (
        <Finding finding={first} first tone={tone} kind={kind} where={where} pictures={pictures} onJump={onJump} />
      ) : (
        <header class={`verdict ${tone}`}>
          <h2 class="cause">{answer.headline}</h2>
          <p>{where}</p>
        </header>
      )}
      <Needed needed={answer.needed} />
      {others.map((finding) => (
        <Finding key={finding.cause + finding.entry} finding={finding} pictures={null} onJump={onJump} />
      ))}
      <Notes notes={answer.notes} />
      <div class="actions">
        {plan && (
          <a class="button" href={plan.href}>{t(plan.label)}</a>
        )}
        <CopyButton text={() => reportText(t, answer)} label={t("report.text")} />
        <CopyButton text={link} label={t("report.link")} />
        <Button onClick={() => print()}>{t("print")}</Button>
      </div>
      {!plan && deployment.model && answer.findings.length > 0 && <p class="hint">{t("finding.name_gpu")}</p>}
      <p class="hint">{t("report.hint")} {isLoopback() && t("share.local")}</p>
    </>
  );
}

function Needed({ needed }) {
  const t = useText();
  if (!needed?.length) return null;
  return (
    <div class="note fair">
      <h3>{t("finding.needed")}</h3>
      <Notes notes={needed} />
    </div>
  );
}

function LogPanel({ log, answer, jump, onJump }) {
  const t = useText();
  const marks = new Map();
  (answer?.findings ?? []).forEach((finding, index) =>
    finding.evidence.forEach(({ line }) => {
      if (!marks.has(line)) marks.set(line, { first: index === 0 });
    }),
  );
  const places = [...marks.keys()].sort((a, b) => a - b);
  const at = places.indexOf(jump?.line);
  const step = (by) => onJump(places[(at + by + places.length) % places.length]);
  return (
    <section class="log-panel" aria-label={t("log.title")}>
      <div class="row spread">
        <h2>
          {log.name || t("log.pasted")}{" "}
          <span class="soft">
            {bytesWords(log.size)}
            {log.lines ? ` · ${t(log.lines.count === 1 ? "log.one_line" : "log.lines", { count: count(log.lines.count) })}` : ""}
          </span>
        </h2>
        {places.length > 0 && log.lines && (
          <div class="row">
            <Button kind="small" onClick={() => step(-1)} aria-label={t("log.previous")}>↑</Button>
            <span class="soft">{t("log.marked", { count: places.length })}</span>
            <Button kind="small" onClick={() => step(1)} aria-label={t("log.next")}>↓</Button>
          </div>
        )}
      </div>
      {log.lines ? <LogView lines={log.lines} marks={marks} jump={jump} /> : <p class="note">{t("log.not_shown")}</p>}
    </section>
  );
}
