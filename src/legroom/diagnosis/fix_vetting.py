"""Every fix before it is offered: known to the release, not in force already, starting by the numbers of the log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from legroom.diagnosis.finding import Fix
from legroom.facts.flags import env_history, env_names, flags_of
from legroom.vllm.args import ServeArgs

if TYPE_CHECKING:
    from legroom.diagnosis.fix_planner import FixPlanner

_NOT_OF_MEMORY = frozenset({"flag", "report", "driver", "request", "disable_custom_allreduce_or_nccl_env"})

_NOT_MOVED_UP = frozenset({"more_or_fewer_gpus_tp_pp", "cpu_offload"})
"""Kinds that are not put first for their certainty: GPUs that may not be there, and weights that every step fetches."""


def vetted(planner: FixPlanner, fixes: Iterable[Fix | None]) -> tuple[Fix, ...]:
    """The fixes that hold, in their order, but for the first: it has to start across the band, if one does that
    may be put first for it."""
    passed = [held for fix in fixes if fix is not None and (held := _held_up(planner, fix))]
    if passed and _is_doubtful(passed[0]):
        sure = next((fix for fix in passed if _is_sure(fix)), None)
        passed = [sure, *(fix for fix in passed if fix is not sure)] if sure else passed
    return tuple(passed)


def _is_doubtful(fix: Fix) -> bool:
    return fix.plan is not None and fix.plan.verdict == "tight" and not fix.proven


def _is_sure(fix: Fix) -> bool:
    if fix.kind in _NOT_MOVED_UP:
        return False
    return fix.proven or (fix.plan is not None and not _is_doubtful(fix))


def _held_up(planner: FixPlanner, fix: Fix) -> Fix | None:
    if not (fix.flags or fix.env):
        return fix
    if fix.kind != "flag" and (not _release_takes(planner, fix) or _in_force(planner, fix)):
        return replace(fix, flags={}, env={}, command=()) if fix.steps and not fix.flags else None
    checked = fix if fix.kind in _NOT_OF_MEMORY else _planned(planner, fix)
    if checked is None:
        return None
    line = checked.command or planner.command(checked.flags, checked.env)
    return replace(checked, command=line, comment=planner.known.rebuilt.remark(checked.flags, checked.env))


def _release_takes(planner: FixPlanner, fix: Fix) -> bool:
    """Whether the release has every flag and variable of a fix; yes where the release is not known."""
    if not planner.known.release_known:
        return True
    release = planner.known.release
    dests = {flag.dest for flag in flags_of(release).values()}
    if any(value is not None and name not in dests for name, value in fix.flags.items()):
        return False
    return all(name in env_names(release) for name in fix.env if env_history(name) is not None)


def _in_force(planner: FixPlanner, fix: Fix) -> bool:
    """Whether the server already ran like this."""
    given = planner.given_args
    flags = all(
        name in ServeArgs.__dataclass_fields__ and getattr(given, name) == value for name, value in fix.flags.items()
    )
    return flags and all(given.env.get(name) == value for name, value in fix.env.items())


def _planned(planner: FixPlanner, fix: Fix) -> Fix | None:
    """The fix with its plan; None where the memory model, or the log's own numbers, refuse it."""
    memory_flags = {name: value for name, value in fix.flags.items() if name in ServeArgs.__dataclass_fields__}
    if fix.plan is not None or fix.proven or not memory_flags:
        return fix
    if planner.base is not None:
        made = planner.plan_with(memory_flags)
        return None if made is None else replace(fix, plan=made, before=planner.base.layout)
    return None if planner.accounting.refuses(memory_flags) else fix
