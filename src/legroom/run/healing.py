"""Finds the next command after a failed run: the first computed fix that the user's bounds allow."""

import contextlib
import re
import shlex
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from legroom.actions.server_log import last_lines
from legroom.deployments.server_words import assignments
from legroom.diagnosis.causes import cause_of
from legroom.diagnosis.causes.kv_too_small_for_max_len import longest_fitting_len
from legroom.diagnosis.finding import Finding, Fix
from legroom.diagnosis.fixes.failed_run import Hints
from legroom.diagnosis.log_diagnosis import read_log
from legroom.errors import LegroomError
from legroom.explain.catalog_entries import entry
from legroom.facts.flags import flag_name, flags_of
from legroom.live.kernel_memory import KernelAccount, KernelKill
from legroom.memory.host_needs import LEAST_PROCESS_BYTES, HostShare, number_of, whole_gib
from legroom.planning.machine import Machine
from legroom.records import dataclass
from legroom.run.expectation import Expectation, Gpus, cpu_pool_bytes, expected_pool, plan_on_machine
from legroom.run.restart_policy import ProcessDeath
from legroom.run.server_command import ServerCommand, read_command
from legroom.units import GIB, MIB, gib
from legroom.vllm.args import other_value
from legroom.vllm.command_line import command_parts, value_of, with_settings
from legroom.vllm_logs.log_masking import masked_log_text
from legroom.vllm_logs.log_sources import pieces_of_file

HOST_MEMORY_CAUSE, _HOST_MEMORY_ENTRY = "host_ram_oom", "LR501"
_CERTAIN = 0.97
_CPU_PROCESSES = 3  # API server, engine core and worker of the CPU build.
_SPARE = 0.05  # Share of a memory limit for file pages and kernel buffers, which the estimate leaves out.


@dataclass(frozen=True)
class HostEstimate:
    """The host memory that a server needs, part by part."""

    shares: tuple[HostShare, ...] = ()
    pool_bytes: int | None = None
    """The KV cache on a CPU, where it is host memory."""

    @property
    def bytes(self) -> int:
        """Host memory in bytes of all the server's parts together."""
        return sum(share.bytes for share in self.shares)


def kernel_finding(kill: KernelKill, command: ServerCommand, environ: Mapping[str, str], gpus: Gpus) -> Finding:
    """The finding of an OOM kill: which process, which limit, and fixes that lower the need or raise the limit."""
    estimate = host_estimate(command, environ, gpus)
    fixes = (*_host_memory_fixes(kill, estimate, command, environ), _more_memory_fix(kill, estimate))
    why = _kill_sentence(kill, estimate)
    return Finding(HOST_MEMORY_CAUSE, _HOST_MEMORY_ENTRY, _CERTAIN, (), why, lambda: (fixes, ()))


def host_estimate(command: ServerCommand, environ: Mapping[str, str], gpus: Gpus) -> HostEstimate:
    """The plan's host memory by part; on a CPU it includes weights and KV cache. Empty without a plan."""
    try:
        if gpus.name:
            return HostEstimate(plan_on_machine(command, environ, Machine(gpus.name, max(gpus.count, 1))).host.shares)
        pool = cpu_pool_bytes(command, environ)
        shares = [HostShare("processes", _CPU_PROCESSES * LEAST_PROCESS_BYTES)]
        with contextlib.suppress(LegroomError):
            # Weights have the same size on a CPU as on any card.
            planned = plan_on_machine(command, environ, Machine("192GiB"))
            shares.append(HostShare("weights", planned.layout.weights.bytes))
        shares += [HostShare("KV cache", pool)] if pool else []
        return HostEstimate(tuple(shares), pool)
    except (LegroomError, ArithmeticError, LookupError, TypeError, ValueError):
        return HostEstimate()


def _kill_sentence(kill: KernelKill, estimate: HostEstimate) -> str:
    """Whom the kernel's OOM killer killed, which limit was reached, and what the plan expects in host memory."""
    who = kill.victim or "a process of this server"
    held = f", which held {gib(kill.victim_bytes)}," if kill.victim_bytes else ""
    if kill.limit_bytes is not None:
        peak = f", of which {gib(kill.peak_bytes)} were in use at the peak" if kill.peak_bytes is not None else ""
        full = f"its cgroup may use {gib(kill.limit_bytes)} ({kill.limit_file}){peak}"
    else:
        full = f"the machine's {gib(kill.machine_bytes)} of RAM were used up" if kill.machine_bytes else "RAM ran out"
    needs = ""
    if estimate.bytes:
        parts = ", ".join(f"{gib(share.bytes)} {share.what}" for share in estimate.shares)
        needs = f" By the plan it holds about {gib(estimate.bytes)} of host memory: {parts}."
    return f"The kernel killed {who}{held} because {full}. It is host memory, not the GPU's.{needs}"


def _host_memory_fixes(
    kill: KernelKill, estimate: HostEstimate, command: ServerCommand, environ: Mapping[str, str]
) -> Iterator[Fix]:
    """Fixes that shrink a CPU's KV cache, or the space for offloaded KV blocks, to the cgroup's limit."""
    if kill.limit_bytes is None:
        return  # other programs may hold the rest of the machine's memory
    room = int(kill.limit_bytes * (1 - _SPARE))
    used = max(estimate.bytes, kill.limit_bytes)
    over = used - room
    if estimate.pool_bytes is not None:
        yield from _smaller_cpu_pool(room - (used - estimate.pool_bytes), estimate.pool_bytes, command, environ)
    offloaded_gib = number_of(other_value(command.args, "--kv-offloading-size") or "")
    if offloaded_gib * GIB > over:
        why = f"{offloaded_gib:g} GiB of host memory were asked for to keep KV blocks in."
        yield Fix("cpu_offload", why, flags={"kv_offloading_size": int((offloaded_gib * GIB - over) // GIB) or None})


def _smaller_cpu_pool(room: int, pool: int, command: ServerCommand, environ: Mapping[str, str]) -> Iterator[Fix]:
    """A fix that lowers a CPU's KV cache from `pool` to `room` bytes; none below 64 MiB, or if the pool fits."""
    why = f"On a CPU the KV cache is host memory, and beside everything else {gib(max(room, 0))} are left for it."
    if not 64 * MIB <= room < pool:
        return
    in_env = {**environ, **command.env}.get("VLLM_CPU_KVCACHE_SPACE") and command.args.kv_cache_memory_bytes is None
    if in_env and room >= GIB:
        yield Fix("kv_cache_memory_bytes", why, env={"VLLM_CPU_KVCACHE_SPACE": str(room // GIB)})
    elif "--kv-cache-memory-bytes" in flags_of(command.release):
        yield Fix("kv_cache_memory_bytes", why, flags={"kv_cache_memory_bytes": room // MIB * MIB})


def _more_memory_fix(kill: KernelKill, estimate: HostEstimate) -> Fix:
    """A fix without flags: raise the memory limit, or add RAM where no limit was reached."""
    wanted = whole_gib(max(estimate.bytes, kill.limit_bytes or 0) * (1 + _SPARE))
    if kill.limit_bytes is None:
        step = f"a machine with more RAM, or fewer other programs on it: this server alone holds {gib(estimate.bytes)}"
    else:
        step = f"raise the memory limit to {wanted // GIB} GiB or more (docker --memory {wanted // GIB}g, "
        step += f"resources.limits.memory: {wanted // GIB}Gi, MemoryMax={wanted // GIB}G)"
    return Fix("more_host_ram_or_shm", "It needs more host memory than it may use.", steps=(step,))


NOT_A_FIX = frozenset(
    {"report", "driver", "engine_version_or_V0", "request", "access", "files", "package", "disk", "port"}
)
_SIZING = ("VLLM_CPU_KVCACHE_SPACE", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_VISIBLE_DEVICES")
_LAST_LINES, _LONGEST_WORDS = 10, 300
_NAMED_LENGTHS = ("kv_tokens_short", "estimated_max_len")
_EXCEPTION_NAME = re.compile(r"\b[A-Z]\w*(?:Error|Exception)\b")
_PYTHON_WARNING = re.compile(r"\b[A-Z]\w*Warning: |^\s*warnings\.warn\(")
_NEVER_CHANGED = frozenset({"model"})  # Settings that a fix must not change.
_KERNEL_FAULTS = frozenset({"illegal_access", "device_assert", "kernel_assertion"})
"""Evidence that the catalog's entry of `not_memory` describes; other failures have no entry of their own."""
Tried = tuple[Sequence[str], Mapping[str, str]]
"""The words of a launched command, and the variables before it."""


@dataclass(frozen=True)
class Bounds:
    keep: tuple[str, ...] = ()
    """Flags that must not change, by vLLM's Python names."""
    min_context: int | None = None
    min_concurrency: float | None = None


@dataclass(frozen=True)
class Remedy:
    """A failure and the next command; `words` is empty where no fix is allowed."""

    cause: str
    entry: str
    failed: str
    """The failure as one line."""
    is_memory: bool
    evidence: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    env: Mapping[str, str] | None = None
    changed: str = ""
    expected: Expectation | None = None
    refused: str = ""
    """Why no fix was applied."""
    by_signal: bool = False
    """Whether a signal from outside ended it, so that the same command may start."""


@dataclass(frozen=True)
class _FixContext:
    command: ServerCommand
    bounds: Bounds
    gpus: Gpus
    environ: Mapping[str, str]
    tried: frozenset[object]
    pool_tokens: int | None
    """Tokens of the KV pool, from the log."""
    named_len: int
    """The max_model_len that vLLM's message names; 0 for none."""


def find_remedy(
    log: Path,
    command: ServerCommand,
    bounds: Bounds,
    gpus: Gpus,
    environ: Mapping[str, str],
    tried: Iterable[Tried] = (),
    kill: KernelKill | None = None,
    death: ProcessDeath | None = None,
    ended: str = "",
) -> Remedy:
    """The diagnosis of the log and the next command to try; its `words` are empty if no fix is allowed. `kill`, `death`
    and `ended` (a sentence) say how the server ended, where known from elsewhere than the log."""
    sizing = {name: value for name, value in environ.items() if name in _SIZING}
    line = shlex.join([*assignments(sizing | dict(command.env)), *command.words])
    hints = Hints(line, None, gpus.name or None, gpus.count or None, command.stated_release or None)
    try:
        runs = read_log(pieces_of_file(str(log)), str(log), hints).runs
    except LegroomError:  # a server that is killed early has an empty log
        if not (death and death.signal):
            raise
        runs = ()
    findings = runs[0].proven_findings if runs else ()
    if kill is not None:
        others = (finding for finding in findings if finding.cause != HOST_MEMORY_CAUSE)
        findings = (kernel_finding(kill, command, environ, gpus), *others)
    shortages = {finding.cause for finding in findings if cause_of(finding.cause).is_memory} - {HOST_MEMORY_CAUSE}
    if death and death.signal and not shortages:  # that the kernel sent it is known from its counters, not from the log
        refused = "a signal from outside asks for no other flags"
        return Remedy("not_memory", "", ended, False, refused=refused, by_signal=True)
    if not findings:
        said = (line.strip() for line in reversed(last_lines(log, _LAST_LINES)) if not _PYTHON_WARNING.search(line))
        last_line = next(filter(None, said), "")
        last = f" Its last line: {masked_log_text(last_line)[:_LONGEST_WORDS]}" if last_line else ""
        why = f"{ended}, and the log does not say why" if ended else "the log does not say why"
        return Remedy("", "", f"{why}.{last}", False, refused="there is nothing to go by")
    first = findings[0]
    why = f"{_failure_title(first)}: {masked_log_text(first.why + _exception_text(first))}"
    lines = tuple(masked_log_text(item.text)[:_LONGEST_WORDS] for item in first.evidence[:3])
    lines = lines or ((kill.line,) if kill and kill.line else ())
    diagnosed = Remedy(first.cause, first.entry, why, cause_of(first.cause).is_memory, lines)
    keys = frozenset(_launch_key(words, env, command, environ) for words, env in (*tried, (command.words, command.env)))
    pool_tokens = longest_fitting_len(runs[0].case) if runs else None
    numbers = (run.case.number(id_, "fits_len_count") for run in runs[:1] for id_ in _NAMED_LENGTHS)
    case = _FixContext(command, bounds, gpus, environ, keys, pool_tokens, max(filter(None, numbers), default=0))
    return _first_allowed_fix(diagnosed, findings, case)


def signal_name(number: int) -> str:
    """A signal's name, such as SIGKILL for 9; real-time signals have a number only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def death_text(death: ProcessDeath, account: KernelAccount | None) -> str:
    """How a process died (for SIGKILL or an unknown signal with the OOM killer's counts); empty if it exited."""
    if death.signal == 0:
        return ""
    how = "ended, and its parent collected the exit status first (Linux 6.15 keeps it)"
    text = f"{death.process} {f'died of {signal_name(death.signal)}' if death.signal else how}"
    if death.signal not in (None, signal.SIGKILL):
        return text
    if account is None or (account.kills is None and account.machine_kills is None):
        return f"{text}; whether the kernel's out-of-memory killer did it cannot be read here"
    sender = ", sent by somebody and" if death.signal else ";"
    return f"{text}{sender} not by the kernel's out-of-memory killer, which counts no kill"


def _launch_key(
    words: Sequence[str], env: Mapping[str, str], command: ServerCommand, environ: Mapping[str, str]
) -> object:
    """A key equal for two commands with the same flags in any order and the same variables beyond `environ`."""
    parts = list(command_parts(words, command.release))
    flags = sorted((part.dest, part.value) for part in parts if part.name)
    bare = tuple(word for part in parts if not part.name for word in part.words)
    return bare, tuple(flags), tuple(sorted(item for item in env.items() if environ.get(item[0]) != item[1]))


def _failure_title(finding: Finding) -> str:
    """The catalog entry's title, else the cause; `It is not memory` for not_memory without a GPU kernel fault."""
    if finding.cause == "not_memory" and not any(item.id in _KERNEL_FAULTS for item in finding.evidence):
        return "It is not memory"
    try:
        return f"{entry(finding.entry).title.en} ({finding.entry})"
    except LegroomError:
        return f"{finding.cause.replace('_', ' ')} ({finding.entry})"


def _exception_text(finding: Finding) -> str:
    """` It says: ` and the exception's message if the cause is not memory, else empty."""
    exception = next((item for item in finding.evidence if item.role == "exception"), None)
    if exception is None or finding.cause != "not_memory":
        return ""
    name = exception.facts.get("type") or next(iter(_EXCEPTION_NAME.findall(exception.text)), None)
    reason = exception.text.partition(str(name))[2].lstrip(":( ") if name else exception.text
    if not reason or reason.endswith(":"):  # the message follows on the next lines
        reason = str(exception.facts.get("message", ""))
    return f" It says: {reason[:_LONGEST_WORDS]}" if reason else ""


def _first_allowed_fix(diagnosed: Remedy, findings: tuple[Finding, ...], case: _FixContext) -> Remedy:
    """The diagnosis with the first fix within the bounds that was not tried, else with why each was refused."""
    refusals: list[str] = []
    for fix in (_at_named_length(each, case.named_len) for each in computed_fixes(findings)):
        command = case.command
        change = _change_text(fix, command, case.environ)
        words = with_settings(command.words, command.flags_at, fix.flags, command.release)
        env = {**command.env, **fix.env}
        reason = _violates_bounds(fix, case.bounds) or _already_tried(fix, words, env, case)
        if not reason:
            changed = read_command([*assignments(env), *words], command.stated_release or None, case.environ)
            expected = expected_pool(changed, case.environ, case.gpus)
            reason = _violates_minimum(fix, expected, case, diagnosed.is_memory)
        if not reason:
            return replace(diagnosed, words=words, env=env, changed=change, expected=expected)
        refusals.append(f"{change} ({reason})")
    if refusals:
        return replace(diagnosed, refused=f"it would have changed {', or '.join(refusals[:3])}")
    steps = [step for fix in findings[0].fixes[:2] for step in fix.steps[:1]]
    hint = f"; what may help: {'; or '.join(steps)}" if steps else ""
    return replace(diagnosed, refused=f"no flags that fix it could be computed{hint}")


def _at_named_length(fix: Fix, named_len: int) -> Fix:
    """The fix with max_model_len set to `named_len`, the length in vLLM's error, if the fix's is that rounded down."""
    length = fix.flags.get("max_model_len")
    if fix.flags.keys() != {"max_model_len"} or not isinstance(length, int) or not named_len // 2 < length < named_len:
        return fix
    return replace(fix, flags={"max_model_len": named_len}, why=fix.why.partition(" Rounded down")[0])


def _already_tried(fix: Fix, words: Sequence[str], env: Mapping[str, str], case: _FixContext) -> str:
    """Why the command `words` with `env`, made by the fix, counts as tried; empty where it is new."""
    if _launch_key(words, env, case.command, case.environ) not in case.tried:
        return ""
    command = case.command
    file = value_of(command.words, command.flags_at, "config", command.release)
    removed = [name for name, value in fix.flags.items() if value is None]
    values = [value_of(command.words, command.flags_at, name, command.release) for name in removed]
    if file and removed and all(value is None for value in values):
        return f"it stands in {file}: change it there"
    return "that has been tried"


def computed_fixes(findings: tuple[Finding, ...]) -> Iterator[Fix]:
    """Fixes by flags or variables of at least 0.5 confidence, in order, up to the first finding below 0.1."""
    for finding in findings:
        if finding.confidence < 0.1:
            return
        for fix in finding.fixes:
            is_allowed = fix.kind not in NOT_A_FIX and not _NEVER_CHANGED & fix.flags.keys()
            if is_allowed and fix.confidence >= 0.5 and (fix.flags or fix.env):
                yield fix


def _violates_bounds(fix: Fix, bounds: Bounds) -> str:
    """Which of the user's bounds (--keep, --min-context, --min-concurrency) the fix violates; empty if none."""
    for name in (*fix.flags, *fix.env):
        if name in bounds.keep:
            return f"--keep {_flag_or_variable(name)}"
    length = fix.flags.get("max_model_len")
    if bounds.min_context and isinstance(length, int) and 0 <= length < bounds.min_context:
        return f"below --min-context {bounds.min_context}"
    seqs = fix.flags.get("max_num_seqs")
    if bounds.min_concurrency and isinstance(seqs, int) and seqs < bounds.min_concurrency:
        return f"below --min-concurrency {bounds.min_concurrency:g}"
    return ""


def _violates_minimum(fix: Fix, expected: Expectation, case: _FixContext, is_memory: bool) -> str:
    """Why the fix's plan is below --min-concurrency or --min-context, or cannot show it; empty if it is not."""
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


def _change_text(fix: Fix, command: ServerCommand, environ: Mapping[str, str]) -> str:
    """The flags and variables that the fix changes, each with its value before the change."""
    parts = []
    for name, value in fix.flags.items():
        before = value_of(command.words, command.flags_at, name, command.release)
        was = f" (was {before})" if before else ""
        flag = _flag_or_variable(name, command)
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


def _flag_or_variable(name: str, command: ServerCommand | None = None) -> str:
    """The flag of a setting by its Python name, as the command's release spells it; a variable's name unchanged."""
    flags = flags_of(command.release).values() if command is not None else ()
    known = next((flag.name for flag in flags if flag.dest == name), None)
    return known or (name if name.isupper() else flag_name(name))
