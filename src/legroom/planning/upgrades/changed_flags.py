"""Flags of a command that another release refuses, renames, ignores, or gives another default."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from legroom.facts.flags import default, env_history, flag_name, flags_of
from legroom.facts.releases import Release
from legroom.records import dataclass
from legroom.vllm.args import EngineSettings, ServeArgs
from legroom.vllm.command_line import command, command_parts, flags_in, with_flags
from legroom.vllm.flag_problems import FlagProblem
from legroom.vllm.parse import parse_flags

ChangedFlagKind = Literal["refused", "renamed", "ignored", "deprecated", "new_default", "unread_variable"]
_SOURCE_TEXT = re.compile(r"<.*|(not )?[A-Za-z_]+(\.|\[).*|.+ if .+ else .+|\w+\(.*\)")
"""A default that the facts hold as an expression of vLLM's source."""
_BATCHING = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill")
_COMPUTED = (*_BATCHING, "enable_prefix_caching", "async_scheduling", "kv_cache_dtype", "dtype", "cudagraph_mode")
_COMPUTED_FLAGS = {name: flag_name(name) for name in (*_COMPUTED, "disable_hybrid_kv_cache_manager")}
_COMPUTED_FLAGS["cudagraph_mode"] = "--compilation-config"
"""The flags of settings whose defaults vLLM computes."""


@dataclass(frozen=True, slots=True)
class ChangedFlag:
    """One flag or environment variable that another release treats differently."""

    flag: str
    kind: ChangedFlagKind
    old: Any
    new: Any
    why: str

    def to_json(self) -> dict[str, Any]:
        """JSON of the flag, with its `old` and `new` value as `from` and `to`."""
        return {"flag": self.flag, "kind": self.kind, "from": self.old, "to": self.new, "why": self.why}


def args_on_release(args: ServeArgs, new: Release) -> ServeArgs:
    """The same server's arguments for another release: renamed flags under their new name, refused ones left out."""
    words = list(command(args, new))
    for problem in parse_flags(words, new).problems:
        if problem.stops_vllm:
            words = _without_refused_flag(words, problem)
    return replace(parse_flags(words, new, usage=args.usage).args, env=args.env)


def _without_refused_flag(words: list[str], problem: FlagProblem) -> list[str]:
    """The command's words without the flag of this problem; with its successor in its place where there is one."""
    instead, _, value = problem.instead.partition(" ")
    given = flags_in(words)
    if problem.kind == "renamed":
        return with_flags(words, {problem.flag: None, instead: given.get(problem.flag, "")})
    if instead.startswith("--") and value and instead not in given:
        return with_flags(words, {problem.flag: None, instead: value})
    return with_flags(words, {problem.flag: None})


def changed_flags(
    args: ServeArgs, old: EngineSettings, new: EngineSettings, releases: tuple[Release, Release]
) -> tuple[ChangedFlag, ...]:
    """Changes of given flags, then of defaults, then environment variables that are no longer read."""
    before, after = releases
    given = list(command(args, before))
    return (
        *_changed_given_flags(given, before, after),
        *_resolved_defaults(given, old, new, releases),
        *_declared_defaults(given, before, after),
        *_unread_variables(args, before, after),
    )


def _changed_given_flags(words: list[str], before: Release, after: Release) -> Iterator[ChangedFlag]:
    """Flags of the command that the newer release refuses, renames, ignores or deprecates."""
    problems = {problem.flag: problem for problem in parse_flags(words, after).problems}
    known = {problem.flag for problem in parse_flags(words, before).problems}
    values = flags_in(words)
    for flag, problem in problems.items():
        if flag in known and not problem.stops_vllm:
            continue
        is_renamed, is_refused = problem.kind == "renamed", problem.stops_vllm
        kind: ChangedFlagKind = "renamed" if is_renamed else "refused" if is_refused else "ignored"
        yield ChangedFlag(flag, kind, values.get(flag, "") or "on", problem.instead or None, problem.message)
    old, new = flags_of(before), flags_of(after)
    for part in command_parts(words, before):
        name = part.long_name
        if not part.name or name in problems or name not in new or name not in old:
            continue
        if new[name].deprecated and not old[name].deprecated:
            why = f"vLLM {after} still takes {name} and calls it deprecated"
            yield ChangedFlag(name, "deprecated", part.value or "on", part.value or "on", why)


def _resolved_defaults(
    words: list[str], old: EngineSettings, new: EngineSettings, releases: tuple[Release, Release]
) -> Iterator[ChangedFlag]:
    """Flags not given whose value vLLM computes at start-up, where the new release computes another."""
    names = _given_names(words, releases[0])
    for field, flag in _COMPUTED_FLAGS.items():
        values = getattr(old, field), getattr(new, field)
        if values[0] == values[1] or flag in names or any(flag not in flags_of(release) for release in releases):
            continue
        if field == "cudagraph_mode" and old.engine != new.engine:
            continue  # V0 has no such modes
        name = f"cudagraph_mode of {flag}" if field == "cudagraph_mode" else flag
        yield _new_default(name, *values, new.release.version)


def _declared_defaults(words: list[str], before: Release, after: Release) -> Iterator[ChangedFlag]:
    """Flags not given whose declared default differs between the releases."""
    names = _given_names(words, before) | {"--model", *_COMPUTED_FLAGS.values()}
    there = flags_of(after)
    for name in flags_of(before):
        if not name.startswith("--") or name in names or name not in there:
            continue
        values = default(name, before), default(name, after)
        is_source = any(isinstance(value, str) and _SOURCE_TEXT.fullmatch(value) for value in values)
        if None not in values and values[0] != values[1] and not is_source:
            yield _new_default(name, *values, after.version)


def _given_names(words: list[str], release: Release) -> set[str]:
    """The long names of the flags in a command."""
    return {part.long_name for part in command_parts(words, release) if part.name}


def _new_default(flag: str, old: Any, new: Any, release: str) -> ChangedFlag:
    """The change of a flag whose default is `old` before and `new` in `release`."""
    why = f"not given: its default was {_value_text(old)} and is {_value_text(new)} in vLLM {release}"
    return ChangedFlag(flag, "new_default", old, new, why)


def _unread_variables(args: ServeArgs, before: Release, after: Release) -> Iterator[ChangedFlag]:
    """VLLM_ environment variables that are set and that the newer release no longer reads."""
    for name, value in args.env.items():
        spans = env_history(name) if name.startswith("VLLM_") else None
        if spans is None:
            continue
        reads = [any(release.within(*span) for span in spans) for release in (before, after)]
        if reads == [True, False]:
            yield ChangedFlag(name, "unread_variable", value, None, f"vLLM {after} no longer reads {name}")


def _value_text(value: Any) -> str:
    """A flag's value as a sentence shows it: on, off, none, or a number with thousands separators."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value) if value != [] else "none"
