"""Computes fixes: every change of flags is checked on the memory model, or on the accounting that the log prints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from legroom.diagnosis.finding import Fix, FixKind, kinds_of_changes, reason
from legroom.diagnosis.fixes.card_holders import described_holder
from legroom.diagnosis.fixes.failed_run import NOT_PLANNABLE
from legroom.diagnosis.fixes.failed_server import FailedServer
from legroom.diagnosis.fixes.tried_changes import is_between_failures
from legroom.facts.flags import flags_changing
from legroom.facts.releases import latest
from legroom.memory.deployment_memory import Measurements
from legroom.units import GIB, MIB, cdiv, gib
from legroom.vllm.command_line import any_release_words

if TYPE_CHECKING:
    from legroom.memory.layout import Layout
    from legroom.planning.plan import Plan, Target

FULL_UTILIZATION, _MIN_UTILIZATION = 0.97, 0.2
"""Above the first, less than what every process needs outside the budget is left of a card of 24 GiB."""
MAX_UTILIZATION = 0.95
"""The largest share that leaves a card of 24 GiB and more the room for what vLLM does not count."""
UNKNOWN_CARD_BYTES = 24 * GIB
"""The card where the text names none: the smallest on which 7B models in 16 bits are served."""
_SPARE_BYTES = GIB // 2  # What a raised share leaves free: a CUDA context and the workspaces of kernels.
_LEAST_LENGTH = 1024  # A pool that holds only shorter requests serves nobody.
_RANK_FLAGS = frozenset({"tensor_parallel_size", "pipeline_parallel_size"})


class FixPlanner(FailedServer):
    """Computes changes of one failed deployment and checks them on the memory model."""

    @cached_property
    def largest_utilization(self) -> float:
        """The largest gpu_memory_utilization beside what others hold by the text; 1 where it tells of no others."""
        holder, total = described_holder(self.case), self.total_bytes
        # Beside its own figure each of them has a CUDA context, as the server has.
        held = holder[1] + GIB if holder is not None and not self.case.platform.trainer else 0
        return math.floor((1 - held / total) * 100) / 100 if total and held < total else 1.0

    def plan_change(
        self,
        kind: FixKind,
        flags: Mapping[str, Any],
        why: str,
        *,
        env: Mapping[str, str] | None = None,
        steps: tuple[str, ...] = (),
        trades: str = "",
    ) -> Fix | None:
        """A fix by flags or variables, with its reason `why` and cost `trades`; None where by its plan, or else by the
        log's figures, it would not start."""
        if (most := self.largest_utilization) < (flags.get("gpu_memory_utilization") or 0):
            if most <= self.utilization:
                return None
            flags, why = {**flags, "gpu_memory_utilization": most}, f"{why} {reason('others_leave', {'share': most})}"
        low, high = self.case.too_small_share or 0, self.case.failed_share
        if low < high < 1 and low and (share := flags.get("gpu_memory_utilization")) and not low < share < high:
            flags = {**flags, "gpu_memory_utilization": round((low + high) / 2, 2)}
            why += f" By the text {low:g} leaves too small a pool and {high:g} does not fit: between them, with a "
            why += "shorter --max-model-len."
        planned = self.plan_with(flags) if flags else None
        if self.failed_plan is not None and flags and planned is None:
            return None
        if flags.get("cpu_offload_gb") and not self.can_offload_weights:
            return None
        if self.failed_plan is None and self.refuses(flags):
            return None
        if planned is not None:
            from legroom.planning.advice import why as in_numbers

            why = f"{why} {in_numbers(self.failed_plan, planned)}." if self.failed_plan is not None else why
            why += _caveat_without_log(planned)
        before = self.failed_plan.layout if self.failed_plan is not None and planned is not None else None
        return Fix(kind, why, dict(flags), dict(env or {}), steps, trades=trades, plan=planned, before=before)

    def refuses(self, flags: Mapping[str, Any]) -> bool:
        """Whether, by the log's figures or a plan that a served run has refuted, these flags cannot start a server."""
        made = self.plan_as_asked(flags) if flags and self.refuted_plan is not None else None
        return self.accounting.refuses(flags) or (made is not None and made.verdict == "does_not_fit")

    def advised_by_plan(self) -> Fix | None:
        """Fix: the first advice of `legroom plan`, where by its plan the run that served cannot have; else None."""
        from legroom.planning.advice import with_advice

        if (made := self.refuted_plan) is None or not (advice := with_advice(made).advice):
            return None
        failure = made.memory.failure
        short = {"needed": gib(failure.needed_bytes), "available": gib(failure.available_bytes)} if failure else {}
        kind = kinds_of_changes().get(next(iter(advice[0].flags)), "max_model_len")
        why, flags = reason("cannot_have_served", short), dict(advice[0].flags)
        return Fix(kind, why, flags, trades=advice[0].trades, command=self.command(flags), plan=advice[0].plan)

    def first_change_that_fits(
        self, kind: FixKind, proposals: Iterable[Mapping[str, Any]], why: str, *, trades: str = ""
    ) -> Fix | None:
        """Fix: the first flag change whose plan fits, else that starts; None if none does. `why`, `trades`: see
        `plan_change`."""
        if self.failed_plan is None:
            return None
        tight: Fix | None = None
        for flags in proposals:
            fix = self.plan_change(kind, flags, why, trades=trades)
            if fix and fix.plan and fix.plan.verdict == "fits":
                if kind != "more_or_fewer_gpus_tp_pp" or tight is None or tight.plan is None:
                    return fix
                changed, reason = " ".join(any_release_words(tight.flags)), tight.plan.reason
                surer = "; --gpu NAME narrows it" if tight.plan.target.gpu.source == "given by size" else ""
                return replace(fix, why=f"{fix.why} {changed} alone is tight: {reason}{surer}.")
            tight = tight or fix
        return tight

    def extend_until_fits(self, fix: Fix | None, why: str) -> Fix | None:
        """The fix, for `why`, with the first advice of `legroom plan` that gives its tight plan room; or unchanged."""
        if fix is None or fix.plan is None or fix.plan.verdict == "fits":
            return fix
        from legroom.planning.advice import with_advice

        for advice in with_advice(fix.plan, keep=("model", *fix.flags)).advice:
            if advice.flags.keys() & _RANK_FLAGS or len(advice.flags) > 2:
                continue  # another fix, or a list of flags that nobody would type
            flags, trades = {**fix.flags, **advice.flags}, f"{fix.trades}; {advice.trades}"
            more = self.plan_change(fix.kind, flags, why, trades=trades)
            if more and more.plan and more.plan.verdict == "fits":
                return more
        return fix

    def pull_lever(self, name: str, why: str) -> Fix | None:
        """Fix: the first change by lever `name` (`planning/levers.py`) that fits, else that starts; None without."""
        if self.failed_plan is None:
            return None
        if name == "more GPUs" and (at_hand := self.pull_lever("idle GPUs", why)) is not None:
            return at_hand
        from legroom.planning.levers import LAST_RESORTS, LEVERS

        lever = next(lever for lever in (*LEVERS, *LAST_RESORTS) if lever.name == name)
        kind, changes = kinds_of_changes()[name], lever.propose(self.failed_plan)
        return self.first_change_that_fits(kind, changes, why, trades=lever.trades)

    def pull_lever_for_weights(self, name: str, why: str) -> Fix | None:
        """Fix: a change by lever `name` and what else makes it start, at last a shorter context; None if none does."""
        planned = self.extend_until_fits(self.pull_lever(name, why), why)
        if planned is not None or self.failed_plan is None:
            return planned
        from legroom.planning.levers import LEVERS

        lever = next(lever for lever in LEVERS if lever.name == name)
        changes = [
            {**flags, "max_model_len": length}
            for flags in lever.propose(self.failed_plan)
            if (length := self.longest_planned(self.plan_as_asked(flags), flags))
        ]
        changes.sort(key=lambda change: -change["max_model_len"])
        trades = f"{lever.trades}; requests longer than this are refused"
        return self.first_change_that_fits(kinds_of_changes()[name], changes, why, trades=trades)

    def pull_combined_levers(self, kind: FixKind, why: str, keep: tuple[str, ...] = ()) -> Fix | None:
        """Fix: several settings, none of `keep`, changed at once as `legroom plan` advises; None if none starts."""
        if self.failed_plan is None:
            return None
        from legroom.planning.advice import with_advice

        # The second pass keeps the utilization, which cannot grow where other processes hold memory.
        for kept in (("model", *keep), ("model", *keep, "gpu_memory_utilization")):
            for advice in with_advice(self.failed_plan, keep=kept).advice:
                if advice.flags.keys() & {*_RANK_FLAGS, "cpu_offload_gb"} or len(advice.flags) < 2:
                    continue  # more GPUs, offloaded weights, and single changes, are separate fixes
                fix = self.plan_change(kind, advice.flags, why, trades=advice.trades)
                if fix is not None:
                    return fix
        return None

    def plan_with(self, flags: Mapping[str, Any]) -> Plan | None:
        """The plan with these flags, if it starts and improves on the failed run; else None."""
        if self.failed_plan is None:
            return None
        from legroom.planning.plan import plan

        try:
            args = replace(self.failed_plan.args, **flags)
            made = self._with_unplanned_peak(plan(self._target_with(flags), args))
        except NOT_PLANNABLE:
            return None
        if made.verdict == self.failed_plan.verdict == "tight" and not self._is_cured(made, self.failed_plan):
            return None  # a tight plan has just failed
        is_same = made.layout == self.failed_plan.layout and made.memory.kv == self.failed_plan.memory.kv
        if not made.starts or not self._frees_enough(made) or is_same:  # the same would fail alike
            return None
        share = flags.get("gpu_memory_utilization") or self.utilization
        is_full = share > min(self.utilization, FULL_UTILIZATION) and made.layout.headroom_bytes < _SPARE_BYTES
        return None if is_full else made

    def _target_with(self, flags: Mapping[str, Any]) -> Target:
        """The failed run's target after changing these flags: its model, GPUs and the measurements that stay valid."""
        from legroom.facts.model_sources import load

        base = self.failed_plan or self.refuted_plan
        assert base is not None
        target, args = base.target, replace(base.args, **flags)
        model = load(str(flags["model"])) if "model" in flags else target.model
        seen = measurements_after(target.seen, flags)
        return replace(target, model=model, gpus=max(target.gpus, args.gpus_needed), seen=seen)

    def _with_unplanned_peak(self, made: Plan) -> Plan:
        """The plan, its peak raised by what the logged profile run took beyond the model's, as no flag removes that."""
        from legroom.planning.plan import plan

        failed, seen = self.failed_plan, made.target.seen
        if failed is None or failed.target.seen is None or seen is None or seen.activation_bytes is not None:
            return made
        if failed.target.seen.activation_bytes is None or failed.args.kv_cache_dtype != made.args.kv_cache_dtype:
            return made
        peak = max(made.layout.activation.bytes + self._unplanned_peak_bytes, 0)
        others, derived = failed.target.seen.non_torch_bytes, ("activation_bytes", *failed.target.seen.derived)
        seen = replace(seen, activation_bytes=peak, non_torch_bytes=others, derived=derived)
        return plan(replace(made.target, seen=seen), made.args)

    @cached_property
    def _unplanned_peak_bytes(self) -> int:
        """By how much the profile run's logged peak exceeds the model's for the same flags; 0 without a logged plan."""
        from legroom.planning.plan import plan

        if (failed := self.failed_plan) is None or failed.target.seen is None:
            return 0
        weights = Measurements(weights_bytes=failed.target.seen.weights_bytes, source=failed.target.seen.source)
        modelled = plan(replace(failed.target, seen=weights), failed.args)
        return failed.layout.activation.bytes - modelled.layout.activation.bytes

    def _is_cured(self, made: Plan, failed: Plan) -> bool:
        """Whether the pool, too small in the plan `failed`, surely holds a request; while serving, capturing graphs or
        in an unknown phase, whether a GiB more is free, or a tenth of a small card."""
        if self.case.phase in (None, "serving", "startup_graph"):
            enough = min(GIB, failed.layout.total_bytes // 10)
            return made.layout.headroom_bytes - failed.layout.headroom_bytes >= enough
        return made.layout.kv_cache.low >= made.memory.kv.needed_bytes > failed.layout.kv_cache.bytes

    def _frees_enough(self, made: Plan) -> bool:
        """Whether the change frees what was missing; True where that is unknown or the plan predicted the failure."""
        base = self.failed_plan
        if self.unpredicted_pool_bytes and base is not None:
            won = made.layout.kv_cache.bytes - base.layout.kv_cache.bytes
            return won >= made.memory.kv.needed_bytes + GIB // 2
        if base is None or base.verdict != "fits" or not self.case.ledger.shortage_bytes:
            return True
        if self.case.phase in ("startup_load", "startup_profile"):
            won = bytes_without_kv(base.layout) - bytes_without_kv(made.layout)
        else:
            won = made.layout.headroom_bytes - base.layout.headroom_bytes
        return won >= self.case.ledger.shortage_bytes

    def command(self, flags: Mapping[str, Any], env: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """The command line with these changes, MODEL for an unknown model; empty where a trainer starts the engine."""
        if self.case.platform.trainer and not self.flags_known:
            return ()
        return self.known.rebuilt.words(flags, env or {}, self.known.release)

    def lower_utilization(self, need_bytes: int, why: str) -> Fix | None:
        """Fix: utilization lower by `need_bytes` and a margin, or a smaller pool of given or advised size; or None."""
        trades = "a smaller KV pool"
        if (pool := self.known.args.kv_cache_memory_bytes) is not None:
            return self._smaller_pool_fix(pool, need_bytes, why)
        if (blocks := self.known.args.num_gpu_blocks_override) is not None:  # then the share changes nothing
            made = self.plan_by_config
            # Where the bytes of a block are not known, a quarter of the pool is given back.
            less = cdiv(need_bytes * 5 // 4, made.memory.kv.bytes_per_block) if made is not None else cdiv(blocks, 4)
            fewer = blocks - less
            flags = {"num_gpu_blocks_override": fewer}
            return self.plan_change("kv_cache_memory_bytes", flags, why, trades=trades) if fewer > 0 else None
        if (advised := self.case.number("pool_advice", "advised_bytes")) and self.case.phase != "serving":
            why += " vLLM itself computes this pool: the share less what it measured, graphs and 150 MiB."
            flags = {"kv_cache_memory_bytes": advised}
            return self.plan_change("kv_cache_memory_bytes", flags, why, trades=trades)
        total = self.total_bytes
        if total is None:
            # Whoever lacks many bytes has a larger card than the smallest one.
            part = need_bytes * 5 / 4 / max(UNKNOWN_CARD_BYTES, 8 * need_bytes)
            step = max(min(self.utilization - max(part, 0.05), self.default_utilization), _MIN_UTILIZATION)
            if is_between_failures(self.case, "gpu_memory_utilization", step):
                return None
            return self.plan_change("lower_util", {"gpu_memory_utilization": round(step, 2)}, why, trades=trades)
        # The piece that failed is one of a step's: 11 published fixes took 0.01 to 0.1 off the share, often 0.03.
        margin = max(min(GIB // 2, total // 20), need_bytes // 4, 0 if self.case.black_box else total // 50)
        highest = self.utilization - max((need_bytes + margin) / total, 0.01)
        # A share above the default was chosen for the pool, and what failed is what the default leaves room for.
        usual = highest if self.case.black_box else min(highest, self.default_utilization)
        value = math.floor(usual * 100) / 100
        if value < _MIN_UTILIZATION or is_between_failures(self.case, "gpu_memory_utilization", value):
            return None
        shares = [value - step / 100 for step in range(15)]
        shares += [value + step / 100 for step in range(1, math.floor((highest - value) * 100) + 1)]
        proposals = [{"gpu_memory_utilization": round(share, 2)} for share in shares]
        fix = self.first_change_that_fits("lower_util", proposals, why, trades=trades)
        return fix or self.lower_utilization_or_len(value, why)

    def _smaller_pool_fix(self, pool_bytes: int, need_bytes: int, why: str) -> Fix | None:
        """Fix: kv_cache_memory_bytes lower by `need_bytes`, as it overrides the utilization; None if none starts."""
        most = pool_bytes - need_bytes - max(GIB // 2, need_bytes // 4)
        sizes = [size for step in range(15) if (size := (most - step * GIB // 2) // MIB * MIB) > 0]
        if not (proposals := [{"kv_cache_memory_bytes": size} for size in sizes]):
            return None
        kind: FixKind = "kv_cache_memory_bytes"
        fix = self.first_change_that_fits(kind, proposals, why, trades="a smaller KV pool")
        return fix or self.plan_change(kind, proposals[0], why, trades="a smaller KV pool")

    def lower_utilization_or_len(self, share: float, why: str) -> Fix | None:
        """Fix: the utilization `share`, with a shorter max_model_len if the pool needs that; None if neither starts."""
        flags: dict[str, Any] = {"gpu_memory_utilization": round(share, 2)}
        lower = self.plan_change("lower_util", flags, why, trades="a smaller KV pool")
        if lower is not None:
            asked = self.known.args.max_model_len or 0
            is_open = asked > _LEAST_LENGTH and lower.plan is None and self.accounting.request_bytes is None
            step = f"if vLLM then refuses {asked:,} tokens: the --max-model-len that its error names"
            return replace(lower, steps=(step,)) if is_open else lower
        made = self.plan_as_asked(flags)
        is_shown = self.flags_known or self.known.args.max_model_len is not None
        length = self.accounting.longest_at(share) if self.failed_plan is None else self.longest_planned(made, flags)
        if length is not None and (is_shown or made is None or made.layout.kv_cache.high <= 0):
            why += f" A pool that much smaller holds one request of {length:,} tokens."
            flags["max_model_len"] = length
            return self.plan_change("lower_util", flags, why, trades="a smaller KV pool and shorter requests")
        if made is None or self.flags_known or made.layout.kv_cache.high <= 0:
            return None
        # The plan has the defaults of every flag that the text does not show, and only they make its pool too small.
        if length is not None and length < _LEAST_LENGTH:
            return None
        shorter = f"--max-model-len {length} or less" if length else "a shorter --max-model-len"
        steps = (f"if the smaller pool is refused: {shorter}, and fewer --max-num-seqs",)
        return Fix("lower_util", why, flags, steps=steps, trades="a smaller KV pool", is_unplanned=True)

    def plan_as_asked(self, flags: Mapping[str, Any]) -> Plan | None:
        """The failed (or refuted) run's plan with these flags, whether it starts or not; None where there is none."""
        from legroom.planning.plan import plan

        try:
            base = self.failed_plan or self.refuted_plan
            return plan(self._target_with(flags), replace(base.args, **flags)) if base is not None else None
        except NOT_PLANNABLE:
            return None

    def longest_planned(self, made: Plan | None, flags: Mapping[str, Any]) -> int | None:
        """The longest max_model_len, of a few below that of plan `made`, that starts with these flags; else None."""
        from legroom.planning.levers import LEVERS

        shorter = next(lever for lever in LEVERS if lever.name == "shorter context")
        proposals = shorter.propose(made) if made is not None else ()
        return next((change["max_model_len"] for change in proposals if self.plan_with({**flags, **change})), None)

    def raise_utilization(self, need_bytes: int, why: str) -> Fix | None:
        """Fix: utilization higher by `need_bytes`; None where too little stays free outside the budget."""
        total = self.accounting.likely_total_bytes or (UNKNOWN_CARD_BYTES if self.utilization_known else None)
        args = self.given_args
        if total is None or args.num_gpu_blocks_override is not None or args.kv_cache_memory_bytes is not None:
            return None  # vLLM ignores the share where the pool is given
        largest = MAX_UTILIZATION if self.total_bytes is None else FULL_UTILIZATION
        value = math.ceil((self.utilization + need_bytes / total) * 100) / 100
        # Of a share that is shown, `checked_fixes` adds eager mode where graphs would not fit beside it.
        usual = GIB if self.captures_outside_budget and not self.utilization_known else 0
        if value > largest or (1 - value) * total < _SPARE_BYTES + (self.case.startup.graph_bytes or usual):
            return None
        flags, trades = {"gpu_memory_utilization": value}, "less of the card is left for what vLLM does not count"
        fix = self.plan_change("raise_util", flags, why, trades=trades)
        return fix if fix is None or self.utilization_known else self.relative_to_share(fix)

    def relative_to_share(self, fix: Fix) -> Fix:
        """The fix, its utilization given as a step, `add 0.05 to ...`, as the text does not show the one in force."""
        value, name = fix.flags["gpu_memory_utilization"], "--gpu-memory-utilization"
        change = round(value - self.utilization, 3)
        step = f"add {change:g} to {name}" if change > 0 else f"take {-change:g} off {name}"
        flags = {other: to for other, to in fix.flags.items() if other != "gpu_memory_utilization"}
        steps = (f"{step}: {value:g} where it was not given", *fix.steps)
        return replace(fix, flags=flags, steps=steps)


def _caveat_without_log(made: Plan) -> str:
    """Sentences where the log's KV cache lies outside the planned range, and where the plan fits only with sizes from
    the log, so `legroom plan` alone disagrees; else empty."""
    from legroom.planning.plan import log_beyond_range, plan

    beyond = log_beyond_range(made)
    beyond = f" {beyond[0].upper()}{beyond[1:]}." if beyond else ""
    if made.target.seen is None or made.verdict != "fits":
        return beyond
    other = plan(replace(made.target, seen=None), made.args)
    says = {"tight": f"calls it tight: {other.reason}", "does_not_fit": "expects that it does not start"}.get(
        other.verdict
    )
    used = other.target.release
    option = "" if used == latest() else f" --vllm {used}"
    return beyond + (f" Without this log, legroom plan{option} {says}." if says else "")


def bytes_without_kv(layout: Layout) -> int:
    """Bytes a server needs before its KV cache is allocated: weights, activation peak and memory outside torch."""
    return layout.weights.bytes + layout.activation.bytes + layout.non_torch.bytes


def measurements_after(seen: Measurements | None, flags: Mapping[str, Any]) -> Measurements | None:
    """The sizes in `seen` that stay valid once these flags change; None without any, or where the weights change."""
    if seen is None or flags.keys() & flags_changing("weights"):
        return None
    if flags.keys() & flags_changing("peak"):
        return Measurements(weights_bytes=seen.weights_bytes, source=seen.source, derived=seen.derived)
    return seen
