"""What each release's quantization methods ask of a card, of the precision, and of the checkpoint.

Data in `data/quantization_methods.json`, read only where a checkpoint or a flag names a method.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from legroom.facts.data_files import read_data
from legroom.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legroom.facts.releases import Release

OfPlain = Literal["online", "file", "arguments"]
"""What a method makes of a checkpoint that is not quantized: quantizes it while loading, looks for its config file,
or cannot even be set up."""


@dataclass(frozen=True, slots=True)
class QuantizationMethod:
    """One method in one release."""

    name: str
    min_capability: int
    """Ten times the smallest compute capability, as vLLM writes it: 75 is Turing."""
    dtypes: tuple[str, ...]
    of_plain: OfPlain


@cache
def _data() -> dict[str, Any]:
    document: dict[str, Any] = read_data("quantization_methods.json")
    return document


def _row(rows: Sequence[Sequence[Any]], release: Release) -> Sequence[Any] | None:
    """The last row that had begun by this release, in rows of [first release, ...]."""
    begun = [row for row in rows if release.at_least(row[0])]
    return begun[-1] if begun else None


def quantization_method(name: str, release: Release) -> QuantizationMethod | None:
    """None: the release has no method of that name."""
    row = _row(_data()["methods"].get(name, ()), release)
    if row is None or row[1] is None:
        return None
    return QuantizationMethod(name, row[1], tuple(row[2]), row[3])


def quantization_methods(release: Release) -> tuple[str, ...]:
    """Every name that the release takes for --quantization."""
    return tuple(name for name in _data()["methods"] if quantization_method(name, release))


def plugin_of(name: str, release: Release) -> str | None:
    """The package that holds a method which once was vLLM's own."""
    since, package = _data()["plugins"].get(name, (None, ""))
    return str(package) if since and release.at_least(since) else None


def is_deprecated(name: str, release: Release) -> bool:
    """Whether the release takes the method only with --allow-deprecated-quantization."""
    span = _data()["deprecated"].get(name)
    return bool(span) and release.within(span[0], span[1])


def amd_methods(release: Release) -> tuple[str, ...] | None:
    """The methods that run on AMD cards; None where the release does not check."""
    row = _row(_data()["amd"], release)
    return tuple(row[1]) if row else None


def scheme_capability(scheme: str, release: Release) -> int | None:
    """The smallest compute capability, times ten, for a scheme of compressed-tensors; None where it has none yet."""
    row = _row(_data()["schemes"][scheme], release)
    return int(row[1]) if row else None
