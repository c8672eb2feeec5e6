"""`legroom simulate --tier`: what host memory behind the GPU's KV cache buys on this trace."""

import argparse
import re
from dataclasses import replace
from typing import Any

from legroom.cli.output import note, print_answer, progress_bar, step_writer, write_file
from legroom.cli.shared_options import sweep_executor
from legroom.cli.simulate_pool import PoolChoice
from legroom.errors import ANSWER_IS_NO, OK, LegroomError
from legroom.memory.host_needs import deployment_host
from legroom.memory.kv.specs import LatentSpec
from legroom.planning.plan import Plan
from legroom.render.simulation_text import tier_text, timeline_svg, timeline_text
from legroom.simulation.flag_search import Candidate
from legroom.simulation.replay_outcome import Goal, load_verdict
from legroom.simulation.tiers.host_tier import TierSettings
from legroom.simulation.tiers.tier_report import CurvePoint, TierReport, hit_curve
from legroom.simulation.tiers.tiered_replay import simulate_with_tier
from legroom.simulation.trace import Trace
from legroom.simulation.trace_replay import simulate
from legroom.units import GIB, parse_bytes, parse_count, round_up

_FORM = "as in --tier cpu=200GiB@50GB/s, or cpu=200GiB@50GB/s,policy=arc,blocks_per_chunk=4"
_TIER = re.compile(r"(?P<kind>\w+)=(?P<size>[^@,]+)(@(?P<rate>[^,/]+)(/s)?)?(?P<options>(,\w+=[\w.]+(/s)?)*)")
_COUNTED = ("blocks_per_chunk", "store_threshold", "max_tracker_size")
_WORTH_PROCESSES = 200  # Traces with fewer requests are replayed in this process: starting workers takes longer.
_PAGE_BYTES = 4096  # vLLM rounds a chunk up to whole pages (`SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT`, 0.32).


def run_tier(args: argparse.Namespace, trace: Trace, pool: PoolChoice, goal: Goal) -> int:
    """Replays the trace with and without the tier of --tier and prints both; exit code 1 where a limit is missed."""
    plan = pool.plan()
    given_tier = tier_settings(args.tier, _block_bytes(plan) if plan is not None else 0)
    tier = _without_copy_times(given_tier) if pool.cost is None else given_tier
    if tier != given_tier:
        note("this trace counts steps, not seconds, so every copy ends with its step; --step-ms gives steps a length")
    with progress_bar("simulating") as bar, step_writer(args.timeline) as write:
        replayed = simulate_with_tier(trace, pool.settings, tier, write, cost=pool.cost, progress=bar)
    without = simulate(trace, pool.settings, cost=pool.cost)
    curve: tuple[CurvePoint, ...] = ()
    if args.tier_curve:
        executor = sweep_executor(args, workers=1 if len(trace) < _WORTH_PROCESSES else None)
        with progress_bar("replaying other sizes") as bar:
            curve = hit_curve(trace, pool.settings, replayed, pool.cost, executor=executor, progress=bar)
    room = tier.num_chunks * round_up(tier.block_bytes * tier.blocks_per_chunk, _PAGE_BYTES)
    host_bytes = (_bytes_held(plan, room / GIB) - _bytes_held(plan, 0)) if plan is not None else None
    report = TierReport(replayed, without, pool.cost, curve, host_bytes)
    load = load_verdict(replayed.timeline, goal)
    if args.svg:
        write_file(args.svg, timeline_svg(replayed.timeline, load), "picture")
    document = {**replayed.timeline.as_json(), "tier": report.as_json()}
    print_answer(args.json, document, lambda style: timeline_text(replayed.timeline, load, style) + tier_text(report))
    return ANSWER_IS_NO if load.missed else OK


def with_tier(args: argparse.Namespace, pool: PoolChoice, candidates: list[Candidate]) -> list[Candidate]:
    """The candidates with prefix caching, each with the tier of --tier; all of them as they are without --tier."""
    if not args.tier:
        return candidates
    plan = pool.plan()
    slot_bytes = _block_bytes(plan) // plan.memory.kv.block_size if plan is not None else 0
    tiered = []
    for candidate in candidates:
        if candidate.settings.enable_prefix_caching:
            tier = tier_settings(args.tier, slot_bytes * candidate.settings.block_size)
            tiered.append(replace(candidate, tier=_without_copy_times(tier) if pool.cost is None else tier))
    return tiered


def _without_copy_times(tier: TierSettings) -> TierSettings:
    """The tier with copies that take no time, for a replay that counts steps."""
    disk = None if tier.disk_s_per_chunk is None else 0.0
    return replace(tier, load_s_per_block=0.0, store_s_per_block=0.0, disk_s_per_chunk=disk)


def tier_settings(text: str, block_bytes: int) -> TierSettings:
    """The tier of --tier's `text`, else LegroomError; `block_bytes`: of one KV block over all ranks, 0 if unknown."""
    match = _TIER.fullmatch(text.strip())
    if match is None:
        raise LegroomError(f"--tier {text}: not a tier", _FORM)
    kind, rate = match["kind"], match["rate"]
    if kind == "disk":
        why = f"--tier {text}: vLLM's files are behind the tier in host memory and have no size: none is ever removed"
        raise LegroomError(why, "give both, with the rate of the disk: --tier cpu=200GiB@50GB/s,disk=5GB/s")
    if kind != "cpu":
        raise LegroomError(f"--tier {text}: {kind} is not simulated, only vLLM's native offloading is", _FORM)
    options = _tier_options(text, match["options"])
    disk = options.pop("disk", None)
    if (blocks_per_chunk := options.get("blocks_per_chunk", 1)) < 1:
        raise LegroomError(f"--tier {text}: a chunk has at least one block", _FORM)
    seconds = 0.0
    if rate:
        _require_block_bytes(text, block_bytes)
        seconds = block_bytes / max(1, parse_bytes(rate, "the rate of --tier"))
    if counted := re.fullmatch(r"([\d_]+) ?blocks", match["size"]):
        num_chunks = int(counted[1]) // blocks_per_chunk
    else:
        _require_block_bytes(text, block_bytes)
        num_chunks = parse_bytes(match["size"], "--tier") // round_up(block_bytes * blocks_per_chunk, _PAGE_BYTES)
    if num_chunks < 1:
        raise LegroomError(f"--tier {text}: too small for one chunk of KV cache", "give the tier more room")
    copies: dict[str, Any] = dict.fromkeys(("load_s_per_block", "store_s_per_block"), seconds)
    disk_s = None if disk is None else _disk_s_per_chunk(text, disk, block_bytes * blocks_per_chunk)
    return TierSettings(num_chunks, block_bytes=block_bytes, **copies, disk_s_per_chunk=disk_s, **options)


def _disk_s_per_chunk(text: str, rate: str, chunk_bytes: int) -> float:
    """Seconds to read or write a chunk at `rate` (`5GB/s`; 0 for `yes`); errors quote `text`, the whole of --tier."""
    if rate == "yes":
        return 0.0
    _require_block_bytes(text, chunk_bytes)
    return chunk_bytes / max(1, parse_bytes(rate.removesuffix("/s"), "the rate of the disk of --tier"))


def _tier_options(text: str, words: str) -> dict[str, Any]:
    """{name: parsed value} of `NAME=VALUE,...` in `words`; LegroomError, quoting --tier's `text`, for unknown ones."""
    options: dict[str, Any] = {}
    for word in filter(None, words.split(",")):
        name, value = word.split("=")
        if name in _COUNTED:
            options[name] = parse_count(value, f"{name} of --tier")
        elif name in ("policy", "disk"):
            options[name] = value
        elif name == "prompt_only" and value in ("yes", "no"):
            options[name] = value == "yes"
        else:
            raise LegroomError(f"--tier {text}: {word} is not known", _FORM)
    return options


def _require_block_bytes(text: str, block_bytes: int) -> None:
    """Raises LegroomError, which quotes --tier's `text`, where the bytes of a KV block are unknown (0)."""
    if not block_bytes:
        hint = "give --model and --gpu, or a number of blocks and no rate: --tier cpu=4000blocks"
        raise LegroomError(f"--tier {text}: how many bytes a block has depends on the model", hint)


def _block_bytes(plan: Plan) -> int:
    """Bytes of one KV block over all ranks of an engine; ranks with the same latent cache count once."""
    settings, shape = plan.settings, plan.memory.kv.shape
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size
    is_latent = all(isinstance(group.spec, LatentSpec) for group in shape.groups)
    copies = 1 if is_latent and settings.pipeline_parallel_size == 1 else ranks
    return shape.stages[0].bytes_per_block * copies


def _bytes_held(plan: Plan, offloading_gib: float) -> int:
    """Bytes of host memory that the server holds if it offloads this many GiB of KV cache."""
    given = plan.settings.given
    # The last value of a repeated flag counts.
    words = (*given.others, "--kv-offloading-size", str(offloading_gib))
    settings = replace(plan.settings, given=replace(given, others=words))
    return deployment_host(plan.target.model, plan.target.gpu, settings, plan.memory).held_bytes
