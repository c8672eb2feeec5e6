"""The KV pool on two releases: what it holds, and what the figures mean that vLLM prints of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from legroom.planning.plan import cold_start
from legroom.records import dataclass
from legroom.units import human_bytes

if TYPE_CHECKING:
    from legroom.memory.kv.kv_plan import KvPlan
    from legroom.planning.plan import Plan

_TOKENS_LINE = {
    "slots": "blocks x block size",
    "slots over groups": "blocks x block size, divided by the number of groups of layers that share the blocks",
    "full-length requests": "full-length requests at once x their length",
}
"""What "GPU KV cache size: N tokens" counts, by how a release computes it (vllm/v1/core/kv_cache_utils.py)."""


@dataclass(frozen=True, slots=True)
class PoolChange:
    """A figure of the pool on the two releases."""

    what: str
    old: float
    new: float
    is_bytes: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"what": self.what, "from": self.old, "to": self.new}


def comparable_tokens(kv: KvPlan) -> int:
    """Tokens that full-length requests can use: the same measure in every release."""
    return round(kv.max_concurrency * kv.max_model_len)


def pool_changes(old: Plan, new: Plan) -> tuple[PoolChange, ...]:
    """The figures in the order of the arithmetic, those that stay as they are included."""
    before, after = old.memory.kv, new.memory.kv
    cold = [cold_start(made) for made in (old, new)]
    rows = (
        ("KV cache", old.layout.kv_cache.bytes, new.layout.kv_cache.bytes, True),
        ("KV cache, first start", cold[0].layout.kv_cache.bytes, cold[1].layout.kv_cache.bytes, True),
        ("bytes of a block", before.bytes_per_block, after.bytes_per_block, True),
        ("block size", before.block_size, after.block_size, False),
        ("blocks", max(before.num_blocks, 0), max(after.num_blocks, 0), False),
        ("groups of layers", len(before.groups) or 1, len(after.groups) or 1, False),
        ("tokens as vLLM prints them", max(before.tokens, 0), max(after.tokens, 0), False),
        ("tokens of full-length requests", comparable_tokens(before), comparable_tokens(after), False),
        ("longest request", before.max_model_len, after.max_model_len, False),
        ("bytes of one longest request", before.needed_bytes, after.needed_bytes, True),
        ("longest requests at once", before.max_concurrency, after.max_concurrency, False),
        (
            "longest requests at once, first start",
            cold[0].memory.kv.max_concurrency,
            cold[1].memory.kv.max_concurrency,
            False,
        ),
        ("free at the peak", old.layout.headroom_bytes, new.layout.headroom_bytes, True),
    )
    return tuple(PoolChange(*row) for row in rows)


def pool_remarks(old: Plan, new: Plan) -> tuple[str, ...]:
    """What to know before two logs are compared."""
    if old.memory.kv.shape.is_empty or new.memory.kv.shape.is_empty:
        return ()
    return (*_tokens_line(old, new), *_request(old, new), *_hybrid(old, new))


def _tokens_line(old: Plan, new: Plan) -> Iterator[str]:
    before, after = old.memory.kv, new.memory.kv
    lines = before.shape.era.tokens_line, after.shape.era.tokens_line
    alike = all(abs(kv.tokens - comparable_tokens(kv)) <= 1 for kv in (before, after))  # rounded this way or that
    if lines[0] == lines[1] or alike:
        return
    versions = old.target.release, new.target.release
    yield (
        f'The line "GPU KV cache size" does not mean the same: in {versions[0]} it is {_TOKENS_LINE[lines[0]]} '
        f"({before.tokens:,} tokens), in {versions[1]} {_TOKENS_LINE[lines[1]]} ({after.tokens:,}). "
        f"Counted alike, in full-length requests, the pool goes from {comparable_tokens(before):,} to "
        f"{comparable_tokens(after):,} tokens."
    )


def _request(old: Plan, new: Plan) -> Iterator[str]:
    before, after = old.memory.kv, new.memory.kv
    if before.needed_bytes == after.needed_bytes or before.max_model_len != after.max_model_len:
        return
    yield (
        f"One request of {after.max_model_len:,} tokens is counted as {human_bytes(before.needed_bytes)} by "
        f"{old.target.release} and as {human_bytes(after.needed_bytes)} by {new.target.release}: a start fails where "
        "the KV cache is smaller than that."
    )


def _hybrid(old: Plan, new: Plan) -> Iterator[str]:
    before, after = old.memory.kv, new.memory.kv
    if max(len(before.groups), 1) != max(len(after.groups), 1):
        yield (
            f"The layers share their blocks in {_groups(before)} with {old.target.release} and in {_groups(after)} "
            f"with {new.target.release}."
        )
    elif before.bytes_per_block != after.bytes_per_block:
        yield (
            f"A block takes {human_bytes(before.bytes_per_block)} with {old.target.release} and "
            f"{human_bytes(after.bytes_per_block)} with {new.target.release}, so the same bytes are not as many blocks."
        )


def _groups(kv: KvPlan) -> str:
    number = len(kv.groups) or 1
    return "one group" if number == 1 else f"{number} groups"
