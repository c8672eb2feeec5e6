"""More sequences may run than there are state blocks for the Mamba or linear-attention layers."""

from __future__ import annotations

from collections.abc import Iterator

from legroom.diagnosis.causes import Assessment, Case, Cause, DeadEnd, Fix, FixPlanner, Localized, proof


def examine(case: Case) -> Assessment | None:
    """vLLM's own check of state blocks."""
    error = case.first("state_blocks_short")
    if error is None:
        return None
    asked, blocks = error.facts.get("max_num_seqs_count"), error.facts["state_blocks_count"]
    running = f"{asked} sequences may run" if asked is not None else "More sequences may run (max_num_seqs)"
    why = (
        f"Every running sequence of this hybrid model needs a state block of its own. {running} and there are only "
        f"{blocks} blocks. This is a second check beside the one for max_model_len: passing one says nothing of the "
        "other."
    )
    return Assessment(0.96, proof(case.first("estimated_max_len"), error), why)


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    error = planner.case.first("state_blocks_short")
    blocks = error.facts.get("state_blocks_count") if error else None
    if isinstance(blocks, int) and blocks > 0:
        seqs = blocks if blocks < 32 else blocks // 8 * 8
        yield planner.plan_change(
            "max_num_seqs",
            {"max_num_seqs": seqs},
            f"There are {blocks} state blocks, one a sequence.",
            trades="fewer requests run at once",
            confidence=0.85,
        )
    yield planner.pull_lever("raise utilization", "raise_util", "A larger pool has more state blocks.", 0.4)
    yield planner.pull_lever(
        "more GPUs", "more_or_fewer_gpus_tp_pp", "Split over more GPUs, a state block is smaller.", 0.35
    )


CAUSE = Cause(
    label="hybrid_state_cache_limit",
    entry="LR202",
    title=Localized("more sequences than state blocks of the hybrid model", "max_num_seqs 超过混合模型的状态缓存块数"),
    phase="startup_kv",
    examine=examine,
    remedies=remedies,
    dead_ends=(DeadEnd("lower max_model_len alone", "state blocks are counted by sequence, not by length"),),
)
