"""What `legroom probe` measured of this user's cards, kept in one small JSON file, and how a plan uses it.

A record belongs to a card, a driver and, as to what vLLM takes, a release. It is kept beside the calibration store and
not in it: that one is rewritten by every `legroom calibrate`, and knows start-ups alone.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.gpus import CardMeasurements, Gpu, gpu
from legroom.facts.releases import Release
from legroom.facts.releases import release as known_release
from legroom.home import cards_path
from legroom.planning.calibration import TOTAL_TOLERANCE
from legroom.planning.calibration_store import locked
from legroom.records import dataclass
from legroom.units import gib

SCHEMA = 1
_MOST_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class CardRecord:
    """One probe. None: it was not measured, or could not be."""

    name: str
    """As CUDA names the card."""
    total_bytes: int
    driver: str = ""
    cuda: str = ""
    torch: str = ""
    vllm: str = ""
    seen: str = ""
    """The day, as YYYY-MM-DD."""
    context_bytes: int | None = None
    held_by_others_bytes: int | None = None
    vllm_non_torch_bytes: int | None = None
    """What vLLM's own profile counted beside torch's memory, for a model of two layers."""
    ranks: int = 1
    nccl_bytes: int | None = None
    """Of one rank, after the first all-reduce over `ranks` cards."""
    smallest_block_bytes: int | None = None
    small_segment_bytes: int | None = None
    large_segment_bytes: int | None = None
    graph_node_bytes: int | None = None
    """What the driver takes for each kernel of a captured graph."""
    host_to_device_bytes_s: int | None = None
    device_to_host_bytes_s: int | None = None
    device_to_device_bytes_s: int | None = None
    pageable_to_device_bytes_s: int | None = None
    pinned_bytes: int | None = None
    """Host memory that could be pinned; the probe stopped there or at its limit."""
    pin_refused: str | None = None

    @property
    def key(self) -> tuple[str, str, str, int]:
        """A later probe of the same replaces an earlier one."""
        return self.name, self.driver, self.vllm, self.ranks

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StoredCards:
    cards: tuple[CardRecord, ...] = ()
    problem: str = ""


def card_record(entry: Any) -> CardRecord:
    """From JSON; ValueError where it is none."""
    if not isinstance(entry, Mapping):
        raise ValueError("a record is not an object")
    kinds = {item.name: str(item.type) for item in fields(CardRecord)}
    values = {name: value for name, value in entry.items() if name in kinds}
    for name, value in values.items():
        expected: type = str if "str" in kinds[name] else int
        if not (value is None and "None" in kinds[name]) and (not isinstance(value, expected) or value is True):
            raise ValueError(f"{name} is not what it should be")
    if not values.get("name") or not values.get("total_bytes"):
        raise ValueError("a record does not say its card and the card's total")
    return CardRecord(**values)


def read_cards(path: Path | None = None) -> StoredCards:
    """What is stored; a file that cannot be read is told as a problem and changes no plan."""
    path = path or cards_path()
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("it is too large")
        content = json.loads(path.read_text("utf-8"))
        if content["schema"] > SCHEMA:
            raise ValueError("it was written by a newer legroom")
        return StoredCards(tuple(card_record(entry) for entry in content["cards"]))
    except FileNotFoundError:
        return StoredCards()
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return StoredCards(problem=f"what was probed cannot be read from {path}: {error}")


def store_card(record: CardRecord, path: Path | None = None) -> None:
    """Add a record in one step; an earlier one of the same card, driver, release and ranks goes."""
    path = path or cards_path()
    with locked(path):
        stored = read_cards(path)
        if stored.problem:
            raise LegroomError(stored.problem, f"move {path} away, and probe again")
        cards = [*(card for card in stored.cards if card.key != record.key), record]
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            content = {"schema": SCHEMA, "cards": [card.to_json() for card in cards]}
            temporary.write_text(json.dumps(content, indent=1), "utf-8")
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            hint = "set LEGROOM_HOME to a folder you can write to"
            raise LegroomError(f"{path} cannot be written: {error.strerror}", hint) from error


def measured_card(card: Gpu, records: Iterable[CardRecord], release: Release, ranks: int) -> Gpu:
    """The card of the facts with what its newest probe measured; what vLLM takes only for the same release."""
    matching = [record for record in reversed(list(records)) if _is_same_card(record, card)]
    if not matching:
        return card
    context = next((record.context_bytes for record in matching if record.context_bytes is not None), None)
    modules = [
        record
        for record in matching
        if record.vllm_non_torch_bytes is not None
        and record.vllm
        and record.ranks in (1, ranks)
        and known_release(record.vllm).version == release.version
    ]
    best = max(modules, key=lambda record: record.ranks == ranks, default=None)
    measured = CardMeasurements(
        context, best.vllm_non_torch_bytes if best else None, best is not None and best.ranks == ranks and ranks > 1
    )
    total = matching[0].total_bytes
    note = f"measured by legroom probe on {matching[0].seen or 'this machine'}: a total of {gib(total)}"
    return replace(
        card,
        total_bytes=total,
        total_low_bytes=total,
        total_high_bytes=total,
        total_source="logged",
        measured=measured,
        note="; ".join(filter(None, (card.note, note))),
    )


def _is_same_card(record: CardRecord, card: Gpu) -> bool:
    try:
        known = gpu(record.name).name
    except LegroomError:
        known = record.name
    return known == card.name and abs(record.total_bytes / card.total_bytes - 1) <= TOTAL_TOLERANCE
