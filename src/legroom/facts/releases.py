"""vLLM releases in order, and the release that a version string means. Data in `data/releases.json`."""

import re
from functools import cache, lru_cache

from legroom.errors import LegroomError
from legroom.facts import read_data
from legroom.records import dataclass


@cache
def first_release(architecture: str) -> str | None:
    """The release that added an architecture; None if the first known release has it or no release does."""
    since = read_data("architecture_releases.json")["since"]
    return next((version for version, names in since.items() if architecture in names), None)


def newest_on(day: str) -> str | None:
    """The newest release out on a day (`2025-09-30`); None for a day before the first or after the last dated one."""
    dates = read_data("release_dates.json")["dates"]
    if day > max(dates.values()):
        return None
    return max((version for version in dates if dates[version] <= day), key=known_releases().index, default=None)


_VERSION = re.compile(
    r"v?(?P<numbers>\d{1,6}(?:\.\d{1,6}){0,4})"
    r"(?:[-_.]?(?P<phase>a|b|c|rc|alpha|beta|pre|preview)[-_.]?(?P<phase_number>\d{0,6}))?"
    r"(?:(?:[-_.]?(?:post|rev|r)[-_.]?|-)(?P<post>\d{1,6}))?"
    r"(?:[-_.]?(?P<dev>dev)[-_.]?\d{0,8})?"
    r"(?:\+(?P<local>[a-z0-9][a-z0-9._-]*))?"
)
_NEWEST_NAMES = re.compile(r"(?:latest|nightly|main|stable)(?:[-_ ][0-9a-z._ -]{0,60})?")
"""Tags without a version number: an image's `latest`, a nightly wheel with or without its commit."""

_Key = tuple[tuple[int, ...], int, int, int]


@lru_cache(maxsize=512)
def _sort_key(version: str) -> _Key:
    """A sort key for versions: dev < rc < final < post; LegroomError where the text is no version."""
    parsed = _VERSION.fullmatch(version.strip().lower())
    if parsed is None:
        shown = version if len(version) <= 40 else version[:40] + "..."
        raise LegroomError(f"vLLM release {shown!r} is not a version number", _known_range_hint())
    numbers = tuple(int(part) for part in parsed["numbers"].split("."))
    numbers += (0,) * (5 - len(numbers))
    phase = -1 if parsed["phase"] else 0
    if parsed["dev"] and not parsed["phase"] and parsed["post"] is None:
        phase = -2
    return numbers, phase, int(parsed["phase_number"] or 0) if parsed["phase"] else 0, int(parsed["post"] or -1) + 1


@dataclass(frozen=True, slots=True)
class Release:
    """A known vLLM release, and the version string that it was chosen for."""

    version: str
    """The release whose facts apply, one of `known_releases()`."""
    requested: str
    """The version string that the user or the file gave."""
    note: str = ""
    """A sentence for the user where `version` is not the release that was written."""

    @property
    def index(self) -> int:
        """The position among `known_releases()`, which the data files use for ranges."""
        return _index_by_release()[self.version]

    def at_least(self, version: str) -> bool:
        """Whether the release is this version or a later one."""
        return _sort_key(self.version) >= _sort_key(version)

    def before(self, version: str) -> bool:
        """Whether the release is older than this version."""
        return _sort_key(self.version) < _sort_key(version)

    def after(self, version: str) -> bool:
        """Whether the release is newer than this version."""
        return _sort_key(self.version) > _sort_key(version)

    def within(self, first: str, last: str) -> bool:
        """Whether first <= release <= last."""
        return _sort_key(first) <= _sort_key(self.version) <= _sort_key(last)

    def __str__(self) -> str:
        return self.version


@cache
def known_releases() -> tuple[str, ...]:
    """Every release with facts, the oldest first."""
    return tuple(read_data("releases.json")["releases"])


@cache
def _index_by_release() -> dict[str, int]:
    """Release -> its position among `known_releases()`."""
    return {name: index for index, name in enumerate(known_releases())}


def latest() -> Release:
    """The newest known release."""
    newest = known_releases()[-1]
    return Release(newest, newest)


def earlier_release(release: Release) -> str | None:
    """The last release of the previous minor version (0.12.0 for 0.13.1); None where no such release is known."""
    minor = _sort_key(release.version)[0][:2]
    older = [name for name in known_releases() if _sort_key(name)[0][:2] < minor]
    return older[-1] if older else None


def successor(release: Release) -> Release | None:
    """The next known release after a version that lies between two; None where the version itself is known."""
    releases = known_releases()
    after = release.index + 1
    return Release(releases[after], release.requested) if release.note and after < len(releases) else None


def _known_range_hint() -> str:
    """A hint that names the oldest and the newest known release."""
    known = known_releases()
    return f"legroom knows the vLLM releases {known[0]} to {known[-1]}; write one like {known[-1]}"


@lru_cache(maxsize=512)
def release(version: str) -> Release:
    """The release that `version` names (`v0.19`, `0.6.3.post1`, `0.10.2+cu128`, `0.11.1rc2`, `nightly`). A pre-release
    becomes its final one, another unknown one the nearest below it, and `note` says so; LegroomError if none is."""
    requested = version.strip()
    known = known_releases()
    if _NEWEST_NAMES.fullmatch(requested.lower()):
        note = f"'{requested}' names no fixed release; the facts of {known[-1]}, the newest legroom knows, apply"
        return Release(known[-1], requested, note)
    key = _sort_key(requested)
    by_key = {_sort_key(name): name for name in known}
    if key in by_key:
        return Release(by_key[key], requested)
    # A release candidate behaves like the release it leads up to, not like the one before.
    if key[1] == -1 and (final := by_key.get((key[0], 0, 0, 0))):
        return Release(final, requested, f"vLLM {requested} is a pre-release; the facts of {final} apply")
    below = [name for name in known if _sort_key(name) < key]
    if not below:
        raise LegroomError(f"vLLM {requested} is older than any release legroom knows", _known_range_hint())
    if below[-1] == known[-1]:
        note = f"vLLM {requested} is newer than legroom's facts; those of {known[-1]}, the newest it knows, apply"
    else:
        note = f"legroom has no facts of vLLM {requested}; those of {below[-1]}, the nearest release below, apply"
    return Release(below[-1], requested, note)


def nearest_release(version: str) -> Release:
    """Like `release`; a version older than every known one becomes the oldest, and the result's `note` says so."""
    oldest = known_releases()[0]
    if _VERSION.fullmatch(version.strip().lower()) is None or _sort_key(version) >= _sort_key(oldest):
        return release(version)
    return Release(oldest, version.strip(), f"vLLM {version} is older than legroom's facts; those of {oldest} apply")


_LEADING_NUMBERS = re.compile(r"v?(?P<numbers>\d{1,4}(?:\.\d{1,4}){1,2})")


@lru_cache(maxsize=512)
def logged_release(version: str) -> Release:
    """The release that a log line prints, never an error: the newest if it is no number, the oldest if before all."""
    requested = version.strip()[:60]
    leading = _LEADING_NUMBERS.match(requested.lower())
    known = known_releases()
    numbers = tuple(int(part) for part in leading["numbers"].split(".")) if leading else ()
    if not numbers or numbers in ((0, 0, 0), (0, 0)) or (numbers[:2] == (0, 1) and ".dev" in requested):
        note = f"'{requested}' is a build without a release number; the facts of {known[-1]}, the newest known, apply"
        return Release(known[-1], requested, note)
    try:
        return nearest_release(requested)
    except LegroomError:
        readable = nearest_release(leading["numbers"] if leading else known[-1])
        note = f"{requested!r} is not a full version; the facts of {readable} apply"
        return Release(readable.version, requested, note)
