"""Looks at a server that do not need a server: a calm one, and one whose pool is full."""

from __future__ import annotations

from legroom.live.metrics.sample import EngineSample, Sample

SERVER = "http://gpu1:8000"


def sample(number: int, kv_use=0.4, running=8.0, waiting=0.0, preemptions=0.0, server=SERVER) -> Sample:
    engine = EngineSample(
        "tiny",
        "0",
        kv_use=kv_use,
        running=running,
        waiting=waiting,
        waiting_for_capacity=waiting,
        preemptions=preemptions,
        prompt_tokens=5000.0 * number,
        generation_tokens=1000.0 * number,
        finished=10.0 * number,
        num_blocks=1001,
        block_size=16,
        prefix_queries=5000.0 * number,
        prefix_hits=100.0,
    )
    return Sample(1_700_000_000.0 + 5 * number, server, (engine,))


def trouble(count: int = 20, start: int = 0) -> list[Sample]:
    """A pool that is full while requests wait and are preempted."""
    return [sample(start + n, 0.99, 30, 60, preemptions=6.0 * n) for n in range(1, count + 1)]


def calm(count: int, start: int) -> list[Sample]:
    preempted = 120.0 if start > 10 else 0.0
    return [sample(start + n, preemptions=preempted) for n in range(1, count + 1)]
