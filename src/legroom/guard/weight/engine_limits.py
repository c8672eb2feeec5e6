"""What the engine can hold: from vLLM's configuration, its metrics page, or a plan.

The blocks of a request follow from the pool's blocks, the blocks of one request of full length, and that length. In a
hybrid model further groups of layers (sliding windows, recurrent states) use the same pool. A request of any length
holds at most what these groups hold at full length, so a full-length request's surplus over plain attention is added to
each request: an upper bound, and exact for states of one size."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.releases import Release
from legroom.guard.request.prefixes import PrefixUnit
from legroom.planning.plan_document import PlanDocument, read_plan
from legroom.records import dataclass
from legroom.units import cdiv

_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
DEFAULT_BLOCK = 16
"""vLLM's usual block size, used while its own is unknown."""
NULL_BLOCK = 1
"""vLLM's V1 pool never allocates its first block."""

SLOTS_PER_DRAFT = 2
"""A step holds slots for the drafts it verifies and for the next ones."""

FIRST_WITH_QUEUE_BOUNDS = "0.29.0"
"""The first vLLM with --max-num-queued-reqs and --max-num-queued-tokens."""

_FLAG_FIELDS = ("max_model_len", "max_num_seqs", "default_output_tokens", "max_logprobs", "media", "prefix_caching")


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """One engine's pool and flags; None: unknown."""

    num_blocks: int | None = None
    """Of one data-parallel rank, the null block included."""
    block_size: int | None = None
    full_request_blocks: int | None = None
    """Blocks of one request of `max_model_len`."""
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    ranks: int = 1
    """Data-parallel engines, each with its own pool."""
    api_servers: int = 1
    """API server processes that share the requests."""
    extra_tokens: int = 0
    """Further slots of a sequence, for speculative drafts."""
    default_output_tokens: int | None = None
    """The server's max_tokens for requests that name none."""
    max_logprobs: int | None = None
    media: Mapping[str, int] | None = None
    max_num_queued_reqs: int | None = None
    """vLLM's own bound on its requests (0.29+); further ones fail with 503."""
    max_num_queued_tokens: int | None = None
    prefix_caching: bool | None = None
    source: str = ""

    @property
    def known(self) -> bool:
        """Whether the number and the size of the KV blocks are known."""
        return bool(self.num_blocks and self.block_size)

    @property
    def cacheless(self) -> bool:
        """Whether the model has no KV cache (an encoder): vLLM then allocates the null block alone."""
        return self.known and self.num_blocks == NULL_BLOCK

    @property
    def rank_blocks(self) -> int:
        """KV blocks that one engine can allocate: all but the null block."""
        return max((self.num_blocks or 0) - NULL_BLOCK, 0)

    @property
    def prefix_unit(self) -> PrefixUnit | None:
        """How prompts are split into blocks to share; None without prefix cache, for several ranks or hybrid models."""
        size = self.block_size
        if not self.prefix_caching or not size or self.cacheless or self.ranks > 1:
            return None
        if self.full_request_blocks and self.full_request_blocks != cdiv(self.max_model_len or 0, size):
            return None
        return PrefixUnit(size, size + 1 if self.extra_tokens else 1)

    def share_blocks(self, overcommit: float = 1.0) -> int | None:
        """This API server's share of all engines' blocks times `overcommit`; None: unknown, or no KV cache."""
        if not self.known or self.cacheless:
            return None
        return max(1, int(self.rank_blocks * self.ranks * overcommit) // self.api_servers)

    def share_sequences(self) -> int | None:
        """This API server's share of max_num_seqs over all ranks, or of vLLM's queue bound if lower; None: unknown."""
        most = [self.max_num_seqs * self.ranks] if self.max_num_seqs else []
        most += [self.max_num_queued_reqs] if self.max_num_queued_reqs else []
        return max(1, min(most) // self.api_servers) if most else None

    def blocks(self, tokens: int) -> int:
        """The most KV blocks that a sequence of this many tokens holds, drafts and sliding or state layers included."""
        size = self.block_size or DEFAULT_BLOCK
        tokens += self.extra_tokens
        plain = cdiv(tokens, size)
        if self.full_request_blocks is None or not self.max_model_len:
            return plain
        longest = cdiv(self.max_model_len + self.extra_tokens, size)
        surplus = self.full_request_blocks - cdiv(self.max_model_len, size)
        if surplus < 0:  # no layer keeps every token
            return self.full_request_blocks
        return min(plain, longest) + surplus

    def completed_by(self, other: "EngineLimits") -> "EngineLimits":
        """These limits, with unknown ones taken from `other`."""
        missing = {name: getattr(other, name) for name in _FLAG_FIELDS if getattr(self, name) is None}
        if not self.known and other.known:
            pool = ("num_blocks", "block_size", "full_request_blocks", "ranks", "extra_tokens")
            missing |= {name: getattr(other, name) for name in pool} | {"source": other.source}
        elif other.known:  # a metrics page does not show drafts, nor, before 0.24, hybrid layers
            missing["extra_tokens"] = self.extra_tokens or other.extra_tokens
            length = self.max_model_len or other.max_model_len
            is_alike = (other.block_size, other.max_model_len) == (self.block_size, length)
            if self.full_request_blocks is None and is_alike:
                missing["full_request_blocks"] = other.full_request_blocks
        return replace(self, **missing)


_PLAN_FIELDS = ("kv.num_blocks", "kv.block_size", "kv.max_concurrency", "args.max_model_len", "args.max_num_seqs")


def limits_of_plan(plan: PlanDocument) -> EngineLimits:
    """The pool and flags of a plan; LegroomError where it has no pool, unless the model needs none."""
    kv, args = plan.kv, plan.args
    # A model without a KV cache has the null block alone.
    blocks = NULL_BLOCK if kv.bytes_per_token == 0 else kv.num_blocks
    limits = EngineLimits(
        num_blocks=blocks,
        block_size=kv.block_size * _context_parallel_ranks(args.get),
        full_request_blocks=round(blocks / kv.max_concurrency) if kv.max_concurrency > 0 else None,
        max_model_len=int(args["max_model_len"]),
        max_num_seqs=int(args["max_num_seqs"]),
        ranks=_positive_int(args.get("data_parallel_size")) or 1,
        extra_tokens=SLOTS_PER_DRAFT * (_positive_int(args.get("num_speculative_tokens")) or 0),
        prefix_caching=_bool_or_none(args.get("enable_prefix_caching")),
        source=plan.source,
    )
    if not limits.known:
        raise LegroomError(f"{plan.source} plans no KV cache: there is nothing to admit to", "plan one that fits first")
    return limits


def read_limits(path: Path) -> EngineLimits:
    """The engine's limits from a file that `legroom plan --json` wrote."""
    return limits_of_plan(read_plan(str(path), _PLAN_FIELDS))


def limits_of_metrics(page: str) -> EngineLimits:
    """Limits from `vllm:cache_config_info` (one row per engine), by the smallest pool; all unknown without it."""
    # Rows of one server's data-parallel engines differ in the engine alone, and each has the sum of their blocks
    # (0.9+).
    servers: Counter[frozenset[tuple[str, str]]] = Counter()
    for line in page.splitlines():
        if line.startswith("vllm:cache_config_info{"):
            servers[frozenset(pair for pair in _LABEL.findall(line) if pair[0] != "engine")] += 1
    engine_limits = [limits for row, engines in servers.items() if (limits := _limits_of_row(dict(row), engines)).known]
    if not engine_limits:
        return EngineLimits(source="no vllm:cache_config_info on the metrics page")
    engine_limits = [limits for limits in engine_limits if not limits.cacheless] or engine_limits
    smallest = min(engine_limits, key=lambda limits: limits.num_blocks or 0)
    return replace(smallest, ranks=sum(limits.ranks for limits in engine_limits))


def _blocks_per_engine(total: Any, engines: int) -> int | None:
    """One engine's blocks of the `total` that vLLM reports over all data-parallel engines (0.9+); None if unknown."""
    return (_positive_int(total) or 0) // engines or None


def _limits_of_row(row: Mapping[str, str], engines: int) -> EngineLimits:
    """Limits of one engine from the labels of a `vllm:cache_config_info` row that covers `engines` engines."""
    blocks = _blocks_per_engine(row.get("num_gpu_blocks"), engines)
    size = _positive_int(row.get("effective_attention_block_size")) or _positive_int(row.get("block_size"))
    full, length = _full_length_request(blocks, row.get("kv_cache_max_concurrency"), row.get("kv_cache_size_tokens"))
    caching = _bool_or_none(row.get("enable_prefix_caching"))
    return EngineLimits(blocks, size, full, length, ranks=engines, prefix_caching=caching, source="the metrics page")


def _full_length_request(blocks: int | None, concurrency: Any, tokens: Any) -> tuple[int | None, int | None]:
    """(KV blocks, tokens) of one request of full length, from the pool's `blocks` and `tokens` and the reported max
    `concurrency` (0.24 on); (None, None) where they are missing."""
    try:
        most, size = float(concurrency), int(tokens)
    except (TypeError, ValueError):
        return None, None
    if not blocks or not 1e-9 < most < math.inf:  # `nan` or nearly 0: a broken page
        return None, None
    # The tokens are most x length rounded down; 1e-6 keeps an exact quotient from being rounded up.
    return max(1, round(blocks / most)), max(1, math.ceil(size / most - 1e-6))


def limits_of_vllm(config: Any, args: Any) -> EngineLimits:
    """Limits from vLLM's VllmConfig and its API server's parsed flags; attributes that a release lacks stay unknown."""
    cache, model = getattr(config, "cache_config", None), getattr(config, "model_config", None)
    scheduler, parallel = getattr(config, "scheduler_config", None), getattr(config, "parallel_config", None)
    ranks = _num_engines(parallel)
    blocks = _blocks_per_engine(getattr(cache, "num_gpu_blocks", None), ranks)
    size = _positive_int(getattr(cache, "block_size", None))
    if size:  # all context-parallel ranks share it
        size *= _context_parallel_ranks(partial(getattr, parallel))
    reported = (getattr(cache, name, None) for name in ("kv_cache_max_concurrency", "kv_cache_size_tokens"))
    full, _ = _full_length_request(blocks, *reported)
    speculation, logprobs = getattr(config, "speculative_config", None), getattr(model, "max_logprobs", None)
    return EngineLimits(
        num_blocks=blocks,
        block_size=_positive_int(getattr(cache, "effective_attention_block_size", None)) or size,
        full_request_blocks=full,
        max_model_len=_positive_int(getattr(model, "max_model_len", None)),
        max_num_seqs=_positive_int(getattr(scheduler, "max_num_seqs", None)),
        ranks=ranks,
        api_servers=_positive_int(getattr(args, "api_server_count", None)) or 1,
        extra_tokens=SLOTS_PER_DRAFT * (_positive_int(getattr(speculation, "num_speculative_tokens", None)) or 0),
        default_output_tokens=_default_output_tokens(model),
        max_logprobs=logprobs if isinstance(logprobs, int) and logprobs >= -1 else None,
        media=_media_limits(model),
        max_num_queued_reqs=_positive_int(getattr(scheduler, "max_num_queued_reqs", None)),
        max_num_queued_tokens=_positive_int(getattr(scheduler, "max_num_queued_tokens", None)),
        prefix_caching=_bool_or_none(getattr(cache, "enable_prefix_caching", None)),
        source="vLLM's own configuration",
    )


def _context_parallel_ranks(flag: Callable[[str, Any], Any]) -> int:
    """Ranks that share the tokens of one sequence; `flag(name, default)` returns a vLLM flag's value."""
    names = ("decode_context_parallel_size", "prefill_context_parallel_size")
    return math.prod(_positive_int(flag(name, None)) or 1 for name in names)


def _num_engines(parallel: Any) -> int:
    """Data-parallel engines that requests can go to, by vLLM's ParallelConfig; one behind an external load balancer."""
    if getattr(parallel, "data_parallel_external_lb", False):
        return 1
    own = "data_parallel_size_local" if getattr(parallel, "data_parallel_hybrid_lb", False) else "data_parallel_size"
    return _positive_int(getattr(parallel, own, None)) or 1


def _default_output_tokens(model: Any) -> int | None:
    """The positive max_tokens in get_diff_sampling_param() of vLLM's ModelConfig; None where it has none."""
    try:
        return _positive_int(model.get_diff_sampling_param().get("max_tokens"))
    except Exception:  # a model config of another release
        return None


def _media_limits(model: Any) -> Mapping[str, int] | None:
    """Modality -> most inputs per prompt (images, audio, video) by vLLM's ModelConfig; None where unknown."""
    try:
        limit = model.multimodal_config.get_limit_per_prompt
        return {name: int(limit(name)) for name in ("image", "audio", "video")}
    except Exception:
        return None


def _bool_or_none(value: Any) -> bool | None:
    """A bool from a flag or from a metric label ("True", "False"); None for anything else."""
    return value if isinstance(value, bool) else {"True": True, "False": False}.get(str(value))


def _positive_int(value: Any) -> int | None:
    """The value as an integer above 0; None where it is not one."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        return None
    return number if number > 0 else None


def native_flags(
    release: Release, limits: EngineLimits, queue_requests: int = 512, overcommit: float = 1.0
) -> dict[str, str]:
    """vLLM flag -> value of its own queue bounds that match `queue_requests` and `overcommit`; {} before 0.29."""
    # vLLM then answers 503 without Retry-After, so the bounds are above the guard's own: a request counts once for each
    # of its prompts, hence twice the running sequences.
    if release.before(FIRST_WITH_QUEUE_BOUNDS):
        return {}
    flags = {}
    if limits.max_num_seqs:
        flags["--max-num-queued-reqs"] = str(2 * limits.max_num_seqs * limits.ranks + queue_requests)
    if limits.rank_blocks and limits.block_size:
        tokens = limits.rank_blocks * limits.block_size * limits.ranks
        flags["--max-num-queued-tokens"] = str(int(tokens * max(1.0, overcommit)))
    return flags
