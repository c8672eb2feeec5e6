"""Environment variables that the release does not read."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from legroom.deployments.subjects import StartedServer
from legroom.facts.flags import env_history, env_names, flags_of, is_read_by_plugin
from legroom.facts.releases import Release
from legroom.lint.rule import Context, LintFinding, Rule, finding

RULE = Rule(
    "env-unknown",
    "warning",
    "A variable that this release does not read",
    "vLLM starts as if it were not set: what it was meant to do does not happen (LR907).",
)
RULES = (RULE,)
_SAME_WORD = 0.6
"""How much of a word is right when it is only badly written: LOG for LOGGING, not PATH for ROOT."""
FLAG_INSTEAD = {"VLLM_ATTENTION_BACKEND": "--attention-backend"}


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """VLLM_* variables of a server: those of another release, and those that are nearly right."""
    if not isinstance(subject, StartedServer):
        return
    release = context.release_of(subject)
    for name, word in subject.env.items():
        if not name.startswith("VLLM_") or is_read_by_plugin(name):
            continue
        history = env_history(name)
        if history is None:
            near = difflib.get_close_matches(name, env_names(release), n=1, cutoff=0.88)
            if near and _is_slip(name, near[0]):
                message = f"no vLLM release reads {name}"
                yield finding(RULE, subject.place_of(word), message, f"write {near[0]}", len(name))
            continue
        if any(not release.before(first) and not release.after(last) for first, last in history):
            continue
        message = no_longer_read(name, history, release)
        flag = FLAG_INSTEAD.get(name, "")
        suggestion = f"write {flag} {word.text}" if flag in flags_of(release) else "leave it out"
        yield finding(RULE, subject.place_of(word), message, suggestion, len(name))


def _is_slip(name: str, meant: str) -> bool:
    """Whether a name has the words of another, badly written: VLLM_CACHE_PATH is no slip for VLLM_CACHE_ROOT."""
    words, meant_words = name.split("_"), meant.split("_")
    if len(words) != len(meant_words):
        return "".join(words) == "".join(meant_words)
    pairs = zip(words, meant_words, strict=True)
    return all(difflib.SequenceMatcher(None, *pair).ratio() >= _SAME_WORD for pair in pairs)


def no_longer_read(name: str, history: tuple[tuple[str, str], ...], release: Release) -> str:
    """What to say of a variable of other releases."""
    return f"vLLM reads {name} from {history[0][0]} to {history[-1][1]}, {release} does not"
