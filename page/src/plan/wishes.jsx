import { useEffect, useRef, useState } from "preact/hooks";
import { addressOf, keepStep } from "../address.js";
import { Newest, engine } from "../engine.js";
import { Button, ErrorNote, ShellText, VERDICT_CLASS } from "../parts/controls.jsx";
import { LIMITS, faultIn, faultOf, readField } from "../limits.js";
import { cardQuestionOf, requestOf, typed, withFound } from "../setup.js";
import { useText } from "../text/language.jsx";
import { count, heldByOne, tokensShort } from "../units.js";
import { readCommand } from "./source.jsx";

// What is searched for where nothing is typed: shown as a suggestion, and no wish of anybody's before.
const USUAL = { context: "32k", users: "16" };

// "I want 32k for 16 users": the flags are searched, put into the form, and what they give up is said.
export function Wishes({ setup: shown, onChange, draft }) {
  const t = useText();
  const { want_context, want_users } = shown;
  const [wish, setWish] = useState({ context: "", users: "" });
  // A link, or a row of Models, brings its own wish, or none.
  useEffect(() => {
    if (!want_context || !want_users) return void setWish({ context: "", users: "" });
    if (lengthOf(wish.context) !== want_context || Number(wish.users) !== want_users)
      setWish({ context: written(want_context), users: String(want_users) });
  }, [want_context, want_users]);
  const [state, setState] = useState({ busy: false, error: null, answer: null, key: "" });
  const newest = useRef(null);
  newest.current ??= new Newest(0);
  const context = lengthOf(wish.context || USUAL.context);
  const users = usersOf(wish.users || USUAL.users);
  const change = (next) => {
    setWish(next);
    const wanted = { want_context: lengthOf(next.context || USUAL.context), want_users: usersOf(next.users || USUAL.users) };
    if (wanted.want_context && wanted.want_users) onChange({ ...shown, ...wanted });
  };
  const asks = { context, users };
  const take = async ({ command, gpus }, { search }, setup = shown, wanted = asks) => {
    const { model, flags } = await readCommand(command);
    const { model: asked, config, checkpoint_bytes } = typed(setup);
    const source = !config && model !== search.model ? { model, config: null, checkpoint_bytes: null } : { model: asked, config, checkpoint_bytes };
    keepStep();
    onChange(withFound(setup, { ...source, gpus, flags, want_context: wanted.context, want_users: wanted.users }));
  };
  const search = async (event, { keep_model = false, on = shown, context = asks.context, users = asks.users } = {}) => {
    event?.preventDefault();
    if (!context || !users) return;
    // A command that was typed and not read yet is what is asked about.
    const setup = draft.current ? await draft.current() : on;
    if (!setup || faultIn(t, setup)) return;
    const key = askedOf(setup, { context, users }, t.language);
    setState({ busy: true, error: null, answer: null, key });
    const { gpus, flags: given } = typed(setup);
    const { max_model_len, max_num_seqs, gpu_memory_utilization, ...flags } = given;
    // How the GPUs that were given are split is part of the search.
    if (gpus) for (const kind of ["tensor", "pipeline"]) delete flags[`${kind}_parallel_size`];
    newest.current.run(
      async (signal) => {
        const request = { ...requestOf(typed(setup)), measured: null, flags, language: t.language, want: { context, users, keep_model } };
        const answer = await engine.call("plan", request, signal);
        if (answer.verdict !== "does_not_fit") await take({ command: answer.command, gpus: answer.gpu.count }, answer, setup, { context, users });
        else if (keep_model) onChange(typed(setup));
        return { ...answer, asked: { ...typed(setup), want_context: context, want_users: users } };
      },
      (answer) => setState({ busy: false, error: null, answer, key }),
      (error) => setState({ busy: false, error, answer: null, key }),
    );
  };
  // An answer about another model, machine or wish than the one in the fields is none, and changes nothing when it comes.
  const asked = askedOf(shown, { context, users }, t.language);
  useEffect(() => void (state.key !== asked && newest.current.cancel()), [asked, state.key]);
  const { busy, error, answer } = state.key === asked ? state : {};
  // What one card holds instead: asked for as a wish of its own.
  const searchOnOne = (wanted) => {
    const on = { ...typed(shown), gpus: 1, want_context: wanted.context, want_users: wanted.users };
    setWish({ context: written(wanted.context), users: String(wanted.users) });
    onChange(on);
    search(null, { on, ...wanted });
  };
  const stop = () => {
    newest.current.cancel();
    setState({ key: "" });
  };
  const field = (name, valid) => (
    <input
      type="text"
      class="wish"
      size={6}
      value={wish[name]}
      placeholder={USUAL[name]}
      aria-label={t(`wish.${name}`)}
      aria-invalid={!valid}
      onInput={(event) => change({ ...wish, [name]: event.target.value })}
    />
  );
  const [before, between, after] = t("wish.sentence").split("|");
  return (
    <form class="panel wishes" aria-label={t("wish.title")} onSubmit={search}>
      <p>{before} {field("context", context)} {between} {field("users", users)} {after}</p>
      {[
        faultOf(t, "length", wish.context || USUAL.context, LIMITS.want_context),
        faultOf(t, "whole", wish.users || USUAL.users, LIMITS.want_users),
      ].map((fault) => fault && <p key={fault} class="problem">{fault}</p>)}
      <p class="hint">{t("read.length")}</p>
      <div class="row">
        <button type="submit" class="button primary" disabled={busy || !context || !users || Boolean(faultIn(t, shown))}>{t(busy ? "wish.busy" : "wish.find")}</button>
        {busy && <Button onClick={stop}>{t("models.stop")}</Button>}
      </div>
      <div aria-live="polite">
        <ErrorNote error={error} />
        {answer && <Found answer={answer} onTake={take} onKeep={() => search(null, { keep_model: true })} onOne={searchOnOne} />}
      </div>
    </form>
  );
}

const askedOf = (setup, ...wish) => {
  const { flags, env, ...asked } = requestOf(typed(setup));
  return JSON.stringify([asked, ...wish]);
};

const written = (length) => (length % 1024 ? String(length) : tokensShort(length));
const lengthOf = (text) => readField("length", text, LIMITS.want_context);
const usersOf = (text) => readField("whole", text, LIMITS.want_users);

function Found({ answer, onTake, onKeep, onOne }) {
  const t = useText();
  const one = heldByOne(answer.words.one_gpu);
  const { words, search, verdict } = answer;
  return (
    <div class={`note ${VERDICT_CLASS[words.mark]}`}>
      <p><strong>{words.headline}</strong></p>
      {answer.model !== search.model && verdict !== "does_not_fit" && (
        <>
          <p>{t("wish.replaced", { asked: answer.asked.model, model: answer.model })}</p>
          <Button kind="small" onClick={onKeep}>{t("wish.keep", { model: answer.asked.model.split("/").pop() })}</Button>
        </>
      )}
      {verdict === "does_not_fit" && (
        <p><a href={addressOf("models", new URLSearchParams(cardQuestionOf(answer.asked)))}>{t("wish.models")}</a></p>
      )}
      {words.one_gpu && <p>{words.one_gpu}</p>}
      {one && (
        <Button kind="small" onClick={() => onOne(one)}>{t("wish.one_gpu", { users: count(one.users), context: count(one.context) })}</Button>
      )}
      {words.gives_up && <p>{words.gives_up}</p>}
      {words.weighed && <p class="soft">{words.weighed}</p>}
      {search.alternatives.length > 0 && (
        <details>
          <summary>{t("wish.others", { count: search.alternatives.length })}</summary>
          <ul class="fix-list">
            {search.alternatives.map((other, index) => (
              <li key={other.command.join(" ")}>
                <button type="button" class="button wide small" onClick={() => onTake(other, answer)}>
                  <strong>{other.command[2]}</strong>{" "}
                  <code><ShellText text={other.command.slice(3).join(" ") || t("wish.defaults")} /></code>
                </button>
                <p class="hint">{words.alternatives[index].text} · {words.alternatives[index].gives_up}</p>
              </li>
            ))}
          </ul>
        </details>
      )}
    </div>
  );
}
