"""Measurements of `legroom probe` on the user's cards: the JSON file that holds them, and their use in a plan. A record
is valid for one card and driver, and its vLLM figures for one release."""

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.gpus import CardMeasurements, Gpu, gpu
from legroom.facts.releases import Release
from legroom.facts.releases import release as known_release
from legroom.files import cards_path
from legroom.json_records import record_from_json
from legroom.planning.calibration_store import TOTAL_TOLERANCE, locked, write_json_file
from legroom.records import dataclass
from legroom.units import gib

SCHEMA = 1
_MOST_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class CardRecord:
    """The measurements of one probe; None: not measured."""

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
    """non_torch_memory of vLLM's profile run with a model of two layers."""
    ranks: int = 1
    nccl_bytes: int | None = None
    """NCCL memory of one rank after the first all-reduce over `ranks` cards."""
    smallest_block_bytes: int | None = None
    small_segment_bytes: int | None = None
    large_segment_bytes: int | None = None
    graph_node_bytes: int | None = None
    """Driver memory per kernel of a captured CUDA graph."""
    host_to_device_bytes_s: int | None = None
    device_to_host_bytes_s: int | None = None
    device_to_device_bytes_s: int | None = None
    pageable_to_device_bytes_s: int | None = None
    pinned_bytes: int | None = None
    """Host memory that the probe pinned before an error or its own limit."""
    pin_refused: str | None = None

    @property
    def key(self) -> tuple[str, str, str, int]:
        """(card, driver, release, ranks): a later record with the same key replaces an earlier one."""
        return self.name, self.driver, self.vllm, self.ranks

    def to_json(self) -> dict[str, Any]:
        """The record as the file and `legroom probe --json` hold it."""
        return asdict(self)


def card_record(entry: Any) -> CardRecord:
    """A record from its JSON object; ValueError where a field is missing or has the wrong type."""
    record = record_from_json(CardRecord, entry)
    if not record.name or not record.total_bytes:
        raise ValueError("a record does not say its card and the card's total")
    return record


def read_cards(path: Path | None = None) -> tuple[CardRecord, ...]:
    """Every stored record, empty without the file; LegroomError where it cannot be read."""
    path = path or cards_path()
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("it is too large")
        content = json.loads(path.read_text("utf-8"))
        if content["schema"] > SCHEMA:
            raise ValueError("it was written by a newer legroom")
        return tuple(card_record(entry) for entry in content["cards"])
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        hint = f"move {path} away, and probe again"
        raise LegroomError(f"what was probed cannot be read from {path}: {error}", hint) from error


def store_card(record: CardRecord, path: Path | None = None) -> None:
    """Add a record; it replaces an earlier one of the same card, driver, release and number of ranks."""
    path = path or cards_path()
    with locked(path):
        cards = [*(card for card in read_cards(path) if card.key != record.key), record]
        write_json_file(path, {"schema": SCHEMA, "cards": [card.to_json() for card in cards]})


def measured_card(card: Gpu, records: Iterable[CardRecord], release: Release, ranks: int) -> Gpu:
    """The card with the figures of its newest probe (unchanged without one); vLLM's own memory only from this release
    and, where measured, with this number of ranks."""
    newest_first = [record for record in reversed(list(records)) if _is_same_card(record, card)]
    if not newest_first:
        return card
    context = next((record.context_bytes for record in newest_first if record.context_bytes is not None), None)
    of_release = [
        record
        for record in newest_first
        if record.vllm_non_torch_bytes is not None
        and record.vllm
        and record.ranks in (1, ranks)
        and known_release(record.vllm).version == release.version
    ]
    best = max(of_release, key=lambda record: record.ranks == ranks, default=None)
    measured = CardMeasurements(context)
    if best is not None:
        measured = CardMeasurements(context, best.vllm_non_torch_bytes, best.ranks == ranks and ranks > 1)
    total = newest_first[0].total_bytes
    note = f"measured by legroom probe on {newest_first[0].seen or 'this machine'}: a total of {gib(total)}"
    totals: dict[str, Any] = dict.fromkeys(("total_bytes", "total_low_bytes", "total_high_bytes"), total)
    notes = "; ".join(filter(None, (card.note, note)))
    return replace(card, **totals, total_source="logged", measured=measured, note=notes)


def _is_same_card(record: CardRecord, card: Gpu) -> bool:
    """Whether a probe's record is of this GPU model, with nearly the same total memory."""
    try:
        known = gpu(record.name).name
    except LegroomError:
        known = record.name
    return known == card.name and abs(record.total_bytes / card.total_bytes - 1) <= TOTAL_TOLERANCE
