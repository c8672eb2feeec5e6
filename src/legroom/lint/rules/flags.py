"""Flags that the release does not take, or takes and does not use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from legroom.deployments.kinds import kind_of
from legroom.deployments.subjects import Invoked, StartedServer
from legroom.facts.flags import advice, companion_of
from legroom.lint.rule import Context, LintFinding, Rule, Severity, finding, flag_word, has_same_words
from legroom.vllm.command_line import plain_name
from legroom.vllm.flag_problems import FlagProblem

_STOPS = "vLLM ends with 'unrecognized arguments' before it loads anything."
UNKNOWN = Rule("flag-unknown", "error", "A flag that no vLLM release has", _STOPS)
REMOVED = Rule("flag-removed", "error", "A flag that this release no longer has", _STOPS)
NOT_YET = Rule("flag-not-yet", "error", "A flag that this release does not have yet", _STOPS)
VALUE = Rule("flag-value", "error", "A value that the flag does not take", "vLLM ends with a usage error at the start.")
IGNORED = Rule(
    "flag-ignored",
    "warning",
    "A flag that changes nothing",
    "vLLM accepts it and does not use it, whatever its name promises.",
)
OTHER = Rule(
    "flag-of-another",
    "note",
    "Flags of another program",
    "A program that reads vLLM's command line and has flags of its own: those are not judged.",
)
RULES = (UNKNOWN, REMOVED, NOT_YET, VALUE, IGNORED, OTHER)
_BY_KIND = {
    "unknown": UNKNOWN,
    "removed": REMOVED,
    "renamed": REMOVED,
    "not_yet": NOT_YET,
    "bad_value": VALUE,
    "bad_choice": VALUE,
    "ignored": IGNORED,
}
_SHARE = "--gpu-memory-utilization"
_VARIABLE = re.compile(
    r"\$|\{\{|<|`|\{[A-Za-z_][^{}\"',;]*\}|\{\d*\}|\.\.\.|…|\?\?|%\w+%|%(\(\w+\))?[sdrif](?!\w)|@\w+@|__\w+__"
)
"""A value that is put in later, or left out by who wrote it down, is not judged."""
_FILLED_IN = re.compile(r"[A-Z][A-Z0-9_-]*|\{.*[:\[,]\s*[A-Z][A-Z0-9_]*\s*[,}\]].*", re.DOTALL)
"""`REPLACE_ENV_MAX_MODEL_LEN`, `PORT`, `{"num_speculative_tokens": N}`: what somebody puts a value in for."""
_LEFT_TO_THE_READER = re.compile(
    r"\d[\d.]*([-~–,/|]\d[\d.]*)+|\{[\d.,]+\}|\[[\w |-]+\]|[A-Za-z_][\w.]*\(.*\)|[a-z]+([_-][a-z]+)+"
)
"""`0.15-0.45`, `1/2/4` and `best_share(model)`: in a document, something to choose or to compute, not what is typed."""
_MORE = re.compile(r"'?([A-Z][A-Z_]*|etc\.?|and|or)'?")
"""`OPTIONS`, `etc`: a document says that more may follow."""
_EXTENSIONS = {"--omni": "vLLM-Omni"}
"""Switches that hand the command line to another program, which has flags of its own."""
_EXTENSION_MODULES = {"dynamo.vllm.omni": "vLLM-Omni"}
_OF_ANOTHER_RELEASE = frozenset({"removed", "renamed", "not_yet"})
_OF_A_FORK = frozenset({"unknown", "bad_choice"})
"""What a fork, a plugin or a release newer than the facts may well take."""
_SLIP = 0.92
"""How much of a flag is right when a letter or two are not."""
_MOST_STRAYS = 2
"""More words that belong to no flag are a sentence in a document, not a slip."""


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """Every problem that reading the command line for the release shows."""
    if isinstance(subject, Invoked):
        yield from _extension_module(subject)
    if not isinstance(subject, StartedServer) or any(word.text.startswith("--help") for word in subject.words):
        return
    problems = context.parsed(subject).problems
    if any(problem.kind == "unknown" for problem in problems) and (program := _stand_in(subject)):
        yield finding(OTHER, subject.place, f"flags of {program} are not judged: it reads this command line itself")
        return
    seen = set()
    other = next((name for word in subject.words if (name := _EXTENSIONS.get(word.text))), "")
    strays = sum(not problem.flag.startswith("-") for problem in problems)
    for problem in problems:
        is_stray = not problem.flag.startswith("-")
        if is_stray and (strays > _MOST_STRAYS or subject.runs in ("config", "python")):
            continue  # in a config file it is the value of a key that is named already
        if is_stray and problem.flag.strip("'").startswith(("[", "(")):
            continue  # `vllm serve MODEL [options]`: how a document says that more may follow
        if problem.kind == "bad_choice" and subject.runs == "python":
            continue  # the parser of the command line holds values against choices, LLM(...) does not
        if other and problem.kind in ("unknown", "bad_value"):
            continue  # the extension's own
        if problem.kind == "bad_value" and not problem.value and _is_emptied(subject, problem.flag):
            continue  # a variable that is to be filled in
        rule = _BY_KIND.get(problem.kind)
        if rule is None or _is_put_in_later(subject, problem) or (problem.flag, problem.kind) in seen:
            continue
        if problem.flag == "--config" and rule is IGNORED:
            continue  # the file lies elsewhere
        seen.add((problem.flag, problem.kind))
        word = next((word for word in subject.words if _same(word.text, problem.flag)), None)
        place = subject.place_of(word) if word else subject.place
        message = problem.message
        if word and problem.kind == "unknown" and word.text.startswith("--no-") and "--no-" not in problem.flag:
            message = message.replace(problem.flag, word.text.partition("=")[0], 1)
        suggestion = f"write {problem.instead}" if problem.instead else "leave it out"
        if problem.kind == "unknown" and problem.instead and advice(problem.flag) is None:
            suggestion = f"leave it out, or did you mean {problem.instead}?"
        elif problem.kind == "removed" and problem.instead:
            suggestion = f"leave it out, or see {problem.instead}"
        severity: Severity | None = None
        if problem.kind in ("unknown", "bad_value", "bad_choice") and subject.runs == "config":
            severity = "warning"  # that the file is vLLM's own is only likely
        if problem.kind in _OF_ANOTHER_RELEASE and subject.runs == "python" and not subject.named_release:
            severity = "warning"  # code often asks for the version first, and has a call for each
        if _depends_on_release(subject, context, problem):
            if problem.kind != "unknown" and not context.knows_release(subject):
                message += f" ({_why_unsure(subject, context)})"
            severity = "warning"
        yield finding(rule, place, message, suggestion, len(problem.flag), severity)
    if other:
        yield finding(OTHER, subject.place, f"flags of {other} are not judged: {other} reads this command line itself")
    yield from _share(subject, context)


def _stand_in(subject: StartedServer) -> str:
    return companion_of(frozenset(plain_name(word.text) for word in subject.words if word.text.startswith("--")))


def _extension_module(subject: Invoked) -> Iterator[LintFinding]:
    for before, word in pairwise(subject.words):
        if before.text == "-m" and (other := _EXTENSION_MODULES.get(word.text)):
            message = f"flags of {other} are not judged: {word.text} reads this command line itself"
            yield finding(OTHER, subject.locate(word.offset), message, length=len(word.text))


def _depends_on_release(subject: StartedServer, context: Context, problem: FlagProblem) -> bool:
    """Whether some release that the server may well run has nothing against it."""
    if problem.kind in _OF_ANOTHER_RELEASE:
        return not context.knows_release(subject)
    if problem.kind in _OF_A_FORK:
        return not context.runs_known_build(subject) and not (problem.kind == "unknown" and _is_slip(subject, problem))
    return not context.knows_release(subject) and not context.is_refused_by_all(subject, problem.flag, problem.kind)


def _is_slip(subject: StartedServer, problem: FlagProblem) -> bool:
    """Whether a flag that no release has can only be a slip of the pen."""
    if subject.launcher or subject.image:
        return False
    import difflib  # only where a flag was wrong

    meant = problem.instead.partition(" ")[0]
    if not has_same_words(problem.flag, meant, "-"):
        return False  # another word is another flag: a fork's --gpu-memory-utilization-gb
    return difflib.SequenceMatcher(None, problem.flag, meant, autojunk=False).ratio() >= _SLIP


def _why_unsure(subject: StartedServer, context: Context) -> str:
    if context.hides_release(subject):
        return f"which release {_what_runs(subject)} holds is not known"
    if subject.is_release_assumed and subject.named_release:
        return f"that {context.release_of(subject)} is what runs is only likely"
    if subject.named_release:
        return f"{_what_runs(subject) or 'it'} is not vLLM's own build of {context.release_of(subject)}"
    return f"the file names no release, and {context.release} is assumed"


def _what_runs(subject: StartedServer) -> str:
    return subject.launcher or ("the image" if "$" in subject.image or "{{" in subject.image else subject.image)


def _is_put_in_later(subject: StartedServer, problem: FlagProblem) -> bool:
    """Whether a program or the reader of a document puts the value in."""
    if _VARIABLE.search(problem.flag) or _VARIABLE.search(problem.value):
        return True
    is_document = kind_of(subject.place.path, "") == "document"
    if not problem.flag.startswith("-"):
        return is_document and bool(_MORE.fullmatch(problem.flag))
    if problem.kind != "bad_value":
        return False
    names_itself = bool(problem.value) and problem.value.replace("_", "-") in problem.flag
    return bool(_FILLED_IN.fullmatch(problem.value)) or (
        is_document and (names_itself or bool(_LEFT_TO_THE_READER.fullmatch(problem.value)))
    )


def _is_emptied(subject: StartedServer, flag: str) -> bool:
    """Whether an empty word stands where the value of a flag belongs."""
    texts = [word.text for word in subject.words]
    return any(
        plain_name(text) == flag and (text.endswith("=") or texts[i + 1 : i + 2] == [""])
        for i, text in enumerate(texts)
    )


def _share(subject: StartedServer, context: Context) -> Iterator[LintFinding]:
    """A share of the GPU that is written in percent; every release refuses one above 1."""
    share = context.parsed(subject).args.gpu_memory_utilization
    word = flag_word(subject, _SHARE, "--device-memory-utilization")
    if share is None or share <= 1 or word is None:
        return
    message = f"{_SHARE} is a share of the GPU from 0 to 1, and {share:g} is asked for"
    suggestion = f"write {_SHARE} {share / 100:g}" if 2 <= share <= 100 else ""
    severity: Severity | None = "warning" if subject.runs == "config" else None  # it may be another program's percent
    yield finding(VALUE, subject.place_of(word), message, suggestion, len(_SHARE), severity)


def _same(word: str, flag: str) -> bool:
    head = word.partition("=")[0]
    if flag in (head, word):
        return True
    if not head.startswith("--"):
        return flag == head.partition(".")[0]
    plain = plain_name(head)
    return flag in (plain, plain.replace("--no-", "--", 1)) or (plain.startswith(flag) and len(flag) > 4)
