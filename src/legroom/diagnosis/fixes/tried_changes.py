"""Changes that the text says were tried in vain: what repeats one is no fix, and what goes on from one comes last."""

import math
import re
from typing import Any

from legroom.diagnosis.case import Case
from legroom.diagnosis.finding import Fix
from legroom.diagnosis.fixes.failed_server import FailedServer
from legroom.facts.releases import logged_release

_LESS_MEMORY = {
    "gpu_memory_utilization": 0.9,
    "max_model_len": math.inf,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
}
"""Settings -> vLLM's default on most cards: who tried less than that tried to save memory."""
_AFTER_POOL = ("", "serving", "kv", "sampler", "warmup", "graph")
"""Sites of a failure with the KV pool in place, so that a larger utilization fails too."""
_NEWER = re.compile(r"vllm>=(\d[\d.]*)|pip install -U vllm|\b(?:upgrade|newest)\b")


def failed_values(case: Case, name: str) -> list[Any]:
    """The values of setting `name` with which, by the text, the server failed too."""
    return [settings[name] for settings, worked in case.reported if not worked and name in settings]


def is_between_failures(case: Case, name: str, value: Any) -> bool:
    """Whether the text says that the server failed with a smaller and with a larger value of this setting."""
    told = [settings[name] for settings, worked in case.reported if not worked and settings.keys() == {name}]
    failed = [other for other in told if isinstance(other, int | float) and isinstance(value, int | float)]
    if name == "gpu_memory_utilization":  # what left too small a pool failed for another reason
        failed = [other for other in failed if other > (case.too_small_share or 0)]
    return any(other <= value for other in failed) and any(other >= value for other in failed)


def was_in_vain(planner: FailedServer, fix: Fix) -> bool:
    """Whether the text says that the server failed with this fix too, or with one that goes further the same way."""
    if any(is_between_failures(planner.case, name, value) for name, value in fix.flags.items()):
        return True
    if fix.proven:
        return False
    case, share = planner.case, fix.flags.get("gpu_memory_utilization") or 0
    if fix.flags.keys() == {"gpu_memory_utilization"} and 0 < share <= (case.too_small_share or 0):
        return True  # the pool was too small at this share
    if share > case.failed_share and _larger_share_fails(case, fix):
        return True  # beside whatever other change
    if fix.kind == "engine_version_or_V0" and not (fix.flags or fix.env) and _is_tried_release(case, fix.steps):
        return True
    changed = (*fix.flags, *fix.env)
    return bool(changed) and all(is_value_in_vain(planner, fix, name) for name in changed)


def is_value_in_vain(planner: FailedServer, fix: Fix, name: str) -> bool:
    """Whether, by the text, the server failed with the fix's value of setting `name`, or with one that goes further."""
    case = planner.case
    if name in fix.env:
        is_tried = "expandable" in fix.env[name] and failed_values(case, "tried expandable_segments")
        return bool(is_tried) or fix.env[name] in failed_values(case, name)
    value, ways = fix.flags[name], failed_values(case, f"tried {name}")
    if ways:
        now = planner.utilization if name == "gpu_memory_utilization" else planner.in_force(name) or 0
        return not ways[-1] or ((value or 0) < now) == (ways[-1] == "lower")
    numbers = [other for other in failed_values(case, name) if isinstance(other, int | float) and value is not None]
    if name == "gpu_memory_utilization" and fix.kind == "raise_util":
        return any(value <= other for other in numbers)
    is_less = name in _LESS_MEMORY and (name != "gpu_memory_utilization" or _larger_share_fails(case, fix))
    further = [other for other in numbers if is_less and value > other > (case.too_small_share or 0)]
    return bool(further) or value in failed_values(case, name)


def goes_on_from_attempt(planner: FailedServer, fix: Fix) -> bool:
    """Whether a fix only goes further than what was tried in vain, and no figure says that this is enough."""
    made = planner.failed_plan
    if fix.proven or not fix.flags or fix.env or (fix.plan is not None and made is not None and not made.starts):
        return False
    return all(
        name in _LESS_MEMORY
        and any((value or math.inf) < tried.get(name, 0) < _LESS_MEMORY[name] for tried in planner.case.attempts)
        for name, value in fix.flags.items()
    )


def _larger_share_fails(case: Case, fix: Fix) -> bool:
    """Whether a utilization above a failed one fails too: once the pool is allocated, or where the fix lowers it."""
    return fix.kind == "lower_util" or (case.is_oom and case.site in _AFTER_POOL)


def _is_tried_release(case: Case, steps: tuple[str, ...]) -> bool:
    """Whether the first step is an upgrade, and by the text the newest release, or one with the change, fails too."""
    step, told = _NEWER.search(steps[0]) if steps else None, failed_values(case, "tried release")
    newest = [each for each in told if not each[0].isdigit()]
    if step is None or newest or step[1] is None:
        return step is not None and bool(newest)
    return any(logged_release(each).at_least(step[1]) for each in told)
