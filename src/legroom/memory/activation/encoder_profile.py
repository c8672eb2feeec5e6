"""What profiling an encoder allocates: the peak inside its tower, and the outputs that wait for the text pass.

vLLM runs one batch of its largest items through the tower before it runs the language model. The tower's layers run
one after another, so its peak is that of the greediest moment of one block (`LiveTensors`, a family's row in
data/towers.json), beside the pixels and what the blocks before it handed out. Which item is profiled, and how many of
it, is what the release's multimodal budget computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from legroom.facts.model import LiveTensors, MediaItem
from legroom.facts.releases import release as known_release
from legroom.memory.attention_workspace import split_key_bytes
from legroom.memory.dtypes import dtype_bytes
from legroom.memory.figure_cache import PROFILE_RUN, cached
from legroom.records import dataclass
from legroom.units import MIB, cdiv
from legroom.vllm.traits import builds_encoders, replicates_encoders

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.facts.model import Modality, Model
    from legroom.vllm.args import EngineSettings

UNLIMITED = 999
"""Items a prompt where the user sets no limit, in V1."""


@dataclass(frozen=True, slots=True)
class ProfiledItem:
    """One item, with the sizes it has at these settings."""

    kind: str
    tokens: int
    """Placeholder tokens that the budget counts."""
    patches: int
    outputs: int
    """Rows the encoder hands to the language model."""
    tower: Modality


def profiled_items(towers: tuple[Modality, ...], settings: EngineSettings) -> tuple[ProfiledItem, ...]:
    """Every kind of item that the limits allow, at its largest."""
    allowed = {item.kind for tower in towers for item in _current(tower, settings) if limit(settings, item.kind)}
    return tuple(
        _sized(item, tower, settings, allowed)
        for tower in towers
        for item in _current(tower, settings)
        if item.kind in allowed and item.tokens > 0
    )


def encoder_budget(items: tuple[ProfiledItem, ...], settings: EngineSettings) -> int:
    """Tokens that one step may encode, and that the encoder cache holds."""
    return max(settings.max_num_batched_tokens, *(item.tokens for item in items))


def items_per_batch(item: ProfiledItem, budget: int, settings: EngineSettings) -> int:
    """How often the profile run repeats the item."""
    per_prompt = limit(settings, item.kind)
    if known_release(settings.release).before("0.10.0"):
        return max(1, min(cdiv(budget, item.tokens), settings.max_num_seqs * per_prompt))
    requests = settings.max_num_seqs
    if not settings.enable_chunked_prefill:
        requests = min(requests, settings.max_num_batched_tokens // item.tokens)
    per_prompt = max(1, min(per_prompt, settings.max_model_len // item.tokens))
    return max(1, min(budget // item.tokens, requests * per_prompt))


def limit(settings: EngineSettings, kind: str) -> int:
    """Items of a kind that one prompt may have."""
    given = (settings.given.limit_mm_per_prompt or {}).get(kind)
    if isinstance(given, Mapping):
        given = given.get("count")
    if isinstance(given, int):
        return given
    return 1 if settings.engine == "V0" else UNLIMITED


def _current(tower: Modality, settings: EngineSettings) -> tuple[MediaItem, ...]:
    release = known_release(settings.release)
    if not tower.items:
        patches = tower.patch_tokens_per_item or tower.max_tokens_per_item
        return (MediaItem(tower.kind, tower.max_tokens_per_item, patches),)
    return tuple(
        item
        for item in tower.items
        if not (item.since and release.before(item.since)) and not (item.until and release.at_least(item.until))
    )


def _sized(item: MediaItem, tower: Modality, settings: EngineSettings, allowed: set[str]) -> ProfiledItem:
    item = _with_processor_limits(item, settings)
    options = (settings.given.limit_mm_per_prompt or {}).get(item.kind)
    options = options if isinstance(options, Mapping) else {}
    tokens, patches, outputs = item.tokens, item.patches, item.outputs or item.tokens
    if item.max_frames:
        image = next((i.tokens for i in _current(tower, settings) if i.kind == "image"), 0)
        shared = "image" in allowed and _shares_length(item, settings)
        steps = _steps(item, settings.max_model_len - (image if shared else 0))
        built = _steps(item, _dummy_length(settings, item, steps))
        tokens, patches, outputs = steps * item.tokens, built * item.patches, built * (item.outputs or item.tokens)
    if item.within_length and tokens > settings.max_model_len:
        patches, outputs = (size * settings.max_model_len // tokens for size in (patches, outputs))
        tokens = settings.max_model_len
    if item.lengths:
        fitting = [length for length in item.lengths if length <= settings.max_model_len]
        patches = patches // tokens * max(fitting, default=item.lengths[0])
        tokens = outputs = max(fitting, default=item.lengths[0])
    share = _smaller(item, patches, options)
    return ProfiledItem(item.kind, tokens, int(patches * share), int(outputs * share), tower)


def _shares_length(item: MediaItem, settings: EngineSettings) -> bool:
    until = item.beside_image_until
    return until == "always" or bool(until and known_release(settings.release).before(until))


def _steps(item: MediaItem, length: int) -> int:
    """Steps of frames that a request of this length holds; a video has one at least."""
    whole = max(length, 0) // item.tokens
    return max(1, min(whole, cdiv(item.max_frames, item.frames_per_step)))


def _dummy_length(settings: EngineSettings, item: MediaItem, steps: int) -> int:
    """Until 0.9 the made-up video was cut for one batch, not for the longest request."""
    release = known_release(settings.release)
    if release.before("0.10.0"):
        return settings.max_num_batched_tokens
    return steps * item.tokens if release.before("0.10.1") else settings.max_model_len


def _with_processor_limits(item: MediaItem, settings: EngineSettings) -> MediaItem:
    """--mm-processor-kwargs {"max_pixels": ...} makes pictures smaller."""
    asked = _max_pixels(settings.given.mm_processor_kwargs or {}, item.kind)
    if not asked or not item.pixels_per_token:
        return item
    share = max(asked // item.pixels_per_token, 1) / item.tokens
    return replace(item, tokens=int(item.tokens * share), patches=int(item.patches * share))


def _max_pixels(kwargs: Mapping[str, Any], kind: str) -> int:
    scoped = kwargs.get(f"{kind}s_kwargs")
    for given in (scoped if isinstance(scoped, Mapping) else {}, kwargs):
        size = given.get("size")
        edge = size.get("longest_edge") if isinstance(size, Mapping) else None
        for value in (given.get("max_pixels"), edge):
            if isinstance(value, int) and value > 0:
                return value
    return 0


def _smaller(item: MediaItem, patches: int, options: Mapping[str, Any]) -> float:
    """The share of the largest item that --limit-mm-per-prompt's sizes leave: they shrink what is made up."""
    share = 1.0
    frames = options.get("num_frames")
    if isinstance(frames, int) and item.max_frames:
        share = min(share, cdiv(frames, item.frames_per_step) * item.patches / patches)
    width, height = options.get("width"), options.get("height")
    if isinstance(width, int) and isinstance(height, int) and item.pixels_per_token and item.patches:
        share *= min(1.0, width * height / item.pixels_per_token / item.tokens)
    return share


_PLAIN = (LiveTensors("feed-forward", hidden=4, inner=2), LiveTensors("attention", hidden=3, heads=5))
_UNSPLIT_BLOCK_BYTES = 20 * MIB
"""0.32 profiles with blocks above this size left whole: a freed one that is a little larger is handed out as it is."""


@dataclass(frozen=True, slots=True)
class EncoderProfile:
    """What profiling the encoder allocates."""

    peak_bytes: int
    peak_how: str
    kept_bytes: int
    how: str
    spread_bytes: int = 0
    """How far the peak may be off."""


@dataclass(frozen=True, slots=True)
class EncoderBatch:
    """One batch of items as it runs through the tower of one rank."""

    item: ProfiledItem
    count: int
    ranks: int
    """Tensor-parallel ranks that share the blocks' heads."""

    @property
    def patches(self) -> int:
        """Rows inside the tower."""
        return self.count * self.item.patches


def encoder_profile(model: Model, settings: EngineSettings, gpu: Gpu) -> EncoderProfile | None:
    """The modality with the most tokens an item, as often as the encoder's budget holds it; None: not profiled."""
    return cached(_profile, model, settings, gpu, inputs=PROFILE_RUN) if model.modalities else None


def _profile(model: Model, settings: EngineSettings, gpu: Gpu, _: int) -> EncoderProfile | None:
    if not _is_profiled(model, settings):
        return None
    items = profiled_items(model.modalities, settings)
    if not items:
        return None
    width = dtype_bytes(settings.dtype)
    if settings.engine == "V0":
        return _inside_the_text_pass(items, model, settings, width)
    largest = max(items, key=lambda item: (item.tokens, item.kind))
    budget = encoder_budget(items, settings)
    count = items_per_batch(largest, budget, settings)
    batch = EncoderBatch(largest, count, settings.tensor_parallel_size)
    if replicates_encoders(settings.given):
        batch = EncoderBatch(largest, cdiv(count, settings.tensor_parallel_size), 1)
    rows = _kept_rows(largest, budget, settings)
    padded = rows != largest.outputs
    handed = largest.tower.feature_levels * model.hidden_size
    kept = (count * rows + (largest.outputs if padded else 0)) * handed * width + largest.tower.table_bytes
    how = f"{count} {largest.kind} items x {rows} tokens x {handed} x {width} bytes"
    if settings.runner != "V2":
        # Local variables of the V1 runner's profile run keep its inputs, and the last output that was padded.
        pixels = batch.patches * _pixel_bytes(largest.tower, settings, width)
        kept += pixels
        how += f" + {pixels / MIB:.0f} MiB of pixels"
    inside, moment = _tower_peak(batch, model, settings, gpu, width)
    scores = _score_matrix_bytes(batch, settings, gpu)
    if scores > inside:
        inside, moment = inside + scores, "attention, whose scores are all kept at once"
    outputs = count * largest.outputs * handed * width
    peak = max(inside, outputs + kept if padded else 0)
    what = f"{count} {largest.kind} items, {batch.patches} patches in the {moment}"
    return EncoderProfile(peak, what, kept, how, int(peak * largest.tower.spread))


def _is_profiled(model: Model, settings: EngineSettings) -> bool:
    given, release = settings.given, known_release(settings.release)
    if given.skip_mm_profiling or not builds_encoders(given, model, release):
        return False
    # The V2 runner profiled no encoder at first.
    return not (settings.engine == "V1" and settings.runner == "V2" and release.before("0.27.0"))


def _kept_rows(item: ProfiledItem, budget: int, settings: EngineSettings) -> int:
    """0.11 padded every output to the whole budget, 0.12 to the item's placeholders; others keep what came out."""
    release = known_release(settings.release)
    if release.before("0.11.0") or release.at_least("0.13.0"):
        return item.outputs
    return max(item.outputs, budget if release.before("0.12.0") else item.tokens)


def _tower_peak(
    batch: EncoderBatch, model: Model, settings: EngineSettings, gpu: Gpu | None, width: int
) -> tuple[int, str]:
    tower = batch.item.tower
    moments = [m for m in tower.moments or _PLAIN if not _outdated(m, settings)]
    at_once = min(batch.patches, _chunk_patches(batch, settings, gpu))
    partial = _partial_sum_bytes(batch, settings, gpu) if gpu else 0
    live, where = max(
        (_live_bytes(moment, tower, batch.ranks, width, model.hidden_size) + partial * moment.splits_keys, moment.where)
        for moment in moments
    )
    pixels = batch.patches * _pixel_bytes(tower, settings, width)
    return at_once * live + pixels + tower.table_bytes + _tapped_bytes(batch, model, settings, width), where


def _partial_sum_bytes(batch: EncoderBatch, settings: EngineSettings, gpu: Gpu) -> int:
    """For every patch, where the tower's attention kernel cuts its keys into parts."""
    tower = batch.item.tower
    if not tower.attending_patches:
        return 0
    heads, head_dim = cdiv(tower.heads, batch.ranks), tower.hidden_size // tower.heads
    sequences = batch.patches // tower.attending_patches
    return split_key_bytes(tower.attending_patches, sequences, heads, head_dim, settings, gpu)


_FLASH_ON_RDNA = "0.15.0"
"""From here on Radeon cards run the towers' attention on Triton's flash kernel; torch's own keeps all scores."""
_RDNA = (10, 0)
_SCORE_BYTES = 4


def _score_matrix_bytes(batch: EncoderBatch, settings: EngineSettings, gpu: Gpu) -> int:
    """What attention takes inside one item where no flash kernel runs: a score for every pair of patches and head."""
    radeon = gpu.vendor == "amd" and gpu.compute_capability >= _RDNA
    if not radeon or known_release(settings.release).at_least(_FLASH_ON_RDNA):
        return 0
    return batch.item.patches**2 * cdiv(batch.item.tower.heads, batch.ranks) * _SCORE_BYTES


def _pixel_bytes(tower: Modality, settings: EngineSettings, width: int) -> int:
    """Input bytes of one patch."""
    raw = bool(tower.raw_pixels_since) and known_release(settings.release).at_least(tower.raw_pixels_since)
    return tower.pixels_per_patch * (1 if raw else width)


def _outdated(moment: LiveTensors, settings: EngineSettings) -> bool:
    release = known_release(settings.release)
    early = bool(moment.since) and release.before(moment.since)
    return early or (bool(moment.until) and release.at_least(moment.until))


def _live_bytes(moment: LiveTensors, tower: Modality, ranks: int, width: int, text: int) -> int:
    split = 1 if not any(weight.split for weight in tower.weights) and tower.weights else ranks
    inner = cdiv(tower.intermediate_size, split)
    elements = moment.hidden * tower.hidden_size + moment.heads * tower.hidden_size / split + moment.inner * inner
    elements += moment.text * text
    return int(elements * width) + moment.extra_bytes


def _chunk_patches(batch: EncoderBatch, settings: EngineSettings, gpu: Gpu | None) -> int:
    """Gemma 4 encodes as many frames at once as its look-up of positions may take of the card."""
    tower, release = batch.item.tower, known_release(settings.release)
    if not tower.chunk_bytes_per_patch or gpu is None:
        return batch.patches
    frame = _FRAME_PATCHES if batch.item.kind == "video" else batch.item.patches
    if release.before(tower.chunked_since):
        return frame
    return max(1, gpu.total_bytes // 10 // (frame * tower.chunk_bytes_per_patch)) * frame


_FRAME_PATCHES = 630
"""Patches of one frame of Gemma 4's videos: 70 tokens of 3 x 3."""


def _tapped_bytes(batch: EncoderBatch, model: Model, settings: EngineSettings, width: int) -> int:
    """DeepStack's features of earlier blocks wait while the last blocks run."""
    tower = batch.item.tower
    if tower.feature_levels < 2:
        return 0
    size = batch.count * batch.item.outputs * model.hidden_size * width
    freed = batch.patches * tower.hidden_size * width
    if known_release(settings.release).at_least("0.27.0") and size < freed < size + _UNSPLIT_BLOCK_BYTES:
        size = freed
    return (tower.feature_levels - 1) * size


_TILES, _MASKS = 4, 3
"""Llama 3.2 Vision: an image is up to four tiles (max_num_tiles), whose patches attend to each other; the mask of every
pair of them is there three times while it is made (vLLM's mllama.py; 19.63 GiB each in a report of 256 sequences)."""


def _inside_the_text_pass(
    items: tuple[ProfiledItem, ...], model: Model, settings: EngineSettings, width: int
) -> EncoderProfile:
    """V0 sends one sequence with every kind of item through the whole model: pixels and outputs stay until its end."""
    sequences = max(1, min(settings.max_num_seqs, settings.max_num_batched_tokens // sum(i.tokens for i in items)))
    masks = 0
    if "cross_attention_layers" in model.config:
        # No token of the prompt stands for an image, so every sequence of the batch has one.
        sequences = settings.max_num_seqs
        masks = sequences * (_TILES * max(item.patches for item in items)) ** 2 * _MASKS * width
    elements = sum(
        item.outputs * model.hidden_size * item.tower.feature_levels + item.patches * item.tower.pixels_per_patch
        for item in items
    )
    kept = sequences * elements * width
    largest = max(items, key=lambda item: item.patches)
    batch = EncoderBatch(largest, sequences, settings.tensor_parallel_size)
    inside, moment = _tower_peak(batch, model, settings, None, width)
    inside += masks
    kinds = " and ".join(item.kind for item in items)
    return EncoderProfile(
        inside + kept,
        f"{sequences} x {kinds}, {batch.patches} patches in the {moment}",
        kept,
        f"pixels and outputs of {sequences} x {kinds}",
        int(inside * largest.tower.spread),
    )
