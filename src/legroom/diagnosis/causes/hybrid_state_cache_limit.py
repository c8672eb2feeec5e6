"""More sequences may run than there are state blocks for the Mamba or linear-attention layers."""

from collections.abc import Iterator

from legroom.diagnosis.causes import Assessment, Case, Cause, Fix, FixPlanner, Strength, proof, reason


def examine(case: Case) -> Assessment | None:
    """Assesses vLLM's error that max_num_seqs exceeds the Mamba state blocks of a hybrid model; None without it."""
    error = case.first("state_blocks_short")
    if error is None:
        return None
    max_seqs, blocks = error.facts.get("max_num_seqs_count"), error.facts["state_blocks_count"]
    running = f"{max_seqs} sequences may run" if max_seqs is not None else "More sequences may run (max_num_seqs)"
    why = reason("state_block_each", {"running": running, "blocks": blocks})
    return Assessment(Strength.NAMED, proof(case.first("estimated_max_len"), error), why)


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes (None: not applicable): no more sequences than state blocks, a larger pool, more GPUs."""
    blocks = planner.case.number("state_blocks_short", "state_blocks_count") or 0
    if blocks > 0:
        seqs = blocks if blocks < 32 else blocks // 8 * 8
        why, trades = f"There are {blocks} state blocks, one a sequence.", "fewer requests run at once"
        yield planner.plan_change("max_num_seqs", {"max_num_seqs": seqs}, why, trades=trades)
    yield planner.pull_lever("raise utilization", "A larger pool has more state blocks.")
    yield planner.pull_lever("more GPUs", "Split over more GPUs, a state block is smaller.")


CAUSE = Cause(entry="LR202", phase="startup_kv")
