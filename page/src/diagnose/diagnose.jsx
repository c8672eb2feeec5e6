import { useEffect, useId, useRef, useState } from "preact/hooks";
import { engine } from "../engine.js";
import { DropArea, ErrorNote, Picker } from "../parts/controls.jsx";
import { gpuOptions, useLists } from "../plan/source.jsx";
import { useText } from "../text/language.jsx";
import { bytesWords, count } from "../units.js";
import { Finding } from "./finding.jsx";
import { NotALog, openLog } from "./log_file.js";
import { LogView } from "./log_view.jsx";
import { SAMPLE_LOG } from "./sample.js";

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

export function DiagnoseArea() {
  const t = useText();
  const lists = useLists();
  const [text, setText] = useState("");
  const [hints, setHints] = useState({ command: "", gpu: "" });
  const [state, setState] = useState({ log: null, answer: null, pictures: null, error: null, busy: false });
  const [jump, setJump] = useState(null);
  const round = useRef(0);

  const read = async (file, name, known = hints) => {
    const mine = ++round.current;
    const put = (change) => mine === round.current && setState((now) => ({ ...now, ...change }));
    setState({ log: null, answer: null, pictures: null, error: null, busy: true });
    try {
      const log = await openLog(file, name, engine.mostLogBytes);
      put({ log });
      const answer = await engine.diagnose(log.blob, known);
      put({ answer, busy: false });
      const line = answer.findings?.[0]?.evidence?.[0]?.line;
      if (line && mine === round.current) setJump({ line });
      put({ pictures: await beforeAndAfter(answer, known) });
    } catch (error) {
      put({
        error: error instanceof NotALog ? { message: t(`log.${error.message}`, { name: name ?? file.name }) } : error,
        busy: false,
      });
    }
  };
  const readText = (written, known) => {
    keepText(written);
    read(new Blob([written]), t("log.pasted"), known);
  };
  const readSample = () => {
    const known = { ...hints, gpu: hints.gpu || "rtx-4090" };
    setText(SAMPLE_LOG);
    setHints(known);
    readText(SAMPLE_LOG, known);
  };
  useEffect(() => {
    const kept = keptText();
    if (kept) {
      setText(kept.length <= MOST_TYPED ? kept : "");
      readText(kept);
    }
  }, []);
  const paste = (event) => {
    const pasted = event.clipboardData?.getData("text") ?? "";
    if (pasted.length <= MOST_TYPED) return;
    // A text field with megabytes in it freezes the page; the view below does not.
    event.preventDefault();
    readText(pasted);
  };
  return (
    <div class="diagnose-area">
      <section class="panel log-input" aria-label={t("diagnose.title")}>
        <h1>{t("diagnose.title")}</h1>
        <p class="private">{t(privacy, { host: location.host })}</p>
        <LogInput
          text={text}
          setText={setText}
          onPaste={paste}
          onRead={() => readText(text)}
          onFile={(file) => {
            keepText("");
            read(file, file.name);
          }}
          busy={state.busy}
        />
        <details class="hints">
          <summary>{t("diagnose.hints")}</summary>
          <HintFields hints={hints} setHints={setHints} lists={lists} />
        </details>
        <div class="row">
          <button
            type="button"
            class="button primary"
            disabled={!text.trim() || state.busy}
            onClick={() => readText(text)}
          >
            {t("diagnose.read")}
          </button>
          <button type="button" class="button" onClick={readSample}>
            {t("diagnose.sample")}
          </button>
        </div>
      </section>
      <div class="diagnosis" aria-live="polite">
        {state.busy && (
          <p class="soft" role="status">
            {t("diagnose.busy", { size: state.log ? bytesWords(state.log.size) : "" })}
          </p>
        )}
        <ErrorNote error={state.error} />
        {state.answer && (
          <Answer answer={state.answer} pictures={state.pictures} onJump={(line) => setJump({ line })} />
        )}
      </div>
      {state.log && <LogPanel log={state.log} answer={state.answer} jump={jump} onJump={(line) => setJump({ line })} />}
    </div>
  );
}

const LOOPBACK = /^(localhost|127\.[\d.]+|\[::1\])$/;
const SERVED = LOOPBACK.test(location.hostname) ? "diagnose.private" : "diagnose.private_elsewhere";
const privacy = engine.edition === "static" ? "diagnose.private_static" : SERVED;

// The card of the command that failed and of the first fix, where the log (or the user) tells enough to draw them.
async function beforeAndAfter(answer, hints) {
  const { model, gpu, vllm, args = {} } = answer.deployment ?? {};
  const fix = answer.findings?.[0]?.fixes?.[0];
  if (!fix?.layout || !model || !(gpu || hints.gpu)) return null;
  const request = { model, gpu: hints.gpu || gpu, vllm: vllm ?? null, flags: args, advice: false };
  const { model: other, ...flags } = fix.flags;
  try {
    const [before, after] = await Promise.all([
      engine.call("plan", request),
      engine.call("plan", { ...request, model: other ?? model, flags: { ...args, ...flags } }),
    ]);
    return { before, after: { ...after, layout: fix.layout, confidence: {} } };
  } catch {
    return null;
  }
}

function LogInput({ text, setText, onPaste, onFile }) {
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
          placeholder={t("diagnose.placeholder")}
          onPaste={onPaste}
          onInput={(event) => setText(event.target.value)}
        />
      </DropArea>
    </div>
  );
}

function HintFields({ hints, setHints, lists }) {
  const t = useText();
  const id = useId();
  return (
    <>
      <div class="field">
        <label for={id}>{t("diagnose.command")}</label>
        <input
          id={id}
          type="text"
          value={hints.command}
          placeholder="vllm serve ..."
          onInput={(event) => setHints({ ...hints, command: event.target.value })}
        />
      </div>
      <Picker
        label={t("gpu")}
        value={hints.gpu}
        options={gpuOptions(lists.gpus)}
        placeholder="h100, 24GiB"
        onPick={(gpu) => setHints({ ...hints, gpu })}
      />
    </>
  );
}

function Answer({ answer, pictures, onJump }) {
  const t = useText();
  const { deployment = {} } = answer;
  const about = [
    deployment.model,
    deployment.gpu && (deployment.gpu.name ?? deployment.gpu),
    deployment.vllm && `vLLM ${deployment.vllm}`,
  ].filter((word) => typeof word === "string");
  const kind = answer.verdict.replaceAll(" ", "_");
  const tone = { cause_found: "bad", no_problem_found: "good" }[kind] ?? "fair";
  return (
    <>
      <header class={`verdict ${tone}`}>
        <span class="badge">{t(`diagnosis.${kind}`)}</span>
        <p>{[about.join(" · "), answer.phase && t(`phase.${answer.phase}`)].filter(Boolean).join(" — ")}</p>
      </header>
      {!answer.findings.length && <p>{t(`diagnosis.${kind}.what`)}</p>}
      {answer.findings.map((finding, index) => (
        <Finding
          key={finding.cause + finding.entry}
          finding={finding}
          first={index === 0}
          pictures={pictures}
          onJump={onJump}
        />
      ))}
    </>
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
          {log.name || t("log.title")}{" "}
          <span class="soft">
            {bytesWords(log.size)}
            {log.lines ? ` · ${t("log.lines", { count: count(log.lines.count) })}` : ""}
          </span>
        </h2>
        {places.length > 0 && log.lines && (
          <div class="row">
            <button type="button" class="button small" onClick={() => step(-1)} aria-label={t("log.previous")}>
              ↑
            </button>
            <span class="soft">{t("log.marked", { count: places.length })}</span>
            <button type="button" class="button small" onClick={() => step(1)} aria-label={t("log.next")}>
              ↓
            </button>
          </div>
        )}
      </div>
      {log.lines ? <LogView lines={log.lines} marks={marks} jump={jump} /> : <p class="note">{t("log.not_shown")}</p>}
    </section>
  );
}
