"""The profile run of a vision or audio encoder: one batch of items, and their outputs that wait for the text pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from legroom.facts.releases import release as known_release
from legroom.memory.dtypes import dtype_bytes
from legroom.records import dataclass
from legroom.units import cdiv
from legroom.vllm.traits import builds_encoders

if TYPE_CHECKING:
    from legroom.facts.model import Modality, Model
    from legroom.vllm.args import EngineSettings


@dataclass(frozen=True, slots=True)
class EncoderProfile:
    """What profiling the encoder allocates."""

    peak_bytes: int
    peak_how: str
    kept_bytes: int
    how: str


def encoder_profile(model: Model, settings: EngineSettings) -> EncoderProfile | None:
    """The most expensive modality at its largest, as often as the encoder's budget holds it; None: not profiled."""
    item = _profiled_item(model, settings)
    if item is None:
        return None
    budget = max(settings.max_num_batched_tokens, item.max_tokens_per_item)
    allowed = settings.max_num_seqs * max(1, _allowed(settings, item.kind) or 1)
    count = max(1, min(cdiv(budget, item.max_tokens_per_item), allowed))
    if settings.engine == "V0":
        count = max(1, min(settings.max_num_seqs, settings.max_num_batched_tokens // item.max_tokens_per_item))
    width = dtype_bytes(settings.dtype)
    kept = count * item.max_tokens_per_item * model.hidden_size * item.feature_levels * width
    patches = count * (item.patch_tokens_per_item or item.max_tokens_per_item)
    # One block of the tower: the residual, its norm, qkv and the output, or both halves of the feed-forward block.
    live = 2 * item.hidden_size + max(6 * item.hidden_size, 2 * item.intermediate_size + item.hidden_size)
    peak = patches * live * width + kept
    handed = item.feature_levels * model.hidden_size
    how = f"{count} {item.kind} items x {item.max_tokens_per_item} tokens x {handed} x {width} bytes"
    return EncoderProfile(peak, f"{patches} patches x {live} x {width} bytes + outputs", kept, how)


def _profiled_item(model: Model, settings: EngineSettings) -> Modality | None:
    given, release = settings.given, known_release(settings.release)
    if given.skip_mm_profiling or not builds_encoders(given, model, release):
        return None
    if settings.engine == "V1" and settings.runner == "V2" and release.before("0.27.0"):
        return None  # the V2 runner profiled no encoder
    items = [m for m in model.modalities if m.max_tokens_per_item > 0 and _allowed(settings, m.kind) != 0]
    return max(items, key=lambda item: item.max_tokens_per_item, default=None)


def _allowed(settings: EngineSettings, kind: str) -> int | None:
    """Items a prompt that the user allows; None: the release's default."""
    limit = (settings.given.limit_mm_per_prompt or {}).get(kind)
    if isinstance(limit, Mapping):
        limit = limit.get("count")
    return limit if isinstance(limit, int) else None
