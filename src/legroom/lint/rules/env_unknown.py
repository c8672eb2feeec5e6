"""Environment variables that the release does not read."""

from __future__ import annotations

import difflib

from legroom.deployments.subjects import StartedServer
from legroom.facts.flags import env_history, env_names, flags_of, is_read_by_plugin
from legroom.lint.rule import Context, Findings, Rule, checks, finding

_WHY = "vLLM starts as if it were not set: what it was meant to do does not happen (LR907)."
RULE = Rule("env-unknown", "warning", "A variable that this release does not read", _WHY)
_FLAG_INSTEAD = {"VLLM_ATTENTION_BACKEND": "--attention-backend"}


@checks(StartedServer, RULE)
def unknown_variables(server: StartedServer, context: Context) -> Findings:
    """VLLM_* variables of another release, and misspelled ones."""
    release = context.release_of(server)
    for name, word in server.env.items():
        if not name.startswith("VLLM_") or is_read_by_plugin(name):
            continue
        history = env_history(name)
        if history is None:
            near = difflib.get_close_matches(name, env_names(release), n=1, cutoff=0.88)
            is_typo = bool(near) and _is_typo(name, near[0])
            # Env files set variables of other programs too. vLLM itself warns of every such name (0.18.0).
            # Called like a flag it is a mistake in every build; an image's own entry point may read it.
            flag = "--" + name.removeprefix("VLLM_").lower().replace("_", "-")
            is_flag = flag in flags_of(release) and len({word.offset for word in server.words[:2]}) == 2
            is_given_to_vllm = server.runs != "config" and (context.runs_vllms_own(server) or is_flag)
            if is_typo or (is_given_to_vllm and name not in context.used_variables):
                instead = near[0] if is_typo else f"the flag {flag}" if is_flag else ""
                suggestion = f"write {instead}" if instead else "leave it out"
                yield finding(RULE, server.place_of(word), f"no vLLM release reads {name}", suggestion, len(name))
            continue
        if any(not release.before(first) and not release.after(last) for first, last in history):
            continue
        message = f"vLLM reads {name} from {history[0][0]} to {history[-1][1]}, {release} does not"
        flag = _FLAG_INSTEAD.get(name, "")
        suggestion = f"write {flag} {word.text}" if flag in flags_of(release) else "leave it out"
        yield finding(RULE, server.place_of(word), message, suggestion, len(name))


def _is_typo(name: str, candidate: str) -> bool:
    """Whether every word of a name is at least 60 % right: LOG for LOGGING, but not PATH for ROOT."""
    words, candidate_words = name.split("_"), candidate.split("_")
    if len(words) != len(candidate_words):
        return "".join(words) == "".join(candidate_words)
    return all(difflib.SequenceMatcher(None, *pair).ratio() >= 0.6 for pair in zip(words, candidate_words, strict=True))
