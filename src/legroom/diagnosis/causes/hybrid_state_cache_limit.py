"""More sequences may run than there are state blocks for the Mamba or linear-attention layers."""

from __future__ import annotations

from collections.abc import Iterator

from legroom.diagnosis.case import Case
from legroom.diagnosis.finding import DeadEnd, Finding, Fix, proof
from legroom.diagnosis.workbench import Workbench

CAUSE, ENTRY = "hybrid_state_cache_limit", "LR202"


def examine(case: Case) -> Finding | None:
    """vLLM's own check; its number is the answer."""
    error = case.first("state_blocks_short")
    if error is None:
        return None
    asked, blocks = error.facts["max_num_seqs_count"], error.facts["state_blocks_count"]
    why = (
        "Every running sequence of this hybrid model needs a state "
        f"block of its own. {asked} sequences may run and there are "
        f"{blocks} blocks. This is a second check beside the one "
        "for max_model_len: passing one says nothing of the other."
    )
    return Finding(CAUSE, ENTRY, 0.96, proof(case.first("estimated_max_len"), error), why)


def remedies(bench: Workbench) -> Iterator[Fix | None]:
    """The printed number is the answer."""
    error = bench.case.first("state_blocks_short")
    blocks = error.facts.get("state_blocks_count") if error else None
    if isinstance(blocks, int) and blocks > 0:
        seqs = blocks if blocks < 32 else blocks // 8 * 8
        yield bench.change(
            "max_num_seqs",
            {"max_num_seqs": seqs},
            f"There are {blocks} state blocks, one a sequence.",
            trades="fewer requests run at once",
            confidence=0.85,
        )
    yield bench.lever("raise utilization", "raise_util", "A larger pool has more state blocks.", 0.4)
    yield bench.lever("more GPUs", "more_or_fewer_gpus_tp_pp", "Split over more GPUs, a state block is smaller.", 0.35)


DEAD_ENDS = (DeadEnd("lower max_model_len alone", "state blocks are counted by sequence, not by length"),)
