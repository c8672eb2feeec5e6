"""Where fixes are made: every change of flags is tried on the memory model before it is offered.

Where the model is not known, it is held against vLLM's accounting with the numbers that the log prints.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from legroom.black_box import BlackBox
from legroom.diagnosis.case import Case
from legroom.diagnosis.finding import Fix, FixKind
from legroom.diagnosis.fixes.failed_run import NOT_PLANNABLE, Hints, Known, base_plan, given_deployment, known_of
from legroom.diagnosis.fixes.log_accounting import LogAccounting, log_accounting
from legroom.memory.deployment_memory import Measurements
from legroom.units import GIB, MIB
from legroom.vllm.args import ServeArgs

if TYPE_CHECKING:
    from legroom.memory.layout import Layout
    from legroom.planning.plan import Plan

_HIGHEST, _LOWEST = 0.97, 0.2


class FixPlanner:
    """One case, what is known of its deployment, and the tools to compute a change."""

    def __init__(self, case: Case, hints: Hints | None = None) -> None:
        self.case = case
        self._hints = hints or Hints()

    @cached_property
    def known(self) -> Known:
        return known_of(self.case, self._hints)

    @cached_property
    def given_args(self) -> ServeArgs:
        """The flags as they were given, however odd: those of the line, else those that the log shows."""
        if self._hints.command:
            return given_deployment(self._hints, self.known.release).args
        return self.case.startup.args

    @cached_property
    def base(self) -> Plan | None:
        """The run as it was, as a plan."""
        return base_plan(self.case, self.known)

    @cached_property
    def accounting(self) -> LogAccounting:
        """vLLM's accounting with the numbers that the log prints."""
        return log_accounting(self.case, self.utilization, self.total_bytes)

    @property
    def missing_bytes(self) -> int:
        """What the failed allocation lacked; 0 where the log does not say."""
        oom = self.case.oom
        return max(oom.wanted_bytes - (oom.free_bytes or 0), 0) if oom else 0

    @property
    def utilization_known(self) -> bool:
        """The log or the user says which share was asked for, or that none was."""
        if self.case.has("free_below_desired") or self.known.args.gpu_memory_utilization is not None:
            return True
        return self.case.startup.args_known or bool(self._hints.command)

    @property
    def utilization(self) -> float:
        """The share of the card that was asked for."""
        check = self.case.first("free_below_desired")
        printed = check.facts.get("utilization_ratio") if check else None
        if isinstance(printed, float):
            return printed
        given = self.known.args.gpu_memory_utilization
        if given is not None:
            return given
        return self.usual_utilization if self.known.release_known else 0.9

    def runs_within(self, first: str, last: str) -> bool:
        """Whether the release is known to be one of these; an open end is empty."""
        release = self.known.release
        if not self.known.release_known or not release.at_least(first):
            return False
        return not last or release.within(first, last)

    @property
    def is_early_v1(self) -> bool:
        """The V1 engine of 0.8 to 0.9.1: by the release, else by its labels. 0.9.2 put the engine's name before every
        line of it, and workers became `Worker_TP0`."""
        if self.known.release_known:
            return self.case.engine.generation == "V1" and self.runs_within("0.8.0", "0.9.1")
        return self.case.engine.looks_before_0_9_2

    @property
    def usual_utilization(self) -> float:
        """What the release takes where nothing is said: 0.9 up to 0.19, 0.92 from 0.20 on."""
        return 0.92 if self.known.release.at_least("0.20.0") else 0.9

    @property
    def total_bytes(self) -> int | None:
        """The card's memory as the log or the user gives it."""
        return self.known.total_bytes or (self.known.gpu.total_bytes if self.known.gpu else None)

    def change(
        self,
        kind: FixKind,
        flags: Mapping[str, Any],
        why: str,
        *,
        env: Mapping[str, str] | None = None,
        steps: tuple[str, ...] = (),
        trades: str = "",
        confidence: float = 0.6,
    ) -> Fix | None:
        """A fix by flags or environment; None where the memory model says that it would not start."""
        planned = self.plan_with(flags) if flags else None
        if self.base is not None and flags and planned is None:
            return None
        if self.base is None and self.accounting.refuses(flags):
            return None
        if planned is not None:
            from legroom.planning.advice import why as in_numbers

            why = f"{why} {in_numbers(self.base, planned)}." if self.base is not None else why
            confidence = min(0.95, confidence + (0.2 if planned.verdict == "fits" else 0.1))
        before = self.base.layout if self.base is not None and planned is not None else None
        line = self.command(flags, env)
        return Fix(
            kind, why, dict(flags), dict(env or {}), steps, confidence, trades, line, plan=planned, before=before
        )

    def first_fitting(
        self,
        kind: FixKind,
        proposals: Iterable[Mapping[str, Any]],
        why: str,
        *,
        trades: str = "",
        confidence: float = 0.6,
    ) -> Fix | None:
        """The first proposal that fits on the memory model, else the first that starts; needs a known deployment."""
        if self.base is None:
            return None
        tight: Fix | None = None
        for flags in proposals:
            fix = self.change(kind, flags, why, trades=trades, confidence=confidence)
            if fix and fix.plan and fix.plan.verdict == "fits":
                return fix
            tight = tight or fix
        return tight

    def made_to_fit(self, fix: Fix | None, why: str, *, confidence: float) -> Fix | None:
        """A change that starts and may run over, with the levers that make it hold; as it is where none does."""
        if fix is None or fix.plan is None or fix.plan.verdict == "fits":
            return fix
        from legroom.planning.advice import with_advice

        for advice in with_advice(fix.plan, keep=("model", *fix.flags)).advice:
            flags, trades = {**fix.flags, **advice.flags}, f"{fix.trades}; {advice.trades}"
            more = self.change(fix.kind, flags, why, trades=trades, confidence=confidence)
            if more and more.plan and more.plan.verdict == "fits":
                return more
        return fix

    def lever(self, name: str, kind: FixKind, why: str, confidence: float = 0.6) -> Fix | None:
        """One of planning's levers, pulled as far as it has to be."""
        if self.base is None:
            return None
        from legroom.planning.levers import LEVERS

        lever = next(lever for lever in LEVERS if lever.name == name)
        return self.first_fitting(kind, lever.propose(self.base), why, trades=lever.trades, confidence=confidence)

    def combined_levers(self, kind: FixKind, why: str, confidence: float = 0.6) -> Fix | None:
        """Several levers at once, as `legroom plan` advises them, for the same model; needs a known deployment."""
        if self.base is None:
            return None
        from legroom.planning.advice import with_advice

        # Beside a neighbour the share of the card cannot grow, and levers on top of a larger one lead nowhere.
        for kept in (("model",), ("model", "gpu_memory_utilization")):
            for advice in with_advice(self.base, keep=kept).advice:
                if advice.flags.keys() & {"tensor_parallel_size", "pipeline_parallel_size"}:
                    continue  # GPUs that may not be there are offered for themselves
                fix = self.change(kind, advice.flags, why, trades=advice.trades, confidence=confidence)
                if fix is not None:
                    return fix
        return None

    def plan_with(self, flags: Mapping[str, Any]) -> Plan | None:
        """The plan that these flags lead to, if it starts, and better than the run that failed."""
        if self.base is None:
            return None
        from legroom.facts.model_sources import load
        from legroom.planning.plan import plan

        try:
            args = replace(self.base.args, **flags)
            target = replace(self.base.target, gpus=max(self.base.target.gpus, args.gpus_needed))
            target = replace(target, seen=still_measured(target.seen, flags))
            if "model" in flags:
                target = replace(target, model=load(str(flags["model"])))
            made = plan(target, args)
        except NOT_PLANNABLE:
            return None
        if made.verdict == "tight" and self.base.verdict == "tight":
            return None  # the run failed where the model saw it tight, so tight is not enough
        if not made.starts or not self._gains_enough(made):
            return None
        return made

    def _gains_enough(self, made: Plan) -> bool:
        """Where the model saw no failure, it is wrong by what was missing: a change has to win at least that much."""
        base = self.base
        if base is None or base.verdict != "fits" or not self.missing_bytes:
            return True
        if self.case.phase in ("startup_load", "startup_profile"):
            won = counted_bytes(base.layout) - counted_bytes(made.layout)
        else:
            won = made.layout.headroom_bytes - base.layout.headroom_bytes
        return won >= self.missing_bytes

    def command(self, flags: Mapping[str, Any], env: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """The line to run, as far as it is known; MODEL stands for a model that nothing shows."""
        return self.known.rebuilt.words(flags, env or {}, self.known.release)

    def lower_utilization(self, need_bytes: int, why: str, confidence: float = 0.65) -> Fix | None:
        """As much less of the card as the failed request needs beside the pool, with a margin."""
        if (pool := self.known.args.kv_cache_memory_bytes) is not None:
            return self._smaller_pool(pool, need_bytes, why, confidence)
        total = self.total_bytes
        if total is None:
            step = max(self.utilization - 0.05, _LOWEST)
            return self.change(
                "lower_util",
                {"gpu_memory_utilization": round(step, 2)},
                why,
                trades="a smaller KV pool",
                confidence=confidence - 0.1,
            )
        margin = max(GIB // 2, need_bytes // 4)
        lowest = self.utilization - max((need_bytes + margin) / total, 0.01)
        value = math.floor(lowest * 100) / 100
        if value < _LOWEST:
            return None
        proposals = [{"gpu_memory_utilization": round(value - step / 100, 2)} for step in range(0, 15)]
        return self.first_fitting(
            "lower_util", proposals, why, trades="a smaller KV pool", confidence=confidence
        ) or self._lower_or_shorter(value, why, confidence)

    def _smaller_pool(self, pool_bytes: int, need_bytes: int, why: str, confidence: float) -> Fix | None:
        """Where the pool is given in bytes, vLLM does not look at the utilization."""
        most = pool_bytes - need_bytes - max(GIB // 2, need_bytes // 4)
        sizes = [size for step in range(15) if (size := (most - step * GIB // 2) // MIB * MIB) > 0]
        proposals = [{"kv_cache_memory_bytes": size} for size in sizes]
        return self.first_fitting(
            "kv_cache_memory_bytes", proposals, why, trades="a smaller KV pool", confidence=confidence
        ) or (
            self.change("kv_cache_memory_bytes", proposals[0], why, trades="a smaller KV pool", confidence=confidence)
            if proposals
            else None
        )

    def _lower_or_shorter(self, share: float, why: str, confidence: float) -> Fix | None:
        """Less of the card, and a shorter request where the smaller pool no longer holds one of the full length."""
        flags: dict[str, Any] = {"gpu_memory_utilization": round(share, 2)}
        lower = self.change("lower_util", flags, why, trades="a smaller KV pool", confidence=confidence)
        length = self.accounting.longest_at(share)
        if lower is not None or self.base is not None or length is None:
            return lower
        why += f" A pool that much smaller holds one request of {length:,} tokens."
        flags["max_model_len"] = length
        return self.change(
            "lower_util", flags, why, trades="a smaller KV pool and shorter requests", confidence=confidence
        )

    def raise_utilization(self, need_bytes: int, why: str, spare_bytes: int = GIB // 2) -> Fix | None:
        """As much more of the card as is missing, if that leaves room outside the budget."""
        total = self.total_bytes
        if total is None:
            return None
        value = math.ceil((self.utilization + need_bytes / total) * 100) / 100
        graphs = self.case.startup.graph_bytes or 0
        if value > _HIGHEST or (1 - value) * total < spare_bytes + graphs:
            return None
        return self.change(
            "raise_util",
            {"gpu_memory_utilization": value},
            why,
            confidence=0.55,
            trades="less of the card is left for what vLLM does not count",
        )


def counted_bytes(layout: Layout) -> int:
    """What a server holds before there is a KV cache."""
    return layout.weights.bytes + layout.activation.bytes + layout.non_torch.bytes


_OTHER_WEIGHTS = frozenset(
    {
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "model",
        "quantization",
        "enable_lora",
        "max_loras",
        "max_lora_rank",
        "speculative_config",
        "cpu_offload_gb",
        "enable_expert_parallel",
    }
)
_OTHER_PEAK = frozenset(
    {
        "max_num_batched_tokens",
        "max_num_seqs",
        "enforce_eager",
        "max_cudagraph_capture_size",
        "limit_mm_per_prompt",
        "kv_cache_dtype",
        "compilation_config",
        "language_model_only",
    }
)


def still_measured(seen: Measurements | None, flags: Mapping[str, Any]) -> Measurements | None:
    """What a run measured, as far as it holds with these flags changed."""
    if seen is None or flags.keys() & _OTHER_WEIGHTS:
        return None
    if flags.keys() & _OTHER_PEAK:
        return Measurements(weights_bytes=seen.weights_bytes, source=seen.source)
    return seen


_LOGPROB_BYTES = 10
"""For a prompt's token and a word of the vocabulary: logits in bfloat16, log-probabilities in float32, and a copy
while they are ranked (`_get_prompt_logprobs_dict` and `gather_logprobs` of vLLM's first model runner)."""
_CHUNK_TOKENS = 1024
"""The second model runner takes a prompt's log-probabilities in pieces (`compute_prompt_logprobs_with_chunking`,
0.16 to 0.32)."""
_RUNNER_V2 = "vllm/v1/worker/gpu/"


def step_shortage_bytes(planner: FixPlanner) -> int:
    """What the step lacked: the request that failed, or what was still to follow it where the record shows that."""
    oom = planner.case.oom
    if oom is None:
        return GIB
    short = oom.wanted_bytes - (oom.free_bytes or 0)
    need = short if short > 0 else oom.wanted_bytes  # free, but not in one piece
    record = planner.case.black_box
    if record is None or record.step is None or not record.step.prompt_logprobs or planner.base is None:
        return need
    whole = _prompt_tokens(record) * planner.base.target.model.vocab_size * _LOGPROB_BYTES
    return max(need, whole - (oom.free_bytes or 0) - (oom.unallocated_bytes or 0))


def _prompt_tokens(record: BlackBox) -> int:
    """Whose log-probabilities are there at once. Prompts are taken one after the other, so the largest decides."""
    tokens = max((request.scheduled_tokens for request in record.step.largest), default=0) if record.step else 0
    frames = record.request.frames if record.request else ()
    return min(tokens, _CHUNK_TOKENS) if any(frame.file.startswith(_RUNNER_V2) for frame in frames) else tokens
