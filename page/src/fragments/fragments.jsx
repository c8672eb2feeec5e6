import { useEffect, useId, useRef, useState } from "preact/hooks";
import { engine } from "../engine.js";
import { Button, DropArea, ErrorNote, Status } from "../parts/controls.jsx";
import { useText } from "../text/language.jsx";
import { bytesWords } from "../units.js";
import { SAMPLE_SNAPSHOT } from "./sample.js";

const MOST_BYTES = 32 * 2 ** 20;

// JSON has no bytes. The reader makes base64 of them in one go, which a loop over characters does not.
const base64 = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });

export function FragmentsArea() {
  const t = useText();
  const [state, setState] = useState({ report: null, error: null, busy: false });
  const first = useRef(null);
  const round = useRef(0);

  const last = useRef(null);
  const ask = async (content, isLater, mine) => {
    last.current = { file: content, earlier: isLater ? first.current : null };
    if (!isLater) first.current = content;
    const report = await engine.call("fragments", { ...last.current, language: t.language });
    if (mine === round.current) setState({ report, error: null, busy: false });
  };
  // The sentences come from the engine: another language asks again.
  useEffect(() => {
    if (!state.report) return;
    const put = (report) => setState({ report, error: null, busy: false });
    engine.call("fragments", { ...last.current, language: t.language }).then(put, () => {});
  }, [t.language]);
  const read = async (file, isLater) => {
    const mine = ++round.current;
    if (file.size > MOST_BYTES) return setState({ report: null, error: { message: t("fragments.big") }, busy: false });
    setState((now) => ({ ...now, error: null, busy: true }));
    try {
      await ask(typeof file === "string" ? file : await base64(file), isLater, mine);
    } catch (error) {
      if (mine === round.current) setState({ report: null, error, busy: false });
    }
  };

  return (
    <section class="panel fragments-area" aria-label={t("fragments.title")}>
      <h1>{t("fragments.title")}</h1>
      <p class="soft">{t("fragments.what")}</p>
      <DropArea label={t("fragments.open")} onFile={(file) => read(file, false)} />
      {!state.report && !state.busy && (
        <Button onClick={() => read(SAMPLE_SNAPSHOT, false)}>{t("fragments.sample")}</Button>
      )}
      {state.report && <DropArea label={t("fragments.compare")} onFile={(file) => read(file, true)} />}
      {state.busy && <Status>{t("fragments.busy")}</Status>}
      <ErrorNote error={state.error} />
      {state.report && <Report report={state.report} />}
    </section>
  );
}

function Report({ report }) {
  const t = useText();
  const id = useId();
  const [zoom, setZoom] = useState(1);
  return (
    <>
      <h2 class="cause">{report.headline}</h2>
      <div class="row">
        <label for={id}>{t("fragments.zoom")}</label>
        <input
          id={id}
          class="zoom"
          type="range"
          min="1"
          max="6"
          step="0.5"
          value={zoom}
          onInput={(event) => setZoom(Number(event.target.value))}
        />
      </div>
      <div class="scroll-x" tabIndex={0} role="region" aria-label={t("fragments.picture")}>
        <img
          class="segments"
          ref={(node) => node?.style.setProperty("--zoom", zoom)}
          src={`data:image/svg+xml;charset=utf-8,${encodeURIComponent(report.svg)}`}
          alt={t("fragments.picture")}
        />
      </div>
      <ul>
        {report.parts.filter((part) => !report.headline.startsWith(part.text)).map((part) => (
          <li key={part.part}>
            {part.bytes == null ? "" : `${bytesWords(part.bytes)}: `}
            {part.text}
          </li>
        ))}
      </ul>
      {report.advice && <p>{report.advice}</p>}
    </>
  );
}
