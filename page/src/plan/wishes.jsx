import { useRef, useState } from "preact/hooks";
import { Newest, engine } from "../engine.js";
import { ErrorNote } from "../parts/controls.jsx";
import { readLength, requestOf } from "../setup.js";
import { useText } from "../text/language.jsx";
import { commandLine } from "../units.js";
import { withServer } from "./source.jsx";

// "I want 32k for 16 users": the flags are searched, put into the form, and what they give up is said.
export function Wishes({ setup, onChange }) {
  const t = useText();
  const [wish, setWish] = useState({ context: "32k", users: "16" });
  const [state, setState] = useState({ busy: false, error: null, answer: null });
  const newest = useRef(null);
  newest.current ??= new Newest(0);
  const context = readLength(wish.context);
  const users = /^[1-9]\d*$/.test(wish.users.trim()) ? Number(wish.users) : null;
  const take = async (command, gpus) => {
    const { servers } = await engine.call("read", { text: commandLine(command) });
    const { vllm, gpu, gpu_memory, env } = setup;
    onChange({ ...withServer(setup, servers[0]), vllm, gpu, gpu_memory, env, gpus });
  };
  const search = (event) => {
    event.preventDefault();
    if (!context || !users) return;
    setState({ busy: true, error: null, answer: null });
    const { max_model_len, max_num_seqs, gpu_memory_utilization, ...flags } = setup.flags;
    newest.current.run(
      async (signal) => {
        const request = { ...requestOf(setup), flags, language: t.language, want: { context, users } };
        const answer = await engine.call("plan", request, signal);
        if (answer.verdict !== "does_not_fit") await take(answer.command, answer.gpu.count);
        return answer;
      },
      (answer) => setState({ busy: false, error: null, answer }),
      (error) => setState({ busy: false, error, answer: null }),
    );
  };
  const field = (name, valid) => (
    <input
      type="text"
      class="wish"
      size={6}
      value={wish[name]}
      aria-label={t(`wish.${name}`)}
      aria-invalid={!valid}
      onInput={(event) => setWish({ ...wish, [name]: event.target.value })}
    />
  );
  const [before, between, after] = t("wish.sentence").split("|");
  return (
    <form class="panel wishes" aria-label={t("wish.title")} onSubmit={search}>
      <p>
        {before} {field("context", context)} {between} {field("users", users)} {after}
      </p>
      <div class="row">
        <button type="submit" class="button primary" disabled={!context || !users}>
          {t(state.busy ? "wish.busy" : "wish.find")}
        </button>
      </div>
      <div aria-live="polite">
        <ErrorNote error={state.error} />
        {state.answer && <Found answer={state.answer} onTake={take} />}
      </div>
    </form>
  );
}

function Found({ answer, onTake }) {
  const t = useText();
  const { words, search, verdict } = answer;
  return (
    <div class={`note ${verdict === "does_not_fit" ? "bad" : "good"}`}>
      <p>
        <strong>{words.headline}</strong>
      </p>
      {words.gives_up && <p>{words.gives_up}</p>}
      <p class="soft">{words.weighed}</p>
      {search.alternatives.length > 0 && (
        <details>
          <summary>{t("wish.others", { count: search.alternatives.length })}</summary>
          <ul class="fix-list">
            {search.alternatives.map((other) => (
              <li key={other.command.join(" ")}>
                <button type="button" class="button wide small" onClick={() => onTake(other.command, other.gpus)}>
                  <code>{other.command.slice(3).join(" ") || t("wish.defaults")}</code>
                </button>
              </li>
            ))}
          </ul>
        </details>
      )}
    </div>
  );
}
