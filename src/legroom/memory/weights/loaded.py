"""The weights of one rank as torch counts them: vLLM's "Model loading took X GiB"."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from legroom.facts.config.quantization import LINEAR_ATTENTION
from legroom.facts.fit import constants
from legroom.facts.gpus import Gpu
from legroom.facts.model import Experts, Model
from legroom.figures import Figure, Term
from legroom.memo import Memo
from legroom.memory.caching_allocator import AllocatorSettings, Block, CachingAllocator, segment_bytes
from legroom.memory.figure_cache import BUDGET, GRAPHS, Inputs, cached
from legroom.memory.weights.draft import is_draft_estimated
from legroom.memory.weights.module import Module
from legroom.memory.weights.rank_modules import StoredModule, loaded_modules, names_another_method, scheme_in_use
from legroom.memory.weights.rope_cache import construction
from legroom.memory.weights.storage import Step, Storage, StorageContext, kernels_unmeasured
from legroom.records import dataclass
from legroom.units import GIB, MIB
from legroom.vllm.args import EngineSettings, env_flag, other_value

_RUNNER_V2_BYTES = 512  # One small tensor that runner V2 creates while it loads.
SHARD_BYTES = 5 * 10**9
"""The largest file of a checkpoint that was saved with the Hub's default shard size."""
_ASSUMED_BAND = 0.02
"""Half the error band where a part of the model had to be assumed; `data/bands.json` widens it by class."""
_LEAST_OF_UNKNOWN = 0.4
"""The share that an unknown architecture may hold: Zamba2-2.7B, whose blocks are shared, held 0.40 of a plain one."""

_UNUSED = (*BUDGET, *GRAPHS, "max_model_len", "auto_fit_len", "max_num_seqs", "block_size", "model")


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """The weights on a rank, and the peak while they load."""

    figure: Figure
    peak_bytes: int
    why: str
    """Why the peak exceeds the weights; empty where it does not."""
    free_blocks: tuple[int, ...]
    """Bytes of every free block in the segments that hold weights."""


def weights(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> Figure:
    """The weights on one rank of a pipeline stage, in GPU bytes with allocator rounding."""
    return loaded_weights(model, settings, gpu, pp_rank).figure


def loaded_weights(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> LoadedWeights:
    """The weights on one rank of a pipeline stage, and the peak while they load."""
    # Only LoRA's, a sparse indexer's and DeepStack's buffers grow with max_num_batched_tokens.
    has_deepstack = any(modality.buffer_levels for modality in model.modalities)
    by_tokens = settings.given.enable_lora or "index_topk" in model.config or has_deepstack
    load = _loaded_by_batched_tokens if by_tokens else _loaded_by_model
    return load(model, settings, _same_kind_of_gpu(gpu.vendor, gpu.compute_capability), pp_rank)


@cache
def _same_kind_of_gpu(vendor: str, compute_capability: tuple[int, int]) -> Gpu:
    """A `Gpu` with only what the weights depend on, so that all cards alike in it share cached weights."""
    return Gpu("", 0, vendor=vendor, compute_capability=compute_capability)


def parameter_bytes(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> int:
    """Bytes of the parameters alone, without buffers, workspaces, LoRA and allocator rounding."""
    stored = stored_modules(model, settings, gpu, pp_rank)
    return sum(sum(each.storage.kept) for each in stored if each.module.part not in ("buffers", "workspace", "lora"))


def stored_modules(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> tuple[StoredModule, ...]:
    """Every matrix on one rank of a pipeline stage, with its storage."""
    return tuple(loaded_modules(model, settings, storage_context(settings, gpu), pp_rank))


def _loaded(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> LoadedWeights:
    """The weights of one rank after loading, their peak while loading, and the reason where that is higher."""
    stored, offloaded = _split_offloaded(stored_modules(model, settings, gpu, pp_rank), settings)
    load_format = other_value(settings.given, "--load-format")
    in_order = stored if load_format == "dummy" else _in_file_order(stored)
    allocated, peak_allocated, free_blocks = _allocator_totals(_allocator_settings(settings, gpu), in_order)
    total = allocated + (_RUNNER_V2_BYTES if settings.runner == "V2" else 0)
    parts: Counter[str] = Counter()
    # Equal layers share their StoredModule objects.
    times = Counter(map(id, stored))
    for number, each in {id(each): each for each in stored}.items():
        kept = each.storage.kept
        weight = max(kept, default=0)
        parts[each.module.part] += times[number] * weight
        if len(kept) > 1:
            beside = "biases" if each.module.bias and len(kept) == 2 else "scales"
            parts[beside] += times[number] * (sum(kept) - weight)
        for rope in each.ropes:
            parts["rope cache"] += times[number] * rope.bytes
    terms = [Term(part, size) for part, size in parts.items() if size]
    terms.append(Term("allocator", total - sum(term.bytes for term in terms), "torch hands out whole blocks"))
    if offloaded:
        terms.append(Term("offloaded", 0, f"{sum(offloaded) / GIB:.2f} GiB live in CPU memory (--cpu-offload-gb)"))
    figure = _weights_figure(model, settings, gpu, total, terms, _uncertain_bytes(model, settings, stored))
    # fastsafetensors holds a file of the checkpoint in GPU memory while copying.
    of_files = sum(sum(each.storage.kept) for each in stored) if load_format == "fastsafetensors" else 0
    staged = min(SHARD_BYTES, of_files)
    peak = max(peak_allocated * figure.bytes // max(total, 1), figure.bytes) + staged
    return LoadedWeights(figure, peak, _loading_peak_reason(stored, staged, peak - figure.bytes), free_blocks)


def unused_bytes(model: Model, settings: EngineSettings, gpu: Gpu, sizes: Iterable[int], pp_rank: int = 0) -> int:
    """Bytes of torch's segments left over beside tensors of these sizes, served from free blocks or new segments."""
    free = list(loaded_weights(model, settings, gpu, pp_rank).free_blocks)
    for request in sizes:
        block = min((size for size in free if size >= request), default=0)
        if block and _allocator_settings(settings, gpu).may_serve(block, request):
            free.remove(block)
        else:
            block = segment_bytes(request)
        free.append(block - request)
    return sum(free)


_loaded_by_batched_tokens = cached(Inputs(*_UNUSED))(_loaded)
_loaded_by_model = cached(Inputs(*_UNUSED, "max_num_batched_tokens"))(_loaded)


def _weights_figure(
    model: Model, settings: EngineSettings, gpu: Gpu, total: int, terms: list[Term], uncertain: tuple[int, int]
) -> Figure:
    """The weights (`total` bytes), exact, or estimated if the config is unclear; `uncertain`: bytes (fewer, more)."""
    saving, extra = uncertain
    share = _checkpoint_ratio(model, settings, gpu)
    if share is not None:
        stored_bytes = int(total * share)
        terms.append(Term("checkpoint", stored_bytes - total, "what the files hold beyond what the config explains"))
        band = int(stored_bytes * _ASSUMED_BAND)
        return Figure(stored_bytes, "estimated", stored_bytes - band, stored_bytes + band, tuple(terms))
    if is_draft_estimated(model, settings) or not model.known or model.assumed:
        band = int(total * _ASSUMED_BAND)
        less = 0 if model.known else int(total * (1 - _LEAST_OF_UNKNOWN))
        return Figure(total, "estimated", total - max(band, less, saving), total + max(band, extra), tuple(terms))
    encoders = all(modality.exact for modality in model.modalities)
    if encoders and not saving + extra and not _is_size_uncertain(model, settings, gpu):
        return Figure(total, "exact", terms=tuple(terms))
    return Figure(total, "estimated", total - saving, total + extra, tuple(terms))


def _uncertain_bytes(model: Model, settings: EngineSettings, stored: Sequence[StoredModule]) -> tuple[int, int]:
    """Bytes by which the weights may be (smaller, larger), as the config does not say which are quantized, or how."""
    scheme = model.quantization
    if scheme is None or scheme.weight_bits >= 16:
        return 0, 0
    if scheme.named:
        return 0, sum(max(0, 2 * each.module.elements - sum(each.storage.kept)) for each in stored)
    if scheme.mean_bits:
        # The mean may be of the tables too, or leave out the scales: at most 8 bits for 16 weights (NVFP4).
        lean = [(sum(each.storage.kept), int(each.module.elements * scheme.mean_bits / 8)) for each in stored]
        scales = int(sum(least for _, least in lean) / 2 / scheme.mean_bits)
        return sum(max(0, kept - least) for kept, least in lean), scales
    since = constants()["quantized_tables"].get(scheme.method.split("_")[0], {}) if model.assumed else {}
    loadable = [name for name, first in since.items() if settings.release.at_least(first)]
    tables = sum(sum(each.storage.kept) for each in stored if each.module.part in loadable)
    linear = [each.module.elements for each in stored if scheme.list_assumed and "linear_attn" in each.module.name]
    saved, is_kept = sum(linear) * (16 - scheme.weight_bits) // 8, LINEAR_ATTENTION in scheme.ignored
    return max(tables * (16 - scheme.weight_bits) // 16, saved if is_kept else 0), 0 if is_kept else saved


def _is_size_uncertain(model: Model, settings: EngineSettings, gpu: Gpu) -> bool:
    """Whether the weights' size is not known to the byte, although the config describes them."""
    scheme = scheme_in_use(model, settings)
    # On ROCm before 0.21, "weights" is the drop of free memory while they load, with torch's reserve and code.
    if gpu.vendor == "amd" and settings.release.before("0.21.0"):
        return True
    # Adapters of experts were 6 MiB larger than their matrices (measured on 0.32). With tied embeddings, families and
    # releases wrap the table a different number of times, and none was measured.
    has_experts = any(isinstance(layer.feedforward, Experts) for layer in model.layers)
    if settings.given.enable_lora and (model.tie_word_embeddings or has_experts):
        return True
    if scheme is None:
        return False
    skip_list_missing = scheme.method == "bitsandbytes" and not scheme.ignored
    # Online: the freed block that a layer reuses depends on the file order. ROCm pads FP8 rows by its own flags.
    if scheme.online or skip_list_missing or gpu.vendor == "amd" or names_another_method(model, settings):
        return True
    return kernels_unmeasured(scheme, storage_context(settings, gpu)) is not None


def _loading_peak_reason(stored: list[StoredModule], staged: int, above: int) -> str:
    """Why loading peaks `above` bytes over the weights (`staged`: bytes of a file on the GPU); empty below 1 MiB."""
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


def _checkpoint_ratio(model: Model, settings: EngineSettings, gpu: Gpu) -> float | None:
    """Bytes of the checkpoint over those its config explains, for GGUF and unknown architectures; else None."""
    vague = not model.known or (model.quantization is not None and model.quantization.method == "gguf")
    if not vague or not model.checkpoint_bytes:
        return None
    explained = parameter_bytes(model, on_one_card(settings), gpu)
    return model.checkpoint_bytes / explained if explained else None


def on_one_card(settings: EngineSettings) -> EngineSettings:
    """The same settings without parallelism and offloading, with which the weights are the whole checkpoint's."""
    sizes = (f"{kind}_parallel_size" for kind in ("tensor", "pipeline", "data", "prefill_context"))
    alone: dict[str, Any] = dict.fromkeys(sizes, 1)
    return replace(settings, **alone, enable_expert_parallel=False, given=replace(settings.given, cpu_offload_gb=None))


def storage_context(settings: EngineSettings, gpu: Gpu) -> StorageContext:
    """What decides in which form vLLM keeps a weight on a card: dtype, release, compute capability, kernels."""
    marlin = bool(env_flag(settings.given, "VLLM_MXFP4_USE_MARLIN"))
    flag = settings.given.quantization
    return StorageContext(settings.dtype, settings.release, gpu.compute_capability, gpu.vendor, marlin, flag)


def _allocator_settings(settings: EngineSettings, gpu: Gpu) -> AllocatorSettings:
    """The allocator's settings while loading: expandable_segments as given, max_split_size_mb:20 on NVIDIA (0.21+)."""
    limited = gpu.vendor == "nvidia" and settings.release.at_least("0.21.0")
    env = settings.given.env
    conf = env.get("PYTORCH_ALLOC_CONF") or env.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return AllocatorSettings("expandable_segments:True" in conf, 20 * MIB if limited else None)


def offload_marks(stored: Sequence[StoredModule], settings: EngineSettings) -> list[bool]:
    """For each module whether --cpu-offload-gb moves it to the host: layers' modules in order, until its limit."""
    limit, offloaded_bytes, marks = (settings.given.cpu_offload_gb or 0) * GIB, 0, []
    for each in stored:
        marks.append(each.in_layer and each.module.part != "buffers" and offloaded_bytes < limit)
        offloaded_bytes += sum(each.storage.kept) * marks[-1]
    return marks


def _split_offloaded(stored: Sequence[StoredModule], settings: EngineSettings) -> tuple[list[StoredModule], list[int]]:
    """(modules that stay on the GPU, bytes of each tensor that --cpu-offload-gb moves to the host); rotary tables of
    an offloaded module stay, as a module of their own."""
    if not settings.given.cpu_offload_gb:
        return list(stored), []
    kept: list[StoredModule] = []
    offloaded: list[int] = []
    for each, is_offloaded in zip(stored, offload_marks(stored, settings), strict=True):
        if not is_offloaded:
            kept.append(each)
            continue
        offloaded += each.storage.kept
        if each.ropes:
            kept.append(StoredModule(each.module, type(each.storage)(()), each.ropes))
    return kept, offloaded


def weight_segments(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> list[int]:
    """Bytes of every allocator segment of a rank's weights; sleep mode copies them one by one."""
    stored, _ = _split_offloaded(stored_modules(model, settings, gpu, pp_rank), settings)
    # The memory pool of sleep mode never uses expandable segments.
    allocator = CachingAllocator(
        replace(_allocator_settings(settings, gpu), expandable_segments=False), ascending_addresses=True
    )
    _replay_loading(allocator, stored)
    return allocator.used_segments


def buffer_bytes(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> int:
    """Bytes of the model's rotary tables, which sleep level 2 copies to the host."""
    return sum(rope.bytes for each in stored_modules(model, settings, gpu, pp_rank) for rope in each.ropes)


def offloaded_tensors(model: Model, settings: EngineSettings, gpu: Gpu) -> list[int]:
    """Bytes of every tensor that --cpu-offload-gb keeps on the host, for a rank of the first stage."""
    return _split_offloaded(stored_modules(model, settings, gpu), settings)[1] if settings.given.cpu_offload_gb else []


def _in_file_order(stored: list[StoredModule]) -> list[StoredModule]:
    """The modules as they load; if layers are quantized meanwhile, each layer's as the files complete them."""
    if not any(each.storage.layer_by_layer for each in stored):
        return stored
    ordered: list[StoredModule] = []
    layer: dict[str, StoredModule] = {}
    for each in (*stored, None):
        if each is None or not each.in_layer or each.module.name in layer:
            ordered += (layer[name] for name in sorted(layer, key=lambda name: _last_tensor(layer[name].module)))
            layer = {}
        if each is not None and each.in_layer:
            layer[each.module.name] = each
        elif each is not None:
            ordered.append(each)
    return ordered


def _last_tensor(module: Module) -> str:
    """The last of a module's tensor names in alphabetical order, in which a checkpoint file holds them."""
    path, _, own = module.name.rpartition(".")
    return f"{path}.{max(module.shards, default=own)}"


_totals: Memo[tuple[int, int, tuple[int, ...]]] = Memo(most=1024)


def _allocator_totals(settings: AllocatorSettings, stored: list[StoredModule]) -> tuple[int, int, tuple[int, ...]]:
    """Bytes (allocated after loading, at its peak, of each block then free); cached by the sizes of all tensors."""

    def replay() -> tuple[int, int, tuple[int, ...]]:
        """What `_allocator_totals` returns, from loading the modules into a new simulated allocator."""
        allocator = CachingAllocator(settings, ascending_addresses=True)
        _replay_loading(allocator, stored)
        allocator.empty_cache()
        return allocator.allocated_bytes, allocator.peak_allocated_bytes, allocator.free_blocks

    # Equal layers share their StoredModule objects: each is hashed once.
    distinct = {id(each): each for each in stored}
    numbers = {key: number for number, key in enumerate(distinct)}
    tensors = ((each.storage, each.ropes) for each in distinct.values())
    return _totals.get((), (settings, *tensors, tuple(numbers[id(each)] for each in stored)), replay)


def _replay_loading(allocator: CachingAllocator, stored: list[StoredModule]) -> None:
    """Create every module, then replace the tensors of quantized ones, as vLLM does after loading."""
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
            _replay(allocator, [], construction(rope))
    freed_last: list[Block] = []
    for blocks, storage in later:
        replaced = freed_last if storage.freed_last else None
        _replay(allocator, blocks or [allocator.allocate(size) for size in storage.loaded], storage.after, replaced)
    for block in freed_last:
        allocator.free(block)


def _replay(
    allocator: CachingAllocator, blocks: list[Block], steps: Iterable[Step], freed_last: list[Block] | None = None
) -> None:
    """Replays `steps`: a size in bytes is allocated and appended to `blocks`, ~i frees `blocks[i]` (or only lists it
    in `freed_last`, if given, for the caller to free)."""
    allocate, free = allocator.allocate, allocator.free
    for step in steps:
        if step >= 0:
            blocks.append(allocate(step))
        elif freed_last is None:
            free(blocks[~step])
        else:
            freed_last.append(blocks[~step])
