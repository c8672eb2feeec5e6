"""The one check that every fix passes before it is shown: it changes something, is new, and leads to a start."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from legroom.diagnosis.case import Case
from legroom.diagnosis.confidence import FixGround
from legroom.diagnosis.finding import DeadEnd, Fix, FixKind, kinds_of_changes
from legroom.diagnosis.fixes import tried_changes
from legroom.diagnosis.fixes.fix_planner import FULL_UTILIZATION, MAX_UTILIZATION, UNKNOWN_CARD_BYTES, FixPlanner
from legroom.diagnosis.fixes.hardware_fixes import exceeds_machine, is_at_hand
from legroom.facts import read_data
from legroom.facts.flags import env_history, env_names, flag_name, flags_ever, flags_of
from legroom.facts.log_messages import message_group
from legroom.units import GIB, gib
from legroom.vllm.args import ServeArgs

_KINDS_WITHOUT_PLAN = frozenset({"flag", "report", "driver", "request", "disable_custom_allreduce_or_nccl_env"})
_LAST = {"more_or_fewer_gpus_tp_pp": 1, "cpu_offload": 2}
"""Kinds that are never moved to the front: extra GPUs may not exist, and offloaded weights slow every step."""
_ONLY_BY_PLAN = frozenset({"kv_cache_dtype", "quantization", "tensor_parallel_size", "pipeline_parallel_size"})
"""Settings that not every card, backend or machine has room for: only a plan tells."""
_PEAK_FLAGS = frozenset({"max_num_batched_tokens", "max_num_seqs", "limit_mm_per_prompt", "enforce_eager"})
"""Settings whose effect in bytes only a plan or a measured peak tells."""
_BATCH_FLAGS = frozenset({"max_num_batched_tokens", "max_num_seqs"})
_AFTER_POOL = ("kv", "sampler", "warmup", "graph")
_COUNTED = ("kv_bytes_short", "kv_tokens_short", "free_below_desired", "state_blocks_short", "profiling_error")
"""Messages whose own numbers say which setting starts, on any release."""
_OTHER_PACKAGE = re.compile(r"(?i)\b(?:safetensors|transformers|torch|flashinfer|triton|verl|trl|sglang|numpy|ray)\b")
_STEP_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
_FORBIDDEN = re.compile(r"(raise|lower|change) (\w+)(?: to ([\d.]+) and more)?")


def checked_fixes(
    planner: FixPlanner, fixes: Iterable[Fix | None], dead_ends: Iterable[DeadEnd] = (), *, is_memory: bool = True
) -> tuple[Fix, ...]:
    """The fixes that change something, are no dead end and whose plan may start; one that surely starts goes before a
    tight first one, more GPUs go last where the number of ranks is known. `is_memory`: the failure is of memory."""
    held = [end for end in dead_ends if _meets_conditions(planner.case, end.when)]
    forbidden = [found for end in held if (found := _FORBIDDEN.match(end.action))]
    passed: list[Fix] = []
    release = _reported_release_fix(planner)
    is_counted = planner.case.has(*_COUNTED)  # then the figures of the message lead, and the release comes second
    for fix in (_reported_fix(planner, is_memory), None if is_counted else release, *fixes):
        if (
            fix is None
            or tried_changes.was_in_vain(planner, fix)
            or any(_is_forbidden(planner, fix, rule) for rule in forbidden)
        ):
            continue
        checked = _check_fix(planner, fix)
        changes = [(other.flags, other.env, other.steps) for other in passed]
        if checked and (checked.flags, checked.env, checked.steps) not in changes:
            passed.append(checked)
    if planner.known.ranks_known:
        passed.sort(key=lambda fix: 0 if fix.proven or is_at_hand(planner, fix) else _LAST.get(fix.kind, 0))
    if passed and passed[0].kind == "checkpoint_format":  # GPUs that no rank uses cost less than another checkpoint
        passed.sort(key=lambda fix: not is_at_hand(planner, fix))
    if passed and _is_tight(passed[0]):
        planned = (fix for fix in passed if fix.kind not in _LAST and (fix.proven or fix.plan is not None))
        certain = next((fix for fix in planned if not _is_tight(fix)), None)  # at both ends of the plan's band
        passed = [certain, *(fix for fix in passed if fix is not certain)] if certain else passed
    passed.sort(key=lambda fix: tried_changes.goes_on_from_attempt(planner, fix))
    if is_counted and release is not None:
        passed.insert(1, release)
    # What the text says that its writer needs goes behind the fixes that keep it.
    needs = read_data("diagnosis_texts.json")["needs"].items()
    needed = {name for told, names in needs if planner.case.has(told) for name in names}
    return tuple(sorted(passed, key=lambda fix: bool(needed & {fix.kind, *fix.flags})))


def checked_dead_ends(planner: FixPlanner, ends: Iterable[DeadEnd], fixes: Iterable[Fix]) -> tuple[DeadEnd, ...]:
    """The dead ends whose conditions hold in this case and that none of these fixes contradicts."""
    offered = tuple(fixes)

    def is_offered(rule: re.Match[str]) -> bool:
        """Whether a fix moves a setting in a dead end's action (`rule`: its match) the way that the action warns of."""
        return any(is_lever_offered(rule[1], name) for name in re.findall("[a-z]+(?:_[a-z]+)+", rule.string))

    def is_lever_offered(verb: str, name: str) -> bool:
        """Whether a fix moves setting `name` from its value in force as `verb` says: raise, lower or change."""
        now = planner.utilization if name == "gpu_memory_utilization" else planner.in_force(name) or 0
        values = [fix.flags[name] for fix in offered if isinstance(fix.flags.get(name), int | float)]
        moves = {"raise" if value > now else "lower" for value in values}
        if name == "gpu_memory_utilization":
            moves |= {fix.kind.removesuffix("_util") for fix in offered if fix.kind in ("raise_util", "lower_util")}
        return verb in moves or (verb == "change" and bool(moves))

    # No pool is there yet, while graphs are measured, that a larger share could make larger.
    held = [end for end in ends if planner.case.site != "graph_profile" or "gpu_memory_utilization" not in end.action]
    held = [end for end in held if _meets_conditions(planner.case, end.when) and not _is_in_use(planner, end)]
    known, total = planner.accounting, planner.accounting.likely_total_bytes or UNKNOWN_CARD_BYTES
    if known.pool_bytes is not None and known.request_bytes:
        needed = planner.utilization + (known.request_bytes - known.pool_bytes) / total
        held = [end for end in held if "and more" not in end.action or needed > MAX_UTILIZATION]
    return tuple(end for end in held if (rule := _FORBIDDEN.match(end.action)) is None or not is_offered(rule))


def _is_in_use(planner: FixPlanner, end: DeadEnd) -> bool:
    """Whether a dead end warns of raising gpu_memory_utilization to a value that the failed run had already."""
    rule = _FORBIDDEN.match(end.action)
    return rule is not None and rule[3] is not None and planner.utilization >= float(rule[3])


def _meets_conditions(case: Case, when: Mapping[str, Sequence[str]]) -> bool:
    """Whether a case meets a `DeadEnd.when`: messages it `has` or `lacks`, code `sites`, unused memory too `scarce`."""
    if ("has" in when and not case.has(*when["has"])) or case.has(*when.get("lacks", ())):
        return False
    unused, free = case.ledger.unused_bytes, case.ledger.free_bytes or 0
    is_scarce = "scarce" not in when or (unused is not None and unused + free < (case.ledger.wanted_bytes or 0))
    return is_scarce and case.site in when.get("sites", (case.site,)) and case.site not in when.get("other_sites", ())


def _reported_fix(planner: FixPlanner, is_memory: bool) -> Fix | None:
    """Fix by the text: the settings with which it started, or one to set; None without these or if not `is_memory`."""
    for settings, worked in planner.case.reported if is_memory else ():
        flags = {name: value for name, value in settings.items() if not name.isupper()}
        env = {name: str(value) for name, value in settings.items() if name.isupper() and value is not None}
        unset = tuple(f"unset {name}" for name, value in settings.items() if name.isupper() and value is None)
        is_new = not all(_is_in_force(planner, name, value) for name, value in flags.items() if value is not None)
        is_new = is_new or any(planner.given_args.env.get(name) != value for name, value in env.items())
        if worked and (is_new or unset):
            why = "The text itself says that this worked."
            return Fix("other_engine_feature_off", why, flags, env, unset, proven=True)
        if worked and None in flags.values():
            flags = {name: value for name, value in flags.items() if value is None}
            why = f"The text itself says that it works without {', '.join(flag_name(name) for name in flags)}."
            return Fix("other_engine_feature_off", why, flags, proven=True)
    if is_memory and (default := planner.case.first("unset_told")) is not None:
        name = str(default.facts["what"]).replace("-", "_")
        if getattr(planner.known.args, name, 0) is None and (kind := kinds_of_changes().get(name)):
            step = f"give {flag_name(name)} explicitly, no larger than your requests need"
            return Fix(kind, "By the text it fails where the setting is left to its default.", steps=(step,))
    return None


def _reported_release_fix(planner: FixPlanner) -> Fix | None:
    """The release with which, by the text, the server started; None where it names none but the one that failed."""
    release = planner.case.first("release_told")
    if release is None or release.facts["what"] == planner.case.startup.vllm:
        return None
    if _OTHER_PACKAGE.search(release.text) and "vllm" not in release.text.lower():
        return None
    why, what = "The text itself says that it worked with this release.", release.facts["what"]
    steps = (f"pip install 'vllm=={what}' (image: vllm/vllm-openai:v{what})",)
    return Fix("engine_version_or_V0", why, steps=steps, proven=True)


def _is_forbidden(planner: FixPlanner, fix: Fix, rule: re.Match[str]) -> bool:
    """Whether a fix does nothing but what a dead end warns of (`rule`: verb, setting and bound in its action)."""
    verb, name, bound = rule.groups()
    is_after_pool = planner.case.site in _AFTER_POOL or planner.case.has("hbm_oom", "cpu_below_desired", "cpu_kv_short")
    if fix.flags.keys() != {name} or fix.env or is_after_pool or fix.proven or fix.is_unplanned:
        return False
    value, now = fix.flags[name], planner.utilization if name == "gpu_memory_utilization" else planner.in_force(name)
    if not isinstance(value, int | float) or not isinstance(now, int | float):
        return verb == "change"
    if bound is not None:
        return False  # a large shortfall: `raise_utilization` bounds it by the card
    return verb == "change" or (value > now if verb == "raise" else value < now)


def _is_tight(fix: Fix) -> bool:
    """Whether the fix's plan starts with hardly any room (`tight`), and the log does not prove the fix."""
    return fix.plan is not None and fix.plan.verdict == "tight" and not fix.proven


def _check_fix(planner: FixPlanner, fix: Fix) -> Fix | None:
    """The fix with its command and plan; None where the release, the machine or the memory model rules it out."""
    steps = tuple(step for step in fix.steps if planner.case.launcher or _release_has_flag_in(planner, step))
    if planner.case.is_npu:
        steps = tuple(step.replace("nvidia-smi before", "npu-smi info before") for step in steps)
        steps = tuple(step.replace("CUDA_VISIBLE", "ASCEND_RT_VISIBLE") for step in steps)
    if fix.steps and not (steps or fix.flags or fix.env):
        return None
    fix = replace(fix, steps=steps)
    if not (fix.flags or fix.env):
        return fix
    is_blind = _lowers_unknown_utilization(planner, fix)
    if fix.flags.keys() & {"model", "quantization"} and planner.case.has("low_bit_load"):
        return None  # the weights are rounded as they are loaded
    card, is_fp8 = planner.known.gpu, "fp8" in str(fix.flags.get("kv_cache_dtype"))
    is_old = card is not None and card.vendor == "nvidia" and (0, 0) < card.compute_capability < (8, 0)
    if exceeds_machine(planner, fix) or (is_fp8 and (is_old or planner.case.is_npu)):
        return None  # neither kernels before Ampere nor vLLM's plugin for Ascend have a KV cache in FP8
    if fix.kind != "flag":
        if not _release_supports(planner, fix):
            return replace(fix, flags={}, env={}) if fix.steps and not fix.flags else None
        changed = _without_values_in_force(planner, fix)
        if not (changed.flags or changed.env):
            return changed if fix.steps and not fix.flags else None
        fix = changed
    planned = fix if fix.kind in _KINDS_WITHOUT_PLAN else _add_plan(planner, fix)
    if planned is None:
        return None
    planned = _past_the_next_step(planner, planned)
    if is_blind:
        planned = planner.relative_to_share(planned)
        if not (planned.flags or planned.env):
            return planned
    if planner.case.launcher is not None and not planner.flags_known and planner.case.launcher.lacks(planned.flags):
        return None
    if (step := _launcher_step(planner, planned)) is not None and not planner.flags_known:
        return replace(planned, comment=step, steps=(step, *planned.steps))
    line = planned.command or planner.command(planned.flags, planned.env)
    comment = planner.known.rebuilt.remark(planned.flags, planned.env)
    if step is not None and planner.case.launcher is not None and planner.case.launcher.is_of_image:
        comment = "; ".join(filter(None, (comment, step)))
    outside = (1 - planner.utilization) * (planner.total_bytes or UNKNOWN_CARD_BYTES)
    if planned.plan is None and planner.utilization_known and outside < GIB // 2:
        full = f"{planner.utilization:g} of the card leaves nothing beside the budget: {MAX_UTILIZATION} at most"
        comment = comment if "gpu_memory_utilization" in planned.flags else "; ".join(filter(None, (comment, full)))
    return replace(planned, command=line, comment=comment)


def _lowers_unknown_utilization(planner: FixPlanner, fix: Fix) -> bool:
    """Whether a fix lowers an unknown utilization, and not by what other processes leave free."""
    share, case = fix.flags.get("gpu_memory_utilization"), planner.case
    if share is None or planner.utilization_known or fix.kind == "raise_util" or share >= planner.utilization:
        return False
    is_shared = case.ledger.other_processes_bytes or case.ledger.unowned_bytes or case.platform.trainer
    is_shared = is_shared or case.has("neighbour_holds", "own_engines_told", "smi_process", "cumem_oom", "frame_wake")
    return not is_shared and case.block_pool_bytes is None and not case.has("sleep_freed", "sleep_on")


def _launcher_step(planner: FixPlanner, fix: Fix) -> str | None:
    """A step: where the program that starts the engine takes these settings; None where that is `vllm serve`."""
    launcher = planner.case.launcher
    settings = {name: value for name, value in fix.flags.items() if value is not None and name != "model"}
    if launcher is None or not settings or any(step.startswith("in the trainer's own") for step in fix.steps):
        return None
    refused = planner.case.first("unexpected_keyword")
    if refused is not None and refused.facts["name"] in settings:
        owner = str(refused.facts["callee"]).partition(".")[0]
        return (
            f"{launcher.words(settings)} in the code of {owner}, which does not take it: where it makes EngineArgs(...)"
        )
    return f"in {launcher.name}: {launcher.words(settings)}"


def _release_has_flag_in(planner: FixPlanner, step: str) -> bool:
    """Whether the release has one of the vLLM flags that a step names; True where it names none or is unknown."""
    known = [name for name in _STEP_FLAG.findall(step) if name in flags_ever()] if planner.known.release_known else []
    return not known or any(name in flags_of(planner.known.release) for name in known)


def _release_supports(planner: FixPlanner, fix: Fix) -> bool:
    """Whether the release has every flag and variable of a fix; true where the release is not known."""
    if not planner.known.release_known:
        return True
    release = planner.known.release
    dests = {flag.dest for flag in flags_of(release).values()}
    if any(value is not None and name not in dests for name, value in fix.flags.items()):
        return False
    return all(name in env_names(release) for name in fix.env if env_history(name) is not None)


def _without_values_in_force(planner: FixPlanner, fix: Fix) -> Fix:
    """The fix without values that the failed run had or that were tried in vain; its kind follows what is left."""
    is_said = fix.is_unplanned or (fix.proven and bool(planner.case.reported))
    known = () if fix.proven else fix.flags.keys() & ServeArgs.__dataclass_fields__
    tried = {name for name in known if tried_changes.is_value_in_vain(planner, fix, name)}
    flags = {
        name: value
        for name, value in fix.flags.items()
        if (is_said and value is None) or not (name in tried or _is_in_force(planner, name, value))
    }
    env = {name: value for name, value in fix.env.items() if planner.given_args.env.get(name) != value}
    if flags == fix.flags and env == fix.env:
        return replace(fix, kind=_kind_of(planner, fix))
    left = replace(fix, flags=flags, env=env)
    return replace(left, kind=_kind_of(planner, left))


def _is_in_force(planner: FixPlanner, name: str, value: Any) -> bool:
    """Whether the failed run had this value of setting `name`, given or by default, or no larger max_num_seqs."""
    given = planner.given_args
    if name == "max_num_seqs" and value is not None and given.max_num_seqs is not None:
        return bool(value >= given.max_num_seqs)
    if name not in ServeArgs.__dataclass_fields__:
        return False
    if name == "enable_chunked_prefill" and (not planner.known.release_known or planner.case.has("kv_tokens_short")):
        return given.enable_chunked_prefill is value  # V0 has it off, or only on at this length
    return getattr(given, name) == value or (value is not None and planner.in_force(name) == value)


def _kind_of(planner: FixPlanner, fix: Fix) -> FixKind:
    """The fix's kind, or that of its first memory flag where no flag is of the fix's kind."""
    known = kinds_of_changes()
    kinds: list[FixKind] = [known[name] for name in fix.flags if name in known]
    if (share := fix.flags.get("gpu_memory_utilization")) is not None:
        kinds.append("raise_util" if share > planner.utilization else "lower_util")
    is_flag_kind = fix.proven or fix.kind in {*known.values(), "lower_util"}
    return kinds[0] if kinds and is_flag_kind and fix.kind not in kinds else fix.kind


def _add_plan(planner: FixPlanner, fix: Fix) -> Fix | None:
    """The fix with the changed server's memory plan; None where by that, or the log's figures, it cannot start."""
    memory_flags = {name: value for name, value in fix.flags.items() if name in ServeArgs.__dataclass_fields__}
    if fix.plan is not None or fix.proven or fix.is_unplanned or not memory_flags:
        return fix
    if planner.failed_plan is not None:
        made = planner.plan_with(memory_flags)
        if made is None and not planner.known.ranks_known and not planner.failed_plan.starts:
            return replace(fix, is_unplanned=True)  # the failed run itself does not start on so few ranks
        return None if made is None else replace(fix, plan=made, before=planner.failed_plan.layout)
    return None if planner.refuses(memory_flags) else fix


def _past_the_next_step(planner: FixPlanner, fix: Fix) -> Fix:
    """The fix, with eager mode or a lower utilization where it leaves too little for what vLLM allocates next."""
    total, share = planner.total_bytes, fix.flags.get("gpu_memory_utilization", planner.utilization)
    if fix.plan is None and fix.flags.keys() & _BATCH_FLAGS and planner.utilization_known and share > FULL_UTILIZATION:
        why = f"{fix.why} {share:g} of the card leaves nothing for what vLLM does not count."
        flags = {**fix.flags, "gpu_memory_utilization": MAX_UTILIZATION}
        return replace(fix, flags=flags, why=why)
    is_checked = fix.kind in ("max_model_len", "raise_util", "kv_cache_dtype") and fix.plan is None
    if not is_checked or not total or not planner.captures_outside_budget or not planner.utilization_known:
        return fix
    outside = total - round(share * total)
    if outside >= GIB or fix.flags.get("enforce_eager") or planner.known.args.enforce_eager:
        return fix
    why = f"{fix.why} At {share:g} of the card only {gib(outside)} are left for the CUDA graphs, which come next."
    trades = f"{fix.trades}; slower decoding" if fix.trades else "slower decoding"
    flags = {**fix.flags, "enforce_eager": True}
    return replace(fix, flags=flags, why=why, trades=trades)


def unexplained_bytes(case: Case, fix: Fix) -> int:
    """Bytes in use at a failed graph capture beyond the failed run's plan; 0 up to 1 GiB, or where not printed."""
    if fix.before is None or case.oom is None or case.oom.free_bytes is None or case.site != "graph":
        return 0
    gap = fix.before.headroom_bytes - case.oom.free_bytes - (case.ledger.other_processes_bytes or 0)
    return gap if gap > GIB else 0


def fix_ground(planner: FixPlanner, fix: Fix, *, is_memory: bool) -> FixGround:
    """What a fix rests on: its plan, figures of the log, a printed limit, a look-alike, or experience."""
    if unexplained_bytes(planner.case, fix) or fix.is_unplanned:
        return "experience"
    if fix.proven or not is_memory:
        return "figures" if fix.proven or (fix.kind == "flag" and fix.flags) else "lookalike"
    if fix.plan is not None:
        return "experience" if _is_tight(fix) else "plan"
    if planner.case.has(*message_group("printed_limits")) and not fix.flags.keys() & _ONLY_BY_PLAN:
        return "printed"
    accounting, oom = planner.accounting, planner.case.oom
    has_sizes = accounting.pool_bytes is not None or oom is not None or planner.case.has("free_below_desired")
    is_sized = has_sizes and not (fix.flags.keys() & _PEAK_FLAGS and accounting.peak_bytes is None)
    needs_sizes = fix.flags.keys() & {"gpu_memory_utilization", *_PEAK_FLAGS}
    if not (fix.flags or fix.env) or fix.flags.keys() & _ONLY_BY_PLAN or (needs_sizes and not is_sized):
        return "experience"
    known = planner.known.args
    are_known = planner.flags_known or all(getattr(known, name, None) is not None for name in fix.flags)
    return "figures" if are_known else "experience"
