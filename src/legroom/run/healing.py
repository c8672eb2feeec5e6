"""From the log of a failed run to the command that is tried next: the first computed fix that the user allows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from legroom.actions.server_log import last_lines
from legroom.deployments.server_words import assignments
from legroom.diagnosis.causes import cause_of
from legroom.diagnosis.causes.kv_too_small_for_max_len import longest_len
from legroom.diagnosis.diagnose import read_log
from legroom.diagnosis.finding import Finding, Fix
from legroom.diagnosis.starting_plan import Hints
from legroom.errors import LegroomError
from legroom.explain.catalog_entries import entry
from legroom.facts.flags import flag_name, flags_of
from legroom.live.host_memory import KernelKill
from legroom.records import dataclass
from legroom.run.expectation import Expectation, Gpus, expect
from legroom.run.host_ram import CAUSE as HOST_CAUSE
from legroom.run.host_ram import kernel_finding
from legroom.run.server_command import ServerCommand, read_command
from legroom.vllm.command_line import command_parts, value_of, with_settings
from legroom.vllm_logs.log_masking import masked
from legroom.vllm_logs.log_sources import pieces_of_file

SURE_ENOUGH = 0.5
"""Causes and fixes below this are reported, never tried."""
NOT_A_FIX = frozenset(
    {"report", "driver", "engine_version_or_V0", "request", "access", "files", "package", "disk", "port"}
)
_SIZING = ("VLLM_CPU_KVCACHE_SPACE", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_VISIBLE_DEVICES")
_LAST_LINES, _LONGEST_WORDS = 10, 300
_EXCEPTION_NAME = re.compile(r"\b[A-Z]\w*(?:Error|Exception)\b")
_NEVER_CHANGED = frozenset({"model"})
"""Another model is another service."""
_KERNEL_FAULTS = frozenset({"illegal_access", "device_assert", "kernel_assertion"})
"""What the catalog's entry of `not_memory` is about; everything else that is not memory has no entry of its own."""
Tried = tuple[Sequence[str], Mapping[str, str]]
"""The words of a command that was launched, and what stood before it."""


@dataclass(frozen=True)
class Bounds:
    """What the user will not give up."""

    keep: tuple[str, ...] = ()
    """Flags that stay as they are, by vLLM's Python names."""
    min_context: int | None = None
    min_concurrency: float | None = None


@dataclass(frozen=True)
class Remedy:
    """What failed and what is done about it; no words where nothing may be done."""

    cause: str
    entry: str
    failed: str
    """What happened, in a line."""
    is_memory: bool
    evidence: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    env: Mapping[str, str] | None = None
    changed: str = ""
    why: str = ""
    expected: Expectation | None = None
    fix: str = ""
    """The kind of the fix."""
    refused: str = ""
    """Why no fix was applied, and what it would have changed."""


@dataclass(frozen=True)
class _Case:
    """What a fix is weighed against."""

    command: ServerCommand
    bounds: Bounds
    gpus: Gpus
    environ: Mapping[str, str]
    tried: frozenset[object]
    pool_tokens: int | None
    """How many tokens the log says its KV pool holds."""


def heal(
    log: Path,
    command: ServerCommand,
    bounds: Bounds,
    gpus: Gpus,
    environ: Mapping[str, str],
    tried: Iterable[Tried] = (),
    kill: KernelKill | None = None,
) -> Remedy:
    """Diagnose the log and work out the next command, one that is not among those that were tried. What the kernel
    killed for want of memory needs no log."""
    hints = Hints(_line(command, environ), None, gpus.name or None, gpus.count or None, command.stated_release or None)
    reading = read_log(pieces_of_file(str(log)), str(log), hints)
    findings = reading.runs[0].proven_findings if reading.runs else ()
    if kill is not None:
        findings = (kernel_finding(kill, command, environ, gpus), *(it for it in findings if it.cause != HOST_CAUSE))
    if not findings:
        last_line = next((line.strip() for line in reversed(last_lines(log, _LAST_LINES)) if line.strip()), "")
        last = f" Its last line: {masked(last_line)[:_LONGEST_WORDS]}" if last_line else ""
        return Remedy("", "", f"the log does not say why.{last}", False, refused="there is nothing to go by")
    first = findings[0]
    diagnosed = Remedy(
        first.cause,
        first.entry,
        f"{_title(first)}: {masked(first.why + _exception_text(first))}",
        cause_of(first.cause).is_memory,
        tuple(masked(item.text)[:300] for item in first.evidence[:3]) or ((kill.line,) if kill and kill.line else ()),
    )
    keys = frozenset(_key(words, env, command, environ) for words, env in (*tried, (command.words, command.env)))
    pool_tokens = longest_len(reading.runs[0].case) if reading.runs else None
    case = _Case(command, bounds, gpus, environ, keys, pool_tokens)
    return _first_allowed(diagnosed, findings, case)


def _key(words: Sequence[str], env: Mapping[str, str], command: ServerCommand, environ: Mapping[str, str]) -> object:
    """Equal for set-ups that a server cannot tell apart: the order of flags and what is inherited anyway are not in."""
    parts = list(command_parts(words, command.release))
    flags = sorted((part.dest, part.value) for part in parts if part.name)
    bare = tuple(word for part in parts if not part.name for word in part.words)
    return bare, tuple(flags), tuple(sorted(item for item in env.items() if environ.get(item[0]) != item[1]))


def _line(command: ServerCommand, environ: Mapping[str, str]) -> str:
    """The command with the variables of this environment that size a server's memory."""
    env = {name: value for name, value in environ.items() if name in _SIZING} | dict(command.env)
    return shlex.join([*assignments(env), *command.words])


def _title(finding: Finding) -> str:
    if finding.cause == "not_memory" and not any(item.id in _KERNEL_FAULTS for item in finding.evidence):
        return "It is not memory"
    try:
        return f"{entry(finding.entry).title.en} ({finding.entry})"
    except LegroomError:
        return f"{finding.cause.replace('_', ' ')} ({finding.entry})"


def _exception_text(finding: Finding) -> str:
    """An exception in its own words: what the cause says of it is general."""
    exception = next((item for item in finding.evidence if item.role == "exception"), None)
    if exception is None or finding.cause != "not_memory":
        return ""
    name = exception.facts.get("type") or next(iter(_EXCEPTION_NAME.findall(exception.text)), None)
    reason = exception.text.partition(str(name))[2].lstrip(":( ") if name else exception.text
    if not reason or reason.endswith(":"):  # the reason is on the lines that follow
        reason = str(exception.facts.get("message", ""))
    return f" It says: {reason[:_LONGEST_WORDS]}" if reason else ""


def _first_allowed(diagnosed: Remedy, findings: tuple[Finding, ...], case: _Case) -> Remedy:
    refusals: list[str] = []
    for fix in computed_fixes(findings):
        command = case.command
        change = _described(fix, command, case.environ)
        words = with_settings(command.words, command.flags_at, fix.flags, command.release)
        env = {**command.env, **fix.env}
        reason = _forbidden(fix, case.bounds) or _nothing_new(fix, words, env, case)
        if not reason:
            changed = read_command([*assignments(env), *words], command.stated_release or None, case.environ)
            expected = expect(changed, case.environ, case.gpus)
            reason = _too_little(fix, expected, case, diagnosed.is_memory)
        if not reason:
            why = masked(fix.why)
            return replace(diagnosed, words=words, env=env, changed=change, why=why, expected=expected, fix=fix.kind)
        refusals.append(f"{change} ({reason})")
    if refusals:
        return replace(diagnosed, refused=f"it would have changed {', or '.join(refusals[:3])}")
    steps = [step for fix in findings[0].fixes[:2] for step in fix.steps[:1]]
    hint = f"; what may help: {'; or '.join(steps)}" if steps else ""
    return replace(diagnosed, refused=f"no flags that fix it could be computed{hint}")


def _nothing_new(fix: Fix, words: Sequence[str], env: Mapping[str, str], case: _Case) -> str:
    """Why this change would lead to a set-up that has failed; empty where it leads to a new one."""
    if _key(words, env, case.command, case.environ) not in case.tried:
        return ""
    command = case.command
    file = value_of(command.words, command.flags_at, "config", command.release)
    taken_out = [name for name, value in fix.flags.items() if value is None]
    if (
        file
        and taken_out
        and not any(value_of(command.words, command.flags_at, name, command.release) is not None for name in taken_out)
    ):
        return f"it stands in {file}: change it there"
    return "that has been tried"


def computed_fixes(findings: tuple[Finding, ...]) -> Iterator[Fix]:
    """Fixes by flags or environment of every cause that is sure enough, in the order of the diagnosis."""
    for finding in findings:
        if finding.confidence < SURE_ENOUGH:
            return
        for fix in finding.fixes:
            if fix.confidence < SURE_ENOUGH or fix.kind in NOT_A_FIX or _NEVER_CHANGED & fix.flags.keys():
                continue
            if fix.flags or fix.env:
                yield fix


def _forbidden(fix: Fix, bounds: Bounds) -> str:
    """Why the user does not want this change; empty where it is fine."""
    for name in (*fix.flags, *fix.env):
        if name in bounds.keep:
            return f"--keep {_flag(name)}"
    length = fix.flags.get("max_model_len")
    if bounds.min_context and isinstance(length, int) and 0 <= length < bounds.min_context:
        return f"below --min-context {bounds.min_context}"
    seqs = fix.flags.get("max_num_seqs")
    if bounds.min_concurrency and isinstance(seqs, int) and seqs < bounds.min_concurrency:
        return f"below --min-concurrency {bounds.min_concurrency:g}"
    return ""


def _too_little(fix: Fix, expected: Expectation, case: _Case, is_memory: bool) -> str:
    bounds, times, length = case.bounds, expected.max_concurrency, expected.max_model_len
    if bounds.min_concurrency and times is None and is_memory and fix.flags:
        wanted = fix.flags.get("max_model_len")
        if fix.flags.keys() != {"max_model_len"} or not isinstance(wanted, int) or wanted < 1 or not case.pool_tokens:
            return f"how many requests that holds cannot be told, and --min-concurrency is {bounds.min_concurrency:g}"
        times = case.pool_tokens / wanted
    if bounds.min_concurrency and times is not None and times < bounds.min_concurrency:
        return f"{times:.2f} requests at once, below --min-concurrency {bounds.min_concurrency:g}"
    if bounds.min_context and length is not None and length < bounds.min_context:
        return f"{length} tokens, below --min-context {bounds.min_context}"
    return ""


def _described(fix: Fix, command: ServerCommand, environ: Mapping[str, str]) -> str:
    parts = []
    for name, value in fix.flags.items():
        before = value_of(command.words, command.flags_at, name, command.release)
        was = f" (was {before})" if before else ""
        flag = _flag(name, command)
        if value is None:
            parts.append(f"{flag}{f' {before}' if before else ''} taken out")
        elif value is True:
            parts.append(f"{flag} added")
        elif value is False:
            parts.append(f"{flag} turned off")
        else:
            parts.append(f"{flag} {value}{was}")
    for name, value in fix.env.items():
        before = {**environ, **command.env}.get(name)
        parts.append(f"{name}={value}{f' (was {before})' if before else ''}")
    return ", ".join(parts)


def _flag(name: str, command: ServerCommand | None = None) -> str:
    if command is not None:
        for flag in flags_of(command.release).values():
            if flag.dest == name:
                return flag.name
    return name if name.isupper() else flag_name(name)
