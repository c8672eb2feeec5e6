"""Remedies for findings: flags computed from the plan and the server's own traffic. Without a plan, the remedy names
the command that makes one."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from legroom.errors import LegroomError
from legroom.live.detectors.base import DetectorFinding
from legroom.live.metrics.window import Window
from legroom.planning.advice import with_advice
from legroom.planning.levers import LEVERS
from legroom.planning.plan import Plan, ready_command, try_flags
from legroom.planning.plan_document import PlanDocument
from legroom.planning.plan_json import replan
from legroom.records import dataclass, field
from legroom.units import GIB, human_bytes

MAKE_A_PLAN = (
    "legroom plan MODEL --gpu NAME [the server's flags] --json > plan.json, then give it with --plan plan.json"
)
_TRAFFIC_OVER_S = 600.0
_BURST_ROOM_BYTES = 2 * GIB  # Log-probabilities or top-p of a large batch allocate 1 to 2.3 GiB at once on an H200.
_RESTARTING = "legroom watch --daemon --config watch.toml --act restart"
_POOL_LEVERS = ("raise utilization", "fp8 KV cache", "fewer captured graphs", "smaller batches", "more GPUs")


@dataclass(frozen=True, slots=True)
class ProposedRemedy:
    """A change that can end a finding."""

    why: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Settings to change, by their names in the plan's `args`."""
    env: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[str, ...] = ()
    """Further steps, as text or commands."""
    command: tuple[str, ...] = ()
    """The command line with the change, where the plan is known."""
    trades: str = ""
    """The cost of the change."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "steps": list(self.steps), "command": list(self.command)}


@dataclass(frozen=True, slots=True)
class Traffic:
    """The recent requests of one engine (None: too few), as flags and plans are per engine."""

    pool_tokens: int | None
    prompt_tokens: float | None
    answer_tokens: float | None
    at_once: float
    """Running and waiting requests per engine."""
    engines: int = 1

    @property
    def request_tokens(self) -> float | None:
        """Mean KV tokens of a request at its end: prompt plus output; None where not known."""
        if self.prompt_tokens is None or self.answer_tokens is None:
            return None
        return self.prompt_tokens + self.answer_tokens

    @property
    def fitting_requests(self) -> int | None:
        """How many requests fit the pool at their full length, at least 1; None where a size is unknown."""
        if not self.pool_tokens or not self.request_tokens:
            return None
        return max(int(self.pool_tokens / self.request_tokens), 1)


def traffic(window: Window) -> Traffic:
    """The mean request per engine over the last ten minutes."""
    latest = window.latest
    if latest is None:
        return Traffic(None, None, None, 0.0)
    first_tokens = window.histogram("ttft", _TRAFFIC_OVER_S)
    prompts = window.increase("prompt_tokens", _TRAFFIC_OVER_S)
    answers, ended = window.increase("generation_tokens", _TRAFFIC_OVER_S), window.increase("finished", _TRAFFIC_OVER_S)
    pools = [engine.pool_tokens for engine in latest.engines if engine.pool_tokens]
    prompt = prompts / first_tokens.count if prompts and first_tokens else None
    answer = answers / ended if answers and ended else None
    requests = ((latest.running or 0.0) + (latest.waiting or 0.0)) / max(len(latest.engines), 1)
    return Traffic(min(pools) if pools else None, prompt, answer, requests, len(latest.engines))


def remedies_for(
    finding: DetectorFinding, window: Window, plan: PlanDocument | None = None
) -> tuple[ProposedRemedy, ...]:
    """One to four changes that can end the finding, best first; with a plan, flags with computed values."""
    planned: Plan | None = None
    problem = ""
    if plan is not None:
        try:
            planned = replan(plan)
        except LegroomError as error:
            problem = error.message
    if finding.kind in _BY_KIND:
        proposed = list(_BY_KIND[finding.kind](finding, traffic(window), planned))
    else:
        explained = ProposedRemedy(f"see: legroom explain {finding.entry}" if finding.entry else finding.title)
        proposed = [_FIXED.get(finding.kind, explained)]
    if planned is None and finding.kind in _NEEDS_PLAN:
        lacks = f"it could not be read: {problem}" if problem else "none is known for this server"
        proposed.append(ProposedRemedy(f"flags are computed from a plan, and {lacks}", steps=(MAKE_A_PLAN,)))
    return tuple(proposed[:4]) or (ProposedRemedy("nothing needs to be changed"),)


def _plan_command(plan: Plan | None) -> tuple[str, ...]:
    """The words of `vllm serve ...` for the plan, without secrets; empty without a plan."""
    return tuple(ready_command(plan)) if plan is not None else ()


def _lower_utilization(planned: Plan, by_bytes: int | float) -> tuple[dict[str, float], Plan] | None:
    """(--gpu-memory-utilization that frees `by_bytes`, the plan with it); None at 0.1 or less or if it fails."""
    share = int((planned.settings.gpu_memory_utilization - by_bytes / planned.layout.total_bytes) * 100) / 100
    flags = {"gpu_memory_utilization": share}
    changed = try_flags(planned, flags) if share > 0.1 else None
    return (flags, changed) if changed is not None and changed.starts else None


def _startup_remedies(finding: DetectorFinding, seen: Traffic, planned: Plan | None) -> Iterator[ProposedRemedy]:
    """For a server that fails to start: the plan's advice where it does not fit, else reading the log."""
    advised = with_advice(planned) if planned is not None else None
    if planned is None or advised is None:
        yield ProposedRemedy("why a server ends stands in its log", steps=("legroom diagnose LOG",))
    elif advised.verdict == "fits":
        room = human_bytes(planned.layout.headroom_bytes)
        why = f"the plan fits with {room} to spare, so the flags are not why it does not start; its log says why"
        yield ProposedRemedy(why, steps=("legroom diagnose LOG",))
    else:
        for advice in advised.advice:
            why = f"the plan says {advised.reason or advised.verdict}; {advice.why}"
            steps, command = ("legroom diagnose LOG, for what really ended it",), _plan_command(advice.plan)
            yield ProposedRemedy(why, dict(advice.flags), {}, steps, command, advice.trades)


def _burst_remedies(finding: DetectorFinding, seen: Traffic, planned: Plan | None) -> Iterator[ProposedRemedy]:
    """For a full KV pool: a smaller batch (unless a guard already refuses requests), and a larger pool."""
    if finding.kind != "refused_load":
        yield from _batch_remedies(finding, seen, planned)
    if planned is not None:
        yield from _pool_remedies(seen, planned)


def _batch_remedies(finding: DetectorFinding, seen: Traffic, planned: Plan | None) -> Iterator[ProposedRemedy]:
    """The `max_num_seqs` that the pool holds at the observed request length: lower than now, or higher where requests
    queue although the pool has room."""
    holds, length = seen.fitting_requests, seen.request_tokens
    if holds is None or length is None or seen.pool_tokens is None:
        return
    now = planned.settings.max_num_seqs if planned is not None else None
    has_room = finding.kind == "queue_backlog" and finding.numbers.get("kv_use", 1.0) < 0.85
    if has_room:
        if now is not None and holds <= now:
            return
        wanted = min(holds, math.ceil(seen.at_once))
        trades = "more requests share every step: each is slower"
    elif now is not None and holds >= now:
        return
    else:
        wanted, trades = holds, "more requests wait outside the batch"
    why = f"requests here reach {length:,.0f} tokens, so the pool of {seen.pool_tokens:,}"
    why += f"{' of each engine' if seen.engines > 1 else ''} holds {holds:,} at once to "
    why += f"their end{f' (the limit is {now:,})' if now is not None else ''}"
    flags = {"max_num_seqs": wanted}
    changed = try_flags(planned, flags) if planned is not None else None
    if changed is not None and not changed.starts:
        return
    yield ProposedRemedy(why, flags, command=_plan_command(changed), trades=trades)


def _pool_remedies(seen: Traffic, planned: Plan) -> Iterator[ProposedRemedy]:
    """By kind of change, cheapest first, the first flags whose KV pool holds the load, else the largest pool's."""
    needed = seen.request_tokens * seen.at_once if seen.request_tokens else None
    base = planned.memory.kv.tokens
    for lever in sorted((lever for lever in LEVERS if lever.name in _POOL_LEVERS), key=lambda lever: lever.cost):
        best: tuple[dict[str, Any], Plan] | None = None
        for flags in lever.propose(planned):
            changed = try_flags(planned, flags)
            if changed is None or changed.verdict != "fits" or changed.memory.kv.tokens <= base:
                continue
            if best is None or changed.memory.kv.tokens > best[1].memory.kv.tokens:
                best = flags, changed
            if needed is not None and changed.memory.kv.tokens >= needed:
                best = flags, changed
                break
        if best is not None:
            flags, changed = best
            tokens = changed.memory.kv.tokens
            share = f", {tokens / needed:.0%} of what is asked now" if needed else ""
            free = human_bytes(changed.layout.headroom_bytes)
            why = f"the pool grows from {base:,} to {tokens:,} tokens{share}; {free} stay free"
            yield ProposedRemedy(why, flags, command=_plan_command(changed), trades=lever.trades)


def _long_prompt_remedies(finding: DetectorFinding, seen: Traffic, planned: Plan | None) -> Iterator[ProposedRemedy]:
    """For long prompts: smaller steps for less activation memory, and admission by the guard."""
    length, pool = finding.numbers.get("mean_prompt_tokens", 0.0), finding.numbers.get("pool_tokens", 0.0)
    if planned is not None and planned.layout.headroom_bytes < planned.layout.activation.bytes:
        lever = next(lever for lever in LEVERS if lever.name == "smaller batches")
        for flags in lever.propose(planned):
            changed = try_flags(planned, flags)
            if changed is not None and changed.verdict == "fits":
                less = planned.layout.activation.bytes - changed.layout.activation.bytes
                tokens = flags["max_num_batched_tokens"]
                why = f"{human_bytes(less)} less activation memory in a step of {tokens:,} tokens"
                yield ProposedRemedy(why, flags, command=_plan_command(changed), trades=lever.trades)
                break
    if length and pool:
        why = f"{pool / length:.0f} such prompts fill the pool; the guard admits what it holds and lets the rest wait"
        guards = "vllm serve ... --middleware legroom.guard.Guard, or legroom guard --upstream URL"
        yield ProposedRemedy(why, steps=(guards,))
    yield from _batch_remedies(finding, seen, planned)


def _creep_remedies(finding: DetectorFinding, seen: Traffic, planned: Plan | None) -> Iterator[ProposedRemedy]:
    """For growing GPU memory: when to restart, and the utilization that leaves headroom for a week."""
    per_h = finding.numbers.get("bytes_per_h", 0.0)
    left_h = finding.numbers.get("hours_left")
    if left_h is not None:
        why = f"the card is full in {left_h:.0f} h at this slope; a restart gives the memory back"
        yield ProposedRemedy(why, steps=(f"restart within {left_h / 2:.0f} h, drained: {_RESTARTING}",))
    if planned is None or per_h <= 0:
        return
    needed = per_h * 7 * 24.0
    room = planned.layout.headroom_bytes
    if room >= needed:
        yield ProposedRemedy(f"{human_bytes(room)} of headroom last {room / per_h:.0f} h: restart once a week")
        return
    lowered = _lower_utilization(planned, needed - room)
    if lowered is None:
        hours, wanted = max(room, 0) / per_h, human_bytes(int(needed))
        yield ProposedRemedy(f"no utilization leaves a week's room ({wanted}); restart every {hours:.0f} h")
        return
    flags, changed = lowered
    why = f"a week of {human_bytes(int(per_h))} an hour needs {human_bytes(int(needed))} of headroom; at "
    why += f"{flags['gpu_memory_utilization']} the pool keeps {changed.memory.kv.tokens:,} tokens"
    yield ProposedRemedy(why, flags, command=_plan_command(changed), trades="a smaller pool")


def _host_creep_remedies(finding: DetectorFinding, seen: Traffic, planned: Plan | None) -> Iterator[ProposedRemedy]:
    """For growing host memory: a restart, and the caches that may grow."""
    per_h = finding.numbers.get("bytes_per_h", 0.0)
    yield ProposedRemedy(
        f"the workers take {human_bytes(int(per_h))} more of the host every hour; a restart gives it back",
        steps=(
            "compare with what the host or the container's limit leaves: free -h, or memory.max of its cgroup",
            f"restart before that is used up, drained: {_RESTARTING}",
            "where images or audio are served: --mm-processor-cache-gb 0, and see whether it still grows",
        ),
    )


def _fragmentation_remedies(finding: DetectorFinding, seen: Traffic, planned: Plan | None) -> Iterator[ProposedRemedy]:
    """For fragmentation: expandable segments, or a planned restart where they clash with custom all-reduce."""
    unused = human_bytes(int(finding.numbers.get("held_bytes", 0)))
    ranks = planned.settings.tensor_parallel_size if planned is not None else 1
    if planned is not None and ranks > 1 and not getattr(planned.args, "disable_custom_all_reduce", None):
        why = f"{unused} lies in pieces; expandable segments clash with custom all-reduce over {ranks} GPUs, so a "
        yield ProposedRemedy(f"{why}planned restart is what is left", steps=(_RESTARTING,))
        return
    yield ProposedRemedy(
        f"PyTorch can grow its segments instead of leaving {unused} in pieces",
        env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        trades="a restart; not together with sleep mode before 0.20",
    )


def _neighbour_remedies(finding: DetectorFinding, seen: Traffic, planned: Plan | None) -> Iterator[ProposedRemedy]:
    """For another process on the GPU: how to find it, and --gpu-memory-utilization lower by its memory."""
    taken = int(finding.numbers.get("taken_bytes", 0))
    why = f"{human_bytes(taken)} of the room that the pool leaves for large steps are gone; whoever took them can give "
    steps = ("nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv",)
    yield ProposedRemedy(f"{why}them back, or run on another card", steps=steps)
    yield from _headroom_remedies(taken, planned, "beside that process")


def _memory_burst_remedies(finding: DetectorFinding, seen: Traffic, planned: Plan | None) -> Iterator[ProposedRemedy]:
    """For allocator retries: a lower utilization, and LEGROOM_WORKER_MEMORY=1, which logs how much was lacking."""
    yield from _headroom_remedies(_BURST_ROOM_BYTES, planned, "for the largest steps")
    steps = ("LEGROOM_WORKER_MEMORY=1 vllm serve ..., then legroom diagnose LOG",)
    yield ProposedRemedy("with the black box on, the first refused request says how much it lacked", steps=steps)


def _headroom_remedies(more_bytes: int, planned: Plan | None, purpose: str) -> Iterator[ProposedRemedy]:
    """--gpu-memory-utilization lower by `more_bytes`, for `purpose` (text); nothing without a working plan."""
    lowered = _lower_utilization(planned, more_bytes) if planned is not None else None
    if lowered is not None:
        flags, changed = lowered
        why = f"leaves {human_bytes(more_bytes)} more {purpose}; the pool keeps {changed.memory.kv.tokens:,} tokens"
        yield ProposedRemedy(why, flags, command=_plan_command(changed), trades="a smaller pool")


def _prefix_cache_remedies(finding: DetectorFinding, seen: Traffic, planned: Plan | None) -> Iterator[ProposedRemedy]:
    """For a low prefix hit rate: turning the cache off, or a larger KV pool that keeps prefixes for longer."""
    flags = {"enable_prefix_caching": False}
    changed = try_flags(planned, flags) if planned is not None else None
    kept = ""
    if changed is not None and planned is not None:
        kept = f" The pool stays at {changed.memory.kv.tokens:,} tokens (now {planned.memory.kv.tokens:,})."
    rate = finding.numbers.get("hit_rate", 0.0)
    yield ProposedRemedy(
        f"only {rate:.1%} of prompt tokens are found, so hashing and look-ups buy nothing; cached blocks are given up "
        f"on demand and take no room from requests.{kept}",
        flags,
        command=_plan_command(changed),
        trades="prompts that do share a beginning are computed in full",
    )
    if planned is not None:
        yield from _pool_remedies(seen, planned)


_FIXED = {
    "plan_drift": ProposedRemedy(
        "the same flags, release and GPU give the planned pool; one of them differs, or something else uses the card",
        steps=(
            "legroom calibrate LOG, to learn what this machine measures",
            "legroom recover --dry-run, for what holds memory",
        ),
    ),
    "stuck_engine": ProposedRemedy(
        "nothing in flight will finish by itself; a restart does, once the evidence is kept",
        steps=("py-spy dump --pid of VLLM::EngineCore, and keep the log", _RESTARTING),
    ),
    "no_traffic": ProposedRemedy("nothing is wrong with the server: no requests reach it"),
}
"""Remedies that depend on nothing but the kind of finding."""
_BY_KIND = {
    **dict.fromkeys(("crash_loop", "unreachable"), _startup_remedies),
    **dict.fromkeys(("pool_pressure", "preemption_thrash", "queue_backlog", "refused_load"), _burst_remedies),
    "long_prompt_burst": _long_prompt_remedies,
    "memory_creep": _creep_remedies,
    "host_memory_creep": _host_creep_remedies,
    "gpu_neighbour": _neighbour_remedies,
    "memory_burst": _memory_burst_remedies,
    "fragmentation": _fragmentation_remedies,
    "prefix_cache_waste": _prefix_cache_remedies,
}
_NEEDS_PLAN = frozenset(_BY_KIND) - {"unreachable", "host_memory_creep", "fragmentation"}
