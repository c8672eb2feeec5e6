"""What vLLM's wheels and images are built with, release by release: the CUDA, the GPU generations, the driver.

Data in `data/builds.json`, and in `data/card_support.json` the oldest and the newest card that anything published runs
on.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from legroom.facts.data_files import read_data
from legroom.facts.releases import Release, release
from legroom.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Build:
    """The default wheel of a span of releases."""

    since: str
    """The first release that is built so."""
    cuda: str
    capabilities: tuple[str, ...]
    """Compute capabilities it has kernels for, oldest first; a newer minor of the same major runs them too."""

    def has_kernels_for(self, capability: tuple[int, int]) -> bool:
        return any(_runs_on(built, capability) for built in self.capabilities)

    @property
    def oldest_driver(self) -> str | None:
        """The oldest Linux driver that serves its CUDA."""
        driver = _data()["drivers"].get(self.cuda)
        return str(driver) if driver else None


@cache
def builds() -> tuple[Build, ...]:
    """Oldest first."""
    return tuple(Build(row["since"], row["cuda"], tuple(row["capabilities"])) for row in _data()["builds"])


def build_of(known: Release) -> Build:
    """How this release is built."""
    return next((build for build in reversed(builds()) if known.at_least(build.since)), builds()[0])


def last_build_with(capability: tuple[int, int]) -> tuple[Build, Build | None] | None:
    """The newest build that runs on a GPU, and the one after it, which does not; None where no build does."""
    for index in reversed(range(len(builds()))):
        if builds()[index].has_kernels_for(capability):
            return builds()[index], builds()[index + 1] if index + 1 < len(builds()) else None
    return None


def first_build_with(capability: tuple[int, int]) -> Build | None:
    return next((build for build in builds() if build.has_kernels_for(capability)), None)


def driver_is_older(driver: str, than: str) -> bool:
    return _numbers(driver) < _numbers(than)


def newest_build_for_driver(driver: str, known: Release) -> Build | None:
    """The newest build, not newer than this release's, whose CUDA a driver serves."""
    older = [build for build in builds() if not release(build.since).after(known.version)]
    fits = [build for build in older if build.oldest_driver and not driver_is_older(driver, build.oldest_driver)]
    return fits[-1] if fits else None


def _runs_on(built: str, capability: tuple[int, int]) -> bool:
    major, minor = (int(part) for part in built.split("."))
    return major == capability[0] and minor <= capability[1]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


@cache
def _data() -> Any:
    return read_data("builds.json")


@cache
def _card_support() -> dict[str, Any]:
    document: dict[str, Any] = read_data("card_support.json")
    return document


def built_for(release: Release) -> tuple[tuple[int, int], tuple[int, int]]:
    """The oldest and the newest compute capability that the release's wheels and images run on."""
    bounds = []
    for end in ("oldest", "newest"):
        capability = [row[1] for row in _card_support()[end] if release.at_least(row[0])][-1]
        bounds.append((int(capability[0]), int(capability[1])))
    return bounds[0], bounds[1]


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
def _methods_data() -> dict[str, Any]:
    document: dict[str, Any] = read_data("quantization_methods.json")
    return document


def _row(rows: Sequence[Sequence[Any]], release: Release) -> Sequence[Any] | None:
    """The last row that had begun by this release, in rows of [first release, ...]."""
    begun = [row for row in rows if release.at_least(row[0])]
    return begun[-1] if begun else None


def quantization_method(name: str, release: Release) -> QuantizationMethod | None:
    """None: the release has no method of that name."""
    row = _row(_methods_data()["methods"].get(name, ()), release)
    if row is None or row[1] is None:
        return None
    return QuantizationMethod(name, row[1], tuple(row[2]), row[3])


def quantization_methods(release: Release) -> tuple[str, ...]:
    """Every name that the release takes for --quantization."""
    return tuple(name for name in _methods_data()["methods"] if quantization_method(name, release))


def plugin_of(name: str, release: Release) -> str | None:
    """The package that holds a method which once was vLLM's own."""
    since, package = _methods_data()["plugins"].get(name, (None, ""))
    return str(package) if since and release.at_least(since) else None


def is_deprecated(name: str, release: Release) -> bool:
    """Whether the release takes the method only with --allow-deprecated-quantization."""
    span = _methods_data()["deprecated"].get(name)
    return bool(span) and release.within(span[0], span[1])


def amd_methods(release: Release) -> tuple[str, ...] | None:
    """The methods that run on AMD cards; None where the release does not check."""
    row = _row(_methods_data()["amd"], release)
    return tuple(row[1]) if row else None


def scheme_capability(scheme: str, release: Release) -> int | None:
    """The smallest compute capability, times ten, for a scheme of compressed-tensors; None where it has none yet."""
    row = _row(_methods_data()["schemes"][scheme], release)
    return int(row[1]) if row else None
