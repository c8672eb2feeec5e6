"""Random workloads that press on a pool."""

from __future__ import annotations

from hypothesis import strategies as st

from legroom.simulation.scheduler_settings import SchedulerSettings
from legroom.simulation.trace import Trace
from legroom.units import cdiv


@st.composite
def workloads(draw: st.DrawFn, in_seconds: bool = False) -> tuple[Trace, SchedulerSettings]:
    block_size = draw(st.sampled_from([4, 8, 16]))
    longest = draw(st.integers(8, 120))
    chunked = draw(st.booleans())
    seats = draw(st.sampled_from([1, 2, 3, 8, 16]))
    tokens = max(draw(st.sampled_from([8, 20, 64, 200])), seats, 0 if chunked else longest)
    settings = SchedulerSettings(
        num_blocks=1 + cdiv(longest, block_size) + draw(st.integers(0, 12)),
        block_size=block_size,
        max_num_seqs=seats,
        max_num_batched_tokens=tokens,
        max_model_len=longest,
        enable_prefix_caching=draw(st.booleans()),
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 5, 17])),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.2])),
        reserve_full_isl=draw(st.booleans()),
        async_scheduling=draw(st.booleans()),
        remote_prefill=draw(st.sampled_from([False, False, False, True])),
    )
    trace = Trace("random", in_seconds=in_seconds)
    arrival = 0.0
    for _ in range(draw(st.integers(1, 25))):
        arrival += draw(st.sampled_from([0, 0, 0, 1, 2, 7, 30]))
        prompt_len = draw(st.integers(1, longest - 1))
        output_len = draw(st.integers(1, longest - prompt_len))
        prefix_len = draw(st.sampled_from([0, 0, prompt_len, min(prompt_len, block_size - 1), min(prompt_len, 21)]))
        trace.add(
            prompt_len,
            output_len,
            arrival,
            prefix_id=draw(st.sampled_from(["a", "b"])) if prefix_len else None,
            prefix_len=prefix_len,
            priority=draw(st.sampled_from([0, 0, 1])),
        )
    return trace, settings
