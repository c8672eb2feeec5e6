"""Tensors that vLLM allocates in one piece, as products of the model's and the engine's sizes."""

import math
from collections.abc import Iterator
from itertools import product

from legroom.facts.gpus import Gpu
from legroom.facts.model import Attention, Dense, Experts, LatentAttention, Layer, Model
from legroom.memory.activation.encoder_profile import encoder_batch
from legroom.memory.activation.layer_peaks import expert_scratch, layer_kinds
from legroom.memory.caching_allocator import LARGE_SEGMENT_BYTES, segment_bytes
from legroom.memory.dtypes import FLOAT32_BYTES, dtype_bytes
from legroom.memory.figure_cache import cached_by_model
from legroom.memory.kv.kv_plan import KvPlan
from legroom.memory.runner_buffers import latent_workspace_tokens
from legroom.memory.weights.loaded import stored_modules
from legroom.records import dataclass
from legroom.units import GIB, MIB, cdiv, round_up
from legroom.vllm.args import EngineSettings
from legroom.vllm.traits import VOCABULARY_PADDING, is_pooling

Factors = tuple[tuple[int, str], ...]

_SAMPLER_BYTES = {"logits as float32": FLOAT32_BYTES, "sorted indices": 8, "buffers of the radix sort": 12}
"""Bytes a logit of the sampler's tensors: torch.sort returns 64-bit indices, and sorts values and indices in a buffer
of both (torch.cuda.memory history of 0.26)."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: its factors, when it is allocated, and the setting that changes its size."""

    name: str
    factors: Factors
    moment: str
    """load | forward (profile run and serving) | sampling (warm-up and serving) | encoder | kv | serving"""
    setting: str = ""
    """By vLLM's Python name; empty: only the model or the number of GPUs changes it."""

    @property
    def bytes(self) -> int:
        """Bytes of the tensor: the product of its factors."""
        return math.prod(number for number, _ in self.factors)

    @property
    def how(self) -> str:
        """The factors as text, such as `256 sequences x 128,256 vocabulary x 4 bytes`."""
        return " x ".join(f"{number:,} {what}".rstrip() for number, what in self.factors)


def printed_request(size_bytes: int) -> str:
    """What torch's out-of-memory message prints for a tensor of these bytes, such as `1.96 GiB`: its segment's size."""
    segment = segment_bytes(size_bytes)
    return f"{segment / GIB:.2f} GiB" if segment > GIB else f"{segment / MIB:.2f} MiB"


def tensors_of_size(size_bytes: int, candidates: Iterator[Tensor]) -> tuple[Tensor, ...]:
    """The candidates for which torch prints the same size; none up to 20 MiB, where unequal tensors print alike."""
    if size_bytes <= LARGE_SEGMENT_BYTES:
        return ()
    printed = printed_request(size_bytes)
    return tuple(dict.fromkeys(tensor for tensor in candidates if printed_request(tensor.bytes) == printed))


def tensors(model: Model, settings: EngineSettings, gpu: Gpu, kv: KvPlan | None = None) -> Iterator[Tensor]:
    """Every large tensor of a start and of serving; with those of the KV cache where `kv` is given."""
    yield from _weight_tensors(model, settings, gpu)
    for layer, _ in cached_by_model(layer_kinds, model):
        yield from _layer_tensors(layer, model, settings)
    yield from _shared_workspaces(model, settings, gpu)
    if not is_pooling(settings.given, model):
        # Tensors that grow with the vocabulary: logits, the sampler's copies, log-probabilities of prompts.
        sequences = (min(settings.max_num_seqs, settings.max_num_batched_tokens), "sequences")
        tokens = (settings.max_num_batched_tokens, "batched tokens")
        for columns in {model.vocab_size, round_up(model.vocab_size, VOCABULARY_PADDING)}:
            vocabulary = (columns, "vocabulary")
            for name, each in {"logits": dtype_bytes(settings.dtype), **_SAMPLER_BYTES}.items():
                yield Tensor(name, (sequences, vocabulary, (each, "bytes")), "sampling", "max_num_seqs")
            table = (sequences, vocabulary, (FLOAT32_BYTES, "bytes"))
            yield Tensor("token counts of the sampler", table, "load", "max_num_seqs")
            table = (tokens, vocabulary, (FLOAT32_BYTES, "bytes"))
            yield Tensor("log-probabilities of prompts", table, "serving", "max_num_batched_tokens")
    yield from _encoder_tensors(model, settings)
    if kv is not None:
        setting = "num_gpu_blocks_override" if settings.num_gpu_blocks_override else "gpu_memory_utilization"
        for spec in (group.spec for group in kv.shape.groups):
            pages = ((kv.num_blocks, "blocks"), (spec.page_bytes, "bytes a block"))
            yield Tensor(f"KV cache of a {spec.kind} layer", pages, "kv", setting)


def _weight_tensors(model: Model, settings: EngineSettings, gpu: Gpu) -> Iterator[Tensor]:
    """The first loaded tensor of every module on one rank, without scales, with the factors of its size."""
    for stored in stored_modules(model, settings, gpu):
        module = stored.module
        setting = "max_loras" if module.part == "lora" else ""
        for size in stored.storage.loaded[:1]:
            copies, rows, columns = module.copies, module.outputs, max(module.inputs, 1)
            each = size // max(copies * rows * columns, 1)
            shape: Factors = ((rows, ""), (columns, ""), (each, "bytes"))
            shape = ((copies, "copies"), *shape) if copies > 1 else shape
            exact = math.prod(number for number, _ in shape) == size
            yield Tensor(f"the weight {module.name}", shape if exact else ((size, "bytes"),), "load", setting)


def _layer_tensors(layer: Layer, model: Model, settings: EngineSettings) -> Iterator[Tensor]:
    """The outputs of one layer's projections for a full batch."""
    ranks, width = settings.tensor_parallel_size, dtype_bytes(settings.dtype)

    def batch(name: str, columns: int, what: str) -> Tensor:
        """The tensor with a row per batched token; `what` names its columns in `how`."""
        rows = (settings.max_num_batched_tokens, "batched tokens")
        return Tensor(name, (rows, (columns, what), (width, "bytes")), "forward", "max_num_batched_tokens")

    yield batch("hidden states", model.hidden_size, "hidden size")
    mixer, block = layer.mixer, layer.feedforward
    if isinstance(mixer, Attention):
        heads, kv_heads = cdiv(mixer.heads, ranks), max(1, mixer.kv_heads // ranks)
        query = heads * mixer.head_dim
        projected = query * (2 if mixer.output_gate else 1) + kv_heads * (mixer.head_dim + mixer.v_head_dim)
        yield batch("queries, keys and values", projected, "qkv")
        yield batch("queries", query, "(heads x head size)")
    elif isinstance(mixer, LatentAttention):
        heads = cdiv(mixer.heads, ranks)
        yield batch("queries", heads * (mixer.qk_nope_head_dim + mixer.qk_rope_head_dim), "(heads x head size)")
        yield batch("expanded keys and values", heads * (mixer.qk_nope_head_dim + mixer.v_head_dim), "(heads x width)")
    dense = block.parallel_dense if isinstance(block, Experts) else block
    if isinstance(dense, Dense):
        inner = cdiv(dense.intermediate_size, ranks)
        if dense.gated:
            yield batch("gate and up projection", 2 * inner, "(gate and up)")
        yield batch("product of gate and up", inner, "intermediate size")
    if isinstance(block, Experts):
        inner = cdiv(block.intermediate_size, 1 if settings.enable_expert_parallel else settings.expert_ranks)
        columns = (2 * inner if block.gated else inner, inner, block.latent_size or block.hidden_size)
        for name, each in zip(("gate and up", "product", "output"), columns, strict=True):
            yield batch(f"{name} of the experts", block.experts_per_token * each, "(experts a token x width)")


def score_tensors(model: Model, settings: EngineSettings) -> Iterator[Tensor]:
    """Attention scores of one whole prompt, which attention without a fused kernel (eager, torch's SDPA) allocates."""
    lengths = settings.max_model_len, settings.max_num_batched_tokens
    sizes = product(lengths, (dtype_bytes(settings.dtype), FLOAT32_BYTES))
    mixers = [layer.mixer for layer, _ in cached_by_model(layer_kinds, model) if isinstance(layer.mixer, Attention)]
    for mixer, (length, each) in product(mixers, sizes):
        heads, tokens = (cdiv(mixer.heads, settings.tensor_parallel_size), "heads"), (length, "tokens")
        factors = (heads, tokens, tokens, (each, "bytes"))
        yield Tensor("attention scores of one prompt", factors, "forward", "max_model_len")


def _shared_workspaces(model: Model, settings: EngineSettings, gpu: Gpu) -> Iterator[Tensor]:
    """Workspaces that all layers share: experts, and MLA's keys and values expanded for chunked prefill."""
    width = dtype_bytes(settings.dtype)
    if kept := expert_scratch(model, settings, gpu).kept_elements:
        elements = ((kept, "elements"), (width, "bytes"))
        yield Tensor("workspace of the experts", elements, "forward", "max_num_batched_tokens")
    for layer, _ in cached_by_model(layer_kinds, model):
        if isinstance(mixer := layer.mixer, LatentAttention):
            tokens = (latent_workspace_tokens(model, settings, gpu), "tokens of context")
            expanded = cdiv(mixer.heads, settings.tensor_parallel_size) * (mixer.qk_nope_head_dim + mixer.v_head_dim)
            yield Tensor("latents of cached context", (tokens, (mixer.latent_width, ""), (width, "bytes")), "load")
            name = "keys and values expanded from latents"
            yield Tensor(name, (tokens, (expanded, "(heads x width)"), (width, "bytes")), "forward")


def _encoder_tensors(model: Model, settings: EngineSettings) -> Iterator[Tensor]:
    """Activations and attention scores of the multimodal encoder in the profile run; none without an encoder."""
    batch = encoder_batch(model, settings)
    if batch is None:
        return
    tower, width = batch.item.tower, (dtype_bytes(settings.dtype), "bytes")
    heads = (cdiv(tower.heads, batch.ranks), "heads")
    for patches in {batch.patches, batch.item.patches}:
        rows = (patches, "patches")
        for columns in (tower.hidden_size, 3 * tower.hidden_size, tower.intermediate_size):
            name = "activations of the encoder"
            yield Tensor(name, (rows, (cdiv(columns, batch.ranks), ""), width), "encoder", "limit_mm_per_prompt")
        for each in {width[0], FLOAT32_BYTES}:
            scores = (heads, rows, rows, (each, "bytes"))
            yield Tensor("attention scores of the encoder", scores, "encoder", "limit_mm_per_prompt")
