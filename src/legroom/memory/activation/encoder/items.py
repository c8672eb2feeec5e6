"""Which item vLLM profiles an encoder with, and how many of it: by release, as its multimodal budget computes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from legroom.facts.model import MediaItem
from legroom.facts.releases import release as known_release
from legroom.records import dataclass
from legroom.units import cdiv

if TYPE_CHECKING:
    from legroom.facts.model import Modality
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
        tokens, patches, outputs = steps * item.tokens, built * item.patches, built * item.tokens
    if item.within_length and tokens > settings.max_model_len:
        patches, outputs = (size * settings.max_model_len // tokens for size in (patches, outputs))
        tokens = settings.max_model_len
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
