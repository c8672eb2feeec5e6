"""vLLM's accounting with a log's figures: pool = share x total - weights - peak - non-torch - graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from legroom.diagnosis.case import Case
from legroom.facts.flags import default, flags_changing
from legroom.facts.gpus import Gpu, all_gpus
from legroom.facts.gpus import gpu as known_gpu
from legroom.records import dataclass
from legroom.units import GIB

if TYPE_CHECKING:
    from legroom.facts.releases import Release
    from legroom.memory.deployment_memory import Measurements
    from legroom.vllm.args import ServeArgs

_CHANGES_REQUEST = frozenset({"max_model_len", "kv_cache_dtype", "block_size"})
"""Flags that change the KV bytes of a request."""
FULL_OF_WEIGHTS = 0.85
"""Weights above this share of a card leave less than a tenth of the largest budget, 0.95, for everything else."""
BESIDE_BYTES = 3 << 30
"""CUDA context, profile run and a small pool, where none is measured."""
_LEAST_BESIDE_BYTES = 1 << 29  # CUDA context and the smallest profile run (H200 starts).


@dataclass(frozen=True, slots=True)
class LogAccounting:
    """The parts of the budget as measured; None where the log does not print one."""

    total_bytes: int | None
    share: float
    free_bytes: int | None
    """Before vLLM allocated anything."""
    weights_bytes: int | None
    """Of the fullest rank."""
    peak_bytes: int | None
    non_torch_bytes: int | None
    pool_bytes: int | None
    """Left for the KV cache; may be negative."""
    request_bytes: int | None = None
    """KV bytes of one request of full length."""
    request_len: int | None = None
    graph_bytes: int | None = None
    """The estimate for CUDA graphs that the pool was charged with."""

    @property
    def likely_total_bytes(self) -> int | None:
        """The card's total as known, else the smallest that the printed weights and pool allow; None without those."""
        if self.total_bytes is not None or self.weights_bytes is None or self.pool_bytes is None:
            return self.total_bytes
        beside = (self.peak_bytes or 0) + (self.non_torch_bytes or 0) + (self.graph_bytes or 0)
        beside = max(beside, _LEAST_BESIDE_BYTES)
        return max(round((self.weights_bytes + self.pool_bytes + beside) / self.share), self.weights_bytes + beside)

    @property
    def weights_over_budget_bytes(self) -> int:
        """How far the weights alone exceed utilization x total; 0 where they do not."""
        if self.total_bytes is None or self.weights_bytes is None:
            return 0
        return max(self.weights_bytes - round(self.share * self.total_bytes), 0)

    def pool_at(self, share: float) -> int | None:
        """KV pool bytes at utilization `share`, an upper bound if a part of the budget is missing; None if unknown."""
        if self.total_bytes is None:
            return None
        if self.pool_bytes is not None:
            return self.pool_bytes + round((share - self.share) * self.total_bytes)
        if self.weights_bytes is None:
            return None
        counted = self.weights_bytes + (self.peak_bytes or 0) + (self.non_torch_bytes or 0)
        return round(share * self.total_bytes) - counted

    def refuses(self, flags: Mapping[str, Any]) -> bool:
        """Whether the log's figures alone show that a server with these flags cannot start."""
        if flags.keys() == {"kv_cache_dtype"} and self.pool_bytes and 2 * self.pool_bytes < (self.request_bytes or 0):
            return True  # 8 bits halve a request
        if self.total_bytes is None or flags.keys() & flags_changing("pool"):
            return False
        share = flags.get("gpu_memory_utilization") or self.share
        pool = self.pool_at(share)
        smaller_peak = flags.keys() & {"max_num_seqs", "max_num_batched_tokens", "limit_mm_per_prompt", "enforce_eager"}
        if smaller_peak:
            return self.weights_bytes is not None and self.total_bytes * share <= self.weights_bytes
        above_free = self.free_bytes is not None and round(share * self.total_bytes) > self.free_bytes
        needed = 0 if flags.keys() & _CHANGES_REQUEST else self.request_bytes or 0
        if pool is None and share < self.share and self.weights_bytes is not None:
            pool = round(share * self.total_bytes) - self.weights_bytes  # before the peak, which is not known
        too_small = pool is not None and (pool <= 0 or pool < needed)
        return too_small or (above_free and "gpu_memory_utilization" in flags)

    def longest_at(self, share: float) -> int | None:
        """Tokens (multiple of 256) of the longest request at utilization `share`, less 3 %; None where unknown or 0."""
        pool = self.pool_at(share)
        if pool is None or self.request_bytes is None or self.request_len is None:
            return None
        tokens = pool * self.request_len // self.request_bytes * 97 // 100
        return min(tokens, self.request_len) // 256 * 256 or None


def log_accounting(case: Case, share: float, total_bytes: int | None, planned_bytes: int | None) -> LogAccounting:
    """The log's memory figures at this utilization and card total; `planned_bytes`: weights where it prints none."""
    startup = case.startup
    is_checked = case.has("free_below_desired")
    pool = pool_bytes(case)
    return LogAccounting(
        total_bytes,
        share,
        case.number("free_below_desired", "free_bytes") if is_checked else startup.free_at_start_bytes,
        startup.weights_bytes or _expected_weights_bytes(case, total_bytes, planned_bytes),
        startup.activation_bytes,
        startup.non_torch_bytes,
        pool,
        *_request_bytes_and_len(case, pool),
        startup.graph_estimate_bytes,
    )


def _expected_weights_bytes(case: Case, total_bytes: int | None, planned_bytes: int | None) -> int | None:
    """The planned weights, else stated ones that nearly fill the card; None if weights that loaded disprove them."""
    weights = planned_bytes or stated_weights_bytes(case)
    is_above = total_bytes is not None and weights > total_bytes
    is_loaded = case.was_ready or case.site not in ("", "build", "load")
    is_full = total_bytes is not None and weights > FULL_OF_WEIGHTS * total_bytes
    return None if is_loaded and (is_above or not planned_bytes) else weights if planned_bytes or is_full else None


def stated_weights_bytes(case: Case, ranks: int = 0) -> int:
    """A rank's weights by sentences on their size, or parameters and dtype, else 0. `ranks` 0: as many as by flags."""
    told, size, args = case.first("parameters_told"), case.first("model_size_told"), case.startup.args
    by_name = float(told.facts["billions"]) * 1e9 * args.dtype_bytes if told is not None else 0
    said = {name: size.number(name) or 0 for name in size.facts if name.endswith("_bytes")} if size else {}
    own = next((said[name] for name in ("rank_bytes", "card_bytes", "own_bytes") if said.get(name)), 0)
    return own or round(max(said.values(), default=by_name) / (ranks or args.engine_ranks))


def _request_bytes_and_len(case: Case, pool: int | None) -> tuple[int | None, int | None]:
    """(KV bytes, tokens) of one request by vLLM's check or the concurrency of `pool` bytes; (None, None) without."""
    needed, length = (case.number("kv_bytes_short", name) for name in ("needed_bytes", "max_model_len_count"))
    if needed is not None and length is not None and needed > 0:
        return needed, length
    concurrency, tokens = case.startup.max_concurrency, case.startup.concurrency_len
    if not concurrency or not tokens or pool is None or pool <= 0:
        return None, None
    return round(pool / concurrency), tokens


_MAX_RELATIVE_DISTANCE = 0.03
"""Distance from a card's known band: an error of 1 GiB in the peak is 4 % of a 24 GiB card."""
_MAX_ITERATIONS = 3  # Defaults depend on the card, and the peak on the defaults; two iterations nearly always suffice.


def deduce_total_bytes(case: Case, args: ServeArgs, release: Release, seen: Measurements) -> int | None:
    """The total of the known card that matches the log's accounting (`seen`: its figures); None where none does."""
    from legroom.planning.plan import Target, plan  # costs a tenth of a second
    from legroom.vllm_logs.printed_flags import load_logged_model

    startup, pool = case.startup, pool_bytes(case)
    if pool is None or not startup.args_known or not startup.weights_bytes or not args.model:
        return None
    share = args.gpu_memory_utilization or default("--gpu-memory-utilization", release)
    model, total = load_logged_model(args.model), round((pool + startup.weights_bytes) / share)
    card: Gpu | None = None
    for _ in range(_MAX_ITERATIONS):
        unnamed = known_gpu(f"{max(total, GIB) / GIB:.2f}GiB")
        layout = plan(Target(model, unnamed, args.gpus_needed, release, seen), args).layout
        counted = layout.weights.bytes + layout.activation.bytes + layout.non_torch.bytes + layout.cuda_graph.bytes
        total = round((pool + counted) / share)
        nearest = _nearest_card(total)
        if nearest is None or nearest == card:
            break
        card, total = nearest, nearest.total_bytes
    return nearest.total_bytes if nearest else None


def pool_bytes(case: Case) -> int | None:
    """The KV pool that vLLM computed from the utilization; None where it is not printed or a flag sets it."""
    is_short, needed = case.has("kv_bytes_short"), case.number("kv_bytes_short", "needed_bytes")
    pool = case.number("kv_bytes_short", "available_bytes") if is_short else case.startup.available_kv_bytes
    wanted = case.number("kv_bytes_short", "max_model_len_count")
    if pool is None and needed and wanted and (fits := case.number("estimated_max_len", "fits_len_count")):
        pool = needed * fits // wanted  # keys and values grow with the length
    return None if case.startup.explicit_kv else pool


def _nearest_card(total_bytes: int) -> Gpu | None:
    """The card whose range of reported totals is nearest to this one; None where none is within 3 %."""
    whole = [card for card in all_gpus() if " MIG " not in card.name and not card.unified]
    near = [card for card in whole if _bytes_outside_range(card, total_bytes) <= _MAX_RELATIVE_DISTANCE * total_bytes]
    return min(near, key=lambda card: _bytes_outside_range(card, total_bytes), default=None)


def _bytes_outside_range(card: Gpu, total_bytes: int) -> int:
    """Bytes by which a total lies outside the totals that cards of this name report; 0 inside."""
    low, high = card.total_low_bytes or card.total_bytes, card.total_high_bytes or card.total_bytes
    return max(low - total_bytes, total_bytes - high, 0)
