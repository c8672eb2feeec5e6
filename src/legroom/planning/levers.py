"""The levers: one function each, from a plan to the flag changes worth trying, the cheapest for the user first.

A lever proposes; whether a proposal works is for the memory model to say (`planning.advice`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from legroom.facts.models import from_bundled, variants
from legroom.facts.releases import release as known_release
from legroom.memory.kv.plan import kv_plan
from legroom.records import dataclass

if TYPE_CHECKING:
    from legroom.planning.plan import Plan

Proposals = Iterator[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Lever:
    """A way to change a deployment, what it costs the user, and when it can help."""

    name: str
    propose: Callable[[Plan], Proposals]
    trades: str
    """What the user gives up, in words."""
    cost: int
    """Order of preference among levers that work: 0 costs nothing, higher is worse."""


def shorter_context(plan: Plan) -> Proposals:
    """The longest length that fits across the error band, rounded down so that small drift does not break it."""
    layouts = plan.memory.ranks
    cautious = [rank.kv_cache.low for rank in layouts]
    for pools in (cautious, [rank.kv_cache.bytes for rank in layouts]):
        longest = kv_plan(plan.target.model, plan.settings, plan.target.gpu, pools).longest_len
        step = 1024 if longest >= 4096 else 128
        length = longest // step * step
        if 0 < length < plan.settings.max_model_len:
            yield {"max_model_len": length}


def more_utilization(plan: Plan) -> Proposals:
    """Raise the share of the card, a hundredth at a time."""
    first = int(plan.settings.gpu_memory_utilization * 100) + 1
    for hundredths in range(first, 99):
        yield {"gpu_memory_utilization": hundredths / 100}


def less_utilization(plan: Plan) -> Proposals:
    """Lower the share of the card, a hundredth at a time, so that what vLLM does not count has room."""
    last = int(plan.settings.gpu_memory_utilization * 100)
    for hundredths in range(last, 29, -1):
        if hundredths / 100 < plan.settings.gpu_memory_utilization:
            yield {"gpu_memory_utilization": hundredths / 100}


def smaller_batches(plan: Plan) -> Proposals:
    """Fewer tokens a step: a smaller activation peak, slower prefill."""
    settings = plan.settings
    floor = settings.max_model_len if not settings.enable_chunked_prefill else max(settings.max_num_seqs, 512)
    tokens = settings.max_num_batched_tokens // 2
    while tokens >= floor:
        yield {"max_num_batched_tokens": tokens}
        tokens //= 2


def fewer_sequences(plan: Plan) -> Proposals:
    """Fewer running requests: smaller logits, sampler tables and CUDA graphs; state blocks in hybrid models."""
    seqs = plan.settings.max_num_seqs
    limit = plan.memory.kv.state_blocks
    if limit is not None and 0 < limit < seqs:
        yield {"max_num_seqs": limit}
    seqs //= 2
    while seqs >= 4:
        yield {"max_num_seqs": seqs}
        seqs //= 2


def fewer_graphs(plan: Plan) -> Proposals:
    """Capture smaller batch sizes only."""
    sizes = plan.settings.cudagraph_capture_sizes
    if len(sizes) < 2 or not known_release(plan.settings.release).at_least("0.11.1"):
        return
    largest = max(sizes) // 2
    while largest >= 16:
        yield {"max_cudagraph_capture_size": largest}
        largest //= 2


def no_graphs(plan: Plan) -> Proposals:
    """Run without CUDA graphs."""
    if not plan.settings.enforce_eager:
        yield {"enforce_eager": True}


def fp8_kv_cache(plan: Plan) -> Proposals:
    """Half the bytes a token, where the GPU computes in fp8."""
    capability = plan.target.gpu.compute_capability
    if plan.settings.kv_cache_dtype in ("auto", "bfloat16", "float16") and capability >= (8, 9):
        yield {"kv_cache_dtype": "fp8"}


def more_gpus(plan: Plan) -> Proposals:
    """Shard over more GPUs: those that are there but unused first, then ones the user would have to add."""
    settings = plan.settings
    for times in (2, 4, 8):
        yield {"tensor_parallel_size": settings.tensor_parallel_size * times}


def quantized_weights(plan: Plan) -> Proposals:
    """A published quantized checkpoint of the same model, the one that gives up the fewest bits first."""
    if plan.target.model.quantization is None:
        models = [from_bundled(variant) for variant in variants(plan.target.model.name)]
        for model in sorted(models, key=lambda model: -model.quantization.weight_bits if model.quantization else 0):
            yield {"model": model.name}


def supported_settings(plan: Plan) -> Proposals:
    """Another precision or quantization where the release does not run the one that is asked for."""
    given = plan.args
    if given.quantization is not None:
        yield {"quantization": None}
    if given.kv_cache_dtype is not None:
        yield {"kv_cache_dtype": None}
    if plan.settings.dtype != "float16":
        yield {"dtype": "half"}


SUPPORTED = Lever("supported settings", supported_settings, "other settings, that this release runs on this card", 0)
"""The one lever for what a release refuses whatever the memory."""

LEVERS: tuple[Lever, ...] = (
    Lever("quantized weights", quantized_weights, "another checkpoint, with weights in fewer bits", 6),
    Lever("more GPUs", more_gpus, "the model runs on more GPUs, which talk to each other on every layer", 6),
    Lever("raise utilization", more_utilization, "less of the card is left for what vLLM does not count", 1),
    Lever("lower utilization", less_utilization, "a smaller KV pool", 1),
    Lever("shorter context", shorter_context, "requests longer than this are refused", 2),
    Lever("fewer captured graphs", fewer_graphs, "decode batches above the largest graph run slower", 2),
    Lever("fewer sequences", fewer_sequences, "fewer requests run at once", 3),
    Lever("smaller batches", smaller_batches, "long prompts take more steps", 3),
    Lever("fp8 KV cache", fp8_kv_cache, "keys and values are stored in 8 bits", 4),
    Lever("no CUDA graphs", no_graphs, "slower decoding, most of all for small batches", 5),
)
