"""Requests that vLLM refuses on arrival, or that no pool of this size could ever finish."""

from __future__ import annotations

from array import array
from operator import add

from legroom.simulation.settings import SchedulerSettings
from legroom.simulation.timeline import Rejection
from legroom.simulation.trace import Trace


def admissible(trace: Trace, settings: SchedulerSettings) -> tuple[array[int], list[Rejection]]:
    """1 for every request that can be served, 0 for the others, and why not."""
    accepted = array("b", bytes([1]) * len(trace))
    rejections: list[Rejection] = []
    longest = settings.max_model_len
    most = max(map(add, trace.prompt_lens, trace.output_lens))
    # The V0 engine takes a request in and ignores it once it has outgrown the pool: its scheduler knows when.
    always_fits = settings.engine == "V0"
    if most <= longest and (always_fits or settings.most_blocks_of(most - 1, 1) <= settings.usable_blocks):
        return accepted, rejections
    for i, (prompt_len, output_len) in enumerate(zip(trace.prompt_lens, trace.output_lens, strict=True)):
        if prompt_len + output_len > longest:
            why = f"{prompt_len} + {output_len} tokens exceed max-model-len {longest}"
        elif not always_fits and settings.most_blocks_of(prompt_len, output_len) > settings.usable_blocks:
            needed = settings.most_blocks_of(prompt_len, output_len)
            why = f"needs {needed} blocks at its longest, the pool has {settings.usable_blocks}"
        else:
            continue
        accepted[i] = 0
        rejections.append(Rejection(trace.id_of(i), why))
    return accepted, rejections
