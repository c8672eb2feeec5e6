"""What torch has allocated on one rank when the model is loaded: vLLM's "Model loading took X GiB"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from legroom.facts.gpus import Gpu
from legroom.facts.model import Experts
from legroom.facts.releases import release as known_release
from legroom.figures import Figure, Term
from legroom.memory.caching_allocator import AllocatorSettings, Block, CachingAllocator
from legroom.memory.figure_cache import BUDGET, GRAPHS, Inputs, cached
from legroom.memory.weights.draft import is_estimated
from legroom.memory.weights.rank_modules import StoredModule, loaded_modules, names_another_method, scheme_in_use
from legroom.memory.weights.rope_cache import construction
from legroom.memory.weights.storage import Step, Storage, StorageContext, kernels_unmeasured
from legroom.records import dataclass
from legroom.units import GIB, MIB
from legroom.vllm.args import env_flag, other_value

if TYPE_CHECKING:
    from legroom.facts.model import Model
    from legroom.vllm.args import EngineSettings


_RUNNER_V2_BYTES = 512
"""One small tensor that runner V2 creates while it loads."""
_ASSUMED_BAND = 0.02
"""How far off the total may be where a part of the model had to be assumed."""

_NO_PART = (*BUDGET, *GRAPHS, "max_model_len", "auto_fit_len", "max_num_seqs", "block_size", "model")
_WITH_STEP_SIZE = Inputs(*_NO_PART)
_WITHOUT_STEP_SIZE = Inputs(*_NO_PART, "max_num_batched_tokens")


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """What loading leaves on a rank, and the most that it held on the way."""

    figure: Figure
    peak_bytes: int
    why: str
    """What the peak is beyond the weights, in words; empty where there is nothing to say."""


def weights(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> Figure:
    """The bytes of the weights on one rank of a stage, with their working."""
    return loaded_weights(model, settings, gpu, pp_rank).figure


def loaded_weights(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> LoadedWeights:
    """The weights on one rank of a stage, and the peak of the moment when they load."""
    like = _like(gpu.vendor, gpu.compute_capability)
    return cached(_loaded, model, settings, like, pp_rank, _inputs(model, settings))


def _inputs(model: Model, settings: EngineSettings) -> Inputs:
    """Only LoRA's, a sparse indexer's and DeepStack's buffers are as large as a step."""
    tapped = any(modality.buffer_levels for modality in model.modalities)
    stepwise = settings.given.enable_lora or "index_topk" in model.config or tapped
    return _WITH_STEP_SIZE if stepwise else _WITHOUT_STEP_SIZE


@cache
def _like(vendor: str, compute_capability: tuple[int, int]) -> Gpu:
    """What the weights depend on of a card: cards that share it share the weights."""
    return Gpu("", 0, vendor=vendor, compute_capability=compute_capability)


def parameter_bytes(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> int:
    """The parameters alone, without buffers, workspaces and rounding."""
    stored = loaded_modules(model, settings, storage_context(settings, gpu), pp_rank)
    return sum(sum(each.storage.kept) for each in stored if each.module.part not in ("buffers", "workspace", "lora"))


def stored_modules(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> tuple[StoredModule, ...]:
    """Every matrix on one rank of a stage, as it is stored."""
    return tuple(loaded_modules(model, settings, storage_context(settings, gpu), pp_rank))


def _loaded(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int) -> LoadedWeights:
    stored, offloaded = _offload(
        list(loaded_modules(model, settings, storage_context(settings, gpu), pp_rank)), settings
    )
    allocator = CachingAllocator(_allocator_settings(settings, gpu), ascending_addresses=True)
    _load(allocator, stored)
    total = allocator.allocated_bytes + (_RUNNER_V2_BYTES if settings.runner == "V2" else 0)
    terms = _terms(stored)
    tensors = sum(term.bytes for term in terms)
    terms.append(Term("allocator", total - tensors, "torch hands out whole blocks"))
    if offloaded:
        terms.append(Term("offloaded", 0, f"{offloaded / GIB:.2f} GiB live in CPU memory (--cpu-offload-gb)"))
    figure = _figure(model, settings, gpu, total, terms)
    staged = _staged_bytes(settings, stored)
    peak = max(allocator.peak_allocated_bytes * figure.bytes // max(total, 1), figure.bytes) + staged
    return LoadedWeights(figure, peak, _why(stored, staged, peak - figure.bytes))


def _figure(model: Model, settings: EngineSettings, gpu: Gpu, total: int, terms: list[Term]) -> Figure:
    share = _checkpoint_share(model, settings, gpu)
    if share is not None:
        stored_bytes = int(total * share)
        terms.append(Term("checkpoint", stored_bytes - total, "what the files hold beyond what the config explains"))
        band = int(stored_bytes * _ASSUMED_BAND)
        return Figure(stored_bytes, "estimated", stored_bytes - band, stored_bytes + band, tuple(terms))
    if is_estimated(model, settings) or not model.known or model.assumed:
        band = int(total * _ASSUMED_BAND)
        return Figure(total, "estimated", total - band, total + band, tuple(terms))
    encoders = all(modality.exact for modality in model.modalities)
    exactly = encoders and not _is_loose(model, settings, gpu)
    return Figure(total, "exact" if exactly else "estimated", terms=tuple(terms))


def _is_loose(model: Model, settings: EngineSettings, gpu: Gpu) -> bool:
    """Whether how the weights are stored, or what the release takes for them, is not known to the last byte."""
    scheme = scheme_in_use(model, settings)
    # On ROCm "weights" was all that the card lost while they loaded, torch's reserve and code with them, until 0.21.
    if gpu.vendor == "amd" and known_release(settings.release).before("0.21.0"):
        return True
    if settings.given.enable_lora and _adapters_are_loose(model):
        return True
    if scheme is None:
        return False
    skip_list_missing = scheme.method == "bitsandbytes" and not scheme.ignored
    # Online: which freed block a layer takes depends on the files' order. ROCm pads FP8 rows by switches of its own.
    if scheme.online or skip_list_missing or gpu.vendor == "amd" or names_another_method(model, settings):
        return True
    return kernels_unmeasured(scheme, storage_context(settings, gpu)) is not None


def _adapters_are_loose(model: Model) -> bool:
    """Adapters of experts came out 6 MiB larger than their matrices (0.32). Where input and output share one table,
    families and releases differ in how many times they wrap it, and no such start was measured."""
    return model.tie_word_embeddings or any(isinstance(layer.feedforward, Experts) for layer in model.layers)


_LARGEST_SHARD_BYTES = 5 * 10**9
"""How the Hub's tools cut a checkpoint into files unless told otherwise."""


def _staged_bytes(settings: EngineSettings, stored: list[StoredModule]) -> int:
    """fastsafetensors reads whole files into the GPU's memory and copies the weights out of them there."""
    if other_value(settings.given, "--load-format") != "fastsafetensors":
        return 0
    return min(_LARGEST_SHARD_BYTES, sum(sum(each.storage.kept) for each in stored))


def _why(stored: list[StoredModule], staged: int, above: int) -> str:
    if above < MIB:
        return ""
    if any(each.storage.freed_last for each in stored):
        return "this release keeps the original weights until the last layer is quantized"
    online = any(each.storage.after and len(each.storage.loaded) == 1 for each in stored)
    if online and not any(each.storage.layer_by_layer for each in stored):
        return "the whole model is loaded in its own precision and quantized afterwards"
    if staged:
        return "fastsafetensors holds a file of the checkpoint on the GPU while it copies the weights out"
    return "a layer is quantized or repacked while its own tensors are still there"


def _checkpoint_share(model: Model, settings: EngineSettings, gpu: Gpu) -> float | None:
    """How the size of the files compares with the config's, where the config does not say all: an architecture that
    legroom does not know, and GGUF, whose tensors have many widths. None: the config is the better witness."""
    vague = not model.known or (model.quantization is not None and model.quantization.method == "gguf")
    if not vague or not model.checkpoint_bytes:
        return None
    explained = parameter_bytes(model, on_one_card(settings), gpu)
    return model.checkpoint_bytes / explained if explained else None


def on_one_card(settings: EngineSettings) -> EngineSettings:
    """The same server without any split: its weights are what the files hold."""
    return replace(
        settings,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        prefill_context_parallel_size=1,
        enable_expert_parallel=False,
    )


def storage_context(settings: EngineSettings, gpu: Gpu) -> StorageContext:
    """What of a deployment decides how its modules are stored."""
    marlin = bool(env_flag(settings.given, "VLLM_MXFP4_USE_MARLIN"))
    asked = settings.given.quantization
    return StorageContext(settings.dtype, settings.release, gpu.compute_capability, gpu.vendor, marlin, asked)


def _allocator_conf(settings: EngineSettings) -> str:
    env = settings.given.env
    return env.get("PYTORCH_ALLOC_CONF") or env.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def _allocator_settings(settings: EngineSettings, gpu: Gpu) -> AllocatorSettings:
    """0.21+ forbids to split blocks above 20 MiB while it loads, on CUDA."""
    limited = gpu.vendor == "nvidia" and known_release(settings.release).at_least("0.21.0")
    expandable = "expandable_segments:True" in _allocator_conf(settings)
    return AllocatorSettings(expandable, 20 * MIB if limited else None)


def _offload(stored: list[StoredModule], settings: EngineSettings) -> tuple[list[StoredModule], int]:
    """--cpu-offload-gb takes parameters of the layers, from the first on, until the limit is reached or passed."""
    limit = (settings.given.cpu_offload_gb or 0) * GIB
    if not limit:
        return stored, 0
    kept: list[StoredModule] = []
    offloaded = 0
    for each in stored:
        if each.in_layer and each.module.part != "buffers" and offloaded < limit:
            offloaded += sum(each.storage.kept)
            if each.ropes:
                kept.append(StoredModule(each.module, type(each.storage)(()), each.ropes))
            continue
        kept.append(each)
    return kept, offloaded


def weight_segments(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> list[int]:
    """The bytes of every segment that torch holds the weights of a rank in: what sleep mode copies, one by one."""
    stored, _ = _offload(list(loaded_modules(model, settings, storage_context(settings, gpu), pp_rank)), settings)
    # The pool of sleep mode is no expandable one, whatever the environment says.
    allocator = CachingAllocator(
        replace(_allocator_settings(settings, gpu), expandable_segments=False), ascending_addresses=True
    )
    _load(allocator, stored)
    return allocator.used_segments


def buffer_bytes(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> int:
    """What the model keeps beside its parameters: tables of rotary embeddings and the like."""
    stored = loaded_modules(model, settings, storage_context(settings, gpu), pp_rank)
    tables = sum(rope.bytes for each in stored for rope in each.ropes)
    return tables + sum(sum(each.storage.kept) for each in stored if each.module.part == "buffers")


def offloaded_tensors(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> list[int]:
    """The bytes of every parameter of a rank that --cpu-offload-gb keeps on the host."""
    limit = (settings.given.cpu_offload_gb or 0) * GIB
    tensors: list[int] = []
    for each in loaded_modules(model, settings, storage_context(settings, gpu), pp_rank) if limit else ():
        if each.in_layer and each.module.part != "buffers" and sum(tensors) < limit:
            tensors += each.storage.kept
    return tensors


def _load(allocator: CachingAllocator, stored: list[StoredModule]) -> None:
    """Build every module, then let each quantized one replace its tensors, as vLLM does after loading."""
    later: list[tuple[list[Block], Storage]] = []
    for each in stored:
        storage = each.storage
        if storage.after:
            blocks = [] if storage.layer_by_layer else [allocator.allocate(size) for size in storage.loaded]
            later.append((blocks, storage))
        elif not storage.layer_by_layer:
            for size in storage.loaded:
                allocator.allocate(size)
        for rope in each.ropes:
            _follow(allocator, [], construction(rope))
    freed_last: list[Block] = []
    for blocks, storage in later:
        replaced = freed_last if storage.freed_last else None
        _follow(allocator, blocks or [allocator.allocate(size) for size in storage.loaded], storage.after, replaced)
    for block in freed_last:
        allocator.free(block)


def _follow(
    allocator: CachingAllocator, blocks: list[Block], steps: Iterable[Step], freed_last: list[Block] | None = None
) -> None:
    allocate, free = allocator.allocate, allocator.free
    for action, value in steps:
        if action == "+":
            blocks.append(allocate(value))
        elif freed_last is None:
            free(blocks[value])
        else:
            freed_last.append(blocks[value])


def _terms(stored: list[StoredModule]) -> list[Term]:
    parts: dict[str, int] = {}
    # Layers of one kind share their modules, so that most of them stand there many times.
    times = Counter(map(id, stored))
    for number, each in {id(each): each for each in stored}.items():
        kept = each.storage.kept
        weight = max(kept, default=0)
        parts[each.module.part] = parts.get(each.module.part, 0) + times[number] * weight
        if len(kept) > 1:
            beside = "biases" if each.module.bias and len(kept) == 2 else "scales"
            parts[beside] = parts.get(beside, 0) + times[number] * (sum(kept) - weight)
        for rope in each.ropes:
            parts["rope cache"] = parts.get("rope cache", 0) + times[number] * rope.bytes
    return [Term(part, size) for part, size in parts.items() if size]
