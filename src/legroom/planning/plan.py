"""A plan: one deployment with its memory, the verdict, and advice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from legroom.errors import LegroomError
from legroom.facts.gpus import Gpu, gpu
from legroom.facts.known_bugs import KnownBug, bugs_with
from legroom.facts.model import LatentAttention, Model, StateSpace
from legroom.facts.releases import Release
from legroom.memory.bands import spare_on_larger_card
from legroom.memory.deployment_memory import (
    DeploymentMemory,
    Measurements,
    deployment_memory,
    failure_at_best,
    stage_layout,
)
from legroom.memory.host_needs import HostNeeds, deployment_host, host_failure, read_bytes
from legroom.memory.kv.kv_plan import kv_plan
from legroom.memory.layout import Layout
from legroom.memory.overhead import file_cache_bytes, held_at_start, host_note, reserve_bytes
from legroom.records import dataclass
from legroom.units import cdiv, gib, human_bytes
from legroom.vllm.args import EngineSettings, ServeArgs, is_given
from legroom.vllm.command_line import command, without_secrets
from legroom.vllm.resolve import resolve
from legroom.vllm.traits import traits

Verdict = Literal["fits", "tight", "does_not_fit"]
Policy = Literal["safe", "balanced", "tight"]

BAND_KEPT: dict[Policy, float] = {"safe": 1.0, "balanced": 0.5, "tight": 0.0}
"""Share of the error band that a policy holds back: all of it, half of it, none."""


def verdict(target: Target, settings: EngineSettings, memory: DeploymentMemory) -> tuple[Verdict, str]:
    """The verdict and its reason: `does_not_fit` and the id of the start-up check that fails by more than the error
    of the estimate; `tight` and a sentence where a check may fail or memory run out within the error band, or vLLM
    may refuse the settings; else `fits` and an empty text."""
    model, gpu = target.model, target.gpu
    if memory.failure:
        short = _near_miss(target, settings, memory) or _starts_as_smaller_card(target, settings)
        return ("tight", short) if short else ("does_not_fit", memory.failure.id)
    if memory.unsupported:
        return "tight", f"vLLM may not start it: {memory.unsupported.hint}"
    over = [rank for rank in memory.ranks if headroom_after_band(rank, 0.0) < 0]
    if over:
        what = "the machine, whose memory this is," if gpu.unified else "the card"
        return "tight", f"{what} runs {human_bytes(-headroom_after_band(over[0], 0.0))} over at its peak"
    if kv_plan(model, settings, gpu, [rank.kv_cache.low for rank in memory.ranks]).failure:
        return "tight", "at the low end of the error band the KV cache is too small"
    for rank in memory.ranks:
        if reason := _out_of_memory_in_band(rank, memory, settings, target):
            return "tight", reason
    if lacks_room_for_page_cache(target, settings, memory):
        files = gib(read_bytes(target.model, target.gpu, settings, memory), 1)
        left = gib(_least_headroom(memory), 1)
        return "tight", (
            f"the checkpoint's files ({files}) stay cached in the memory that CPU and GPU share, and {left} of it are "
            "left at the peak; the driver does not always get the cache back, so drop it once the weights are loaded"
        )
    return "fits", ""


def lacks_room_for_page_cache(target: Target, settings: EngineSettings, memory: DeploymentMemory) -> bool:
    """Whether a unified memory is too small for the server and the page cache of its checkpoint together."""
    if not target.gpu.unified:
        return False
    files = file_cache_bytes(target.gpu, read_bytes(target.model, target.gpu, settings, memory))
    return files > _least_headroom(memory) + reserve_bytes(target.gpu)


def _least_headroom(memory: DeploymentMemory) -> int:
    """Headroom in bytes of the fullest rank."""
    return min(rank.headroom_bytes for rank in memory.ranks)


def _near_miss(target: Target, settings: EngineSettings, memory: DeploymentMemory) -> str:
    """A sentence on how a failing start-up check may still pass within the error band; empty where it cannot."""
    failure, model, gpu = memory.failure, target.model, target.gpu
    if failure is None or not failure.needed_bytes:
        return ""
    short = failure.needed_bytes - failure.available_bytes
    passes = failure_at_best(model, gpu, settings, memory, target.held_by_others_bytes) is None
    if failure is not memory.kv.failure:
        less = f"{human_bytes(short)} more than the card has, less than the estimate may be wrong by"
        return f"{_NEEDS.get(failure.id, 'the start')} needs {less}" if passes else ""
    by = f"{human_bytes(short)} too small" if short > 0 else "too small"
    if passes:
        return f"the KV cache is expected to be {by}, less than the estimate may be wrong by"
    other_card, pools = spare_on_larger_card(settings, gpu), [rank.kv_cache for rank in memory.ranks]
    if other_card and not kv_plan(model, settings, gpu, [pool.bytes + other_card for pool in pools]).failure:
        return f"two cards have that name: on {gpu.name} the KV cache is {by}, on {gpu.larger} it is large enough"
    return ""


def _starts_as_smaller_card(target: Target, settings: EngineSettings) -> str:
    """A sentence where an unnamed card fails only with the default batch of larger cards; else empty."""
    given, others = settings.given, target.held_by_others_bytes
    if any(target.gpu.compute_capability) or None not in (given.max_num_seqs, given.max_num_batched_tokens):
        return ""
    seqs = given.max_num_seqs or min(settings.max_num_seqs, _SMALLER_BATCH[0])
    tokens = given.max_num_batched_tokens or min(settings.max_num_batched_tokens, _SMALLER_BATCH[1])
    smaller = replace(settings, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    fails = deployment_memory(target.model, target.gpu, smaller, target.seen, others).failure
    starts = "the card was not named: it starts with the default batch of a smaller card, not with this one"
    return "" if fails else starts


_SMALLER_BATCH = (256, 2048)
"""Sequences and tokens that `vllm serve` takes on cards other than H100, H200 and MI300X (`get_batch_defaults`)."""
_NEEDS = {
    "free_memory_lt_requested": "the budget",
    "weights_too_big": "loading the weights",
    "loading_oom": "loading the weights",
    "profiling_activation_peak": "the profile run",
    "kv_allocation_oom": "allocating the KV cache",
    "cudagraph_capture_oom": "capturing CUDA graphs",
}


def _out_of_memory_in_band(rank: Layout, memory: DeploymentMemory, settings: EngineSettings, target: Target) -> str:
    """A clause on where the card may run out of memory at the upper end of the error band; empty where it does not."""
    gpu = target.gpu
    free = gpu.total_bytes - held_at_start(target.model, settings, gpu).high - rank.held_by_others_bytes
    counted = rank.weights.bytes + rank.non_torch.bytes
    if counted + rank.activation.bytes + (rank.kv_cache.bytes - rank.kv_cache.low) > free:
        return "at the high end of the error band the profile run does not fit on the card"
    if counted + max(rank.kv_cache.bytes, 0) + memory.graphs.high > free:
        return "at the high end of the error band there is no room to capture CUDA graphs"
    if headroom_after_band(rank, 1.0) >= 0:
        return ""
    if gpu.unified:
        left = human_bytes(headroom_after_band(rank, 0.0))
        return f"CPU and GPU share this memory, and {left} left at the peak is too little for the system"
    if headroom_after_band(replace(rank, desktop_bytes=0), 1.0) >= 0:
        left, usual = gib(rank.headroom_bytes, 1), gib(rank.desktop_bytes, 1)
        return f"{left} are left, and a desktop on this card takes about {usual}; without one, say so (--gpu-used 0)"
    return "at the high end of the error band the card runs over at its peak"


def headroom_after_band(layout: Layout, band_kept: float) -> int:
    """Free bytes at the peak, less `band_kept` (0 to 1) of the reserve and of what uncounted memory may add."""
    # The two errors are independent.
    unknown = math.hypot(layout.outside.high - layout.outside.bytes, layout.desktop_bytes)
    return layout.headroom_bytes - int((unknown + layout.reserve_bytes) * band_kept)


@dataclass(frozen=True)
class Target:
    """The model, GPUs and release of a plan."""

    model: Model
    gpu: Gpu
    gpus: int
    release: Release
    seen: Measurements | None = None
    """Figures from the user's own start-ups."""
    held_by_others_bytes: int = 0
    host_limit_bytes: int | None = None
    """The limit of host memory, of the container or given by the user."""
    gpus_given: bool = False
    """The number of GPUs is given by the user or the pod, so advice uses no more."""

    def stage_layouts(self, settings: EngineSettings, *, cold: bool = False) -> tuple[Layout, ...]:
        """The memory layout of each pipeline stage under these settings; `cold`: with an empty compile cache."""
        seen, others = self.seen or Measurements(), self.held_by_others_bytes
        stages = range(settings.pipeline_parallel_size)
        return tuple(stage_layout(self.model, self.gpu, settings, stage, seen, others, cold=cold) for stage in stages)


@dataclass(frozen=True)
class Advice:
    """A change of flags that makes a plan fit, and the plan with it."""

    flags: Mapping[str, Any]
    why: str
    plan: Plan
    trades: str = ""


@dataclass(frozen=True)
class Plan:
    """One deployment with its memory, verdict and advice."""

    target: Target
    args: ServeArgs
    settings: EngineSettings
    memory: DeploymentMemory
    verdict: Verdict
    reason: str
    advice: tuple[Advice, ...] = ()
    notes: tuple[str, ...] = ()
    advised: bool = False
    """Whether the search for advice has ended, with or without a result."""
    bug: KnownBug | None = None
    """A bug of the release because of which a plan that fits is `tight`."""

    @property
    def starts(self) -> bool:
        """Whether every start-up check passes; a plan that fails one may still be `tight`."""
        return self.memory.failure is None

    @property
    def holds(self) -> float:
        """How many requests of max_model_len the KV caches of all data-parallel engines hold at once."""
        return self.memory.kv.max_concurrency * self.settings.data_parallel_size

    @property
    def runs_at_once(self) -> float:
        """How many requests of max_model_len run at once: as many as it holds, at most max_num_seqs of each engine."""
        return min(self.holds, self.settings.max_num_seqs * self.settings.data_parallel_size)

    @property
    def reaches_pool(self) -> bool:
        """Whether the plan has a KV cache: the server starts or may start, or fails only because that is too small."""
        failure = self.memory.failure if self.verdict == "does_not_fit" else None
        return self.memory.kv.num_blocks > 0 and (failure is None or failure.id not in _NEEDS)

    @property
    def missing_bytes(self) -> int:
        """Bytes that a card lacks: for the whole start with one request's KV cache, if it fails before it has one; else
        for the failed check."""
        failure, kv = self.memory.failure, self.memory.kv
        short = failure.needed_bytes - failure.available_bytes if failure else 0
        is_early = failure is not None and failure.id in ("weights_too_big", "loading_oom", "profiling_activation_peak")
        return max(short, *(kv.needed_bytes - rank.kv_cache.bytes for rank in self.memory.ranks)) if is_early else short

    @property
    def layout(self) -> Layout:
        """The memory layout of the GPU with the smallest KV cache."""
        return self.memory.tightest

    @cached_property
    def host(self) -> HostNeeds:
        """Host memory and CPUs that the planned server needs."""
        return deployment_host(self.target.model, self.target.gpu, self.settings, self.memory)


def plan_on_named_card(target: Target, args: ServeArgs) -> Plan:
    """The plan on a card given by name; if two cards share it, the larger is used where only that holds the weights."""
    made = plan(target, args)
    failure = made.memory.failure
    if failure is None or failure.id != "weights_too_big" or not target.gpu.larger:
        return made
    note = f"read as {target.gpu.larger}: the smaller card of that name does not hold the weights"
    return plan(replace(target, gpu=replace(gpu(target.gpu.larger), note=note)), args)


def plan(target: Target, args: ServeArgs) -> Plan:
    """The plan of these flags, without advice; LegroomError where they need more GPUs than the target has."""
    settings = resolve(args, target.model, target.gpu, target.release)
    needed = args.gpus_needed
    if needed > target.gpus:
        there = "is only 1" if target.gpus == 1 else f"are only {target.gpus}"
        why = f"the flags ask for {needed} GPUs (the product of the parallel sizes), but there {there}"
        raise LegroomError(why, f"say --gpus {needed}, or lower the parallel sizes")
    memory = deployment_memory(target.model, target.gpu, settings, target.seen, target.held_by_others_bytes)
    if settings.auto_fit_len and memory.kv.max_model_len != settings.max_model_len:
        settings = replace(settings, max_model_len=memory.kv.max_model_len)
    answer, reason = verdict(target, settings, memory)
    input_notes = (target.release.note, target.gpu.note, host_note(settings, target.gpu))
    notes = (*(note for note in input_notes if note), *settings.notes)
    made = _with_host_verdict(Plan(target, args, settings, memory, answer, reason, notes=notes))
    return _with_start_up_bug(_with_first_start_verdict(made)) if made.verdict == "fits" else made


def _with_start_up_bug(made: Plan) -> Plan:
    """The plan, `tight` instead of `fits` where a bug of the release is known to stop such starts."""
    # All known start-up bugs need several GPUs or sleep mode.
    may_happen = made.settings.tensor_parallel_size > 1 or is_given(made.args, "--enable-sleep-mode")
    if made.verdict != "fits" or not may_happen:
        return made
    for bug in bugs_of(made):
        if bug.may_end_start(made.settings.given, made.target.gpu.interconnect):
            fixed = f" (fixed in {bug.fixed_in})" if bug.fixed_in else ""
            reason = f"vLLM {made.target.release} has a bug that ended starts like this: {bug.title}{fixed}"
            return replace(made, verdict="tight", reason=reason, bug=bug)
    return made


def bugs_of(plan: Plan) -> list[KnownBug]:
    """The known bugs of the plan's release that occur with its settings, kind of model and GPU vendor."""
    settings, vendor = plan.settings, plan.target.gpu.vendor
    present = bug_traits(plan.target.model) | {f"{settings.engine} engine", f"runner {settings.runner}"}
    present |= {"several kv groups"} if len(plan.memory.kv.shape.groups) > 1 else set()
    return [bug for bug in bugs_with(settings.release, settings.given, vendor) if set(bug.model) <= present]


def bug_traits(model: Model) -> set[str]:
    """The names of the model's traits that restrict known bugs, such as `mla` and `multimodal`."""
    mixers = [mixer for layer in model.layers for mixer in (layer.mixer, *layer.also)]
    present = {
        "mla": any(isinstance(mixer, LatentAttention) for mixer in mixers),
        "experts": traits(model).moe,
        "no state layers": not any(isinstance(mixer, StateSpace) for mixer in mixers),
        "multimodal": bool(model.modalities),
        "encoder-decoder": bool(model.encoder_layers),
    }
    return {name for name, has in present.items() if has}


def _with_first_start_verdict(made: Plan) -> Plan:
    """The plan, `tight` instead of `fits` where its first start, with an empty compile cache, fails or is tight."""
    first = cold_start(made)
    if first.memory.failure:
        return replace(made, verdict="tight", reason="the first start, with a cold compile cache, fails")
    # What compiling allocates is gone before a pool of given bytes is: serving is the same after any start.
    if first.verdict == "tight" and made.settings.kv_cache_memory_bytes is None:
        return replace(made, verdict="tight", reason=f"on the first start, with a cold compile cache: {first.reason}")
    return made


def try_flags(start: Plan, flags: Mapping[str, Any]) -> Plan | None:
    """The plan with these flags (by dest) changed; None where the release or the model refuses them."""
    try:
        return plan(start.target, replace(start.args, **flags))
    except LegroomError:
        return None


def cold_start(warm: Plan) -> Plan:
    """The plan of a start with an empty torch.compile cache; `warm` itself if the activation peak is no larger then."""
    target, settings = warm.target, warm.settings
    held_by_others = target.held_by_others_bytes
    memory = deployment_memory(target.model, target.gpu, settings, target.seen, held_by_others, cold=True)
    pairs = zip(memory.ranks, warm.memory.ranks, strict=True)
    if all(first.activation.bytes <= later.activation.bytes for first, later in pairs):
        return warm
    answer, reason = verdict(target, settings, memory)
    return _with_host_verdict(replace(warm, memory=memory, verdict=answer, reason=reason))


def log_beyond_range(made: Plan) -> str:
    """A sentence if the KV cache that a log printed is outside the range planned without the log; empty otherwise."""
    seen, has = made.target.seen, made.layout.kv_cache.bytes
    if seen is None or not seen.derived:
        return ""
    none_derived: dict[str, Any] = dict.fromkeys(seen.derived)
    printed = replace(seen, **none_derived, derived=())
    expected = plan(replace(made.target, seen=printed), made.args).layout.kv_cache
    if expected.low <= has <= expected.high:
        return ""
    off = f"{gib(expected.low - has)} below" if has < expected.low else f"{gib(has - expected.high)} above"
    why = "something else on the card" if has < expected.low else "a larger card"
    return (
        f"the KV cache in the log, {gib(has)}, is {off} what is planned for this server, {gib(expected.low)} to "
        f"{gib(expected.high)}: {why}, another release or flags that are not shown would explain it"
    )


def sure_longest_len(plan: Plan) -> int:
    """The longest max_model_len, rounded, that the low end of the KV cache's error band holds on any start."""
    ranks = zip(cold_start(plan).memory.ranks, plan.memory.ranks, strict=True)
    worst = [min(first.kv_cache.low, later.kv_cache.low) for first, later in ranks]
    return rounded_len(kv_plan(plan.target.model, plan.settings, plan.target.gpu, worst).longest_len)


def rounded_len(tokens: int) -> int:
    """The tokens rounded down to a multiple of 1,024, or of 128 below 4,096."""
    return tokens // 1024 * 1024 if tokens >= 4096 else tokens // 128 * 128


def _with_host_verdict(made: Plan) -> Plan:
    """The plan, `does_not_fit` where the host memory limit is below the least that the server needs, `tight` instead of
    `fits` where it may need more; unchanged without a limit, or where a GPU check fails before."""
    limit = made.target.host_limit_bytes
    if limit is None or made.memory.failure is not None:
        return made
    needs = made.host
    failure = host_failure(needs, limit)
    if failure is not None:
        memory = replace(made.memory, failure=failure)
        return replace(made, memory=memory, verdict="does_not_fit", reason=failure.id)
    if limit < needs.held_bytes and made.verdict == "fits":
        reason = f"the server may come to hold {gib(needs.held_bytes)} of the host's memory, and may use {gib(limit)}"
        return replace(made, verdict="tight", reason=reason)
    return made


_USERS = (4, 16, 64)


def context_by_user_count(plan: Plan) -> dict[int, int]:
    """Tokens per user when 4, 16 or 64 users (up to max_num_seqs) share the KV cache, for counts that it does not
    hold at full length; empty where the server does not start."""
    kv, settings, engines = plan.memory.kv, plan.settings, plan.settings.data_parallel_size
    if plan.memory.failure is not None:
        return {}
    shares = {users: cdiv(users, engines) for users in _USERS if plan.holds < users}
    lengths = {users: kv.longest_for(share) for users, share in shares.items() if share <= settings.max_num_seqs}
    return {users: tokens for users, tokens in lengths.items() if tokens >= kv.block_size}


def ready_command(plan: Plan) -> list[str]:
    """`vllm serve ...`, with the Hub id where the model was named by its bundled short name, and no secrets."""
    model = plan.target.model
    name = model.name if model.source.startswith("bundled") else plan.args.model
    release = plan.target.release
    return list(without_secrets(command(replace(plan.args, model=name), release), release))
