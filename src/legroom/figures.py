"""A figure in bytes with its certainty, error band and terms."""

from typing import Literal

from legroom.records import dataclass

Certainty = Literal["exact", "measured", "derived", "estimated"]
"""`derived`: what makes a sum come out as measured."""
_RANK: dict[Certainty, int] = {"exact": 0, "measured": 1, "derived": 2, "estimated": 3}


@dataclass(frozen=True, slots=True)
class Term:
    """One term of a figure: `label` = `bytes`, computed as `how`."""

    label: str
    bytes: int
    how: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """Bytes with their certainty, error band and terms."""

    bytes: int
    kind: Certainty = "exact"
    low: int = -1
    high: int = -1
    terms: tuple[Term, ...] = ()

    def __post_init__(self) -> None:
        if self.low == -1 and self.high == -1:
            object.__setattr__(self, "low", self.bytes)
            object.__setattr__(self, "high", self.bytes)

    def __add__(self, other: "Figure") -> "Figure":
        """The sum: bands add up, and the certainty is the lower one."""
        kind = self.kind if _RANK[self.kind] >= _RANK[other.kind] else other.kind
        low, high, terms = self.low + other.low, self.high + other.high, self.terms + other.terms
        return Figure(self.bytes + other.bytes, kind, low, high, terms)


def exact(bytes_: int, label: str = "", how: str = "") -> Figure:
    """A figure in bytes without error band, from known facts; `label` and `how` (its arithmetic) make its term."""
    return Figure(bytes_, "exact", terms=(Term(label, bytes_, how),) if label else ())


def estimated(bytes_: int, low: int, high: int, terms: tuple[Term, ...] = ()) -> Figure:
    """A figure in bytes from a fitted model; its error band is `low` to `high`, widened to include it."""
    return Figure(bytes_, "estimated", min(low, bytes_), max(high, bytes_), terms)


def measured(bytes_: int, label: str = "", how: str = "") -> Figure:
    """A figure in bytes without error band, from this user's log or GPU; `label` and `how` make its one term."""
    return Figure(bytes_, "measured", terms=(Term(label, bytes_, how),) if label else ())
