"""vLLM's flags by release: existence, value kinds, defaults, choices and replacements. Data: `data/flags.json` (names,
ranges, kinds), `defaults.json`, `choices.json`, `flag_advice.json`. A plan reads the first alone."""

from functools import cache, lru_cache
from typing import Any, Literal

from legroom.facts import read_data
from legroom.facts.releases import Release, known_releases
from legroom.records import dataclass

Kind = (
    Literal["switch", "bool", "optbool", "int", "human", "float", "str", "maybe", "json", "pairs"]
    | Literal["list:str", "list:int", "list:float"]
)
"""The value syntax: `switch` --x; `bool` --x or --no-x; `optbool` --x [True|False]; `human` an int that may end in
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
    """The ranges of releases that have a flag."""

    name: str
    spans: tuple[tuple[str, str], ...]

    @property
    def first(self) -> str:
        """The release that introduced the flag."""
        return self.spans[0][0]

    @property
    def last(self) -> str:
        """The last release that has the flag."""
        return self.spans[-1][1]

    @property
    def removed_in(self) -> str | None:
        """The first release without it; None where the newest still has it."""
        releases = known_releases()
        after = releases.index(self.last) + 1
        return releases[after] if after < len(releases) else None


@dataclass(frozen=True, slots=True)
class FlagAdvice:
    """The replacement of a flag, and the reason."""

    use: str = ""
    why: str = ""
    renamed: bool = False


def _is_in_spans(spans: list[list[int]], release: Release) -> bool:
    """Whether the release's index lies in one of these [first, last] spans, ends included."""
    return any(first <= release.index <= last for first, last in spans)


def _value_at(ranges: list[list[Any]], release: Release) -> Any:
    """The value of the row [first, last, value] whose release indexes include the release's; None without one."""
    return next((value for first, last, value in ranges if first <= release.index <= last), None)


_shared_flag = cache(Flag)  # One object for all releases in which a flag is the same.


@lru_cache(maxsize=32)
def flags_of(release: Release) -> dict[str, Flag]:
    """Every flag that a release's server accepts, by long and by short name."""
    table: dict[str, Flag] = {}
    for name, entry in read_data("flags.json")["flags"].items():
        if not _is_in_spans(entry["in"], release):
            continue
        short_names = tuple(entry.get("aliases", ()))
        # 0.12.0 gave -O to --optimization-level; until then it was the compilation config's.
        if name == "--compilation-config":
            short_names = ("-O",) if release.before("0.12.0") else ("-cc",)
        deprecated = _is_in_spans(entry.get("deprecated", []), release)
        kind = _value_at(entry["kinds"], release) or "str"
        flag = _shared_flag(name, entry.get("dest", dest_name(name)), kind, short_names, deprecated)
        table |= dict.fromkeys((name, *short_names), flag)
    return table


def flag_history(name: str) -> FlagHistory | None:
    """The releases that have a flag; None for a name that no known release has."""
    entry = read_data("flags.json")["flags"].get(name)
    return FlagHistory(name, _release_ranges(entry["in"])) if entry else None


def _release_ranges(spans: list[list[int]]) -> tuple[tuple[str, str], ...]:
    """Spans of release indexes as pairs of first and last version."""
    releases = known_releases()
    return tuple((releases[first], releases[last]) for first, last in spans)


def flag_kind_ever(name: str) -> Kind | None:
    """The value kind of a flag in the last release that has it; None for an unknown flag."""
    entry = read_data("flags.json")["flags"].get(name)
    return entry["kinds"][-1][2] if entry else None


@cache
def flags_ever() -> dict[str, Flag]:
    """Every flag of any known release, in its last form, by its long name and each short name."""
    table: dict[str, Flag] = {}
    for name, entry in read_data("flags.json")["flags"].items():
        short_names = tuple(entry.get("aliases", ()))
        flag = Flag(name, entry.get("dest", dest_name(name)), entry["kinds"][-1][2], short_names)
        table |= dict.fromkeys((name, *short_names), flag)
    return table


def flags_changing(part: str) -> frozenset[str]:
    """The flags, by Python name, that change a server's measured memory `part`: `weights`, `peak` or `pool`."""
    return frozenset(read_data("flag_companions.json")["changes"][part])


def flag_name(dest: str) -> str:
    """The command-line name of a Python name: `--max-model-len` for `max_model_len`."""
    return "--" + dest.lstrip("-").replace("_", "-")


def dest_name(flag: str) -> str:
    """The Python name that argparse derives from a flag: `max_model_len` for `--max-model-len`."""
    return flag.lstrip("-").replace("-", "_")


def default(name: str, release: Release) -> Any:
    """A flag's declared default; None also where vLLM computes it (`vllm.resolve`) or the release lacks the flag."""
    return _value_at(read_data("defaults.json")["defaults"].get(name, []), release)


def defaults_ever(name: str) -> tuple[Any, ...]:
    """Every default of a flag in any known release."""
    return tuple(value for _, _, value in read_data("defaults.json")["defaults"].get(name, []))


def choices(name: str, release: Release) -> tuple[Any, ...] | None:
    """The allowed values of a flag; None where every value is allowed, and for a flag that the release lacks."""
    allowed = _value_at(read_data("choices.json")["choices"].get(name, []), release)
    return tuple(allowed) if allowed is not None else None


def advice(name: str) -> FlagAdvice | None:
    """What to use instead of a flag that was removed or never existed; None where the data file says nothing."""
    data = read_data("flag_advice.json")
    entry = data["replaced"].get(name, data["never_existed"].get(name))
    return FlagAdvice(**entry) if entry is not None else None


def all_flag_names() -> tuple[str, ...]:
    """The long name of every flag of any known release."""
    return tuple(read_data("flags.json")["flags"])


def env_default(name: str, release: Release) -> Any:
    """The declared default of an environment variable; None where the release has none or does not read it."""
    entry = read_data("env.json")["env"].get(name)
    return _value_at(entry["defaults"], release) if entry else None


def env_history(name: str) -> tuple[tuple[str, str], ...] | None:
    """The ranges of releases that read an environment variable; None where none does."""
    entry = read_data("env.json")["env"].get(name)
    return _release_ranges(entry["in"]) if entry else None


def is_read_by_plugin(name: str) -> bool:
    """Whether a plugin of vLLM, or KServe, reads an environment variable that vLLM itself does not."""
    data = read_data("plugin_env.json")
    return name.startswith(tuple(data["prefixes"])) or any(name in names for names in data["plugins"].values())


def companion_of(names: frozenset[str]) -> str:
    """The program, run in place of `vllm serve`, that has one of these flags; empty where none has."""
    programs = read_data("companion_flags.json")["programs"]
    return next((program for program, flags in programs.items() if not names.isdisjoint(flags)), "")


def env_names(release: Release) -> tuple[str, ...]:
    """Every environment variable that a release reads."""
    return tuple(name for name, entry in read_data("env.json")["env"].items() if _is_in_spans(entry["in"], release))
