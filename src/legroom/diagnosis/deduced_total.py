"""How much memory a card has whose log does not say: vLLM's accounting solved for the total.

pool = share x total - weights - peak - non-torch - graphs, so total = (pool + all that was counted) / share. The pool
and the weights are printed, the rest is known of the model; the card with that total is what the run had.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.facts.gpus import Gpu, all_gpus
from legroom.facts.gpus import gpu as known_gpu

if TYPE_CHECKING:
    from legroom.diagnosis.case import Case
    from legroom.facts.releases import Release
    from legroom.memory.deployment_memory import Measurements
    from legroom.vllm.args import ServeArgs

_NEAR = 0.03
"""How far the sum may lie from a card's known band: a peak that is wrong by 1 GiB moves a card of 24 GiB by 4 %."""
_ROUNDS = 3
"""Defaults follow the size of the card, and the peak follows them: the second look is nearly always the last."""


def deduced_total_bytes(case: Case, args: ServeArgs, release: Release, seen: Measurements) -> int | None:
    """The total of the known card that the log's own numbers lead to; None where they lead to none."""
    from legroom.planning.plan import Target, plan  # costs a tenth of a second
    from legroom.vllm_logs.printed_flags import load_logged_model

    startup, pool = case.startup, pool_bytes(case)
    if pool is None or not startup.args_known or not startup.weights_bytes or not args.model:
        return None
    share = args.gpu_memory_utilization or (0.92 if release.at_least("0.20.0") else 0.9)
    model, total = load_logged_model(args.model), round((pool + startup.weights_bytes) / share)
    card: Gpu | None = None
    for _ in range(_ROUNDS):
        layout = plan(Target(model, _sized(total), args.gpus_needed, release, seen), args).layout
        counted = layout.weights.bytes + layout.activation.bytes + layout.non_torch.bytes + layout.cuda_graph.bytes
        total = round((pool + counted) / share)
        nearest = _nearest_card(total)
        if nearest is None or nearest == card:
            break
        card, total = nearest, nearest.total_bytes
    return nearest.total_bytes if nearest else None


def pool_bytes(case: Case) -> int | None:
    """What was left for the KV cache, where vLLM computed it from the share of the card."""
    error = case.first("kv_bytes_short")
    pool = error.facts.get("available_bytes") if error else case.startup.available_kv_bytes
    return pool if isinstance(pool, int) and not case.startup.explicit_kv else None


def _sized(total_bytes: int) -> Gpu:
    return known_gpu(f"{max(total_bytes, 1 << 30) / (1 << 30):.2f}GiB")


def _nearest_card(total_bytes: int) -> Gpu | None:
    whole = [card for card in all_gpus() if " MIG " not in card.name and not card.unified]
    near = [card for card in whole if _distance(card, total_bytes) <= _NEAR * total_bytes]
    return min(near, key=lambda card: _distance(card, total_bytes), default=None)


def _distance(card: Gpu, total_bytes: int) -> int:
    """To the band of totals that such cards report."""
    low, high = card.total_low_bytes or card.total_bytes, card.total_high_bytes or card.total_bytes
    return max(low - total_bytes, total_bytes - high, 0)
