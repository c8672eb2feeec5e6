"""Messages that vLLM, torch, CUDA, NCCL and the host write about memory or about failures that resemble it. Data in
`data/evidence.json` and `data/startup_lines.json`. Patterns are RE2, which matches in linear time."""

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Literal

from legroom.facts import read_data
from legroom.records import dataclass
from legroom.units import GIB

Value = int | float | str
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d*)?")
_UNITS = {"bytes": 1, "B": 1, "kB": 1 << 10} | {
    prefix + suffix: 1 << 10 * power for power, prefix in enumerate("KMGT", 1) for suffix in ("iB", "B", "i", "")
}


def typed_groups(groups: Mapping[str, str]) -> dict[str, Value]:
    """Named groups of a match: `x_gib` and `x_size` as `x_bytes`, `_count` and `_ratio` as numbers, others as text."""
    values: dict[str, Value] = {}
    for name, text in groups.items():
        stem, _, unit = name.rpartition("_")
        try:
            if unit == "gib":
                values[f"{stem}_bytes"] = round(float(text) * GIB)
            elif unit == "size":
                values[f"{stem}_bytes"] = size_bytes(text)
            elif unit == "count":
                values[name] = int(text.replace(",", "")[:18])
            else:
                values[name] = float(text.rstrip(".")) if unit == "ratio" else text
        except (ValueError, OverflowError):
            continue
    return values


def size_bytes(text: str) -> int:
    """Bytes of a printed size such as `1.96 GiB`; ValueError for other text."""
    number = _NUMBER.match(text.strip())
    if number is None:
        raise ValueError(text)
    unit = text.strip()[number.end() :].strip() or "bytes"
    if unit not in _UNITS:
        raise ValueError(text)
    return round(float(number[0].replace(",", "")) * _UNITS[unit])


LineKind = Literal["settings", "gpu", "memory", "capacity", "ready", "failure"]


@dataclass(frozen=True, slots=True)
class StartupLine:
    """One known start-up line. The suffix of a group is its unit: `_gib`, `_bytes`, `_count`, `_ratio`; else text."""

    id: str
    mark: str
    """A substring of every matching line."""
    kind: LineKind
    pattern: re.Pattern[str]


@cache
def startup_lines() -> tuple[StartupLine, ...]:
    """Every known start-up line, in matching order."""
    return tuple(
        StartupLine(line["id"], line["mark"], line["kind"], re.compile(line["pattern"]))
        for line in read_data("startup_lines.json")["lines"]
    )


Role = (
    Literal["failure", "symptom", "host", "hint", "milestone", "setting", "platform", "frame", "stats"]
    | Literal["once", "banner", "exception", "stop", "told"]
)


@dataclass(frozen=True, slots=True)
class MessagePattern:
    """One known message. The suffix of a group is its unit: `_gib`, `_size`, `_count`, `_ratio`; else text."""

    id: str
    role: Role
    marks: tuple[str, ...]
    """Substrings, one of which every matching line holds."""
    pattern: str | None
    """RE2; None: a mark alone is a match."""
    phase: str | None


@cache
def message_patterns() -> tuple[MessagePattern, ...]:
    """Every known message, in the order of the data file."""
    return tuple(
        MessagePattern(
            entry["id"], entry["role"], tuple(entry["marks"]), entry.get("pattern"), entry.get("phase") or None
        )
        for entry in read_data("evidence.json")["messages"]
    )


def message_group(name: str) -> tuple[str, ...]:
    """Ids of the messages that a diagnosis treats alike, by the group's name in evidence.json, such as `refusal`."""
    return tuple(read_data("evidence.json")["groups"][name])


@cache
def covered_messages() -> Mapping[str, tuple[str, ...]]:
    """By a message's id, the ids of those to ignore where it stands in the same line, as they say less."""
    return {strong: tuple(weaker) for strong, weaker in read_data("evidence.json")["covered"].items()}


@cache
def message_openings() -> tuple[str, ...]:
    """The beginnings of the error messages that decide a diagnosis, with `#` for every number."""
    return tuple(read_data("evidence.json")["openings"])


def engine_files(generation: str) -> frozenset[str]:
    """The names of the source files from which vLLM's V0 or V1 engine (`generation`) logs."""
    return frozenset(read_data("evidence.json")["engine_files"][generation])


@dataclass(frozen=True, slots=True)
class Launcher:
    """A program that starts the engine itself and takes vLLM's settings in a form of its own."""

    name: str
    setting: str
    """Template of one setting, with `{name}` and `{value}`."""
    names: Mapping[str, str]
    """Templates of the settings that have another name there, by vLLM's Python name."""
    has_no_others: bool = False
    """Whether it takes the settings of `names` alone."""
    is_of_image: bool = False
    """Whether it starts vLLM's own server in a container, with vLLM's own flags."""

    def lacks(self, settings: Mapping[str, object]) -> bool:
        """Whether this program cannot take some of these settings (by vLLM's Python names; `model` is always taken)."""
        return self.has_no_others and not settings.keys() - {"model"} <= self.names.keys()

    def words(self, settings: Mapping[str, object]) -> str:
        """The settings (vLLM's Python name -> value) written as flags or arguments of this program."""
        forms = (
            self.names.get(name, self.setting)
            .format(name=name, value=json.dumps(value) if "{{" in self.setting else value, flag=name.replace("_", "-"))
            .removesuffix(" True" if self.setting.startswith("--{flag}") else "\n")
            for name, value in settings.items()
        )
        if (before := self.setting.partition("{name}")[0]).endswith(","):  # one list, which a second one would replace
            return before + ",".join(form.removeprefix(before) for form in forms)
        return (" " if before or self.setting.startswith("--") else ", ").join(forms)


def launcher_in(text: str) -> Launcher | None:
    """The first program or library known to start vLLM whose call is in the text; None for `vllm serve` itself."""
    rows = read_data("trainers.json")["launchers"]
    if re.search(r"\bvllm serve\b|vllm\.entrypoints|vllm/vllm-openai", text):
        rows = [row for row in rows if row.get("is_of_image")]
    found = next((row for row in rows if re.search(row["mark"], text)), None)
    if found is None:
        return None
    optional = {name: found.get(name, False) for name in ("has_no_others", "is_of_image")}
    return Launcher(found["name"], found["setting"], found["names"], **optional)


def trainer_settings(line: str) -> Mapping[str, str] | None:
    """How the training framework that a log line names sets vLLM's memory (a row of trainers.json); None for none."""
    text, rows = line.lower(), read_data("trainers.json")["trainers"]
    return next((row for row in rows if row["mark"] in text), None)
