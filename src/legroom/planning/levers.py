"""Levers: functions from a plan to changes of flags that may make it fit; `planning.advice` tries them."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from legroom.memory.kv.kv_plan import kv_plan
from legroom.planning.capacity_search import UTILIZATIONS
from legroom.planning.checkpoints import FP8_MARLIN, quantized_checkpoints, smaller_models
from legroom.planning.plan import Plan, cold_start, rounded_len, sure_longest_len, try_flags
from legroom.records import dataclass
from legroom.units import GIB

Proposals = Iterator[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Lever:
    """One kind of change of a deployment, and its cost to the user."""

    name: str
    propose: Callable[[Plan], Proposals]
    trades: str
    """The trade-off, as a clause."""
    cost: int
    """Order of preference among working levers: 0 costs nothing, higher is worse."""
    shrinks_weights: bool = False
    """Whether it reduces the weights per card, which alone helps where they exceed the card."""


def shorter_context(plan: Plan) -> Proposals:
    """Shorter max_model_len: first what fits surely and on a first start, then longer ones that fit the estimate."""
    cold, warm = cold_start(plan).memory.ranks, plan.memory.ranks
    pools = ([rank.kv_cache.low for rank in warm], *([rank.kv_cache.bytes for rank in ranks] for ranks in (cold, warm)))
    held = (kv_plan(plan.target.model, plan.settings, plan.target.gpu, pool).longest_len for pool in pools)
    for length in (sure_longest_len(plan), *map(rounded_len, held)):
        if 0 < length < plan.settings.max_model_len:
            yield {"max_model_len": length}


def more_utilization(plan: Plan) -> Proposals:
    """Higher gpu_memory_utilization in steps of 0.01 up to 0.98; empty where even that gives too little memory."""
    first, last = int(plan.settings.gpu_memory_utilization * 100) + 1, round(UTILIZATIONS[-1] * 100)
    fullest = try_flags(plan, {"gpu_memory_utilization": UTILIZATIONS[-1]})
    if fullest is not None and _pool_is_short(fullest):
        return
    yield from ({"gpu_memory_utilization": hundredths / 100} for hundredths in range(first, last + 1))


def _pool_is_short(plan: Plan) -> bool:
    """Whether the KV cache is too small for max_model_len, rather than something else failing."""
    return plan.memory.failure is not None and plan.memory.failure is plan.memory.kv.failure


def less_utilization(plan: Plan) -> Proposals:
    """Lower gpu_memory_utilization in steps of 0.01 down to 0.30; none where the KV cache is too small already."""
    if _pool_is_short(plan):
        return
    share = plan.settings.gpu_memory_utilization
    yield from ({"gpu_memory_utilization": each} for each in reversed(UTILIZATIONS) if each < share)


def _halved(value: int, least: int) -> Iterator[int]:
    """Half of the value, a quarter and so on, as integers, as long as they are at least `least`."""
    while (value := value // 2) >= least:
        yield value


def smaller_batches(plan: Plan) -> Proposals:
    """Smaller max_num_batched_tokens: a smaller activation peak, slower prefill."""
    settings = plan.settings
    floor = settings.max_model_len if not settings.enable_chunked_prefill else max(settings.max_num_seqs, 512)
    yield from ({"max_num_batched_tokens": tokens} for tokens in _halved(settings.max_num_batched_tokens, floor))


def fewer_sequences(plan: Plan) -> Proposals:
    """Smaller max_num_seqs: smaller logits, sampler tables and CUDA graphs, fewer state blocks in hybrid models."""
    seqs = plan.settings.max_num_seqs
    limit = plan.memory.kv.state_blocks
    if limit is not None and 0 < limit < seqs:
        yield {"max_num_seqs": limit}
    yield from ({"max_num_seqs": fewer} for fewer in _halved(seqs, 4))


def fewer_graphs(plan: Plan) -> Proposals:
    """Smaller --max-cudagraph-capture-size: CUDA graphs for smaller batch sizes only."""
    sizes = plan.settings.cudagraph_capture_sizes
    if len(sizes) >= 2 and plan.settings.release.at_least("0.11.1"):
        yield from ({"max_cudagraph_capture_size": largest} for largest in _halved(max(sizes), 16))


def fewer_media(plan: Plan) -> Proposals:
    """Smaller --limit-mm-per-prompt: no videos, then one image at most; each also with the longer context it allows."""
    given = dict(plan.args.limit_mm_per_prompt or {})
    kinds = {item.kind for tower in plan.target.model.modalities for item in tower.items}
    limits = {"video": 0} if "video" in kinds and given.get("video") != 0 else {}
    as_it_is = next((shorter["max_model_len"] for shorter in shorter_context(plan)), 0)
    tighter = [limits] if limits else []
    if "image" in kinds and given.get("image") not in (0, 1):
        tighter.append({**limits, "image": 1})
    for media in tighter:
        flags = {"limit_mm_per_prompt": {**given, **media}}
        yield flags
        changed = try_flags(plan, flags)
        lengths = shorter_context(changed) if changed else ()
        yield from ({**flags, **shorter} for shorter in lengths if shorter["max_model_len"] > as_it_is)


def no_graphs(plan: Plan) -> Proposals:
    """--enforce-eager, which captures no CUDA graphs."""
    if not plan.settings.enforce_eager:
        yield {"enforce_eager": True}


def fp8_kv_cache(plan: Plan) -> Proposals:
    """--kv-cache-dtype fp8, for cards given by name; those without FP8 units use it if a kernel can unpack it."""
    if plan.settings.kv_cache_dtype in ("auto", "bfloat16", "float16") and any(plan.target.gpu.compute_capability):
        yield {"kv_cache_dtype": "fp8"}


def idle_gpus(plan: Plan) -> Proposals:
    """Larger parallel sizes that use GPUs of the machine on which no rank runs yet."""
    yield from _parallel_sizes(plan, plan.target.gpus)


def more_gpus(plan: Plan) -> Proposals:
    """Parallel sizes for more GPUs than planned, up to 8 or twice as many; empty where the user gave their number."""
    if not plan.target.gpus_given:
        settings = plan.settings
        used = settings.tensor_parallel_size * settings.pipeline_parallel_size * settings.data_parallel_size
        yield from _parallel_sizes(plan, max(8, used * 2), max(plan.target.gpus // settings.data_parallel_size, 1))


def _parallel_sizes(plan: Plan, most: int, above: int = 0) -> Proposals:
    """Larger tensor, then pipeline parallel sizes, with over `above` GPUs in one engine and at most `most` in all."""
    settings = plan.settings
    tensor, pipeline = settings.tensor_parallel_size, settings.pipeline_parallel_size
    fitting = [
        times for times in (2, 4, 8, 3, 6) if above < tensor * pipeline * times <= most // settings.data_parallel_size
    ]
    yield from ({"tensor_parallel_size": tensor * times} for times in fitting)
    yield from ({"pipeline_parallel_size": pipeline * times} for times in fitting)


def quantized_weights(plan: Plan) -> Proposals:
    """Published quantized checkpoints of the model, the widest weights first."""
    for model in quantized_checkpoints(plan.target, plan.args):
        yield {"model": model.name}


def online_quantization(plan: Plan) -> Proposals:
    """--quantization fp8 on an unquantized checkpoint, on NVIDIA cards from Ampere on."""
    model, gpu = plan.target.model, plan.target.gpu
    unquantized = model.quantization is None and plan.args.quantization is None
    if unquantized and gpu.vendor == "nvidia" and gpu.compute_capability >= FP8_MARLIN:
        yield {"quantization": "fp8"}


def offloaded_weights(plan: Plan) -> Proposals:
    """--cpu-offload-gb for the missing memory, up to half of the weights."""
    if plan.args.cpu_offload_gb:
        return
    weights = max(rank.weights.bytes for rank in plan.memory.ranks)
    needed = plan.memory.kv.needed_bytes
    missing = max(needed - rank.kv_cache.low for rank in plan.memory.ranks)
    for margin in (1, 2, 4):
        gib = math.ceil(missing / GIB) + margin
        if 0 < gib * GIB <= weights // 2:
            yield {"cpu_offload_gb": float(gib)}


def smaller_model(plan: Plan) -> Proposals:
    """The smaller models of the same series, the largest first."""
    for model in smaller_models(plan.target, plan.args):
        yield {"model": model.name}


def supported_settings(plan: Plan) -> Proposals:
    """Replacements for refused settings, one at a time: default quantization, default KV cache dtype, float16."""
    given = vars(plan.args)
    yield from ({name: None} for name in ("quantization", "kv_cache_dtype") if given[name] is not None)
    if plan.settings.dtype != "float16":
        yield {"dtype": "half"}


_FEWER_BITS = "another checkpoint, with weights in fewer bits; --served-model-name keeps the name that clients ask for"
SUPPORTED = Lever("supported settings", supported_settings, "other settings, that this release runs on this card", 0)
"""For settings that a release refuses whatever the memory."""

LEVERS: tuple[Lever, ...] = (
    Lever("idle GPUs", idle_gpus, "the model runs on all the GPUs, which exchange data at every step", 1, True),
    Lever("raise utilization", more_utilization, "less of the card is left for what vLLM does not count", 1),
    Lever("lower utilization", less_utilization, "a smaller KV pool", 1),
    Lever("fewer media", fewer_media, "requests with more media, or longer ones, are refused", 2),
    Lever("shorter context", shorter_context, "requests longer than this are refused", 2),
    Lever("fewer captured graphs", fewer_graphs, "decode batches above the largest graph run slower", 2),
    Lever("fewer sequences", fewer_sequences, "fewer requests run at once", 3),
    Lever("smaller batches", smaller_batches, "long prompts take more steps", 3),
    Lever("fp8 KV cache", fp8_kv_cache, "keys and values are stored in 8 bits", 4),
    Lever("no CUDA graphs", no_graphs, "slower decoding, most of all for small batches", 5),
    Lever("quantized weights", quantized_weights, _FEWER_BITS, 6, True),
    Lever("more GPUs", more_gpus, "more GPUs than were planned with, which exchange data at every step", 20, True),
)
LAST_RESORTS: tuple[Lever, ...] = (
    Lever("online quantization", online_quantization, "weights are rounded to 8 bits while they are loaded", 7),
    Lever(
        "offloaded weights",
        offloaded_weights,
        "part of the weights stays in the host's memory and crosses the bus at every step: many times slower",
        30,
    ),
    Lever("smaller model", smaller_model, "a smaller model of the same series", 25),
)
"""Tried only where no other lever makes the plan fit on its GPUs."""
