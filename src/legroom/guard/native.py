"""The queue bounds that vLLM has itself since 0.29, and what the guard leaves to them."""

from __future__ import annotations

from legroom.facts.releases import Release
from legroom.guard.limits import EngineLimits

FIRST_RELEASE = "0.29.0"


def native_flags(
    release: Release, limits: EngineLimits, queue_requests: int = 512, overcommit: float = 1.0
) -> dict[str, str]:
    """Flags to set beside the guard, by name; empty before 0.29 or where the pool is not known.

    They bound what gets into vLLM past the guard, or without one: unfinished requests, and prompt tokens that were not
    computed yet. Both answer 503 without Retry-After and know nothing of the KV cache, so they stand behind the guard's
    own limits: a request with many prompts counts each of them, hence twice the sequences that run.
    """
    if release.before(FIRST_RELEASE):
        return {}
    flags = {}
    if limits.max_num_seqs:
        flags["--max-num-queued-reqs"] = str(2 * limits.max_num_seqs * limits.ranks + queue_requests)
    if limits.rank_blocks and limits.block_size:
        tokens = limits.rank_blocks * limits.block_size * limits.ranks
        flags["--max-num-queued-tokens"] = str(int(tokens * max(1.0, overcommit)))
    return flags
