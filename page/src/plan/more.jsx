import { useEffect, useId, useState } from "preact/hooks";
import { callOnce, engine } from "../engine.js";
import { Button, Command, ErrorNote, Notes, Status, Tabs, VerdictBadge, useFold } from "../parts/controls.jsx";
import { LIMITS, faultIn, faultOf } from "../limits.js";
import { requestOf, withUnit } from "../setup.js";
import { useText } from "../text/language.jsx";
import { commandLine, gib, signed } from "../units.js";
import { save } from "./picture_file.js";
import { versionOf, withServer } from "./source.jsx";

const FORMS = ["docker", "compose", "kubernetes", "systemd", "prometheus"];

// The same server as a command, or as the file that starts it.
export function ToRun({ plan, request }) {
  const t = useText();
  const [form, setForm] = useState("command");
  const [state, setState] = useState({ key: "", files: null, error: null });
  const { language, advice, ...asked } = request ?? {};
  const key = form === "command" ? "" : JSON.stringify({ plan: asked, format: form });
  useEffect(() => {
    if (!key) return undefined;
    const timer = setTimeout(
      () =>
        callOnce("files", JSON.parse(key)).then(
          ({ files }) => setState({ key, files, error: null }),
          (error) => setState({ key, files: null, error }),
        ),
      200,
    );
    return () => clearTimeout(timer);
  }, [key]);
  const ready = state.key === key;
  return (
    <section class="to-run" aria-label={t("command.title")}>
      <h2>{t("command.title")}</h2>
      {plan.verdict === "tight" && <p class="note fair">{t("command.tight")}</p>}
      {request && (
        <Tabs
          label={t("command.title")}
          value={form}
          onPick={setForm}
          tabs={["command", ...FORMS].map((value) => ({ value, label: t(`form.${value}`) }))}
        />
      )}
      {form === "command" && <Command text={commandLine(plan.command, plan.env)} />}
      {form !== "command" && (ready ? <ErrorNote error={state.error} /> : <Status>…</Status>)}
      {form !== "command" &&
        ready &&
        state.files?.map((file) => (
          <div class="to-run file" key={file.path}>
            <h3 class="mono">{file.path}</h3>
            <Command text={file.text} label={file.path}>
              <Button onClick={() => save(new Blob([file.text], { type: "text/plain" }), file.path.split("/").pop())}>{t("save")}</Button>
            </Command>
          </div>
        ))}
    </section>
  );
}

// A question that takes a search is asked when its fold is opened and its button pressed; the answer to another one is none.
function useAnswer(name, request) {
  const key = JSON.stringify(request);
  const [state, setState] = useState({ key: "" });
  const ask = () => {
    const put = (answered) => setState((now) => (now.key === key ? { key, ...answered } : now));
    setState({ key, busy: true });
    engine.call(name, request).then(
      (answer) => put({ answer }),
      (error) => put({ error }),
    );
  };
  return [state.key === key ? state : {}, ask];
}

// What another release changes for this server.
export function Upgrade({ asked, setup, plan, lists }) {
  const t = useText();
  const fold = useFold(asked);
  const id = useId();
  const releases = lists.releases.map(versionOf).filter((version) => version !== plan?.vllm);
  const [to, setTo] = useState("");
  const { cold, measured, ...request } = requestOf(setup);
  const target = releases.includes(to) ? to : releases[0] ?? "";
  const [state, go] = useAnswer("upgrade", { ...request, vllm: plan?.vllm, to: target, language: t.language });
  return (
    <details {...fold}>
      <summary>{t("upgrade.title")}</summary>
      <div class="row">
        <label for={id}>{t("upgrade.to", { from: plan?.vllm ?? "" })}</label>
        <select id={id} value={target} onChange={(event) => setTo(event.target.value)}>
          {releases.map((version) => (
            <option key={version} value={version}>{version}</option>
          ))}
        </select>
        <Button disabled={!plan || !target || state.busy} onClick={go}>{t(state.busy ? "wish.busy" : "upgrade.go")}</Button>
      </div>
      <ErrorNote error={state.error} />
      {state.answer && <UpgradeAnswer answer={state.answer} />}
    </details>
  );
}

function UpgradeAnswer({ answer }) {
  const t = useText();
  const { words, to } = answer;
  return (
    <>
      <p><VerdictBadge verdict={to.verdict} /> {words.headline} <strong>{words.conclusion}</strong></p>
      {words.range && <p>{words.range}</p>}
      <div class="scroll-x" tabIndex={0} role="region" aria-label={t("upgrade.title")}>
        <table>
          <tbody>
            {words.figures.map(([name, ...cells]) => (
              <tr key={name}>
                <th scope="row">{name}</th>
                {cells.map((cell, index) => <td class="figure" key={index}>{cell}</td>)}
              </tr>
            ))}
          </tbody>
        </table>
        {["changes", "outside"].map((kind) => (
          <Changes key={kind} title={t(`upgrade.${kind}`)} changes={answer[kind]} words={words[kind]} />
        ))}
      </div>
      {["remarks", "flags", "metrics", "bugs"].map((name) => words[name].length > 0 && (
        <section key={name}>
          <h3>{t(`upgrade.${name}`)}</h3>
          <Notes notes={words[name]} />
        </section>
      ))}
      {words.kept && (
        <>
          <h3>{t("upgrade.keeps", { to: to.vllm })}</h3>
          {words.caveats.map((text) => (
            <p key={text} class="note fair">{text}</p>
          ))}
          <Command text={commandLine(answer.command)} />
          <p>{words.kept}</p>
        </>
      )}
    </>
  );
}

function Changes({ title, changes, words }) {
  const rows = changes.map((change, index) => ({ ...change, ...words[index] })).filter(({ bytes }) => Math.abs(bytes) >= 2 ** 20);
  if (!rows.length) return null;
  return (
    <table>
      <caption>{title}</caption>
      <tbody>
        {rows.map(({ bytes, what, why }) => (
          <tr key={what}>
            <th scope="row" class="figure">{signed(bytes)}</th>
            <td>
              <strong>{what}</strong>
              <br />
              {why}
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

// What `legroom pack` takes among the flags of a server.
const PACK_OPTIONS = /(?<!\S)--(want-context|want-concurrency|weight|name)(=|\s+)\S+/g;
const linesOf = (text) => text.split("\n").filter((line) => line.trim());

// The first server of the lines that were written; null while they are the plan's own.
export function useFirstPacked(setup) {
  const text = linesOf(setup?.pack ?? "")[0]?.replace(PACK_OPTIONS, "").trim() ?? "";
  const [state, setState] = useState({});
  useEffect(() => {
    if (!text) return undefined;
    const read = () =>
      callOnce("read", { text }).then(
        ({ servers }) => setState({ text, server: servers[0] }),
        (error) => setState({ text, error }),
      );
    const timer = setTimeout(read, 300);
    return () => clearTimeout(timer);
  }, [text]);
  if (!text) return null;
  const { server, error } = state.text === text ? state : {};
  const { gpu, gpu_memory } = setup ?? {};
  return { error, setup: server && { ...withServer(setup, server), gpu, gpu_memory, gpus: null } };
}

// Several servers on the machine of this plan.
export function Pack({ asked, setup, plan, onChange }) {
  const t = useText();
  const fold = useFold(asked);
  const id = useId();
  const own = plan?.words.to_run.length ? commandLine(plan.words.to_run) : `vllm serve ${setup.model}`;
  const written = setup.pack ?? `${own}\nvllm serve Qwen/Qwen3-0.6B --max-model-len 8192\n`;
  const commands = linesOf(written);
  const gpus = setup.gpus ?? plan?.gpu.count ?? 1;
  const machine = { vllm: setup.vllm, gpu: setup.gpu, gpu_memory: withUnit(setup.gpu_memory ?? "") || null, gpu_used: withUnit(setup.gpu_used ?? "") || null };
  const tooMany = faultOf(t, "whole", gpus, LIMITS.packed_gpus);
  const fault = faultIn(t, setup)?.message ?? (tooMany ? `${t("gpus")}: ${tooMany}` : commands.length > 8 ? t("pack.most") : "");
  const [state, go] = useAnswer("pack", { ...machine, gpus, commands, language: t.language });
  return (
    <details {...fold}>
      <summary>{t("pack.title")}</summary>
      <div class="field">
        <label for={id}>{t("pack.label", { gpus, gpu: plan?.gpu.name ?? setup.gpu })}</label>
        {!setup.pack && <p class="hint">{t("pack.example")}</p>}
        <textarea id={id} rows={4} spellcheck={false} value={written} onInput={(event) => onChange({ ...setup, pack: event.target.value || null })} />
      </div>
      {fault && <p class="problem">{fault}</p>}
      <Button disabled={!commands.length || Boolean(fault) || state.busy} onClick={go}>{t(state.busy ? "wish.busy" : "pack.go")}</Button>
      <ErrorNote error={state.error} />
      {state.answer && (
        <>
          <p><VerdictBadge verdict={state.answer.verdict} /> {state.answer.words.headline}</p>
          <Notes notes={state.answer.words.changes} />
          {state.answer.verdict !== "does_not_fit" &&
            state.answer.servers.map((server, at) => (
              <div key={server.name}>
                <p class="soft">{t(server.pool_bytes ? "pack.server" : "pack.no_cache", { name: server.name, peak: gib(server.peak_bytes), pool: gib(server.pool_bytes), holds: state.answer.words.holds[at] })}</p>
                <Command text={commandLine(server.command, server.env)} />
              </div>
            ))}
        </>
      )}
    </details>
  );
}
