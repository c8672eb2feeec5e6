import { useEffect, useId, useRef, useState } from "preact/hooks";
import { callOnce, engine } from "../engine.js";
import { Button, Choice, DropArea, ErrorNote, NumberField, Picker, SizeField, Status, Tabs, problemWith } from "../parts/controls.jsx";
import { LIMITS, cardsOffered } from "../limits.js";
import { EMPTY, isExample, typed, withGpus } from "../setup.js";
import { useText } from "../text/language.jsx";
import { commandLine, gib, memoryOf } from "../units.js";

export function useLists() {
  const [lists, setLists] = useState({ models: [], gpus: [], usual: [], releases: [], error: null });
  useEffect(() => {
    const put = (answer) => setLists((now) => ({ ...now, ...answer }));
    for (const name of ["models", "gpus", "releases"]) callOnce(name).then(put, (error) => put({ error }));
  }, []);
  return lists;
}

function inBillions(parameters) {
  if (!parameters) return "";
  return parameters < 1e9 ? `${Math.round(parameters / 1e6)}M` : `${(parameters / 1e9).toPrecision(3)}B`;
}

// A slider draws the form again sixty times a second: lists are made into options once.
const made = new WeakMap();
const once = (make) => (list) => {
  if (!made.has(list)) made.set(list, make(list));
  return made.get(list);
};

export const modelOptions = once((models) =>
  models.flatMap((model) =>
    (model.ids ?? [model.id]).map((id) => ({
      value: id,
      search: `${id} ${model.name ?? ""}`.toLowerCase(),
      note: inBillions(model.parameters),
    })),
  ),
);

// The size that is printed on a card's box: CUDA reports a little less of it.
const SOLD_GIB = [4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 141, 180, 192, 256, 288];
const boxSize = (bytes) => SOLD_GIB.find((size) => size >= bytes / 2 ** 30) ?? Math.ceil(bytes / 2 ** 30);

export const gpuOptions = once((gpus) =>
  gpus.map((gpu) => ({
    value: gpu.write?.[0] ?? gpu.name,
    search: `${gpu.name} ${(gpu.write ?? []).join(" ")} ${boxSize(gpu.total_bytes)}gb ${boxSize(gpu.total_bytes)}gib`.toLowerCase(),
    note: `${gpu.name}, ${gib(gpu.total_bytes, 1)}`,
  })),
);

// Where the model and the flags come from: a name, a config.json, or whatever text starts the server.
export function Source({ setup, onChange, onRefused, lists, error, draft }) {
  const t = useText();
  const [kind, setKind] = useState(setup.config ? "config" : "name");
  return (
    <section class="panel" aria-label={t("source.title")}>
      <Tabs
        label={t("source.title")}
        value={kind}
        onPick={setKind}
        tabs={["name", "config", "text"].map((value) => ({ value, label: t(`source.${value}`) }))}
      />
      {kind === "name" && <ByName setup={setup} onChange={onChange} lists={lists} error={error} />}
      {kind === "config" && <ByConfig setup={setup} onChange={onChange} />}
      {kind === "text" && (
        <ByText
          setup={setup}
          draft={draft}
          onRefused={onRefused}
          onPick={(next) => {
            onChange(next);
            setKind("name");
          }}
        />
      )}
      <Machine setup={setup} onChange={onChange} lists={lists} error={error} />
    </section>
  );
}

// A link to the Hub is copied more often than an id is typed.
const HUB = /^https?:\/\/(www\.)?(huggingface\.co|hf\.co)\//;

function ByName({ setup, onChange, lists, error }) {
  const t = useText();
  const options = modelOptions(lists.models);
  const known = !options.length || options.some((option) => option.value.toLowerCase() === setup.model?.toLowerCase());
  return (
    <>
      <Picker
        label={t("model")}
        value={setup.config ? "" : setup.model}
        options={options}
        placeholder="org/name"
        problem={problemWith(error, `'${setup.model}'`, "model")}
        hint={t("model.hint")}
        onPick={(written) => onChange({ ...typed(setup), model: written.replace(HUB, ""), config: null, checkpoint_bytes: null })}
      />
      {setup.config && <p class="hint">{t("config.used", { name: setup.model })}</p>}
      {!known && setup.model?.includes("/") && !setup.config && <HubLookUp key={setup.model} setup={setup} onChange={onChange} />}
    </>
  );
}

function HubLookUp({ setup, onChange }) {
  const t = useText();
  const [state, setState] = useState({ busy: false, error: null });
  const look = async () => {
    setState({ busy: true, error: null });
    try {
      const { config, checkpoint_bytes = null } = await engine.call("hub", { id: setup.model });
      onChange({ ...setup, config, checkpoint_bytes });
      setState({ busy: false, error: null });
    } catch (error) {
      setState({ busy: false, error });
    }
  };
  return (
    <div class="hub">
      <Button disabled={state.busy} onClick={look}>{state.busy ? t("hub.busy") : t("hub.look")}</Button>
      <p class="hint">{t("hub.hint")}</p>
      <ErrorNote error={state.error} />
    </div>
  );
}

function ByConfig({ setup, onChange }) {
  const t = useText();
  const id = useId();
  const [text, setText] = useState(setup.config ? JSON.stringify(setup.config, null, 1) : "");
  const [problem, setProblem] = useState("");
  const take = (written) => {
    setText(written);
    setProblem("");
    if (!written.trim()) return;
    try {
      const config = JSON.parse(written);
      if (!config || typeof config !== "object" || Array.isArray(config)) throw new Error(t("config.no_object"));
      onChange({ ...setup, config, model: config._name_or_path || t("config.name") });
    } catch (error) {
      setProblem(t("config.broken", { why: error.message }));
    }
  };
  const drop = async (file) => take(file.size > 2 ** 21 ? t("config.too_big") : await file.text());
  return (
    <div class="field">
      <label for={id}>config.json</label>
      <DropArea label={t("choose_file")} onFile={drop}>
        <textarea
          id={id}
          rows={7}
          spellcheck={false}
          value={text}
          placeholder={'{"architectures": ["LlamaForCausalLM"], ...}'}
          aria-invalid={Boolean(problem)}
          onInput={(event) => take(event.target.value)}
        />
      </DropArea>
      {problem && (
        <p class="note bad" role="alert">{problem}</p>
      )}
    </div>
  );
}

// A text that was pasted is read at once; one that was typed when its button is pressed, or when a search needs it.
function ByText({ setup, onPick, onRefused, draft }) {
  const t = useText();
  const id = useId();
  const [text, setText] = useState("");
  const [state, setState] = useState({ servers: null, error: null });
  // What vLLM refuses is never planned without the flag that it refuses.
  const pick = (server) => {
    if (server.refused) return void onRefused({ message: server.refused.why, hint: server.refused.action });
    const next = withServer(setup, server);
    onPick(next);
    return next;
  };
  // Leaving the field and pressing its button both read: the newest answer counts, and none after another change.
  const turn = useRef(0);
  useEffect(() => void (turn.current += 1), [setup]);
  const read = async (written = text) => {
    const mine = (turn.current += 1);
    setState({ servers: null, error: null });
    try {
      const { servers } = await engine.call("read", { text: written, vllm: setup.vllm, language: t.language });
      if (mine !== turn.current) return undefined;
      setState({ servers, error: null });
      return servers.length === 1 ? pick(servers[0]) : undefined;
    } catch (error) {
      if (mine !== turn.current) return undefined;
      onRefused(error);
      setState({ servers: null, error });
    }
  };
  draft.current = text.trim() ? read : null;
  useEffect(() => () => void (draft.current = null), []);
  return (
    <div class="field">
      <label for={id}>{t("text.label")}</label>
      <DropArea
        label={t("choose_file")}
        onFile={async (file) => {
          const written = await file.text();
          setText(written);
          read(written);
        }}
      >
        <textarea
          id={id}
          rows={6}
          spellcheck={false}
          value={text}
          placeholder="vllm serve Qwen/Qwen3-32B --tensor-parallel-size 2 ..."
          onChange={() => text.trim() && read()}
          onInput={({ target, inputType }) => {
            setText(target.value);
            if (inputType === "insertFromPaste") read(target.value);
          }}
        />
      </DropArea>
      <Button kind="primary" disabled={!text.trim()} onClick={() => read()}>{t("text.read")}</Button>
      <ErrorNote error={state.error} />
      {state.servers?.length === 0 && <Status kind="note">{t("text.none")}</Status>}
      {state.servers?.length > 1 && (
        <ul class="servers-read">
          {state.servers.map((server) => (
            <li key={server.place}>
              <Button kind="wide" onClick={() => pick(server)}><strong>{server.model}</strong> <span class="soft">{server.place}</span></Button>
            </li>
          ))}
        </ul>
      )}
    </div>
  );
}

// Another server has wishes of its own; those that no search has answered yet are for it.
export const withServer = (setup, server) => ({
  ...EMPTY,
  // The example's card is nobody's.
  gpu: server.gpu ?? (isExample(setup) ? "" : setup.gpu),
  gpus: server.gpus ?? null,
  gpu_memory: server.gpu && server.gpu !== setup.gpu ? null : setup.gpu_memory,
  gpu_used: setup.gpu_used,
  want_context: setup.found.length ? null : setup.want_context,
  want_users: setup.found.length ? null : setup.want_users,
  budget: setup.budget,
  host_memory: server.host_memory ?? null,
  vllm: server.vllm_named === false ? setup.vllm : server.vllm,
  model: server.model,
  env: { ...server.env },
  flags: { ...server.flags },
});

// A command that legroom wrote, as the flags it has.
export const readCommand = async (command) =>
  (await engine.call("read", { text: commandLine(command) })).servers[0];

function Machine({ setup, onChange, lists, error }) {
  const t = useText();
  const offered = cardsOffered(error);
  const size = (name, placeholder, hint) => (
    <SizeField
      name={name}
      value={setup[name]}
      problem={problemWith(error, `--${name.replace("_", "-")}`)}
      placeholder={placeholder}
      hint={hint}
      onChange={(text) => onChange({ ...setup, [name]: text })}
    />
  );
  return (
    <div class="machine">
      <Picker
        label={t("gpu")}
        value={setup.gpu}
        options={gpuOptions(lists.gpus)}
        placeholder="h100, 24GiB"
        problem={problemWith(error, `'${setup.gpu}'`, "gpu") || (offered && error.message)}
        onPick={(gpu) => onChange({ ...setup, gpu, gpu_memory: null })}
      />
      <NumberField
        isOptional
        kind="whole"
        label={t("gpus")}
        limits={LIMITS.gpus}
        value={setup.gpus ?? ""}
        problem={offered ? "" : problemWith(error, "--gpus", "gpus")}
        placeholder={t("auto")}
        onChange={(gpus) => onChange(withGpus(setup, gpus === "" ? null : gpus))}
      />
      {offered && (
        <Button kind="small" onClick={() => onChange({ ...setup, ...offered, gpu_memory: null })}>{t("gpu.take", offered)}</Button>
      )}
      {size("gpu_used", "0, 2GiB", t("gpu_used.hint"))}
      <ReleaseField
        value={setup.vllm}
        releases={lists.releases}
        unset={lists.releases.length ? t("newest", { version: versionOf(lists.releases[0]) }) : "…"}
        onPick={(vllm) => onChange({ ...setup, vllm })}
      />
      {size("gpu_memory", memoryOf(lists.gpus, setup.gpu) || t("auto"))}
      {size("host_memory", t("auto"))}
    </div>
  );
}

export const ReleaseField = ({ value, releases, unset, onPick }) => (
  <Choice
    label="vLLM"
    value={value ?? ""}
    choices={[{ value: "", label: unset }, ...releases.map((release) => ({ value: versionOf(release) }))]}
    onPick={(version) => onPick(version || null)}
  />
);

export const versionOf = (release) => (typeof release === "string" ? release : (release?.version ?? ""));
