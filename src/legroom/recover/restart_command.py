"""Computes the command to start after a crash, from the log or the command of the crashed server."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legroom.deployments.server_words import assignments
from legroom.errors import LegroomError
from legroom.facts.releases import release as known_release
from legroom.files import runs_folder
from legroom.records import dataclass
from legroom.vllm.command_line import without_secrets
from legroom.vllm.parse import split_assignments

if TYPE_CHECKING:
    from legroom.diagnosis.fixes.failed_run import Hints
    from legroom.facts.releases import Release
    from legroom.planning.plan import Plan, Target
    from legroom.vllm.args import ServeArgs


@dataclass(frozen=True)
class CrashedServer:
    command: str | None = None
    log: str | None = None
    gpu: str | None = None
    gpus: int | None = None
    vllm: str | None = None
    source: str = ""
    """Where the command and log were found, as text for the user."""


class NoRestartCommand(LegroomError):
    """No command follows from what is known."""


@dataclass(frozen=True)
class RestartCommand:
    """A command that fits according to its plan."""

    command: tuple[str, ...]
    why: str
    plan: Plan | None = None


def last_killed_run() -> CrashedServer | None:
    """The newest `legroom run` whose run file is left though it no longer runs; None without one."""
    notes = sorted(runs_folder().glob("*.json"), key=_modification_time_s, reverse=True)
    for note in notes:
        if note.name.endswith(".flags.json"):
            continue
        try:
            run_note: Mapping[str, Any] = json.loads(note.read_text("utf-8"))
            command = run_note["command"]
            command = shlex.split(command) if isinstance(command, str) else command
            words = [*assignments(run_note.get("env", {})), *command]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        if _is_run_alive(run_note):
            continue
        line = shlex.join(str(word) for word in words)
        log = run_note.get("log")
        readable = isinstance(log, str) and Path(log).is_file()
        return CrashedServer(line, log if readable else None, source=f"the run noted in {note.name}")
    return None


def _is_run_alive(run_file: Mapping[str, Any]) -> bool:
    """Whether the process that wrote a run file (its JSON) still runs, and its PID was not reused."""
    import psutil

    pid, started_s = run_file.get("pid"), run_file.get("started_s")
    if not isinstance(pid, int) or pid < 1:
        return False
    try:
        process = psutil.Process(pid)
        came_later = isinstance(started_s, (int, float)) and process.create_time() > started_s + 1
        return not came_later and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _modification_time_s(path: Path) -> float:
    """When a file was last modified, in Unix seconds; 0 where it cannot be read."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def restart_after(crashed: CrashedServer) -> RestartCommand:
    """The command with the fix for the failure in the log, else the crashed command changed until it fits; secrets are
    left out. NoRestartCommand where there is neither."""
    restart = _restart_command(crashed)
    env, words = split_assignments(restart.command)
    given, _ = split_assignments(shlex.split(crashed.command or ""))
    return replace(restart, command=tuple(without_secrets([*assignments({**given, **env}), *words])))


def _restart_command(crashed: CrashedServer) -> RestartCommand:
    """The command that fixes the log's proven failure, else one that fits the GPU; NoRestartCommand without either."""
    from legroom.diagnosis.fixes.failed_run import Hints

    hints = Hints(crashed.command, None, crashed.gpu, crashed.gpus, crashed.vllm)
    restart = _fix_of_log(crashed.log, hints) if crashed.log else None
    if restart:
        return restart
    if crashed.command is None:
        raise NoRestartCommand("the log shows no failure that flags would fix", "give the line that ran with --command")
    from legroom.deployments.deployment import deployment_from_command
    from legroom.drawing.text import plural
    from legroom.planning.advice import with_advice
    from legroom.planning.plan import plan, plan_on_named_card, ready_command

    deployment = deployment_from_command(crashed.command, known_release(crashed.vllm) if crashed.vllm else None)
    fatal = [problem for problem in deployment.problems if problem.stops_vllm]
    if fatal:
        hint = "; ".join(f"instead of {problem.flag}: {problem.instead}" for problem in fatal if problem.instead)
        raise LegroomError("; ".join(problem.message for problem in fatal), hint)
    target = _plan_target(crashed, deployment.args, deployment.release, deployment.gpu_count)
    first = plan_on_named_card(target, deployment.args)
    fitting, why = first, "it fits as it is"
    if first.verdict != "fits":
        working = [each for each in with_advice(first).advice if each.plan.verdict == "fits"]
        # Prefers the same model to another checkpoint, and flags that leave as much headroom as before.
        headroom = first.layout.headroom_bytes
        advice = min(
            working, key=lambda each: ("model" in each.flags, each.plan.layout.headroom_bytes < headroom), default=None
        )
        if advice is None:
            hint = "see legroom plan and legroom size"
            raise NoRestartCommand(f"no change of flags makes it fit: {first.reason}", hint)
        fitting, why = advice.plan, advice.why
    holds = max(1, int(fitting.memory.kv.max_concurrency))
    if holds < fitting.settings.max_num_seqs:
        fitting = plan(fitting.target, replace(fitting.args, max_num_seqs=holds))
        at_a_time = f"{plural(holds, 'request')} at a time"
        why += f"; {at_a_time}, so that each can grow to the full context and none is ever preempted"
    return RestartCommand(tuple(ready_command(fitting)), why, fitting)


def _fix_of_log(log: str, hints: Hints) -> RestartCommand | None:
    """The first fix with a command for a proven failure in the log; None where there is none."""
    from legroom.diagnosis.log_diagnosis import read_log
    from legroom.vllm_logs.log_sources import pieces_of_file

    reading = read_log(pieces_of_file(log), log, hints)
    findings = reading.runs[0].proven_findings if reading.runs else ()
    for finding in findings:
        for fix in finding.fixes:
            if fix.command:
                return RestartCommand(fix.command, f"{finding.why} {fix.why}".strip(), fix.plan)
    return None


def _plan_target(crashed: CrashedServer, args: ServeArgs, release: Release, gpu_count: int | None) -> Target:
    """The model of `args`, card, GPU count and release to plan for; by default the machine's first card."""
    from legroom.facts.gpus import gpu, with_total
    from legroom.live.gpu_memory import nvml_devices
    from legroom.planning.plan import Target
    from legroom.vllm.resolve import served_model

    cards = nvml_devices()
    if crashed.gpu is None and not cards:
        raise LegroomError("which GPU? no NVIDIA driver answers here", "say --gpu h100, or a size such as --gpu 24GiB")
    card = gpu(crashed.gpu or cards[0].name)
    if crashed.gpu is None:
        card = with_total(card, cards[0].total_bytes)
    known = crashed.gpus or gpu_count
    return Target(served_model(args), card, max(known or 1, args.gpus_needed), release, gpus_given=known is not None)
