"""Constants fitted to real start-ups, and error bands by distance from the measured starts.

The constants are in `data/fit.json` (`bench/fit.py`), the bands in `data/bands.json` (`bench/fit_bands.py`). A band
grows with the number of properties of a deployment (card family, release line, architecture ...) that few known starts
have. Weights have a band by how they are stored: a path such as `quantized/awq/text`, each step splitting it further.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from legroom.facts import read_data
from legroom.facts.releases import Release
from legroom.records import dataclass


@cache
def constants() -> dict[str, Any]:
    """The fitted constants of `data/fit.json`."""
    fitted: dict[str, Any] = read_data("fit.json")
    return fitted


def by_release(rows: Sequence[dict[str, Any]], release: Release) -> dict[str, Any]:
    """The last of `rows` whose `since` is at or before the release; IndexError where all begin later."""
    return [row for row in rows if release.at_least(row["since"])][-1]


def runs_on_transformers(model_type: str, release: Release) -> bool:
    """Whether the release runs this family on the Transformers library's code."""
    since = constants()["eager"]["transformers_backend"].get(model_type)
    return bool(since) and release.at_least(since)


ROOT = ""
"""The class of all weights."""
Properties = tuple[tuple[str, str], ...]
"""(`card`, `hopper`), (`architecture`, `latent+experts`) ...: what the error of a deployment depends on."""


@dataclass(frozen=True, slots=True)
class BandRow:
    """The error band of one class of weights."""

    below: float
    """The lower side of the 90 % band as a share of the bytes."""
    above: float
    most: float
    """The limit of both sides as a share of the card: 1.5 times the largest error of the class."""
    records: int
    sources: int


@cache
def bands() -> dict[str, Any]:
    """The fitted error bands of `data/bands.json`."""
    fitted: dict[str, Any] = read_data("bands.json")
    return fitted


def known_starts(kind: str, value: str) -> tuple[int, int]:
    """How many starts of a kind such as ("card", "hopper") are known: (measured, measured or published)."""
    measured, everywhere = bands()["properties"].get(kind, {}).get(value, (0, 0))
    return measured, everywhere


@cache
def evidence(properties: Properties) -> tuple[str, tuple[tuple[str, str], ...]]:
    """(the kind of evidence for such deployments, one of KINDS; their properties that few known starts have)."""
    few = bands()["few"]
    machine = (known_starts(*each)[0] for each in properties if each[0] in MACHINE)
    rare = tuple(each for each in properties if known_starts(*each)[1] < few)
    return "measured" if all(count >= few for count in machine) else kind_unmeasured(properties), rare


MACHINE = ("card", "release", "gpus")
KINDS = ("measured", "text", "encoder", "shared", "other")
"""Measured on this card and release; else, from vLLM's source, in the order of the errors that were seen: text alone,
with an encoder or a draft, on memory that CPU and GPU share, on cards of other makers or of unknown name."""


def kind_unmeasured(properties: Properties) -> str:
    """The class of a start with no measured one like it: `shared` memory, `other` cards, `text` or `encoder` model."""
    of = dict(properties)
    if of.get("memory") == "shared" or of.get("card") in ("amd", "intel", "unknown"):
        return "shared" if of.get("memory") == "shared" else "other"
    return "text" if of.get("media", "text") == "text" and of.get("draft", "none") == "none" else "encoder"


def num_starts_as_known(properties: Properties) -> int:
    """How many known starts, measured or published, the error band of deployments with these properties rests on."""
    kind, rare = evidence(properties)
    starts: Sequence[int] = bands()["starts"][kind]
    return starts[min(len(rare), len(starts) - 1)]


def own_error(figure: str, scale: float) -> float:
    """The usual error in bytes of a figure: `scale`, its own error by its rule, times the factor fitted for it."""
    return float(bands()["laws"][figure]["own"] * scale)


def half_band(figure: str, properties: Properties, own_error: float, total_bytes: int) -> int:
    """Bytes from a figure to either end of its 90 % error band; `own_error`: its usual error (0: it has no band)."""
    kind, rare = evidence(properties)
    of_card = bands()["laws"][figure][kind] * bands()["growth"] ** min(len(rare), bands()["farthest"])
    return int(math.hypot(own_error, of_card * total_bytes)) if own_error else 0


@cache
def weights_rows() -> Mapping[str, BandRow]:
    """The error bands of weights by checkpoint class."""
    return {name: BandRow(**values) for name, values in bands()["weights"].items()}


def row_at(rows: Mapping[str, BandRow], path: Sequence[str]) -> tuple[BandRow, bool]:
    """(error band of the class `path`, such as (quantized, awq, text), whether it is its own and not a parent's)."""
    for steps in range(len(path), 0, -1):
        row = rows.get("/".join(path[:steps]))
        if row is not None:
            return row, steps == len(path)
    return rows[ROOT], not path


def weights_band(
    rows: Mapping[str, BandRow], path: Sequence[str], weights_bytes: int, total_bytes: int
) -> tuple[int, int]:
    """Bytes (below, above) the weights in the 90 % band of the class `path`; wider where none was measured."""
    row, seen = row_at(rows, path)
    if seen:
        most = row.most * total_bytes
        return int(min(row.below * weights_bytes, most)), int(min(row.above * weights_bytes, most))
    unseen = bands()["unseen"]
    sides = (max(unseen["factor"] * side, unseen["least_of_weights"]) for side in (row.below, row.above))
    below, above = (int(side * weights_bytes) for side in sides)
    return below, above
