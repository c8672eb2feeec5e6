"""The memory of profiling a multimodal encoder: its peak, and the outputs that live during the text pass.

vLLM runs one batch of the largest items through the encoder before the language model. Its layers run one after
another, so the peak is the widest point of one block (`LiveTensors`, a row of data/towers.json) with the pixels and
the DeepStack features. The release's multimodal budget decides which item is profiled and how many of it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from legroom.facts.gpus import Gpu
from legroom.facts.model import LiveTensors, MediaItem, Modality, Model
from legroom.facts.releases import Release
from legroom.memory.attention_workspace import split_kv_bytes
from legroom.memory.caching_allocator import LARGE_SEGMENT_BYTES
from legroom.memory.dtypes import FLOAT32_BYTES, dtype_bytes
from legroom.memory.figure_cache import PROFILE_RUN, cached
from legroom.records import dataclass
from legroom.units import MIB, cdiv
from legroom.vllm.args import EngineSettings
from legroom.vllm.traits import builds_encoders, replicates_encoders

UNLIMITED = 999
"""V1's default of --limit-mm-per-prompt (vLLM's MultiModalConfig)."""


@dataclass(frozen=True, slots=True)
class ProfiledItem:
    """One dummy item of the profile run."""

    kind: str
    tokens: int
    """Placeholder tokens."""
    patches: int
    outputs: int
    """Encoder output rows."""
    tower: Modality


def profiled_items(towers: tuple[Modality, ...], settings: EngineSettings) -> tuple[ProfiledItem, ...]:
    """The largest dummy item of each kind of media that the encoders take and --limit-mm-per-prompt allows."""
    kinds = {item.kind for tower in towers for item in _release_items(tower, settings)}
    allowed = {kind for kind in kinds if items_per_prompt(settings, kind)}
    return tuple(
        _as_profiled(item, tower, settings, allowed)
        for tower in towers
        for item in _release_items(tower, settings)
        if item.kind in allowed and item.tokens > 0
    )


def encoder_budget(items: tuple[ProfiledItem, ...], settings: EngineSettings) -> int:
    """Tokens that the encoder may take in one step: max_num_batched_tokens, or those of the largest item if more."""
    return max(settings.max_num_batched_tokens, *(item.tokens for item in items))


def items_per_batch(item: ProfiledItem, budget: int, settings: EngineSettings) -> int:
    """How many items like this one fit into the profile run's `budget` of encoder tokens; at least 1."""
    per_prompt = items_per_prompt(settings, item.kind)
    if settings.release.before("0.10.0"):
        return max(1, min(cdiv(budget, item.tokens), settings.max_num_seqs * per_prompt))
    requests = settings.max_num_seqs
    if not settings.enable_chunked_prefill:
        requests = min(requests, settings.max_num_batched_tokens // item.tokens)
    per_prompt = max(1, min(per_prompt, settings.max_model_len // item.tokens))
    return max(1, min(budget // item.tokens, requests * per_prompt))


def items_per_prompt(settings: EngineSettings, kind: str) -> int:
    """Items of a kind ("image", "video" ...) per prompt: --limit-mm-per-prompt, else 999 (V1) or 1 (V0)."""
    given = (settings.given.limit_mm_per_prompt or {}).get(kind)
    given = given.get("count") if isinstance(given, Mapping) else given
    return given if isinstance(given, int) else 1 if settings.engine == "V0" else UNLIMITED


def _release_items(tower: Modality, settings: EngineSettings) -> tuple[MediaItem, ...]:
    """The encoder's media items that exist in this release; where none are listed, one of the largest size."""
    if not tower.items:
        patches = tower.patch_tokens_per_item or tower.max_tokens_per_item
        return (MediaItem(tower.kind, tower.max_tokens_per_item, patches),)
    return tuple(item for item in tower.items if _exists_in(item, settings.release))


def _exists_in(part: MediaItem | LiveTensors, release: Release) -> bool:
    """Whether a media item, or a set of live tensors, is one of this release."""
    return not (part.since and release.before(part.since)) and not (part.until and release.at_least(part.until))


def _as_profiled(item: MediaItem, tower: Modality, settings: EngineSettings, allowed: set[str]) -> ProfiledItem:
    """The item as large as the profile run builds it; if "image" is among the `allowed` media, videos are shorter."""
    item = _with_processor_limits(item, settings)
    options = (settings.given.limit_mm_per_prompt or {}).get(item.kind)
    options = options if isinstance(options, Mapping) else {}
    tokens, patches, outputs = item.tokens, item.patches, item.outputs or item.tokens
    if item.max_frames:
        image = next((i.tokens for i in _release_items(tower, settings) if i.kind == "image"), 0)
        until, release = item.beside_image_until, settings.release
        is_shared = until == "always" or bool(until and release.before(until))  # max_model_len, with an image
        steps = _video_frame_steps(item, settings.max_model_len - (image if "image" in allowed and is_shared else 0))
        built = _video_frame_steps(item, _dummy_length(settings, item, steps))
        tokens, patches, outputs = steps * item.tokens, built * item.patches, built * (item.outputs or item.tokens)
    if item.within_length and tokens > settings.max_model_len:
        patches, outputs = (size * settings.max_model_len // tokens for size in (patches, outputs))
        tokens = settings.max_model_len
    if item.lengths:
        fitting = [length for length in item.lengths if length <= settings.max_model_len]
        patches = patches // tokens * max(fitting, default=item.lengths[0])
        tokens = outputs = max(fitting, default=item.lengths[0])
    share = 1.0
    frames = options.get("num_frames")
    if isinstance(frames, int) and item.max_frames:
        share = min(share, cdiv(frames, item.frames_per_step) * item.patches / patches)
    width, height = options.get("width"), options.get("height")
    if isinstance(width, int) and isinstance(height, int) and item.pixels_per_token and item.patches:
        share *= min(1.0, width * height / item.pixels_per_token / item.tokens)
    return ProfiledItem(item.kind, tokens, int(patches * share), int(outputs * share), tower)


def _video_frame_steps(item: MediaItem, length: int) -> int:
    """Temporal patches (`frames_per_step` frames each) of a video that fit into `length` prompt tokens, at least 1."""
    return max(1, min(max(length, 0) // item.tokens, cdiv(item.max_frames, item.frames_per_step)))


def _dummy_length(settings: EngineSettings, item: MediaItem, frame_steps: int) -> int:
    """Tokens of the dummy video: max_num_batched_tokens before 0.10.0, all `frame_steps` in it, max_model_len after."""
    if settings.release.before("0.10.0"):
        return settings.max_num_batched_tokens
    return frame_steps * item.tokens if settings.release.before("0.10.1") else settings.max_model_len


def _with_processor_limits(item: MediaItem, settings: EngineSettings) -> MediaItem:
    """The item scaled to the max_pixels of --mm-processor-kwargs; unchanged where none is given."""
    max_pixels = _max_pixels(settings.given.mm_processor_kwargs or {}, item.kind)
    if not max_pixels or not item.pixels_per_token:
        return item
    share = max(max_pixels // item.pixels_per_token, 1) / item.tokens
    return replace(item, tokens=int(item.tokens * share), patches=int(item.patches * share))


def _max_pixels(kwargs: Mapping[str, Any], kind: str) -> int:
    """The most pixels of an image or video (`kind`) that --mm-processor-kwargs allows; 0 where it names none."""
    scoped, stated = kwargs.get(f"{kind}s_kwargs"), []
    for given in (scoped if isinstance(scoped, Mapping) else {}, kwargs):
        size = given.get("size")
        stated += [given.get("max_pixels"), size.get("longest_edge") if isinstance(size, Mapping) else None]
    return next((value for value in stated if isinstance(value, int) and value > 0), 0)


_PLAIN = (LiveTensors("feed-forward", hidden=4, inner=2), LiveTensors("attention", hidden=3, heads=5))


@dataclass(frozen=True, slots=True)
class EncoderProfile:
    """The memory of profiling the encoder."""

    peak_bytes: int
    peak_how: str
    kept_bytes: int
    """Outputs and inputs that live during the text pass."""
    how: str
    spread_bytes: int = 0
    """Half the error band of the peak."""
    scores_bytes: int = 0
    """What attention keeps beside the peak where the `flash_attn` package is not installed."""


@dataclass(frozen=True, slots=True)
class EncoderBatch:
    """One batch of items in the encoder of one rank."""

    item: ProfiledItem
    count: int
    ranks: int
    """Tensor-parallel ranks that share the attention heads."""

    @property
    def patches(self) -> int:
        """Patches of all items in the batch."""
        return self.count * self.item.patches


def encoder_batch(model: Model, settings: EngineSettings) -> EncoderBatch | None:
    """The largest item, as often as vLLM profiles it in one encoder batch of a rank; None where it profiles none."""
    if not model.modalities or not _is_profiled(model, settings):
        return None
    items = profiled_items(model.modalities, settings)
    if not items:
        return None
    largest = max(items, key=lambda item: (item.tokens, item.kind))
    count = items_per_batch(largest, encoder_budget(items, settings), settings)
    if replicates_encoders(settings.given, model):
        return EncoderBatch(largest, cdiv(count, settings.tensor_parallel_size), 1)
    return EncoderBatch(largest, count, settings.tensor_parallel_size)


@cached(PROFILE_RUN)
def encoder_profile(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> EncoderProfile | None:
    """Peak and kept bytes of the encoder's profile run with the largest items; None where vLLM profiles no encoder."""
    batch = encoder_batch(model, settings)
    if batch is None:
        return None
    items, width = profiled_items(model.modalities, settings), dtype_bytes(settings.dtype)
    if settings.engine == "V0":
        return _v0_profile(items, model, settings, width)
    largest, budget = batch.item, encoder_budget(items, settings)
    count = items_per_batch(largest, budget, settings)
    rows = _kept_rows(largest, budget, settings)
    padded = rows != largest.outputs
    handed = largest.tower.feature_levels * model.hidden_size
    kept = (count * rows + (largest.outputs if padded else 0)) * handed * width + largest.tower.table_bytes
    how = f"{count} {largest.kind} items x {rows} tokens x {handed} x {width} bytes"
    if settings.runner != "V2":
        # Local variables of the V1 runner's profile run reference its inputs and the last padded output.
        pixels = batch.patches * _pixel_bytes(largest.tower, settings, width)
        kept += pixels
        how += f" + {pixels / MIB:.0f} MiB of pixels"
    inside, moment = _tower_peak(batch, model, settings, gpu, width)
    radeon = gpu.vendor == "amd" and gpu.compute_capability >= (10, 0)
    scores = batch.item.patches**2 * cdiv(batch.item.tower.heads, batch.ranks) * FLOAT32_BYTES if radeon else 0
    has_flash = settings.release.at_least(_FLASH_ON_RDNA)
    if scores > inside and not has_flash:
        inside, moment = inside + scores, "attention, whose scores are all kept at once"
    outputs = count * largest.outputs * handed * width
    peak = max(inside, outputs + kept if padded else 0)
    what = f"{count} {largest.kind} items, {batch.patches} patches in the {moment}"
    return EncoderProfile(peak, what, kept, how, int(peak * largest.tower.spread), scores if has_flash else 0)


def _is_profiled(model: Model, settings: EngineSettings) -> bool:
    """Whether the profile run includes the multimodal encoders, by release, model runner and flags."""
    given, release = settings.given, settings.release
    if given.skip_mm_profiling or not builds_encoders(given, model, release):
        return False
    # The V2 runner profiles no encoder before 0.27.
    return not (settings.engine == "V1" and settings.runner == "V2" and release.before("0.27.0"))


def _kept_rows(item: ProfiledItem, budget: int, settings: EngineSettings) -> int:
    """Rows of an item's cached output: its outputs; in 0.11 at least `budget` (encoder tokens), in 0.12 its tokens."""
    if settings.release.before("0.11.0") or settings.release.at_least("0.13.0"):
        return item.outputs
    return max(item.outputs, budget if settings.release.before("0.12.0") else item.tokens)


def _tower_peak(
    batch: EncoderBatch, model: Model, settings: EngineSettings, gpu: Gpu | None, width: int
) -> tuple[int, str]:
    """(peak bytes of the encoder for this batch on one rank, the operation at the peak); `width`: bytes of a value."""
    tower = batch.item.tower
    moments = [moment for moment in tower.moments or _PLAIN if _exists_in(moment, settings.release)]
    at_once = min(batch.patches, _chunk_patches(batch, settings, gpu))
    partial = _partial_sum_bytes(batch, settings, gpu) if gpu else 0
    live, where = max(
        (_live_bytes(moment, tower, batch.ranks, width, model.hidden_size) + partial * moment.splits_keys, moment.where)
        for moment in moments
    )
    pixels = batch.patches * _pixel_bytes(tower, settings, width)
    return at_once * live + pixels + tower.table_bytes + _deepstack_bytes(batch, model, settings, width), where


def _partial_sum_bytes(batch: EncoderBatch, settings: EngineSettings, gpu: Gpu) -> int:
    """Bytes per patch of the split-KV buffers of the encoder's attention kernel; 0 where it does not split."""
    tower = batch.item.tower
    if not tower.attending_patches:
        return 0
    heads, head_dim = cdiv(tower.heads, batch.ranks), tower.hidden_size // tower.heads
    sequences = batch.patches // tower.attending_patches
    return split_kv_bytes(tower.attending_patches, sequences, heads, head_dim, settings, gpu)


_FLASH_ON_RDNA = "0.15.0"
"""The first release that runs encoders on Radeon by the `flash_attn` package; torch's own kernel keeps all scores."""


def _pixel_bytes(tower: Modality, settings: EngineSettings, value_bytes: int) -> int:
    """Bytes of one patch's input pixels, each of `value_bytes`, or of one byte where the release passes raw pixels."""
    raw = bool(tower.raw_pixels_since) and settings.release.at_least(tower.raw_pixels_since)
    return tower.pixels_per_patch * (1 if raw else value_bytes)


def _live_bytes(moment: LiveTensors, tower: Modality, ranks: int, value_bytes: int, text_hidden_size: int) -> int:
    """Bytes per patch alive at one `moment` of the encoder's forward pass, on one of `ranks` ranks."""
    split = 1 if not any(weight.split for weight in tower.weights) and tower.weights else ranks
    inner = cdiv(tower.intermediate_size, split)
    elements = moment.hidden * tower.hidden_size + moment.heads * tower.hidden_size / split + moment.inner * inner
    elements += moment.text * text_hidden_size
    return int(elements * value_bytes) + moment.extra_bytes


def _chunk_patches(batch: EncoderBatch, settings: EngineSettings, gpu: Gpu | None) -> int:
    """Patches encoded at once: the batch; in Gemma 4 what fits a tenth of the card, in its first releases one frame."""
    tower, release = batch.item.tower, settings.release
    if not tower.chunk_bytes_per_patch or gpu is None:
        return batch.patches
    frame = 630 if batch.item.kind == "video" else batch.item.patches  # a video frame has 70 tokens of 3 x 3 patches
    if release.before(tower.chunked_since):
        return frame
    return max(1, gpu.total_bytes // 10 // (frame * tower.chunk_bytes_per_patch)) * frame


def _deepstack_bytes(batch: EncoderBatch, model: Model, settings: EngineSettings, value_bytes: int) -> int:
    """Bytes of the earlier blocks' features that DeepStack keeps until the last blocks run; 0 without DeepStack."""
    tower = batch.item.tower
    if tower.feature_levels < 2:
        return 0
    size = batch.count * batch.item.outputs * model.hidden_size * value_bytes
    freed = batch.patches * tower.hidden_size * value_bytes
    # 0.32 profiles with max_split_size_mb:20, so a freed block that is a little larger is reused whole.
    if settings.release.at_least("0.32.0") and size < freed < size + LARGE_SEGMENT_BYTES:
        size = freed
    return (tower.feature_levels - 1) * size


def _v0_profile(items: tuple[ProfiledItem, ...], model: Model, settings: EngineSettings, width: int) -> EncoderProfile:
    """V0's profile run (`width` bytes a value): each sequence has an item of every kind, kept with its output."""
    sequences = max(1, min(settings.max_num_seqs, settings.max_num_batched_tokens // sum(i.tokens for i in items)))
    masks = 0
    if "cross_attention_layers" in model.config:
        # Llama 3.2 Vision has no placeholder tokens, so every sequence has an image of up to four tiles. Their
        # attention mask exists three times while it is built (mllama.py; 19.63 GiB each in a report of 256 sequences).
        sequences = settings.max_num_seqs
        masks = sequences * (4 * max(item.patches for item in items)) ** 2 * 3 * width
    elements = sum(
        item.outputs * model.hidden_size * item.tower.feature_levels + item.patches * item.tower.pixels_per_patch
        for item in items
    )
    kept = sequences * elements * width
    largest = max(items, key=lambda item: item.patches)
    batch = EncoderBatch(largest, sequences, settings.tensor_parallel_size)
    inside, moment = _tower_peak(batch, model, settings, None, width)
    inside += masks
    what = f"{sequences} x {' and '.join(item.kind for item in items)}"
    peak_how, spread = f"{what}, {batch.patches} patches in the {moment}", int(inside * largest.tower.spread)
    return EncoderProfile(inside + kept, peak_how, kept, f"pixels and outputs of {what}", spread)
