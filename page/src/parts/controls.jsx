import { useEffect, useId, useMemo, useRef, useState } from "preact/hooks";
import { faultOf, readField, sizeFault } from "../limits.js";
import { readCount, withUnit } from "../setup.js";
import { useText } from "../text/language.jsx";
import { count } from "../units.js";

export function CopyButton({ text, label }) {
  const t = useText();
  const [state, setState] = useState("");
  const copy = async () => {
    setState((await writeClipboard(typeof text === "function" ? await text() : text)) ? "copied" : "failed");
    setTimeout(() => setState(""), 1600);
  };
  return (
    <button type="button" class="button copy" onClick={copy}>
      <span aria-live="polite">{state === "copied" ? t("copied") : state === "failed" ? t("copy.failed") : (label ?? t("copy"))}</span>
    </button>
  );
}

async function writeClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Plain http on another address has no clipboard API.
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "off-screen";
    document.body.append(area);
    area.select();
    const worked = document.execCommand("copy");
    area.remove();
    return worked;
  }
}

// A shell text whose flags never break inside their names.
export const ShellText = ({ text }) =>
  text
    .split(/((?:^|(?<=[\s(（]))--?[A-Za-z][\w-]*)/)
    .map((part, at) => (at % 2 ? <span class="flag-name">{part}</span> : part));

// A sentence of the knowledge base: what stands in backticks is code.
export const Prose = ({ text }) =>
  text
    .replace(/^[a-z](?=[a-z]*[ ,;:])/, (letter) => letter.toUpperCase())
    .split(/`([^`]+)`/)
    .map((part, at) => (at % 2 ? <code>{part}</code> : part));

export function Command({ text, label, children }) {
  const t = useText();
  return (
    <div class="command">
      <pre tabIndex={0} aria-label={label ?? t("command")}><code><ShellText text={text} /></code></pre>
      <div class="command-actions">
        <CopyButton text={text} />
        {children}
      </div>
    </div>
  );
}

export function ErrorNote({ error }) {
  const t = useText();
  if (!error) return null;
  const known = { unreachable: "error.unreachable", "no-wasm": "error.no_wasm" }[error.message];
  return (
    <div class="note bad" role="alert">
      <p>{known ? t(known) : error.message}</p>
      {error.hint && !error.hint.includes("openapi.json") && <p class="soft">{error.hint}</p>}
    </div>
  );
}

// What goes on, or what to know of an answer, told to who does not see it too.
export const Status = ({ kind = "soft", children }) => (
  <p class={kind} role="status">{children}</p>
);

export const Button = ({ kind = "", ...rest }) => <button type="button" class={`button ${kind}`.trim()} {...rest} />;

// An answer whose beginning cannot be seen comes into view.
export const reveal = (selector) =>
  requestAnimationFrame(() => {
    const place = document.querySelector(selector);
    const { top } = place?.getBoundingClientRect() ?? { top: 0 };
    if (top < 0 || top > innerHeight / 2) place.scrollIntoView({ block: "start" });
  });

// A fold that an address may ask for: it is open then, and comes first.
export function useFold(asked) {
  const [open, setOpen] = useState(asked);
  useEffect(() => void (asked && setOpen(true)), [asked]);
  return { open, class: asked ? "fold asked" : "fold", onToggle: (event) => setOpen(event.currentTarget.open) };
}

export const Notes = ({ notes }) =>
  notes?.length ? (
    <ul class="notes">
      {notes.map((note) => (
        <li key={note}>{note}</li>
      ))}
    </ul>
  ) : null;

export const VERDICT_CLASS = { fits: "good", tight: "fair", does_not_fit: "bad" };

export function VerdictBadge({ verdict }) {
  const t = useText();
  return <span class={`badge small ${VERDICT_CLASS[verdict]}`}>{t(`badge.${verdict}`)}</span>;
}

// A control with its label, and beside it what is wrong with its value.
export function Field({ id, label, kind = "", onReset, problem, children }) {
  const t = useText();
  return (
    <div class={`field ${kind}${onReset ? " is-set" : ""}`}>
      <div class="field-head">
        <label for={id}>{label}</label>
        {onReset && (
          <button type="button" class="reset" onClick={onReset} title={t("flag.reset")}>
            {t("flag.set")} × <span class="off-screen">{`${t("flag.reset")}: ${label}`}</span>
          </button>
        )}
      </div>
      {children}
      {problem && (
        <p id={`${id}-problem`} class="problem">{problem}</p>
      )}
    </div>
  );
}

const wrong = (id, problem) => problem && { "aria-invalid": true, "aria-describedby": `${id}-problem` };

// The engine names what it refuses: the field of that name shows it.
export function problemWith(error, name, field) {
  if (!error) return "";
  const named = error.field ? error.field === field : (error.source ?? error.message).split(/[^\w'./-]+/).includes(name);
  return named ? [error.message, error.hint].filter(Boolean).join(" · ") : "";
}

// A line of text, or several `rows`; `onInput` follows every letter, `onChange` waits until the field is left.
export function TextField({ label, onReset, problem, hint, ...input }) {
  const id = useId();
  const told = (tell) => tell && ((event) => tell(event.target.value));
  const Written = input.rows ? "textarea" : "input";
  return (
    <Field {...{ id, label, onReset, problem }}>
      <Written {...input} {...wrong(id, problem)} id={id} type={input.rows ? undefined : "text"} onInput={told(input.onInput)} onChange={told(input.onChange)} />
      {hint && <p class="hint">{hint}</p>}
    </Field>
  );
}

// A number, a flag of vLLM or a length, as the command line reads it; what is none stays in sight, with the reason.
// Where it stands for nothing, the field may be empty.
export function NumberField({ label, value, onChange, placeholder, kind = "number", limits, isOptional, problem: refused }) {
  const t = useText();
  const problem = refused || (isOptional && value === "" ? "" : faultOf(t, kind, value, limits));
  return (
    <TextField {...{ label, value, placeholder, problem }} inputMode="decimal" onInput={(text) => onChange(readField(kind, text, limits) ?? text.trim())} />
  );
}

// A size by the name of its field: a plain number is GiB, and stays so in sight.
export function SizeField({ name, value, problem, placeholder, hint, onChange }) {
  const t = useText();
  return (
    <TextField
      label={t(name)}
      problem={sizeFault(t, name, value) || problem}
      value={value ?? ""}
      placeholder={placeholder}
      hint={hint}
      onChange={(text) => onChange(withUnit(text) || null)}
    />
  );
}

// A text field that offers what is known and takes anything else as it is written, nothing too; `isClosed` takes what is
// known alone. A text with a space is a search: where it leaves one option, Enter takes that.
export function Picker({ label, value, options, onPick, placeholder, hint, problem, isClosed }) {
  const id = useId();
  const t = useText();
  const [text, setText] = useState(value);
  const [open, setOpen] = useState(false);
  const [at, setAt] = useState(-1);
  const edited = useRef(false);
  useEffect(() => setText(value), [value]);
  // A name that is written in full needs no list, which would cover what is below the field.
  const isWhole = edited.current && options.some((option) => option.value.toLowerCase() === text.toLowerCase());
  const shown = useMemo(
    () => (open && !isWhole ? matching(options, edited.current ? text : "") : []),
    [options, text, open, isWhole],
  );
  // What was wrong with a text is not wrong with the one that is written in its place.
  const told = text === value && problem;
  const pick = (choice) => {
    const taken = isClosed && !options.some((option) => option.value === choice) ? "" : choice.trim();
    edited.current = false;
    setOpen(false);
    setAt(-1);
    setText(taken || !isClosed ? taken : value);
    if (taken !== value && (taken || !isClosed)) onPick(taken);
  };
  // What Enter takes of a written text: the marked option, the first of a closed list, the only one of a search.
  const taken = (written) => {
    if (at >= 0 && shown[at]) return shown[at].value;
    const hits = edited.current ? matching(options, written) : [];
    return isClosed || (hits.length === 1 && written.trim().includes(" ")) ? hits[0]?.value : written;
  };
  const keys = (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      setOpen(true);
      const step = event.key === "ArrowDown" ? 1 : -1;
      setAt((now) => Math.max(-1, Math.min(now + step, shown.length - 1)));
    } else if (event.key === "Enter") {
      event.preventDefault();
      const choice = taken(event.target.value);
      if (choice !== undefined) pick(choice);
    } else if (event.key === "Escape") setOpen(false);
  };
  return (
    <Field kind="picker" {...{ id, label }} problem={told}>
      <input
        {...wrong(id, told)}
        id={id}
        type="text"
        role="combobox"
        aria-expanded={open}
        aria-controls={`${id}-list`}
        aria-autocomplete="list"
        autocomplete="off"
        spellcheck={false}
        aria-activedescendant={open && at >= 0 ? `${id}-${at}` : undefined}
        value={text}
        placeholder={placeholder}
        onInput={(event) => {
          edited.current = true;
          setText(event.target.value);
          setOpen(true);
          setAt(-1);
        }}
        onFocus={(event) => {
          event.target.select();
          setOpen(!text);
        }}
        onClick={() => setOpen(true)}
        onKeyDown={keys}
        onBlur={(event) => pick(event.target.value)}
      />
      {hint && <p class="hint">{hint}</p>}
      {/* A list that scrolls is a stop of the Tab key unless it says otherwise, and it closes as soon as the field is left. */}
      <ul
        id={`${id}-list`}
        role="listbox"
        tabIndex={-1}
        aria-label={label}
        class="options"
        hidden={!open || isWhole || !(shown.length || isClosed)}
      >
        {open &&
          shown.map((option, index) => (
            <li
              key={option.value}
              id={`${id}-${index}`}
              role="option"
              aria-selected={index === at}
              class={index === at ? "at" : ""}
              onMouseDown={(event) => event.preventDefault()}
              onClick={() => pick(option.value)}
              ref={(node) => index === at && node?.scrollIntoView({ block: "nearest" })}
            >
              <span>{option.value}</span>
              {option.note && <span class="soft">{option.note}</span>}
            </li>
          ))}
        {open && (shown.more > 0 || !shown.length) && (
          <li class="soft more" role="presentation">{t(shown.length ? "picker.more" : "picker.none", { count: shown.more })}</li>
        )}
      </ul>
    </Field>
  );
}

// A flag is found as it is written in a command (--a-b), in Python (a_b) and without its dashes.
const plain = (text) => text.toLowerCase().replaceAll("_", "-").replace(/(^|\s)--/g, "$1");

function matching(options, text, most = 60) {
  const words = plain(text).split(/\s+/).filter(Boolean);
  const hits = options.filter((option) => words.every((word) => plain(option.search).includes(word)));
  // What begins with the words comes first, then the shorter name.
  const rank = ({ value }) =>
    value.length + (words.length && value.split("/").pop().toLowerCase().startsWith(words[0]) ? 0 : 1000);
  if (words.length) hits.sort((a, b) => rank(a) - rank(b));
  const shown = hits.slice(0, most);
  shown.more = hits.length - shown.length;
  return shown;
}

export function Choice({ label, value, choices, onPick, onReset, problem }) {
  const id = useId();
  const known = choices.some((choice) => String(choice.value) === String(value));
  return (
    <Field kind="choice" {...{ id, label, onReset, problem }}>
      <select {...wrong(id, problem)} id={id} value={value} onChange={(event) => onPick(event.target.value)}>
        {[...(known ? [] : [{ value }]), ...choices].map((choice) => (
          <option key={choice.value} value={choice.value}>{choice.label ?? choice.value}</option>
        ))}
      </select>
    </Field>
  );
}

// A small k is a thousand to vLLM, where a wish means 1,024.
function thousands(typed) {
  const other = typed.toUpperCase();
  const [number, more] = [typed, other].map(readCount);
  return number === more ? null : { typed, number, value: count(number), other, more: count(more) };
}

// A slider with the number beside it. `stops` turn its even travel into the values that make sense (powers of two, say).
// What is typed is read as the command line reads it; what is no number goes to the engine, which says what is wrong. An
// emptied field has its default again.
export function Slider({ label, value, stops, onMove, onReset, problem, format = String, unit }) {
  const id = useId();
  const at = nearest(stops, value);
  const t = useText();
  const [typed, setTyped] = useState(null);
  const [read, setRead] = useState(null);
  const commit = () => {
    if (typed?.trim()) {
      onMove(readCount(typed) ?? typed.trim());
      setRead(thousands(typed.trim()));
    } else if (typed !== null) onReset?.();
    setTyped(null);
  };
  return (
    <Field kind="slider" {...{ id, label, onReset, problem }}>
      <div class="slider-row">
        <input
          id={id}
          type="range"
          min="0"
          max={stops.length - 1}
          step="1"
          value={at}
          aria-valuetext={Number.isFinite(value) ? format(value) : String(value)}
          ref={(node) => node?.style.setProperty("--fill", `${(100 * at) / (stops.length - 1)}%`)}
          onInput={(event) => onMove(stops[Number(event.target.value)])}
        />
        <input
          type="text"
          inputMode="decimal"
          class="number"
          {...wrong(id, problem)}
          aria-label={`${label}${unit ? `, ${unit}` : ""}`}
          value={typed ?? String(value ?? "")}
          onFocus={(event) => event.target.select()}
          onInput={(event) => setTyped(event.target.value)}
          onBlur={commit}
          onKeyDown={(event) => event.key === "Enter" && commit()}
        />
      </div>
      {read && read.number === value && <p class="hint">{t("read.as", read)}</p>}
    </Field>
  );
}

function nearest(stops, value) {
  let best = 0;
  for (let index = 1; index < stops.length; index++)
    if (Math.abs(stops[index] - value) < Math.abs(stops[best] - value)) best = index;
  return best;
}

export function Toggle({ label, value, onPick, onReset, problem, plain }) {
  const id = useId();
  return (
    <Field kind={`toggle${plain ? " plain" : ""}`} {...{ id, label, onReset, problem }}>
      <input
        {...wrong(id, problem)}
        id={id}
        type="checkbox"
        role="switch"
        checked={Boolean(value)}
        onChange={(event) => onPick(event.target.checked)}
      />
    </Field>
  );
}

export function Tabs({ label, tabs, value, onPick }) {
  return (
    <div class="tabs" role="group" aria-label={label}>
      {tabs.map((tab) => (
        <button key={tab.value} type="button" aria-pressed={tab.value === value} onClick={() => onPick(tab.value)}>{tab.label}</button>
      ))}
    </div>
  );
}

export function DropArea({ onFile, label, children }) {
  const [over, setOver] = useState(false);
  const input = useRef(null);
  return (
    <div
      class={`drop${over ? " over" : ""}`}
      onDragOver={(event) => {
        event.preventDefault();
        setOver(true);
      }}
      onDragLeave={() => setOver(false)}
      onDrop={(event) => {
        event.preventDefault();
        setOver(false);
        if (event.dataTransfer.files[0]) onFile(event.dataTransfer.files[0]);
      }}
    >
      {children}
      <Button onClick={() => input.current.click()}>{label}</Button>
      <input
        ref={input}
        type="file"
        class="off-screen"
        tabIndex={-1}
        aria-label={label}
        onChange={(event) => {
          if (event.target.files[0]) onFile(event.target.files[0]);
          event.target.value = "";
        }}
      />
    </div>
  );
}
