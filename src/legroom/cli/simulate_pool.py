"""The pool and the cost of a step that the options of `legroom simulate` describe."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any

from legroom.cli.shared_options import described_machine, described_server
from legroom.errors import LegroomError
from legroom.explain.catalog_entries import title_of_label
from legroom.simulation.fast.rows import StepCost
from legroom.simulation.flag_search import SEARCHED, Candidate, flag_combinations
from legroom.simulation.scheduler_settings import LayerGroup, SchedulerSettings
from legroom.simulation.step_time import calibrated, fixed_cost, roofline, step_band
from legroom.simulation.trace import Trace
from legroom.vllm.command_line import any_release_words, setting_words

if TYPE_CHECKING:
    from legroom.deployments.deployment import Deployment
    from legroom.planning.plan import Plan
    from legroom.simulation.step_time import StepBand

_UTILIZATIONS = (0.9, 0.94)
_DEFAULTS = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "block_size": 16}
_PLANNED = (*_DEFAULTS, "max_model_len", "enable_prefix_caching", "enable_chunked_prefill", "async_scheduling")
_UNPLANNED = ("scheduling_policy", "long_prefill_token_threshold", "scheduler_reserve_full_isl", "watermark")
"""Scheduler flags that do not change a plan."""


@dataclass
class PoolChoice:
    """The scheduler settings and the step cost of a replay, and those with other flags or on other cards."""

    args: argparse.Namespace
    trace: Trace
    settings: SchedulerSettings
    cost: StepCost | None
    notes: list[str] = field(default_factory=list)
    deployment: Deployment | None = None
    """None: the pool is a number of blocks."""

    @property
    def gpu(self) -> str:
        """The GPU's name, as --gpu or the deployment file gives it; empty where --blocks gives the pool's size."""
        return "" if self.deployment is None else described_machine(self.args, self.deployment).gpu

    @property
    def band(self) -> StepBand | None:
        """The error of the estimated step times; None where they were given or measured, or steps are counted."""
        from legroom.simulation.from_plan import hardware

        is_given = self.cost is None or self.args.step_ms is not None or self.args.measured_step_ms is not None
        plan = None if is_given else self.plan()
        return step_band(plan, hardware(plan)) if plan else None

    def plan(self) -> Plan | None:
        """The plan of the server; None where --blocks gives the pool's size."""
        return None if self.deployment is None else _plan_with_flags(self.args, self.deployment, {})

    def candidates(self) -> list[Candidate]:
        """The settings to replay: every combination of the searched flags with which vLLM starts."""
        given = {name for name in _PLANNED if getattr(self.args, name) is not None}
        searched = dict(SEARCHED)
        if self.deployment is not None:
            serve = self.deployment.args
            given |= {name for name in _PLANNED if getattr(serve, name) is not None}
            if serve.gpu_memory_utilization is None and serve.kv_cache_memory_bytes is None:
                # A second utilization in place of a second block size: most attention kernels need 16.
                searched["block_size"] = (16,)
                searched["gpu_memory_utilization"] = _UTILIZATIONS
        return list(self._build_candidates(flag_combinations(given, searched), self.args))

    def larger_cards(self, flags: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[Candidate]]]:
        """(name, candidates) of each GPU with more bandwidth or memory, slowest first, for each of `flags` and none."""
        # Empty where the time of a step is given or measured, and therefore would not change with the card.
        if self.deployment is None or not self.trace.in_seconds or self.args.blocks is not None:
            return
        if self.args.step_ms is not None or self.args.measured_step_ms is not None:
            return
        from legroom.facts.gpus import gpu as known_gpu
        from legroom.planning.sizing import USUAL_GPUS

        here = known_gpu(self.gpu)
        cards = {name: known_gpu(name) for name in USUAL_GPUS}
        for name, card in sorted(cards.items(), key=lambda named: named[1].bandwidth_bytes_s):
            larger = card.bandwidth_bytes_s > here.bandwidth_bytes_s or card.total_bytes > here.total_bytes
            # FLOPS of 0 are unknown.
            if larger and card.vendor == here.vendor and card.bf16_flops > 0:
                elsewhere = argparse.Namespace(**{**vars(self.args), "gpu": name, "gpu_memory": None, "gpu_used": None})
                yield name, list(self._build_candidates([*flags, {}], elsewhere))

    def _build_candidates(self, flags: Iterable[dict[str, Any]], args: argparse.Namespace) -> Iterator[Candidate]:
        """The settings to replay for each of `flags` on the machine of `args`, without those that vLLM refuses."""
        tokens = self.settings.num_blocks * self.settings.block_size
        for combination in flags:
            try:
                if self.deployment is not None:
                    settings, cost, _ = _planned_settings(args, self.trace, self.deployment, combination)
                else:
                    size = combination.get("block_size", self.settings.block_size)
                    settings = replace(self.settings, **combination, num_blocks=tokens // size)
                    cost = self.cost
            except LegroomError:
                continue
            yield Candidate(combination, settings, cost)

    def command(self, flags: dict[str, Any]) -> list[str]:
        """The server's command line with the options of this call and `flags`, in the words of its release."""
        given = {name: getattr(self.args, name) for name in (*_PLANNED, *_UNPLANNED)}
        given = {name: value for name, value in given.items() if value is not None}
        if self.deployment is None:
            return ["vllm", "serve", "MODEL", *any_release_words({**given, **flags})]
        from legroom.planning.machine import plan_deployment
        from legroom.planning.plan import ready_command

        deployment, words = self.deployment, list[str]()
        for name in _UNPLANNED:
            if name in given:
                words += setting_words(name, given.pop(name), deployment.release) or ()
        serve = replace(deployment.args, **{**given, **flags}, others=(*deployment.args.others, *words))
        machine = described_machine(self.args, deployment)
        return ready_command(plan_deployment(replace(deployment, args=serve), machine, advice=False))


def pool_of(args: argparse.Namespace, trace: Trace) -> PoolChoice:
    """The KV pool of --blocks, or of the plan of the described server; LegroomError where neither is given."""
    is_planned = bool(args.model or args.line or args.file or args.python or args.command_words)
    if args.blocks is None and not is_planned:
        raise LegroomError("how large is the pool?", "give --blocks N, or --model MODEL --gpu NAME to plan it")
    if args.blocks is not None and not is_planned and args.vllm_words:
        raise LegroomError(f"{args.vllm_words[0]} is not an option of legroom simulate", "see legroom simulate --help")
    if not is_planned:
        flags = {name: value for name in _PLANNED if (value := getattr(args, name)) is not None}
        settings = _scheduler_settings(args, trace, {"num_blocks": args.blocks, **_DEFAULTS, **flags})
        return PoolChoice(args, trace, settings, _fixed_cost(args, trace))
    if args.model:
        args.vllm_words = [args.model, *args.vllm_words]
    deployment = described_server(args)
    trace = trace.of_engine(deployment.args.data_parallel_size or 1)
    settings, cost, taken = _planned_settings(args, trace, deployment, {})
    return PoolChoice(args, trace, settings, cost, [*deployment.notes, *taken], deployment)


def _fixed_cost(args: argparse.Namespace, trace: Trace) -> StepCost | None:
    """The step cost by --step-ms, None for a trace in steps; LegroomError if a trace in seconds lacks --step-ms."""
    if args.step_ms is not None:
        return fixed_cost(args.step_ms / 1000)
    if trace.in_seconds:
        why = f"{trace.name} gives arrivals in seconds, so legroom must know how long a step of the engine takes"
        raise LegroomError(why, "add --step-ms 30 (or what you measured), or --model MODEL --gpu NAME to estimate it")
    return None


def _plan_with_flags(args: argparse.Namespace, deployment: Deployment, flags: dict[str, Any]) -> Plan:
    """The deployment's plan on the described machine, with `flags` (by Python name) over the command line's own."""
    from legroom.planning.machine import plan_deployment

    given = {name: value for name in _PLANNED if (value := getattr(args, name)) is not None}
    machine = described_machine(args, deployment)
    changed = replace(deployment, args=replace(deployment.args, **given, **flags))
    return plan_deployment(changed, machine, advice=False)


def _planned_settings(
    args: argparse.Namespace, trace: Trace, deployment: Deployment, flags: dict[str, Any]
) -> tuple[SchedulerSettings, StepCost | None, list[str]]:
    """(scheduler settings, step cost (None: trace in steps), notes) of the plan; LegroomError if it cannot start."""
    from legroom.simulation.from_plan import as_one_group, hardware, planned_scheduler

    plan = _plan_with_flags(args, deployment, flags)
    if args.blocks is None and plan.verdict == "does_not_fit":
        failure = plan.memory.failure
        longest = failure.estimated_max_len if failure else None
        hint = (
            f"--max-model-len {longest} would do" if longest else "legroom plan with the same flags says what would do"
        )
        why = f"this deployment does not start ({title_of_label(plan.reason)}), so there is no pool"
        raise LegroomError(why, hint)
    taken = planned_scheduler(plan)
    card_notes = [plan.target.gpu.note] if plan.target.gpu.note else []
    notes, resolved = [*card_notes, *taken.notes], dict(taken.flags)
    if args.blocks is not None:
        resolved["num_blocks"] = args.blocks
    if args.choose and resolved.get("groups", (LayerGroup(),)) != (LayerGroup(),):
        resolved = as_one_group(trace, resolved)
        pool = f"one group of layers and {resolved['num_blocks']:,} blocks, which hold as many requests of this trace's"
        remark = "mean length; replay the chosen flags without --choose for the groups themselves"
        notes.append(f"searched with {pool} {remark}")
    if resolved["engine"] == "V0" and resolved["enable_chunked_prefill"]:
        notes.append("this release prefills in chunks here; the V0 rules are simulated with whole prompts")
    cost = None
    if args.step_ms is not None:
        cost = fixed_cost(args.step_ms / 1000)
    elif trace.in_seconds:
        work = hardware(plan)
        cost = roofline(work)
        if args.measured_step_ms is not None:
            cost = calibrated(cost, *_measured_step(args.measured_step_ms))
        else:
            notes.append(f"{step_band(plan, work).text}; --measured-step-ms scales them to this server")
    return _scheduler_settings(args, trace, resolved), cost, notes


def _scheduler_settings(args: argparse.Namespace, trace: Trace, fields: dict[str, Any]) -> SchedulerSettings:
    """The scheduler settings of `fields` (by name) and the options; max_model_len defaults to the trace's longest."""
    fields = dict(fields)
    if fields.get("max_model_len") is None:
        fields["max_model_len"] = trace.longest
    if fields.get("engine") == "V0":
        # Sets V0's defaults: no chunked prefill, no prefix caching, a token budget of the longest prompt.
        fields["enable_chunked_prefill"] = bool(args.enable_chunked_prefill)
        fields["enable_prefix_caching"] = bool(args.enable_prefix_caching)
        fields["async_scheduling"] = bool(args.async_scheduling)
        fields.setdefault("watermark", 0.01)
        if args.max_num_batched_tokens is None:
            fields["max_num_batched_tokens"] = max(fields["max_num_batched_tokens"], fields["max_model_len"])
    for name in ("watermark", "num_speculative_tokens"):
        if getattr(args, name) is not None:
            fields[name] = getattr(args, name)
    if args.sliding_windows:
        fields["groups"] = tuple(LayerGroup(window or None) for window in _parse_windows(args.sliding_windows))
    return SchedulerSettings(
        scheduling_policy=args.scheduling_policy or "fcfs",
        long_prefill_token_threshold=args.long_prefill_token_threshold or 0,
        reserve_full_isl=args.scheduler_reserve_full_isl is not False,
        speculative_acceptance=args.acceptance if fields.get("num_speculative_tokens") else 0.0,
        **fields,
    )


def _measured_step(text: str) -> tuple[float, float, float]:
    """(seconds of a step, running requests or 1, pool tokens or 0) from `MS[@RUNNING,TOKENS]`; else LegroomError."""
    milliseconds, _, load = text.partition("@")
    running, _, tokens = load.partition(",")
    try:
        numbers = float(milliseconds) / 1000, float(running or 1), float(tokens or 0)
    except ValueError:
        numbers = inf, inf, inf
    if not all(0 <= number < inf for number in numbers):
        raise LegroomError(f"--measured-step-ms {text}: not MS[@RUNNING,TOKENS]", "as in 28.5@12,40000")
    return numbers


def _parse_windows(text: str) -> list[int]:
    """Sliding windows in tokens, one per group of layers; 0 is full attention. LegroomError for other texts."""
    if not all(word.isdecimal() for word in text.split(",")):
        raise LegroomError(f"--sliding-windows {text}: not window sizes", "as in 0,1024: 0 for full attention")
    return [int(word) for word in text.split(",")]
