import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { Newest, engine } from "../engine.js";
import { faultIn } from "../limits.js";
import { requestOf } from "../setup.js";
import { useText } from "../text/language.jsx";

const REST_MS = 180;

// The plan of a setup, kept on the screen until a newer one is there. The picture comes first; fixes, which take a search,
// follow when the slider rests.
export function usePlan(setup) {
  const t = useText();
  const { language } = t;
  const [state, setState] = useState({ plan: null, error: null, busy: true, request: null, speed: null });
  const quick = useRef(null);
  const thorough = useRef(null);
  const timed = useRef(null);
  timed.current ??= new Newest(0);
  quick.current ??= new Newest();
  thorough.current ??= new Newest(0);
  const key = setup && !faultIn(t, setup) && JSON.stringify({ ...requestOf(setup), language });
  const want = setup?.want_users ? { context: setup.want_context, users: setup.want_users } : null;
  // Before the next frame is drawn, not after it: a slider's request leaves a frame earlier.
  useLayoutEffect(() => {
    if (!key) return undefined;
    const request = JSON.parse(key);
    let rest = 0;
    // The plan of another model or card is no answer, not even for a moment.
    setState((now) => (now.request && subjectOf(now.request) !== subjectOf(request) ? { ...now, plan: null, speed: null, error: null } : now));
    thorough.current.cancel();
    timed.current.cancel();
    const failed = (error) => setState((now) => ({ ...now, error, busy: false }));
    const askForFixes = () =>
      thorough.current.run(
        (signal) => engine.call("plan", request, signal),
        (plan) => setState((now) => ({ ...now, plan, error: null, busy: false, request })),
        failed,
      );
    const askForSpeed = () =>
      timed.current.run(
        (signal) => engine.call("speed", { ...request, want }, signal),
        (speed) => setState((now) => ({ ...now, speed })),
        () => setState((now) => ({ ...now, speed: null })),
      );
    quick.current.run(
      (signal) => engine.call("plan", { ...request, advice: false }, signal),
      (plan) => {
        setState((now) => ({ plan: keepFixes(plan), error: null, busy: plan.verdict !== "fits", request, speed: now.speed }));
        rest = setTimeout(() => {
          if (plan.verdict !== "fits") askForFixes();
          if (plan.verdict === "does_not_fit") setState((now) => ({ ...now, speed: null }));
          else askForSpeed();
        }, REST_MS);
      },
      failed,
    );
    return () => clearTimeout(rest);
  }, [key, want?.users]);
  return state;
}

const subjectOf = ({ model, config, gpu, gpus, vllm }) => JSON.stringify([model, config, gpu, gpus, vllm]);

// While the fixes of the new setting are searched for, none are shown: those of another setting would be wrong.
const keepFixes = (plan) => ({ ...plan, advice: plan.advice ?? [] });

// How each figure came about, asked for when somebody wants to know.
export function useMath(request, wanted) {
  const [state, setState] = useState({ key: "", terms: null, error: null });
  const newest = useRef(null);
  newest.current ??= new Newest();
  const key = request && wanted ? JSON.stringify(request) : "";
  useEffect(() => {
    if (!key || key === state.key) return;
    newest.current.run(
      (signal) => engine.call("math", JSON.parse(key), signal),
      ({ terms }) => setState({ key, terms, error: null }),
      (error) => setState({ key, terms: null, error }),
    );
  }, [key]);
  return key && key === state.key ? state : { terms: null, error: null };
}
