"""The activation peak of vLLM's profile_run: forward pass, encoder, logits and sampler."""

from dataclasses import replace

from legroom.facts.fit import constants, runs_on_transformers
from legroom.facts.gpus import BLACKWELL, HOPPER, Gpu, dotted
from legroom.facts.model import Experts, Model, Quantization, latent, recurrent
from legroom.figures import Figure, Term, estimated
from legroom.memory.activation import layer_peaks as peaks
from legroom.memory.activation.encoder_profile import encoder_profile
from legroom.memory.dtypes import FLOAT32_BYTES, dtype_bytes
from legroom.memory.figure_cache import PROFILE_RUN, cached, cached_by_model
from legroom.memory.runner_buffers import latent_workspace_tokens
from legroom.memory.stages import stage_range
from legroom.memory.weights.draft import EAGLE3_STATES
from legroom.memory.weights.rank_modules import scheme_in_use
from legroom.records import dataclass
from legroom.units import KIB, MIB, cdiv
from legroom.vllm.args import EngineSettings, draft_method, predicts_itself
from legroom.vllm.cudagraphs import compilation_level
from legroom.vllm.traits import built_encoders, is_pooling


@cached(PROFILE_RUN)
def activation_cold(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> Figure:
    """The activation peak of a first start, on which torch.compile and Triton tune kernels; at least a later one's."""
    warm = activation(model, settings, gpu, pp_rank)
    encoders = built_encoders(settings.given, model, settings.release)
    copied = 0 if not is_compiled(settings) or pp_rank or encoders else _peak_on_copy(model, settings, gpu)
    tuning = _tuning_peak(model, settings, gpu, pp_rank)
    if not copied and tuning <= warm.bytes:
        return warm
    cold = max(warm.bytes, copied, tuning)
    how = "tuning kernels of the state space" if cold == tuning else "compiling, on a copy of the embedding"
    return estimated(cold, cold - _half_band(cold), cold + _half_band(cold), (Term("first start", cold, how),))


def _peak_on_copy(model: Model, settings: EngineSettings, gpu: Gpu) -> int:
    """Bytes alive while torch.compile tunes the first graph piece, of model or EAGLE-3 head, on a copied embedding."""
    width = dtype_bytes(settings.dtype)
    table = cdiv(model.vocab_size, settings.tensor_parallel_size) * model.hidden_size * width
    hidden = settings.max_num_batched_tokens * model.hidden_size * width
    if draft_method(settings.given.speculative_config) != "eagle3":
        return table + 2 * hidden
    # Beside what the model left for the EAGLE-3 head, and what the head's first piece reads and writes.
    return table + (EAGLE3_STATES + 7) * hidden + cublas_workspace(gpu)


def _tuning_peak(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int) -> int:
    """Bytes alive while Triton tunes the first Mamba-2 layer (0.22+, `_warmup_ssd_kernels`); 0 without such a layer."""
    moments = [moment for moment in _stage_peaks(model, settings, pp_rank) if moment.where == peaks.TUNING]
    if not moments or settings.release.before("0.22.0"):
        return 0
    elements = moments[0].elements * settings.max_num_batched_tokens
    elements += peaks.expert_scratch(model, settings, gpu).kept_elements if moments[0].after_experts else 0
    return elements * dtype_bytes(settings.dtype) + _TUNING_BYTES + cublas_workspace(gpu)


def first_start_leftover_bytes(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> int:
    """Bytes of a first start's peak, if torch may keep and vLLM charge them (0.27+, on NVIDIA up to 0.31); else 0."""
    release, cold = settings.release, activation_cold(model, settings, gpu, pp_rank)
    limited = gpu.vendor == "nvidia" and release.at_least("0.32.0")
    return 0 if release.before("0.27.0") or limited or cold == activation(model, settings, gpu, pp_rank) else cold.bytes


@cached(PROFILE_RUN)
def forward_bytes(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> int:
    """The peak of temporary tensors in the forward pass of a full batch, without persistent workspaces."""
    scratch = peaks.expert_scratch(model, settings, gpu)
    moments = (moment for moment in _stage_peaks(model, settings, pp_rank) if moment.where != peaks.TUNING)
    return max((_peak_bytes(moment, model, settings, gpu, scratch) for moment in moments), default=0)


def is_compiled(settings: EngineSettings) -> bool:
    """Whether torch.compile runs the model: on V1, unless switched off (--enforce-eager, compilation mode 0, -O0)."""
    is_on = compilation_level(settings.given, settings.release) != 0
    return settings.engine == "V1" and not settings.enforce_eager and is_on


def cublas_workspace(gpu: Gpu) -> int:
    """Bytes of torch's cuBLAS workspace: 8 x 4 MiB on Hopper and later, 2 x 4 MiB and 128 KiB before."""
    return 32 * MIB if gpu.compute_capability >= HOPPER else 8 * MIB + 128 * KIB


@cached(PROFILE_RUN)
def activation(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> Figure:
    """The profile run's peak of temporary tensors above the weights, with a warm compile cache."""
    scratch = peaks.expert_scratch(model, settings, gpu)
    encoder = encoder_profile(model, settings, gpu) if pp_rank == 0 else None
    images = encoder.kept_bytes if encoder else 0
    kept = scratch.kept_elements * dtype_bytes(settings.dtype)
    at_forward, forward_terms = _forward_peak(model, settings, gpu, pp_rank)
    at_sampling, how = _sampling_peak(model, settings, gpu, pp_rank)
    # A multimodal model reads the batch's embeddings from a persistent buffer, a text model allocates them.
    is_buffered = encoder is not None and not is_compiled(settings) and settings.engine != "V0"
    is_buffered = is_buffered and not model.model_type.startswith(tuple(constants()["eager"]["fresh_residuals"]))
    buffered = settings.max_num_batched_tokens * model.hidden_size * dtype_bytes(settings.dtype) if is_buffered else 0
    terms: tuple[Term, ...] = (Term("encoder outputs", images, encoder.how),) if encoder and images else ()
    doubt = 0
    in_tower = encoder.peak_bytes + cublas_workspace(gpu) if encoder else 0
    if encoder and in_tower > images + max(at_forward - buffered, at_sampling + kept):
        tower = Term("encoder", encoder.peak_bytes, encoder.peak_how)
        terms = (tower, Term("cuBLAS workspace", in_tower - encoder.peak_bytes, "kept by torch"))
        peak, doubt = in_tower, encoder.spread_bytes
    elif at_sampling + kept > at_forward - buffered:
        peak = at_sampling + kept + images
        terms += (Term("experts' workspace", kept, "kept for every later step"),) if kept else ()
        terms += (Term("logits and sampler", at_sampling, how),)
    else:
        peak, terms = at_forward - buffered + images, terms + forward_terms
        if buffered:
            terms += (Term("embeddings", -buffered, "read from a buffer that was there before the profile run"),)
    slack = _reserved_slack(peak, settings)
    if slack:
        terms += (Term("reserved but unused", slack, "before 0.6.4 all that torch held on to was charged"),)
    spread = max(_half_band(peak), doubt) + slack // 2
    saved_by_flashinfer = sampling(model, settings, gpu).flashinfer_saving_bytes
    least = max(at_forward - buffered, at_sampling + kept - saved_by_flashinfer) + images
    low = min(peak, max(least, in_tower)) + slack - spread
    high = max(peak + slack + spread, _tuning_peak(model, settings, gpu, pp_rank))
    if encoder and encoder.scores_bytes:
        high = max(high, min(in_tower + encoder.scores_bytes, gpu.total_bytes))
    if encoder and _peaks_may_add_up(model, gpu):
        high = max(high, in_tower + at_forward - buffered)
    return estimated(peak + slack, low, high, terms)


def _peaks_may_add_up(model: Model, gpu: Gpu) -> bool:
    """Whether encoder and forward peak may add up, as one RTX 5090 report shows (gated delta net, NVFP4, Blackwell)."""
    # The report has their sum (2.21 GiB at 2,048 tokens, 2.84 at 8,192); on all measured cards the larger one counts.
    scheme = model.quantization
    if scheme is None or gpu.compute_capability[0] < BLACKWELL[0]:
        return False
    nvfp4 = any(each.is_nvfp4 for each in (scheme, *(other for _, other in scheme.rules)))
    mixers = recurrent(layer.mixer for layer, _ in cached_by_model(peaks.layer_kinds, model))
    return nvfp4 and any(mixer.kind == "gdn" for mixer in mixers)


def _reserved_slack(peak_bytes: int, settings: EngineSettings) -> int:
    """Bytes of fragmentation charged beside the peak up to 0.6.3, whose measurement includes torch's cache; then 0."""
    if settings.release.at_least("0.6.4"):
        return 0
    fit = constants()["reserved_slack"]
    return int(peak_bytes * fit["relative"] + fit["fixed_mib"] * MIB)


_TUNING_BYTES = 256 * MIB
"""What Triton's autotuner writes before each try, so that the L2 cache is cold (`get_empty_cache_for_benchmark`)."""


def _stage_peaks(model: Model, settings: EngineSettings, pp_rank: int) -> tuple[peaks.LayerPeak, ...]:
    """The peaks of the layers on one pipeline stage, in elements per token."""
    return _peaks_of(model, stage_range(len(model.layers), settings, pp_rank), settings)


def _peaks_of(model: Model, indices: range, settings: EngineSettings) -> tuple[peaks.LayerPeak, ...]:
    """The peaks of the layers with these indices, in elements per token."""
    scheme, fused = scheme_in_use(model, settings), constants()["eager"]["fused_static_fp8"]
    static = bool(scheme and scheme.static_activations and scheme.number == "float" and scheme.weight_bits == 8)
    in_release = settings.release.at_least(fused["since"])
    fuses_product = static and in_release and model.model_type in fused["families"]
    execution = peaks.Execution(
        settings.tensor_parallel_size,
        is_compiled(settings),
        # What torch.compile writes in 8 bits was measured with quantized checkpoints only.
        _quantizes_activations(model.quantization if is_compiled(settings) else scheme),
        bool(scheme and scheme.block and scheme.weight_bits == 8),
        fuses_product,
        runs_on_transformers(model.model_type, settings.release),
        settings.release.at_least(constants()["eager"]["fused_gated_norm"]["since"]),
    )
    return cached_by_model(peaks.layer_peaks, model, indices.start, indices.stop, execution)


def _forward_peak(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int) -> tuple[int, tuple[Term, ...]]:
    """(peak bytes of the forward pass through this stage's layers and the draft's, the terms that it is the sum of)."""
    width, tokens = dtype_bytes(settings.dtype), settings.max_num_batched_tokens
    scratch = peaks.expert_scratch(model, settings, gpu)
    best = 0
    best_terms: tuple[Term, ...] = ()
    draft, states = _draft(model, settings)
    of_target = EAGLE3_STATES if draft_method(settings.given.speculative_config) == "eagle3" else 0
    passes = [(model, of_target, moment) for moment in _stage_peaks(model, settings, pp_rank)]
    if passes and draft and pp_rank == settings.pipeline_parallel_size - 1:
        passes += [(draft, states, moment) for moment in _peaks_of(draft, range(len(draft.layers)), settings)]
    for running, waiting, moment in passes:
        if moment.where == peaks.TUNING:
            continue
        live = _peak_bytes(moment, running, settings, gpu, scratch)
        live += waiting * tokens * model.hidden_size * width
        kept = scratch.kept_elements * width if moment.after_experts or running is not model else 0
        if live + kept > best:
            best = live + kept
            label = f"{tokens} tokens x {width} bytes x ({moment.how})"
            best_terms = (Term("experts' workspace", kept, "kept for every later step"),) if kept else ()
            label += f" + {waiting} x hidden for the draft" if waiting else ""
            best_terms += (Term(moment.where, live, label),)
    # Quantized dense models, mxfp4 aside, reach their peak before the first cuBLAS product, the one of the output head.
    scheme = scheme_in_use(model, settings)
    experts = any(isinstance(layer.feedforward, Experts) for layer, _ in cached_by_model(peaks.layer_kinds, model))
    never_calls_cublas = scheme is not None and not experts and scheme.method != "mxfp4"
    cublas = 0 if never_calls_cublas else cublas_workspace(gpu)
    return best + cublas, (*best_terms, Term("cuBLAS workspace", cublas, "kept by torch"))


def _draft(model: Model, settings: EngineSettings) -> tuple[Model | None, int]:
    """(the draft model or MTP layers as a `Model`, None without one; hidden states kept per token for the draft)."""
    method, fit = draft_method(settings.given.speculative_config), constants()["eager"]["draft_states"]
    if predicts_itself(method) and model.draft_layers:
        fuses = model.model_type.startswith(tuple(constants()["eager"]["mtp_without_states"]))
        states = 0 if fuses else fit["mtp"]
        drafting = replace(model, layers=model.draft_layers)
    elif method in fit:
        states, drafting = fit[method], model.draft or model
    else:
        return None, 0
    return drafting, min(states, EAGLE3_STATES) if is_compiled(settings) else states


def _peak_bytes(
    moment: peaks.LayerPeak, model: Model, settings: EngineSettings, gpu: Gpu, scratch: peaks.ExpertScratch
) -> int:
    """Live bytes at one layer's peak in a batch of max_num_batched_tokens, without `scratch.kept_elements`."""
    elements = moment.elements * settings.max_num_batched_tokens
    if moment.where == "experts":
        elements += scratch.passing_elements + scratch.quantized_elements
    if moment.where == "latent attention":
        elements += _expanded_prefill(model, settings, gpu)
        return elements * dtype_bytes(settings.dtype) + _indexer_logits(model, settings)
    return elements * dtype_bytes(settings.dtype)


def _indexer_logits(model: Model, settings: EngineSettings) -> int:
    """Bytes of the largest logits of DeepSeek-V4's indexer in the profile run (0.20+); 0 for other models."""
    mixers = latent(layer.mixer for layer, _ in cached_by_model(peaks.layer_kinds, model))
    indexed = any(mixer.index_head_dim and mixer.compress_ratio for mixer in mixers)
    if not indexed or settings.release.before("0.20.0"):
        return 0
    given = settings.given.env.get("VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", "")
    return (int(given) if given.isdecimal() else 512) * MIB  # vLLM's default


def _expanded_prefill(model: Model, settings: EngineSettings, gpu: Gpu) -> int:
    """Elements of keys and values that a rank's chunked prefill expands from MLA's latent (0.8+); 0 if not MLA."""
    if settings.release.before("0.8.0"):
        return 0
    tokens = latent_workspace_tokens(model, settings, gpu)
    mixers = latent(layer.mixer for layer, _ in cached_by_model(peaks.layer_kinds, model))
    ranks = settings.tensor_parallel_size
    return max(tokens * cdiv(m.heads, ranks) * (m.qk_nope_head_dim + m.v_head_dim) for m in mixers)


def _sampling_peak(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int) -> tuple[int, str]:
    """(bytes of hidden states, logits and sampler, how they add up); (0, "") before the last stage and when pooling."""
    if pp_rank != settings.pipeline_parallel_size - 1 or is_pooling(settings.given, model):
        return 0, ""
    sample = sampling(model, settings, gpu)
    sequences = min(settings.max_num_seqs, settings.max_num_batched_tokens)
    rows = settings.max_num_batched_tokens + (1 if settings.runner == "V2" else 2) * sequences
    hidden = rows * model.hidden_size * dtype_bytes(settings.dtype)
    return hidden + sample.bytes + cublas_workspace(gpu), sample.how


def _quantizes_activations(scheme: Quantization | None) -> bool:
    """Whether activations are quantized to 8 bits with one scale per token or tensor."""
    if scheme is None or scheme.block is not None or scheme.weight_bits != 8:
        return False
    return scheme.dynamic_activations or scheme.static_activations


def _half_band(peak_bytes: int) -> int:
    """Bytes from the activation peak to either end of its error band, from the residuals of the fit."""
    band = constants()["activation_band"]
    return int(peak_bytes * band["relative"]) + int(band["fixed_mib"] * MIB)


# Bytes for each logit alive at once, beside the model's own copy: float32 logits, softmax and noise.
_MASKING = 12
# The sampler that sorts keeps values, 64-bit indices and the radix sort's own buffers: 36 beside the model's copy.
# Between 2 and 127 rows torch sorts all at once with their row numbers (SortStable.cu): 12 more.
_SORTING, _SORTING_TOGETHER = 36, 48
# With speculative tokens a rejection sampler runs over one draft token a sequence: 28 beside the model's copy.
_REJECTING = 28


@dataclass(frozen=True, slots=True)
class Sampling:
    """Logits and sampler buffers of the profile run."""

    bytes: int
    kept_bytes: int
    """The persistent top-k scratch buffer."""
    how: str
    flashinfer_saving_bytes: int = 0
    """By how much `bytes` shrinks if FlashInfer's sampler is installed, where that is not known."""


def sampling(model: Model, settings: EngineSettings, gpu: Gpu) -> Sampling:
    """Bytes that the profile run takes for the logits of max_num_seqs sequences and the release's sampler."""
    release = settings.release
    sequences = min(settings.max_num_seqs, settings.max_num_batched_tokens)
    width = dtype_bytes(settings.dtype)
    logits = sequences * model.vocab_size
    copies = 2 if model.config.get("final_logit_softcapping") else 1
    if settings.engine == "V1" and release.before("0.7.3"):
        everything = settings.max_num_batched_tokens * model.vocab_size
        return Sampling(everything * width * copies, 0, "batched tokens x vocabulary: every token gets logits")
    if settings.engine == "V1" and (settings.runner == "V2" or release.before("0.8.0")):
        if settings.tensor_parallel_size > 1:
            copies = max(copies, 2)
        return Sampling(logits * width * copies, 0, "sequences x vocabulary; this runner profiles no sampler")
    if settings.engine == "V1" and release.at_least("0.17.0") and sequences >= 8:
        scratch = scratch_rows(gpu, sequences) * model.vocab_size * FLOAT32_BYTES
        each = (_REJECTING if settings.num_speculative_tokens > 0 else _MASKING) + width
        return Sampling(logits * each + scratch, scratch, f"{each} bytes x sequences x vocabulary + top-k scratch")
    each = (_SORTING_TOGETHER if 1 < sequences < 128 else _SORTING) + width
    masking = logits * (_MASKING + width)
    flashinfer_switch = settings.given.env.get("VLLM_USE_FLASHINFER_SAMPLER")
    takes_flashinfer = settings.engine == "V1" and gpu.vendor == "nvidia" and gpu.compute_capability >= (8, 0)
    if takes_flashinfer and flashinfer_switch == "1":
        return Sampling(masking, 0, f"{_MASKING + width} bytes x sequences x vocabulary: FlashInfer's sampler")
    # Up to 0.11.0 FlashInfer's sampler runs where FlashInfer is installed: in the images, not with pip.
    maybe = takes_flashinfer and flashinfer_switch is None and release.before("0.11.1")
    how = f"{each} bytes x sequences x vocabulary: this sampler sorts"
    return Sampling(logits * each, 0, how, logits * each - masking if maybe else 0)


def scratch_rows(gpu: Gpu, sequences: int) -> int:
    """Rows of the top-k kernel's scratch: `sequences` rounded up to a power of two, at most one per multiprocessor."""
    known = constants()["multiprocessors"]
    by_name = next((count for name, count in known["by_name"].items() if name in gpu.name.lower()), None)
    by_capability = known["by_capability"].get(dotted(gpu.compute_capability), known["unknown"])
    processors = int(by_name or by_capability)
    return min(1 << (min(processors, sequences) - 1).bit_length(), processors)
