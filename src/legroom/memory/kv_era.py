"""How a release counts, checks and reports its KV cache: one set of answers a release."""

from __future__ import annotations

from functools import cache
from typing import Literal

from legroom.facts.releases import release as known_release
from legroom.records import dataclass

LengthCheck = Literal["slots", "layers", "first group of the model", "first group", "all groups"]
TokensLine = Literal["slots", "slots over groups", "full-length requests"]


@dataclass(frozen=True, slots=True)
class Era:
    """The planner's habits in one release."""

    length_check: LengthCheck
    """What the bytes of one full-length request are summed over."""
    null_block_held_back: bool
    """The check leaves out the block that the pool never hands out."""
    override_replaces_memory: bool
    """num_gpu_blocks_override also decides the memory that the checks see."""
    override_forgotten: bool
    tokens_line: TokensLine
    concurrency_by_slots: bool
    concurrency_by_blocks: bool
    """Blocks over blocks a request; before, bytes over bytes, which rounds otherwise."""
    first_stage_printed: bool
    """Every stage printed its own line before the smallest count was taken."""
    smallest_stage_alone: bool
    """One check of the whole model against the smallest stage."""


@cache
def era(version: str, engine: str) -> Era:
    """The era of a release; V0 never left the first one."""
    now = known_release(version)
    v0 = engine == "V0"
    check: LengthCheck = "slots"
    if not v0:
        if now.at_least("0.19.0"):
            check = "all groups"
        elif now.at_least("0.17.0"):
            check = "first group"
        elif now.at_least("0.14.0"):
            check = "first group of the model"
        else:
            check = "layers"
    tokens: TokensLine = "slots over groups"
    if v0 or now.before("0.9.1"):
        tokens = "slots"
    elif now.at_least("0.20.1"):
        tokens = "full-length requests"
    return Era(
        length_check=check,
        null_block_held_back=not v0 and now.at_least("0.29.0"),
        override_replaces_memory=not v0 and now.at_least("0.20.1"),
        override_forgotten=now.version == "0.9.1" and not v0,
        tokens_line=tokens,
        concurrency_by_slots=v0 or now.before("0.9.1"),
        concurrency_by_blocks=now.at_least("0.27.0"),
        first_stage_printed=now.before("0.11.1"),
        smallest_stage_alone=not v0 and now.within("0.14.0", "0.16.0"),
    )
