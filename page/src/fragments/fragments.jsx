import { useRef, useState } from "preact/hooks";
import { engine } from "../engine.js";
import { DropArea, ErrorNote } from "../parts/controls.jsx";
import { useText } from "../text/language.jsx";
import { bytesWords } from "../units.js";

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

  const read = async (file, isLater) => {
    const mine = ++round.current;
    if (file.size > MOST_BYTES) return setState({ report: null, error: { message: t("fragments.big") }, busy: false });
    setState((now) => ({ ...now, error: null, busy: true }));
    try {
      const content = await base64(file);
      const request = { file: content, earlier: isLater ? first.current : null };
      if (!isLater) first.current = content;
      const report = await engine.call("fragments", request);
      if (mine === round.current) setState({ report, error: null, busy: false });
    } catch (error) {
      if (mine === round.current) setState({ report: null, error, busy: false });
    }
  };

  return (
    <section class="panel fragments-area" aria-label={t("fragments.title")}>
      <h1>{t("fragments.title")}</h1>
      <p class="soft">{t("fragments.what")}</p>
      <DropArea label={t("fragments.open")} onFile={(file) => read(file, false)} />
      {state.report && <DropArea label={t("fragments.compare")} onFile={(file) => read(file, true)} />}
      {state.busy && (
        <p class="soft" role="status">
          {t("fragments.busy")}
        </p>
      )}
      <ErrorNote error={state.error} />
      {state.report && <Report report={state.report} />}
    </section>
  );
}

function Report({ report }) {
  const t = useText();
  return (
    <>
      <h2>{report.headline}</h2>
      <img
        class="segments"
        src={`data:image/svg+xml;charset=utf-8,${encodeURIComponent(report.svg)}`}
        alt={t("fragments.picture")}
      />
      <ul>
        {report.parts.map((part) => (
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
