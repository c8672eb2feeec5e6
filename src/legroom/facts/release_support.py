"""What each vLLM release supports: GPU generations, CUDA and driver of its wheels, quantization methods, sleep mode."""

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

from legroom.facts import read_data
from legroom.facts.fit import by_release
from legroom.facts.gpus import Gpu
from legroom.facts.releases import Release
from legroom.facts.releases import release as known_release
from legroom.records import dataclass


@dataclass(frozen=True, slots=True)
class Build:
    """The default wheel of a range of releases. Data in `data/builds.json`."""

    since: str
    """The first release of the range."""
    cuda: str
    capabilities: tuple[str, ...]
    """Compute capabilities with kernels, oldest first; a newer minor of the same major runs them too."""

    def has_kernels_for(self, capability: tuple[int, int]) -> bool:
        """Whether the wheel has kernels that run on this compute capability: same major, minor no higher."""
        built = (tuple(map(int, name.split("."))) for name in self.capabilities)
        return any(major == capability[0] and minor <= capability[1] for major, minor in built)

    @property
    def oldest_driver(self) -> str | None:
        """The oldest Linux driver that runs this CUDA version; None where it is not recorded."""
        driver = read_data("builds.json")["drivers"].get(self.cuda)
        return str(driver) if driver else None


@cache
def builds() -> tuple[Build, ...]:
    """The default wheels of vLLM (CUDA version, compute capabilities) by range of releases, oldest first."""
    rows = read_data("builds.json")["builds"]
    return tuple(Build(row["since"], row["cuda"], tuple(row["capabilities"])) for row in rows)


def build_of(release: Release) -> Build:
    """The CUDA version and compute capabilities of a release's default wheel."""
    return next((build for build in reversed(builds()) if release.at_least(build.since)), builds()[0])


def last_build_with(capability: tuple[int, int]) -> tuple[Build, Build | None] | None:
    """(newest build with kernels for a card, the next one, or None if it is the last); None where no build has any."""
    pairs = zip(builds(), (*builds()[1:], None), strict=True)
    return next((pair for pair in reversed(list(pairs)) if pair[0].has_kernels_for(capability)), None)


def first_build_with(capability: tuple[int, int]) -> Build | None:
    """The first build with kernels for a compute capability; None where no build has any."""
    return next((build for build in builds() if build.has_kernels_for(capability)), None)


def driver_is_older(driver: str, than: str) -> bool:
    """Whether NVIDIA driver version `driver` is lower than `than`, compared part by part as numbers."""
    numbers = [[int(part) for part in version.split(".") if part.isdigit()] for version in (driver, than)]
    return numbers[0] < numbers[1]


def newest_build_for_driver(driver: str, release: Release) -> Build | None:
    """The newest build, up to this release, whose CUDA version the NVIDIA driver runs; None where it runs none."""
    older = [build for build in builds() if not known_release(build.since).after(release.version)]
    fits = [build for build in older if build.oldest_driver and not driver_is_older(driver, build.oldest_driver)]
    return fits[-1] if fits else None


def supported_capabilities(release: Release) -> tuple[tuple[int, int], tuple[int, int]]:
    """(oldest, newest) compute capability of a release's published builds, each (major, minor)."""
    bounds = []
    for end in ("oldest", "newest"):
        row = _row_of_release(read_data("card_support.json")[end], release)
        assert row is not None
        bounds.append((int(row[1][0]), int(row[1][1])))
    return bounds[0], bounds[1]


@dataclass(frozen=True, slots=True)
class QuantizationMethod:
    """One quantization method in one release. Data in `data/quantization_methods.json`."""

    name: str
    min_capability: int
    """Ten times the lowest compute capability, as vLLM writes it: 75 is Turing."""
    dtypes: tuple[str, ...]
    of_plain: Literal["online", "file", "arguments"]
    """With an unquantized checkpoint: quantizes while loading, lacks its config file, or its config class raises."""


def _row_of_release(rows: Sequence[Sequence[Any]], release: Release) -> Sequence[Any] | None:
    """The last of the rows [first release, ...] that begins at or before the release; None where none does."""
    begun = [row for row in rows if release.at_least(row[0])]
    return begun[-1] if begun else None


def quantization_method(name: str, release: Release) -> QuantizationMethod | None:
    """The release's facts on the quantization method of this name; None where it has no such method."""
    row = _row_of_release(read_data("quantization_methods.json")["methods"].get(name, ()), release)
    return None if row is None or row[1] is None else QuantizationMethod(name, row[1], tuple(row[2]), row[3])


def quantization_methods(release: Release) -> tuple[str, ...]:
    """Every value that the release accepts for --quantization."""
    names = read_data("quantization_methods.json")["methods"]
    return tuple(name for name in names if quantization_method(name, release))


def plugin_of(name: str, release: Release) -> str | None:
    """The package that provides a quantization method which vLLM has dropped by this release; None if there is none."""
    since, package = read_data("quantization_methods.json")["plugins"].get(name, (None, ""))
    return str(package) if since and release.at_least(since) else None


def is_deprecated(name: str, release: Release) -> bool:
    """Whether the method needs --allow-deprecated-quantization."""
    span = read_data("quantization_methods.json")["deprecated"].get(name)
    return bool(span) and release.within(span[0], span[1])


def amd_methods(release: Release) -> tuple[str, ...] | None:
    """The quantization methods that the release allows on AMD cards; None where it allows all."""
    row = _row_of_release(read_data("quantization_methods.json")["amd"], release)
    return tuple(row[1]) if row else None


def scheme_capability(scheme: str, release: Release) -> int | None:
    """The least compute capability (75 for 7.5) for a compressed-tensors scheme; None where the release lacks it."""
    row = _row_of_release(read_data("quantization_methods.json")["schemes"][scheme], release)
    return int(row[1]) if row else None


SLEEP_FLAG = "--enable-sleep-mode"
ENDPOINTS_SWITCH = "VLLM_SERVER_DEV_MODE"
"""Set to 1, `vllm serve` answers /sleep, /wake_up and /is_sleeping."""


@dataclass(frozen=True, slots=True)
class SleepRules:
    """What leaves the card during sleep in one release. Data in `data/sleep.json`."""

    buffers_saved: bool
    """Level 2 copies the model's buffers to the host."""
    sampler_pooled: bool
    """The sampler tables of model runner V2 are allocated in the pool of the weights."""
    runtime_offloaded: bool
    """Block tables, input buffers and the experts' workspace leave the card."""
    graphs_flag: str | None
    """The flag that frees CUDA graphs; None where the release has none."""
    communication_flag: str | None
    """The flag that frees NCCL buffers; None where the release has none."""


def sleep_rules(release: Release) -> SleepRules | None:
    """Which memory a release frees in sleep mode and which it keeps; None where it has no sleep mode."""
    data = read_data("sleep.json")
    if release.before(first_release_with_sleep()):
        return None
    row = {name: value for name, value in by_release(data["releases"], release).items() if name in _SWITCHES}
    flags: dict[str, Any] = {
        name: data[name]["name"] if release.at_least(data[name]["since"]) else None for name in _FLAGS
    }
    return SleepRules(**row, **flags)


_SWITCHES = ("buffers_saved", "sampler_pooled", "runtime_offloaded")
_FLAGS = ("graphs_flag", "communication_flag")


def first_release_with_sleep() -> str:
    """The first vLLM release that has sleep mode."""
    return str(read_data("sleep.json")["releases"][0]["since"])


def host_bandwidth_bytes_s(gpu: Gpu) -> float:
    """Usual bytes per second from pinned host memory to this card."""
    speeds = read_data("sleep.json")["host_bandwidth_gb_s"]
    return float(speeds["by_capability"].get(str(gpu.compute_capability[0]), speeds["unknown"]) * 10**9)
