"""The gain from a host tier: hits beside those of the GPU, bytes moved, and whether loading beats recomputing."""

from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from legroom.simulation.fast.fast_replay import Progress
from legroom.simulation.fast.rows import StepCost
from legroom.simulation.scheduler_settings import SchedulerSettings
from legroom.simulation.tiers.host_tier import TierSettings
from legroom.simulation.tiers.tiered_replay import TieredTimeline, simulate_with_tier
from legroom.simulation.timeline import Timeline, percentile
from legroom.simulation.trace import Trace
from legroom.sweeps import ProcessExecutor, SweepExecutor, sweep

HIT_SHARE = 0.95
"""Share of all possible hits at which the curve of hits over size has flattened."""
_HALVINGS = 6  # Sizes of the curve: down to 1/64 of the tier without evictions.

CurveTask = tuple[Trace, SchedulerSettings, TierSettings, StepCost | None]
"""The constant inputs of the replays of a curve."""


class CurvePoint(NamedTuple):
    num_chunks: int
    hit_ratio: float


def hit_curve(
    trace: Trace,
    settings: SchedulerSettings,
    replayed: TieredTimeline,
    cost: StepCost | None,
    *,
    executor: SweepExecutor | None = None,
    progress: Progress | None = None,
) -> tuple[CurvePoint, ...]:
    """Points (size, hit ratio): a tier that never evicts, one of half its size, a quarter and so on; smallest first."""
    report = progress or (lambda _share: None)
    unlimited = _unlimited_tier(trace, settings, replayed, cost, lambda share: report(share / (_HALVINGS + 1)))
    points = [CurvePoint(unlimited.tally.peak_chunks, unlimited.hit_ratio)]
    sizes = [size for halving in range(1, _HALVINGS + 1) if (size := points[0].num_chunks >> halving)]
    task: CurveTask = (trace, settings, replayed.tier, cost)
    where = executor or ProcessExecutor(1)  # without --workers or a cluster in this process
    points += sweep(replay_size, task, sizes, where, lambda share: report((1 + share * len(sizes)) / (len(sizes) + 1)))
    return tuple(sorted(points))


def _unlimited_tier(
    trace: Trace, settings: SchedulerSettings, replayed: TieredTimeline, cost: StepCost | None, progress: Progress
) -> TieredTimeline:
    """The replay with a tier that never evicts: `replayed` itself if it never did, else one with a larger tier."""
    if not (replayed.tally.evicted_chunks or replayed.tally.failed_stores):
        return replayed
    chunk_tokens = settings.block_size * replayed.tier.blocks_per_chunk
    ends = map(int.__add__, trace.prompt_lens, trace.output_lens)
    tier = replace(replayed.tier, num_chunks=1 + sum(end // chunk_tokens for end in ends))
    return simulate_with_tier(trace, settings, tier, cost=cost, progress=progress)


def replay_size(task: CurveTask, num_chunks: int) -> CurvePoint:
    """The hit ratio of the task's trace with a tier of `num_chunks` chunks; executors can pickle this function."""
    trace, settings, tier, cost = task
    tier = replace(tier, num_chunks=num_chunks)
    return CurvePoint(num_chunks, simulate_with_tier(trace, settings, tier, cost=cost).hit_ratio)


def chunks_for_hit_share(curve: tuple[CurvePoint, ...], share: float) -> int | None:
    """The interpolated tier size in chunks with `share` (0 to 1) of the curve's most hits; None without hits."""
    if not curve or not curve[-1].hit_ratio:
        return None
    wanted = share * curve[-1].hit_ratio
    below = CurvePoint(0, 0.0)
    for point in curve:
        if point.hit_ratio >= wanted:
            part = (wanted - below.hit_ratio) / (point.hit_ratio - below.hit_ratio)
            return round(below.num_chunks + part * (point.num_chunks - below.num_chunks))
        below = point
    return curve[-1].num_chunks


@dataclass(frozen=True)
class TierReport:
    """A replay with a tier, and the same one without."""

    replayed: TieredTimeline
    without: Timeline
    cost: StepCost | None
    curve: tuple[CurvePoint, ...] = ()
    host_bytes: int | None = None
    """As the host allocates the tier; None where the model is not known."""

    def bytes_of(self, blocks: int) -> int:
        """The bytes of this many GPU blocks of KV cache."""
        return blocks * self.replayed.tier.block_bytes

    def tier_bytes(self, num_chunks: int) -> int:
        """The bytes of this many of the tier's chunks."""
        return self.bytes_of(num_chunks * self.replayed.tier.blocks_per_chunk)

    @property
    def recompute_s(self) -> float | None:
        """GPU seconds to compute the loaded tokens instead; None where step times are not known."""
        if self.cost is None or self.cost.token <= 0:
            return None
        tally = self.replayed.tally
        return self.cost.token * tally.loaded_tokens + self.cost.pair * tally.loaded_pairs

    @property
    def break_even_bytes_s(self) -> float | None:
        """Bytes per second of copying below which recomputing is faster; None without loads or step times."""
        recompute_s = self.recompute_s
        loaded = self.bytes_of(self.replayed.tally.loaded_blocks)
        return loaded / recompute_s if recompute_s and loaded else None

    @property
    def is_slower_than_recomputing(self) -> bool | None:
        """Whether loading takes longer than recomputing the tokens would; None where either takes no time."""
        load_s, recompute_s = self.replayed.load_busy_s, self.recompute_s
        return load_s > recompute_s if load_s and recompute_s else None

    @property
    def first_tokens_s(self) -> tuple[list[float], list[float]] | None:
        """Sorted seconds to the first token (with the tier, without it); None where the trace counts steps."""
        if self.without.clocks is None:
            return None
        return self.replayed.timeline.seconds["first_token_s"], self.without.seconds["first_token_s"]

    def _files_json(self) -> dict[str, Any] | None:
        """File traffic in bytes, chunks and seconds; None for a tier without files."""
        files = self.replayed.files
        if files is None:
            return None
        return {
            "stored_bytes": self.tier_bytes(files.stored_chunks),
            "loaded_bytes": self.tier_bytes(files.loaded_chunks),
            "stored_chunks": files.stored_chunks,
            "loaded_chunks": files.loaded_chunks,
            "store_s": round(files.store_busy_s, 4),
            "load_s": round(files.load_busy_s, 4),
        }

    def as_json(self) -> dict[str, Any]:
        """The key `tier` of `legroom simulate --json`."""
        replayed, tally = self.replayed, self.replayed.tally
        enough = chunks_for_hit_share(self.curve, HIT_SHARE)
        document: dict[str, Any] = {
            "name": "cpu",
            "settings": asdict(replayed.tier),
            "host_bytes": self.host_bytes,
            "hit_tokens": tally.hit_tokens,
            "hit_ratio": round(replayed.hit_ratio, 6),
            "gpu_hit_ratio": round(replayed.timeline.hit_ratio, 6),
            "gpu_hit_ratio_without": round(self.without.hit_ratio, 6),
            "loaded_tokens": tally.loaded_tokens,
            "loaded_bytes": self.bytes_of(tally.loaded_blocks),
            "stored_bytes": self.bytes_of(tally.stored_blocks),
            "loaded_blocks": tally.loaded_blocks,
            "stored_blocks": tally.stored_blocks,
            "evicted_chunks": tally.evicted_chunks,
            "failed_stores": tally.failed_stores,
            "flushed_stores": tally.flushes,
            "peak_chunks": tally.peak_chunks,
            "load_s": round(replayed.load_busy_s, 4),
            "store_s": round(replayed.store_busy_s, 4),
            "flush_wait_s": round(replayed.flush_wait_s, 4),
            "recompute_s": self.recompute_s,
            "break_even_bytes_s": self.break_even_bytes_s,
            "slower_than_recomputing": self.is_slower_than_recomputing,
            "curve": [
                {"chunks": point.num_chunks, "bytes": self.tier_bytes(point.num_chunks), "hit_ratio": point.hit_ratio}
                for point in self.curve
            ],
            "most_hits": None
            if enough is None
            else {"share_of_hits": HIT_SHARE, "chunks": enough, "bytes": self.tier_bytes(enough)},
            "files": self._files_json(),
        }
        if self.first_tokens_s:
            for name, waits in zip(("with", "without"), self.first_tokens_s, strict=True):
                document[f"first_token_s_{name}"] = {f"p{p}": round(percentile(waits, p / 100), 4) for p in (50, 99)}
        return document
