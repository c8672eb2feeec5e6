"""What profiling an encoder allocates: the peak inside its tower, and the outputs that wait for the text pass.

vLLM runs one batch of its largest items through the tower before it runs the language model. The tower's layers run
one after another, so its peak is that of the greediest moment of one block (`LiveTensors`, a family's row in
data/towers.json), beside the pixels and what the blocks before it handed out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.facts.model import LiveTensors
from legroom.facts.releases import release as known_release
from legroom.memory.activation.encoder.items import (
    ProfiledItem,
    encoder_budget,
    items_per_batch,
    profiled_items,
)
from legroom.memory.cache import PROFILE_RUN, cached
from legroom.memory.dtypes import dtype_bytes
from legroom.records import dataclass
from legroom.units import MIB, cdiv
from legroom.vllm.traits import builds_encoders, replicates_encoders

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.facts.model import Modality, Model
    from legroom.vllm.args import EngineSettings

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
    kept = (count * rows + (largest.outputs if padded else 0)) * handed * width
    how = f"{count} {largest.kind} items x {rows} tokens x {handed} x {width} bytes"
    if settings.runner != "V2":
        # Local variables of the V1 runner's profile run keep its inputs, and the last output that was padded.
        pixels = batch.patches * _pixel_bytes(largest.tower, settings, width)
        kept += pixels
        how += f" + {pixels / MIB:.0f} MiB of pixels"
    inside, moment = _tower_peak(batch, model, settings, gpu, width)
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
    live, where = max((_live_bytes(moment, tower, batch.ranks, width), moment.where) for moment in moments)
    pixels = batch.patches * _pixel_bytes(tower, settings, width)
    return at_once * live + pixels + _tapped_bytes(batch, model, settings, width), where


def _pixel_bytes(tower: Modality, settings: EngineSettings, width: int) -> int:
    """Input bytes of one patch."""
    raw = bool(tower.raw_pixels_since) and known_release(settings.release).at_least(tower.raw_pixels_since)
    return tower.pixels_per_patch * (1 if raw else width)


def _outdated(moment: LiveTensors, settings: EngineSettings) -> bool:
    release = known_release(settings.release)
    early = bool(moment.since) and release.before(moment.since)
    return early or (bool(moment.until) and release.at_least(moment.until))


def _live_bytes(moment: LiveTensors, tower: Modality, ranks: int, width: int) -> int:
    split = 1 if not any(weight.split for weight in tower.weights) and tower.weights else ranks
    inner = cdiv(tower.intermediate_size, split)
    elements = moment.hidden * tower.hidden_size + moment.heads * tower.hidden_size / split + moment.inner * inner
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


def _inside_the_text_pass(
    items: tuple[ProfiledItem, ...], model: Model, settings: EngineSettings, width: int
) -> EncoderProfile:
    """V0 sends one sequence with every kind of item through the whole model: pixels and outputs stay until its end."""
    sequences = max(1, min(settings.max_num_seqs, settings.max_num_batched_tokens // sum(i.tokens for i in items)))
    elements = sum(
        item.outputs * model.hidden_size * item.tower.feature_levels + item.patches * item.tower.pixels_per_patch
        for item in items
    )
    kept = sequences * elements * width
    largest = max(items, key=lambda item: item.patches)
    batch = EncoderBatch(largest, sequences, settings.tensor_parallel_size)
    inside, moment = _tower_peak(batch, model, settings, None, width)
    kinds = " and ".join(item.kind for item in items)
    return EncoderProfile(
        inside + kept,
        f"{sequences} x {kinds}, {batch.patches} patches in the {moment}",
        kept,
        f"pixels and outputs of {sequences} x {kinds}",
        int(inside * largest.tower.spread),
    )
