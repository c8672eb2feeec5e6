"""Size or number of images, videos and audio - real or dummy - the encoder's cache, or its attention fallback."""

from collections.abc import Iterator
from dataclasses import replace

from legroom.diagnosis.causes import Assessment, Case, Cause, Fix, FixPlanner, known_fix, proof, reason
from legroom.diagnosis.finding import Strength
from legroom.diagnosis.fixes.flag_repair import smaller_media_fix
from legroom.diagnosis.fixes.step_savings import smaller_step_flags, step_shortage_bytes
from legroom.units import gib, round_up


def examine(case: Case) -> Assessment | None:
    """Assesses the encoder cache's error, an encoder in the traceback, or a request larger than the card; else None."""
    cache = case.first("encoder_cache_short", "mm_item_limit", "mm_tokens_not_enough")
    if cache:
        item, size = cache.facts.get("item_tokens_count"), cache.facts.get("cache_tokens_count")
        numbers = f" The item has {item} tokens and the cache {size}." if item is not None else ""
        why = f"A media item is larger than the encoder cache was made for.{numbers}"
        if cache.id == "mm_item_limit":
            why = reason("more_media", cache.facts)
        return Assessment(Strength.NAMED, proof(cache), why)
    short = case.first("mm_profile_too_short")
    if short and not case.last_error and not case.was_ready:
        return Assessment(Strength.POSSIBLE, proof(short), reason("media_encoded_at_once", short.facts))
    if not case.is_oom or case.site == "kv":
        return None  # KV tensors are no media
    if case.ledger.larger_than_card:
        strength = Strength.NAMED
    elif "frame_vision" in case.frames:
        strength = Strength.SHOWN
    elif case.has("media_told", "pixels_told") and case.oom is None and not case.has_site_frame:  # told of media
        strength = Strength.NAMED if case.site in ("serving", "profile") else Strength.SUGGESTED
    elif _dummy_media_suspected(case):
        strength = Strength.POSSIBLE
    else:
        return None
    return Assessment(strength, proof(case.first("frame_vision"), case.first("torch_oom")), _explanation(case))


def _dummy_media_suspected(case: Case) -> bool:
    """Whether the profile run's dummy images are likely to have caused the failed allocation."""
    if case.has("mm_profile_too_short", "encoder_budget") and case.site == "profile":
        return True
    oom = case.oom
    return bool(oom and not case.site and oom.total_bytes and oom.wanted_bytes > oom.total_bytes // 4)


def _explanation(case: Case) -> str:
    """Why the vision or audio encoder ran out of memory, with the allocation's size if it exceeds the card."""
    oom = case.oom
    if oom and case.ledger.larger_than_card:
        of = f" on a card of {gib(oom.total_bytes)}" if oom.total_bytes else ""
        return reason("image_larger_than_card", {"wanted": gib(oom.wanted_bytes), "of": of})
    return reason("encoder_takes_all_patches")


def is_ruled_out(planner: FixPlanner) -> bool:
    """Whether media are ruled out: the model is known and takes no images, video or audio."""
    return planner.model is not None and not planner.model.modalities and not planner.model.encoder_layers


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes (None: not applicable): media limits, a larger encoder cache, flash attention for it, smaller steps."""
    cache = planner.case.first("encoder_cache_short")
    size = (cache.number("cache_tokens_count") if cache else None) or 0
    item = (cache.number("item_tokens_count") or 2 * size) if cache else None
    limit = _bounded_media_fix(planner)
    if item and cache is not None:
        newer = known_fix("encoder_cache_bug")
        tokens = max(round_up(item, 1024), planner.known.args.max_num_batched_tokens or 0, 2048)
        named = "item_tokens_count" in cache.facts
        holds = f"hold an item of {item} tokens" if named else f"be larger, as the item has more than {size} tokens"
        why, flags = f"The encoder cache is sized from it and must {holds}.", {"max_num_batched_tokens": tokens}
        unplanned = Fix("max_num_batched_tokens", why, flags, trades="a larger activation peak", is_unplanned=True)
        larger = planner.plan_change(unplanned.kind, flags, why, trades=unplanned.trades) or unplanned
        larger = replace(larger, proven=named)
        yield from (newer, limit, larger) if size == 0 else (larger, limit)
        return
    has_flag = planner.release_is_within("0.12.0", "")
    kernel = replace(known_fix("encoder_kernel"), flags={"mm_encoder_attn_backend": "FLASH_ATTN"} if has_flag else {})
    oom = planner.case.oom
    is_square = oom is not None and oom.platform == "CUDA" and planner.case.ledger.larger_than_card
    if oom is not None and (oom.pools_bytes or planner.case.site == "serving") and not is_square:  # beside the pool
        need = step_shortage_bytes(planner)
        yield planner.lower_utilization(need, f"{gib(need)} more must stay free for the encoder beside the pool.")
    yield from (kernel, limit) if is_square else (limit, kernel)
    flags = smaller_step_flags(planner, max(planner.step_tokens // 2, 1024))
    why = "Fewer media tokens are encoded at once."
    yield planner.plan_change("max_num_batched_tokens", flags, why, trades="long prompts take more steps")


def _bounded_media_fix(planner: FixPlanner) -> Fix:
    """Fix: limits on media per prompt and their size, or no media where one dummy item alone exceeds the card."""
    why = "Dummy and real media are bounded by these limits; passed to the engine, not only to the client."
    case, limit = planner.case, smaller_media_fix(planner, why)
    is_above_card = case.oom is not None and case.ledger.larger_than_card and case.site != "serving"
    return known_fix("smaller_dummy_image") if is_above_card and "mm_processor_kwargs" not in limit.flags else limit


CAUSE = Cause(entry="LR402")
