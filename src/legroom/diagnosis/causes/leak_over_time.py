"""Memory that grows with uptime or with the number of requests."""

import re
from collections.abc import Iterator
from dataclasses import replace

from legroom.diagnosis.causes import Assessment, Case, Cause, Fix, FixPlanner, Strength, known_fix, proof
from legroom.diagnosis.recorded_memory import assess_leak, duration_text, leak_growth
from legroom.units import GIB, KIB, gib
from legroom.vllm_logs.evidence import Evidence, sizes_bytes

_OF_CARD = re.compile(r"(?i)\b(?:GPU|VRAM|CUDA) (?:memory|OOM|usage)\b|\bVRAM\b|显存")
_MEDIA = re.compile(
    r"(?i)multi-?modal|[-_.]VL\b|\bVLM\b|\bomni\b|vision|\b(?:images?|videos?|audio)\b|多模态|图片|视频"
)
_OF_HOST = re.compile(r"(?i)(?<!v)\bRAM\b|\bRSS\b|\b(?:host|system|CPU) memory|(?<!显)内存")
_LIMITS = ("killed_process", "oom_killer", "sigkill", "killed_word", "ray_node_memory")


def examine(case: Case) -> Assessment | None:
    """Assesses memory of a process that only grows; None without a series of readings or a sentence that shows it."""
    if case.black_box is not None and (recorded := assess_leak(case.black_box, case.black_box_line)):
        return recorded
    series: dict[str, list[tuple[int, Evidence]]] = {}
    for item in case.all("ps_row", "resident_metric"):
        value = item.facts.get("rss_count")
        resident = item.facts.get("resident_ratio")
        amount = value * KIB if isinstance(value, int) else int(resident) if isinstance(resident, float) else 0
        series.setdefault(str(item.facts.get("pid", "")), []).append((amount, item))
    for points in series.values():
        amounts = [amount for amount, _ in points]
        if len(points) >= 3 and amounts == sorted(amounts) and amounts[-1] > amounts[0] * 1.1:
            first, last = gib(amounts[0]), gib(amounts[-1])
            why = f"One process grows from {first} to {last} of host memory and never gives any back."
            return Assessment(Strength.SHOWN, proof([item for _, item in points]), why)
    return _assess_written_growth(case) or _assess_memory_after_sleep(case)


def _assess_written_growth(case: Case) -> Assessment | None:
    """Assesses a growth series in a person's words, `10 GiB -> 14 GiB -> 21 GiB`; None without one."""
    # A limit that is reached in the end is what a leak ends in.
    strength = Strength.NAMED if case.has(*_LIMITS) or case.is_oom else Strength.LIKELY
    for item in case.all("growth_series"):
        amounts = sizes_bytes(re.split(r" ?(?:->|→) ?", str(item.facts.get("series", ""))))
        if len(amounts) >= 3 and list(amounts) == sorted(amounts) and amounts[-1] > amounts[0] * 1.1:
            why = f"Memory only grows: from {gib(amounts[0])} to {gib(amounts[-1])}."
            return Assessment(strength, proof(item), why)
    if (said := case.first("leak_named", "growth_words")) is None or case.has("torch_oom", "cuda_oom"):
        return None
    return Assessment(strength, proof(said), "Memory grows while it serves, by the text.")


def _assess_memory_after_sleep(case: Case) -> Assessment | None:
    """Assesses three or more sleeps of which each left at least as much in use, the last 10 % more; None otherwise."""
    left = [item for item in case.all("sleep_freed") if isinstance(item.facts.get("left_bytes"), int)]
    amounts = [int(item.facts["left_bytes"]) for item in left]
    if len(left) >= 3 and amounts == sorted(amounts) and amounts[-1] > amounts[0] * 1.1:
        why = f"After every sleep more stays in use: {gib(amounts[0])}, then {gib(amounts[-1])}."
        return Assessment(Strength.SUGGESTED, proof(left), why)
    return None


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes (None: not applicable): a planned restart, another release, bounded caches, fewer graphs."""
    if _assess_memory_after_sleep(planner.case):
        # vLLM's figure covers the whole card, so a trainer too.
        yield from (known_fix("whose_memory_grows"), known_fix("sleep_on_newest_release"))
        return
    record = planner.case.black_box
    if record is not None and (growth := leak_growth(record)):
        every = duration_text(growth.seconds)
        grew = f"It grew by {gib(growth.bytes)} in {every}, {gib(round(growth.bytes_per_h))} an hour under this load"
        often = f"until the leak is fixed: restart, drained, at least every {every} of such load"
        steps = (often, "keep the records of two moments: legroom fragments shows which part grew between them")
        why = f"{grew}: a restart gives all of it back, and it lasts as long again."
        yield Fix("sequence_starts_or_wait", why, steps=steps)
    if planner.case.has("ps_row"):
        why, trades = "In old releases captured graphs and their NCCL work grew on the host.", "slower decoding"
        yield planner.plan_change("eager_or_fewer_graphs", {"enforce_eager": True}, why, trades=trades)
    newest, media, lower = known_fix("newest_release_and_restart"), known_fix("no_media_cache"), None
    if of_card := grows_on_card(planner.case):
        why = "The pool keeps its size: what grows on the card is torch's own cache, which needs room beside it."
        lower = planner.lower_utilization(GIB, why)
        lower = replace(lower, is_unplanned=True) if lower is not None else None
    is_of_media = planner.case.tells(_MEDIA) or bool(_MEDIA.search(planner.known.args.model))
    yield media if is_of_media and not of_card else None
    # A trainer's own tensors grow on the card, too, and no share of it ends that.
    yield from (newest, lower) if planner.case.platform.trainer else (lower, newest)


def grows_on_card(case: Case) -> bool:
    """Whether it is the GPU's memory that grows, not the host's, by sentences on the growth or a GPU OOM at its end."""
    told = tuple(item.text for item in case.all("growth_words", "growth_series")) or case.written_lines
    is_told = any(_OF_CARD.search(line) and not _OF_HOST.search(line) for line in told)
    return is_told or (case.is_oom and case.tells(_OF_CARD))


CAUSE = Cause(entry="LR405", phase="serving")
