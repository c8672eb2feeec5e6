"""What torch has allocated on one rank when the model is loaded: vLLM's "Model loading took X GiB"."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legroom.facts.anatomy import Anatomy, anatomy
from legroom.facts.attention import Attention, LatentAttention
from legroom.facts.feedforward import Experts
from legroom.facts.model import Layer, Model
from legroom.facts.quantization import Quantization
from legroom.facts.quantization_config import online_quantization
from legroom.facts.releases import release as known_release
from legroom.figures import Figure, Term
from legroom.memory.quantized_modules import Schemes
from legroom.memory.rope_cache import RopeCache, construction, rope_caches
from legroom.memory.stages import stage_range
from legroom.memory.torch_allocator import Block, TorchAllocator
from legroom.memory.weight_modules import Module, Ranks, feedforward_modules, mixer_modules, norm
from legroom.memory.weight_storage import Step, Storage, StorageContext, storage
from legroom.units import MIB, cdiv, round_up

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.vllm.args import EngineSettings

_VOCABULARY_PADDING = 64
_SPLIT_LIMIT_BYTES = 20 * MIB
_ATTENTION_SCALARS = 4
"""Scales of K, V, Q and probabilities: buffers of 4 bytes, 512 each to the allocator."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A module, how it is stored, and a table to build right after it."""

    module: Module
    storage: Storage
    ropes: tuple[RopeCache, ...] = ()


def weights(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> Figure:
    """The bytes of the weights on one rank of a stage, with their working."""
    context = StorageContext(settings.dtype, settings.release, gpu.compute_capability, gpu.vendor)
    stored = list(loaded_modules(model, settings, context, pp_rank))
    allocator = _allocator(settings, gpu)
    _load(allocator, stored)
    terms = _terms(stored)
    tensors = sum(term.bytes for term in terms)
    terms.append(Term("allocator", allocator.allocated_bytes - tensors, "blocks larger than the tensors in them"))
    return Figure(allocator.allocated_bytes, "exact", terms=tuple(terms))


def parameter_bytes(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> int:
    """The parameters alone, without buffers and rounding."""
    context = StorageContext(settings.dtype, settings.release, gpu.compute_capability, gpu.vendor)
    stored = loaded_modules(model, settings, context, pp_rank)
    return sum(sum(one.storage.kept) for one in stored if one.module.part not in ("buffers", "rope cache"))


def loaded_modules(model: Model, settings: EngineSettings, context: StorageContext, pp_rank: int) -> Iterator[Stored]:
    """Everything one rank holds, in the order vLLM creates it."""
    shape = anatomy(model.model_type, model.architecture)
    tp = settings.tensor_parallel_size
    ranks = Ranks(tp, tp * settings.data_parallel_size if settings.enable_expert_parallel else 1)
    schemes = Schemes(_quantization(model, settings), shape)
    stage = stage_range(len(model.layers), settings, pp_rank)
    first, last = pp_rank == 0, pp_rank == settings.pipeline_parallel_size - 1
    for module in _encoders(model, tp, first):
        yield Stored(module, storage(module, None, context))
    for module in _embeddings(model, shape, ranks, (first, last)):
        yield Stored(module, storage(module, None, context))
    yield from _layers(model, shape, settings, ranks, (stage, schemes, context))
    for module in _outputs(model, shape, ranks, last):
        yield Stored(module, storage(module, schemes.of_lm_head() if module.name == "lm_head" else None, context))


def _quantization(model: Model, settings: EngineSettings) -> Quantization | None:
    if model.quantization is not None:
        return model.quantization
    return online_quantization(settings.quantization) if settings.quantization else None


def _encoders(model: Model, tp: int, first: bool) -> Iterator[Module]:
    for encoder in model.modalities:
        for weight in encoder.weights:
            outputs = cdiv(weight.outputs, tp) if weight.split == "out" else weight.outputs
            inputs = cdiv(weight.inputs, tp) if weight.split == "in" else weight.inputs
            module = Module("encoder", weight.name, outputs, inputs, weight.bias, dtype=weight.dtype)
            for _ in range(weight.count):
                yield module


def _vocabulary(model: Model, tp: int) -> int:
    return round_up(model.vocab_size, _VOCABULARY_PADDING) // tp


def _embeddings(model: Model, shape: Anatomy, ranks: Ranks, ends: tuple[bool, bool]) -> Iterator[Module]:
    first, last = ends
    if not (first or shape.embeddings_on == "all" or (last and model.tie_word_embeddings)):
        return
    yield Module("embeddings", "embed_tokens", _vocabulary(model, ranks.tensor), model.hidden_size)
    config = model.config
    if shape.positions:
        count = int(config.get(shape.positions) or model.max_position_embeddings) + shape.positions_offset
        yield Module("embeddings", "embed_positions", count, model.hidden_size)
    if shape.token_types:
        yield Module("embeddings", "token_type", int(config.get(shape.token_types) or 2), model.hidden_size)
    if shape.embedding_norm:
        yield from norm("norms", "embed_norm", model.hidden_size, shape)
    if shape.normalizer:
        yield Module("buffers", "normalizer", 1)


def _outputs(model: Model, shape: Anatomy, ranks: Ranks, last: bool) -> Iterator[Module]:
    if shape.final_norm and (last or shape.final_norm_on == "all"):
        yield from norm("norms", "norm", model.hidden_size, shape)
    if not (last or shape.lm_head_on == "all"):
        return
    if model.is_pooling or not shape.lm_head or (model.tie_word_embeddings and not shape.lm_head_bias):
        return
    vocabulary = _vocabulary(model, ranks.tensor)
    if not model.tie_word_embeddings:
        yield Module("lm_head", "lm_head", vocabulary, model.hidden_size, shape.lm_head_bias, quantizable=True)


def _layers(
    model: Model,
    shape: Anatomy,
    settings: EngineSettings,
    ranks: Ranks,
    how: tuple[range, Schemes, StorageContext],
) -> Iterator[Stored]:
    stage, schemes, context = how
    ropes = rope_caches(model, shape, settings, context.dtype_bytes)
    built: dict[Layer, list[Module]] = {}
    pending = list(ropes)
    for index in stage:
        layer = model.layers[index]
        modules = built.get(layer)
        if modules is None:
            modules = built[layer] = _layer_modules(layer, model.hidden_size, shape, ranks)
        due = tuple(rope for rope in pending if rope.layer <= index and _same_kind(model, rope.layer, index))
        pending = [rope for rope in pending if rope not in due]
        for module in modules:
            how_stored = storage(module, schemes.of(module, index), context)
            at_output = due if due and module.name.endswith(("o_proj", "out_proj")) else ()
            yield Stored(module, how_stored, at_output)
            due = () if at_output else due
        for rope in due:
            yield Stored(Module("buffers", "none", 0), Storage(()), (rope,))


def _same_kind(model: Model, first: int, index: int) -> bool:
    return first == index or model.layers[first].mixer == model.layers[index].mixer


def _layer_modules(layer: Layer, hidden: int, shape: Anatomy, ranks: Ranks) -> list[Module]:
    out: list[Module] = []
    for mixer in (layer.mixer, *layer.also):
        if mixer is None:
            continue
        out += mixer_modules(mixer, hidden, shape, ranks)
        if isinstance(mixer, (Attention, LatentAttention)):
            out += [Module("buffers", "scale", 1, dtype="float32")] * _ATTENTION_SCALARS
    if layer.feedforward is not None:
        out += feedforward_modules(layer.feedforward, shape, ranks)
    count = shape.norms + (shape.expert_norms if isinstance(layer.feedforward, Experts) else 0)
    for number in range(count):
        out += norm("norms", f"norm{number}", hidden, shape)
    return out + [Module("buffers", "scalar", 1)] * shape.scalars_per_layer


def _allocator(settings: EngineSettings, gpu: Gpu) -> TorchAllocator:
    conf = settings.given.env.get("PYTORCH_CUDA_ALLOC_CONF", "") + settings.given.env.get("PYTORCH_ALLOC_CONF", "")
    expandable = "expandable_segments:True" in conf
    limited = gpu.vendor == "nvidia" and known_release(settings.release).at_least("0.21.0")
    return TorchAllocator(_SPLIT_LIMIT_BYTES if limited else None, expandable)


def _load(allocator: TorchAllocator, stored: list[Stored]) -> None:
    """Build every module, then let each quantized one replace its tensors, as vLLM does after loading."""
    later: list[tuple[list[Block], tuple[Step, ...]]] = []
    for one in stored:
        blocks = [allocator.allocate(size) for size in one.storage.loaded]
        if one.storage.after:
            later.append((blocks, one.storage.after))
        for rope in one.ropes:
            _follow(allocator, [], construction(rope))
    for blocks, steps in later:
        _follow(allocator, blocks, steps)


def _follow(allocator: TorchAllocator, blocks: list[Block], steps: Iterable[Step]) -> None:
    for action, value in steps:
        if action == "+":
            blocks.append(allocator.allocate(value))
        else:
            allocator.free(blocks[value])


def _terms(stored: list[Stored]) -> list[Term]:
    parts: dict[str, int] = {}
    for one in stored:
        kept = one.storage.kept
        weight = max(kept, default=0)
        parts[one.module.part] = parts.get(one.module.part, 0) + weight
        if len(kept) > 1:
            beside = "biases" if one.module.bias and len(kept) == 2 else "scales"
            parts[beside] = parts.get(beside, 0) + sum(kept) - weight
        for rope in one.ropes:
            parts["rope cache"] = parts.get("rope cache", 0) + rope.bytes
    return [Term(part, size) for part, size in parts.items() if size]
