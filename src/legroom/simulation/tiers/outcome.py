"""What a tier bought: hits beside those of the GPU, bytes moved, and whether loading beats computing again."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from legroom.simulation.fast.columns import StepCost
from legroom.simulation.settings import SchedulerSettings
from legroom.simulation.tiers.replay import TieredTimeline, simulate_with_tier
from legroom.simulation.timeline import Timeline, percentile
from legroom.simulation.trace import Trace

MOST_OF_THE_HITS = 0.95
_HALVINGS = 6


class CurvePoint(NamedTuple):
    """Hits of a tier of this size."""

    num_chunks: int
    hit_ratio: float


def hit_curve(
    trace: Trace, settings: SchedulerSettings, replayed: TieredTimeline, cost: StepCost | None
) -> tuple[CurvePoint, ...]:
    """Replays of a tier that never evicts, and of halves, quarters and so on of what that one held; smallest first."""
    chunk_tokens = settings.block_size * replayed.tier.blocks_per_chunk
    ends = map(int.__add__, trace.prompt_lens, trace.output_lens)
    everything = 1 + sum(end // chunk_tokens for end in ends)
    unlimited = simulate_with_tier(trace, settings, replace(replayed.tier, num_chunks=everything), cost=cost)
    points = [CurvePoint(unlimited.tally.peak_chunks, tier_hit_ratio(unlimited))]
    for halving in range(1, _HALVINGS + 1):
        num_chunks = points[0].num_chunks >> halving
        if num_chunks < 1:
            break
        smaller = simulate_with_tier(trace, settings, replace(replayed.tier, num_chunks=num_chunks), cost=cost)
        points.append(CurvePoint(num_chunks, tier_hit_ratio(smaller)))
    return tuple(reversed(points))


def tier_hit_ratio(replayed: TieredTimeline) -> float:
    """Share of prompt tokens that were loaded."""
    prompt_tokens = replayed.timeline.tally.prompt_tokens
    return replayed.tally.hit_tokens / prompt_tokens if prompt_tokens else 0.0


def chunks_for(curve: tuple[CurvePoint, ...], share: float) -> int | None:
    """Chunks that give this share of all the hits there are, between two replays in proportion."""
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
    """A replay with a tier beside the same one without."""

    replayed: TieredTimeline
    without: Timeline
    cost: StepCost | None
    curve: tuple[CurvePoint, ...] = ()
    host_bytes: int | None = None
    """As the host allocates the tier; None where the model is not known."""

    @property
    def hit_ratio(self) -> float:
        return tier_hit_ratio(self.replayed)

    def bytes_of(self, blocks: int) -> int:
        return blocks * self.replayed.tier.block_bytes

    def tier_bytes(self, num_chunks: int) -> int:
        return self.bytes_of(num_chunks * self.replayed.tier.blocks_per_chunk)

    @property
    def recompute_s(self) -> float | None:
        """What the GPU would compute on the loaded tokens; None where the length of a step does not depend on them."""
        if self.cost is None or self.cost.token <= 0:
            return None
        tally = self.replayed.tally
        return self.cost.token * tally.loaded_tokens + self.cost.pair * tally.loaded_pairs

    @property
    def break_even_bytes_s(self) -> float | None:
        """The rate of copies below which computing again is faster than loading."""
        recompute_s = self.recompute_s
        loaded = self.bytes_of(self.replayed.tally.loaded_blocks)
        return loaded / recompute_s if recompute_s and loaded else None

    @property
    def is_slower_than_recomputing(self) -> bool | None:
        """None where copies or steps have no length."""
        load_s, recompute_s = self.replayed.load_busy_s, self.recompute_s
        return load_s > recompute_s if load_s and recompute_s else None

    @property
    def first_tokens_s(self) -> tuple[list[float], list[float]] | None:
        """Waits for the first token with the tier and without it."""
        if self.without.clocks is None:
            return None
        return self.replayed.timeline.seconds["first_token_s"], self.without.seconds["first_token_s"]

    def as_json(self) -> dict[str, Any]:
        """The key `tier` of `legroom simulate --json`."""
        replayed, tally = self.replayed, self.replayed.tally
        document: dict[str, Any] = {
            "name": "cpu",
            "settings": asdict(replayed.tier),
            "host_bytes": self.host_bytes,
            "hit_tokens": tally.hit_tokens,
            "hit_ratio": round(self.hit_ratio, 6),
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
        }
        if self.first_tokens_s:
            for name, waits in zip(("with", "without"), self.first_tokens_s, strict=True):
                document[f"first_token_s_{name}"] = {
                    "p50": round(percentile(waits, 0.5), 4),
                    "p99": round(percentile(waits, 0.99), 4),
                }
        return document
