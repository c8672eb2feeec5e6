"""Memory bugs of vLLM: affected releases and settings, fix and workaround. Data in `data/known_bugs.json`."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from legroom.facts import read_data
from legroom.facts.releases import Release
from legroom.json_records import record_from_json
from legroom.records import dataclass, field


@dataclass(frozen=True, slots=True)
class KnownBug:
    """One bug. It occurs where `settings`, `model` and `platform` all match."""

    id: str
    title: str
    first: str
    """The first affected release."""
    last: str | None
    """The last affected release; None: all since `first`."""
    fixed_in: str | None
    memory: str
    """The affected memory: gpu | host."""
    causes: tuple[str, ...]
    """The diagnosis labels."""
    evidence: tuple[str, ...]
    """Ids of messages that the log must hold; empty: none."""
    effect: str
    source: str
    settings: Mapping[str, str] = field(default_factory=dict)
    """By vLLM's Python names: on | not on | not off | set | above 1 | above 2, or words that `others` must hold."""
    model: tuple[str, ...] = ()
    """Traits of the model and the engine: mla, experts, multimodal, encoder-decoder, several kv groups, no state
    layers, runner V2, V1 engine."""
    platform: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[str, ...] = ()
    start: Mapping[str, str] | None = None
    """Further settings, and the `interconnect` of the cards, with which it stops a start-up that has enough memory;
    None: it stops no start-up."""

    def is_in(self, release: Release) -> bool:
        """Whether the release has the bug: from `first` to `last` inclusive, every later one where `last` is None."""
        return release.at_least(self.first) and (self.last is None or not release.after(self.last))

    def may_end_start(self, args: Any, interconnect: str) -> bool:
        """Whether the bug may end a start that has enough memory, with these ServeArgs and this GPU interconnect."""
        if self.start is None or self._is_worked_around(args):
            return False
        wanted = dict(self.start)
        return wanted.pop("interconnect", interconnect) == interconnect and all(
            _matches_setting(getattr(args, name, None), word) for name, word in wanted.items()
        )

    def _is_worked_around(self, args: Any) -> bool:
        """Whether these ServeArgs have all of the workaround's flags and variables, or a still smaller utilization."""
        given = {name: getattr(args, name, None) for name in self.flags}
        share = given.get("gpu_memory_utilization")
        if share is not None and share <= self.flags["gpu_memory_utilization"]:
            given["gpu_memory_utilization"] = self.flags["gpu_memory_utilization"]
        env = {name: args.env.get(name) for name in self.env}
        return bool(given or env) and given == dict(self.flags) and env == dict(self.env)

    @property
    def threads(self) -> str:
        """The number, such as `#44490`, of the pull request that fixed the bug, or else of its report."""
        return self.source.partition(" ")[2].partition(",")[0].partition(" (")[0]

    @property
    def upgrade_step(self) -> str | None:
        """The command that installs the release with the fix; None where no release has it."""
        return self.fixed_in and f"pip install -U 'vllm>={self.fixed_in}' (image: vllm/vllm-openai:v{self.fixed_in})"


@cache
def known_bugs() -> tuple[KnownBug, ...]:
    """Every known vLLM memory bug of the data file."""
    rows = read_data("known_bugs.json")["bugs"]
    renamed = ({**row, **row["workaround"], "first": row["from"], "last": row["to"]} for row in rows)
    return tuple(record_from_json(KnownBug, row) for row in renamed)


def bugs_with(release: Release, args: Any, platform: str | None) -> tuple[KnownBug, ...]:
    """The bugs of a release with these ServeArgs on this platform, for any model."""
    return tuple(
        bug
        for bug in known_bugs()
        if bug.is_in(release)
        and bug.platform in (None, platform)
        and all(_matches_setting(getattr(args, name, None), wanted) for name, wanted in bug.settings.items())
    )


def _matches_setting(value: Any, condition: str) -> bool:
    """Whether a flag's value meets a condition (`on`, `off`, `not off`, `set`, `above 1`) or contains its text."""
    known = {"on": value is True, "not on": value is not True, "not off": value is not False, "set": value is not None}
    if condition.startswith("above "):
        return isinstance(value, int) and value > int(condition.removeprefix("above "))
    return known.get(condition, value is not None and condition in str(value))
