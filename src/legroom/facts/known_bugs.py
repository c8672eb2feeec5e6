"""Memory failures that are vLLM's own bugs: in which releases, with which settings, and what fixed them.

Data in `data/known_bugs.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from legroom.facts.data_files import read_data
from legroom.facts.releases import Release
from legroom.records import dataclass


@dataclass(frozen=True, slots=True)
class KnownBug:
    """One bug. `settings`, `model` and `platform` must all hold for it to happen."""

    id: str
    title: str
    first: str
    """The first release that has it."""
    last: str | None
    """The last one; None: every one since."""
    fixed_in: str | None
    settings: Mapping[str, str]
    """By vLLM's Python names: on | not on | not off | set | above 1 | above 2, or words that `others` must hold."""
    model: tuple[str, ...]
    """Traits of the model and of how it is run: mla, experts, multimodal, encoder-decoder, several kv groups, no state
    layers, runner V2, V1 engine."""
    platform: str | None
    memory: str
    """gpu | host: which memory it costs."""
    causes: tuple[str, ...]
    """The labels under which it shows in a diagnosis."""
    evidence: tuple[str, ...]
    """Messages that must be in the log, where it is told by one."""
    effect: str
    flags: Mapping[str, Any]
    env: Mapping[str, str]
    steps: tuple[str, ...]
    source: str
    start: Mapping[str, str] | None = None
    """What must hold besides for it to keep a server from starting whose figures fit: settings as above, and the
    `interconnect` of the cards. None: no start is known to have ended by it."""

    def is_in(self, release: Release) -> bool:
        return release.at_least(self.first) and (self.last is None or not release.after(self.last))

    def happens_with(self, args: Any) -> bool:
        """Whether these flags set it off."""
        return all(_holds(getattr(args, name, None), wanted) for name, wanted in self.settings.items())

    def may_end_start(self, args: Any, interconnect: str) -> bool:
        """Whether a start with these flags may end by it although the memory is there."""
        if self.start is None or self._is_worked_around(args):
            return False
        wanted = dict(self.start)
        wire = wanted.pop("interconnect", interconnect)
        return wire == interconnect and all(_holds(getattr(args, name, None), word) for name, word in wanted.items())

    def _is_worked_around(self, args: Any) -> bool:
        """Whether the flags of the workaround are given already, or a smaller share of the card."""
        given = {name: getattr(args, name, None) for name in self.flags}
        share = given.get("gpu_memory_utilization")
        if share is not None and share <= self.flags["gpu_memory_utilization"]:
            given["gpu_memory_utilization"] = self.flags["gpu_memory_utilization"]
        env = {name: args.env.get(name) for name in self.env}
        return bool(given or env) and given == dict(self.flags) and env == dict(self.env)

    @property
    def threads(self) -> str:
        """Where it is told: the first of vLLM's threads."""
        return self.source.partition(" ")[2].partition(",")[0].partition(" (")[0]

    @property
    def upgrade_step(self) -> str | None:
        return (
            f"pip install -U 'vllm>={self.fixed_in}' (image: vllm/vllm-openai:v{self.fixed_in})"
            if self.fixed_in
            else None
        )


@cache
def known_bugs() -> tuple[KnownBug, ...]:
    """In the order of the data file."""
    return tuple(_bug(row) for row in read_data("known_bugs.json")["bugs"])


def bugs_with(release: Release, args: Any, platform: str | None) -> tuple[KnownBug, ...]:
    """The bugs of a release that these flags set off on this kind of card; the model is not looked at."""
    return tuple(
        bug
        for bug in known_bugs()
        if bug.is_in(release) and bug.happens_with(args) and (bug.platform is None or bug.platform == platform)
    )


def _holds(value: Any, wanted: str) -> bool:
    match wanted:
        case "on":
            return value is True
        case "not on":
            return value is not True
        case "not off":
            return value is not False
        case "set":
            return value is not None
        case "above 1":
            return isinstance(value, int) and value > 1
        case "above 2":
            return isinstance(value, int) and value > 2
        case _:
            return value is not None and wanted in str(value)


def _bug(row: Mapping[str, Any]) -> KnownBug:
    workaround = row["workaround"]
    return KnownBug(
        row["id"],
        row["title"],
        row["from"],
        row["to"],
        row["fixed_in"],
        row.get("settings", {}),
        tuple(row.get("model", ())),
        row.get("platform"),
        row["memory"],
        tuple(row["causes"]),
        tuple(row["evidence"]),
        row["effect"],
        workaround.get("flags", {}),
        workaround.get("env", {}),
        tuple(workaround.get("steps", ())),
        row["source"],
        row.get("start"),
    )
