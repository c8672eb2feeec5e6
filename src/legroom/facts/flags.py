"""vLLM's flags by release: when each existed, how its value is read, defaults, choices, and what took its place.

Data: `data/flags.json` (names, ranges, kinds), `defaults.json`, `choices.json`, `flag_advice.json`. Each is read only
when asked for, because a plan needs the first alone.
"""

from __future__ import annotations

import json
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

from legroom.facts.releases import Release, known_releases
from legroom.records import dataclass

Kind = Literal[
    "switch",
    "bool",
    "optbool",
    "int",
    "human",
    "float",
    "str",
    "maybe",
    "json",
    "pairs",
    "list:str",
    "list:int",
    "list:float",
]
"""How a value is read: `switch` --x; `bool` --x or --no-x; `optbool` --x [True|False]; `human` an int that may end in
k, K, M ...; `maybe` an optional string; `pairs` a=1,b=2; `list:*` one or more values."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag as one release reads it."""

    name: str
    dest: str
    kind: Kind
    short_names: tuple[str, ...] = ()
    deprecated: bool = False


@dataclass(frozen=True, slots=True)
class FlagHistory:
    """When a flag existed, in release numbers."""

    name: str
    spans: tuple[tuple[str, str], ...]

    @property
    def first(self) -> str:
        """The release that brought it."""
        return self.spans[0][0]

    @property
    def last(self) -> str:
        """The last release that had it."""
        return self.spans[-1][1]

    @property
    def removed_in(self) -> str | None:
        """The first release without it, None while the newest still has it."""
        releases = known_releases()
        after = releases.index(self.last) + 1
        return releases[after] if after < len(releases) else None


@dataclass(frozen=True, slots=True)
class FlagAdvice:
    """What to write instead of a flag, and why."""

    use: str = ""
    why: str = ""
    renamed: bool = False


@cache
def _data(name: str) -> Any:
    return json.loads(Path(__file__).with_name("data").joinpath(f"{name}.json").read_text("utf-8"))


@cache
def _index() -> dict[str, int]:
    return {name: i for i, name in enumerate(known_releases())}


def _in_spans(spans: list[list[int]], i: int) -> bool:
    return any(first <= i <= last for first, last in spans)


def _value_at(ranges: list[list[Any]], i: int) -> Any:
    return next((value for first, last, value in ranges if first <= i <= last), None)


@cache
def _flag(name: str, dest: str, kind: Kind, short_names: tuple[str, ...], deprecated: bool) -> Flag:
    """One object for all releases in which a flag is the same."""
    return Flag(name, dest, kind, short_names, deprecated)


@lru_cache(maxsize=32)
def flags_of(release: Release) -> dict[str, Flag]:
    """Every flag that a release's server takes, by its long name and by each short name."""
    i = _index()[release.version]
    table: dict[str, Flag] = {}
    for name, entry in _data("flags")["flags"].items():
        if not _in_spans(entry["in"], i):
            continue
        short_names = tuple(entry.get("aliases", ()))
        # 0.12.0 gave -O to --optimization-level; until then it was the compilation config's.
        if name == "--compilation-config":
            short_names = ("-O",) if release.before("0.12.0") else ("-cc",)
        deprecated = _in_spans(entry.get("deprecated", []), i)
        flag = _flag(name, _dest(name, entry), _value_at(entry["kinds"], i) or "str", short_names, deprecated)
        table[name] = flag
        for short_name in short_names:
            table[short_name] = flag
    return table


def flag_history(name: str) -> FlagHistory | None:
    """When a flag existed; None for a name that no known release ever had."""
    entry = _data("flags")["flags"].get(name)
    if entry is None:
        return None
    releases = known_releases()
    return FlagHistory(name, tuple((releases[first], releases[last]) for first, last in entry["in"]))


def flag_kind_ever(name: str) -> Kind | None:
    """How the last release that had a flag read it."""
    entry = _data("flags")["flags"].get(name)
    return entry["kinds"][-1][2] if entry else None


@cache
def flags_ever() -> dict[str, Flag]:
    """Every flag that any known release had, as the last one with it read it, by its long name and each short name."""
    table: dict[str, Flag] = {}
    for name, entry in _data("flags")["flags"].items():
        short_names = tuple(entry.get("aliases", ()))
        flag = Flag(name, _dest(name, entry), entry["kinds"][-1][2], short_names)
        table |= dict.fromkeys((name, *short_names), flag)
    return table


def _dest(name: str, entry: dict[str, Any]) -> str:
    return str(entry.get("dest", dest_name(name)))


def flag_name(dest: str) -> str:
    """`max_model_len` as it is typed: `--max-model-len`."""
    return "--" + dest.lstrip("-").replace("_", "-")


def dest_name(flag: str) -> str:
    """`--max-model-len` as vLLM's Python name, where the release says no other: `max_model_len`."""
    return flag.lstrip("-").replace("-", "_")


def default(name: str, release: Release) -> Any:
    """The default a release declares for `--flag`; None where code resolves it (see `vllm.resolve`)."""
    return _value_at(_data("defaults")["defaults"].get(name, []), _index()[release.version])


def defaults_ever(name: str) -> tuple[Any, ...]:
    """Every default that any known release declares for `--flag`."""
    return tuple(value for _, _, value in _data("defaults")["defaults"].get(name, []))


def choices(name: str, release: Release) -> tuple[Any, ...] | None:
    """The values a release allows for `--flag`; None where any is taken."""
    allowed = _value_at(_data("choices")["choices"].get(name, []), _index()[release.version])
    return tuple(allowed) if allowed is not None else None


def advice(name: str) -> FlagAdvice | None:
    """What to use instead of a flag that is gone or never was."""
    data = _data("flag_advice")
    entry = data["replaced"].get(name, data["never_existed"].get(name))
    return FlagAdvice(**entry) if entry is not None else None


def all_flag_names() -> tuple[str, ...]:
    """Every flag that any known release had."""
    return tuple(_data("flags")["flags"])


def env_default(name: str, release: Release) -> Any:
    """The default a release declares for an environment variable; None where it has none or does not know it."""
    entry = _data("env")["env"].get(name)
    return _value_at(entry["defaults"], _index()[release.version]) if entry else None


def env_history(name: str) -> tuple[tuple[str, str], ...] | None:
    """The ranges of releases that read an environment variable; None for one that none reads."""
    entry = _data("env")["env"].get(name)
    releases = known_releases()
    return tuple((releases[first], releases[last]) for first, last in entry["in"]) if entry else None


@cache
def _plugin_env() -> frozenset[str]:
    return frozenset(name for names in _data("plugin_env")["plugins"].values() for name in names)


def is_read_by_plugin(name: str) -> bool:
    """Whether a plugin for other hardware reads a variable that vLLM itself gave up."""
    return name in _plugin_env()


def companion_of(names: frozenset[str]) -> str:
    """The program that stands in for vLLM's server and alone has one of some flags; empty where none has."""
    programs = _data("companion_flags")["programs"]
    return next((program for program, flags in programs.items() if not names.isdisjoint(flags)), "")


def env_names(release: Release) -> tuple[str, ...]:
    """Every environment variable that a release reads."""
    i = _index()[release.version]
    return tuple(name for name, entry in _data("env")["env"].items() if _in_spans(entry["in"], i))
