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
    """By vLLM's Python names: on | not on | not off | set | above 1, or words that `others` must hold."""
    model: tuple[str, ...]
    """Traits of the model: mla, multimodal, encoder-decoder, several kv groups, no state layers."""
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

    def is_in(self, release: Release) -> bool:
        return release.at_least(self.first) and (self.last is None or not release.after(self.last))

    def happens_with(self, args: Any) -> bool:
        """Whether these flags set it off."""
        return all(_holds(getattr(args, name, None), wanted) for name, wanted in self.settings.items())

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
        case _:
            return value is not None and wanted in str(value)


def _bug(row: Mapping[str, Any]) -> KnownBug:
    workaround = row["workaround"]
    return KnownBug(
        row["id"], row["title"], row["from"], row["to"], row["fixed_in"], row.get("settings", {}),
        tuple(row.get("model", ())), row.get("platform"), row["memory"], tuple(row["causes"]), tuple(row["evidence"]),
        row["effect"], workaround.get("flags", {}), workaround.get("env", {}), tuple(workaround.get("steps", ())),
        row["source"],
    )  # fmt: skip
