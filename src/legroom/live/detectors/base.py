"""The one interface of all detectors, and the patience they share: a minimum duration, and calm before the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from legroom.live.metrics.window import Window
from legroom.live.thresholds import DEFAULT, Hold, Thresholds
from legroom.planning.plan_document import PlanDocument
from legroom.records import dataclass, field

Severity = Literal["info", "warning", "critical"]
Situation = Literal["start-up", "burst", "chronic", "prefix-cache", ""]
"""The four situations of a server in memory trouble; empty for what is none of them."""

_JITTER = 0.9
"""Of a duration that is enough: scrapes come a little early or late."""
_SETTLED_S = 60.0
"""After this long of watching, rates over a minute are known."""
_MAX_UNKNOWN = 2
"""Scrapes in a row that say nothing before what was bad until then is forgotten: one lost scrape changes nothing."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What a detector measured at one scrape."""

    is_bad: bool
    is_calm: bool
    """Neither is possible: better than bad, and not good enough to end a finding."""
    reason: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    engine: str = ""
    severity: Severity | None = None
    """Where it is not the detector's own."""
    restart_helps: bool | None = None
    title: str | None = None
    """Where it is not the detector's own."""
    is_certain: bool = False
    """Whether a single scrape is enough for who does not stay for a second one."""


@dataclass(frozen=True, slots=True)
class DetectorFinding:
    """Something is wrong, why legroom says so, and what kind of answer can help."""

    kind: str
    server: str
    severity: Severity
    title: str
    reason: str
    """A sentence with the numbers."""
    since_s: float
    time_s: float
    numbers: Mapping[str, float] = field(default_factory=dict)
    engine: str = ""
    """Which engine, where the server has several."""
    cause: str = ""
    """The label of the cause in the catalog."""
    entry: str = ""
    """The catalog entry that tells the long story."""
    situation: Situation = ""
    restart_helps: bool = False
    is_seen_now: bool = True
    """False while it is merely not over yet: the last scrape no longer showed it."""

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"numbers": dict(self.numbers)}


class Detector(ABC):
    """Watches one server for one kind of trouble. Feed it the window after every scrape."""

    kind: ClassVar[str]
    title: ClassVar[str]
    severity: ClassVar[Severity] = "warning"
    cause: ClassVar[str] = ""
    entry: ClassVar[str] = ""
    situation: ClassVar[Situation] = ""
    restart_helps: ClassVar[bool] = False
    """Whether starting the server anew, with the same flags, can end this."""
    what_helps: ClassVar[str]
    """In a sentence, for people."""

    def __init__(self, thresholds: Thresholds = DEFAULT, plan: PlanDocument | None = None) -> None:
        self.levels = thresholds
        self.plan = plan
        """The JSON document of `legroom plan`, where one is known."""
        self._bad_since_s: float | None = None
        self._bad_scrapes = 0
        self._calm_since_s: float | None = None
        self._calm_scrapes = 0
        self._unknown_scrapes = 0
        self._last_s: float | None = None
        self.is_active = False

    @abstractmethod
    def measure(self, window: Window, now_s: float) -> Condition | None:
        """The condition at this scrape; None where nothing can be said."""

    @property
    def hold(self) -> Hold:
        """How long it must be bad before it is said."""
        return self.levels.hold

    @property
    def calm(self) -> Hold:
        """How long it must be calm before it is over."""
        return self.levels.calm

    @property
    def warm_up_s(self) -> float:
        """How long it must have watched a server before its silence means that nothing is wrong."""
        return _SETTLED_S + self.hold.seconds

    def update(self, window: Window, now_s: float) -> DetectorFinding | None:
        """The finding while it lasts, with the numbers of this scrape; None otherwise."""
        if self._last_s is not None and now_s < self._last_s:
            self._forget_times()
        self._last_s = now_s
        condition = self.measure(window, now_s)
        if condition is None:
            self._unknown_scrapes += 1
            if self.is_active or self._unknown_scrapes >= _MAX_UNKNOWN:
                self._note_calm(now_s)
        else:
            self._unknown_scrapes = 0
            self._note(condition, now_s)
        return self._finding(window, now_s, condition) if self.is_active else None

    def _note(self, condition: Condition, now_s: float) -> None:
        if condition.is_bad:
            self._calm_since_s, self._calm_scrapes = None, 0
            self._bad_since_s = now_s if self._bad_since_s is None else self._bad_since_s
            self._bad_scrapes += 1
            self.is_active = self.is_active or _passed(self.hold, self._bad_scrapes, now_s - self._bad_since_s)
        elif condition.is_calm or not self.is_active:
            self._note_calm(now_s)
        else:
            self._calm_since_s, self._calm_scrapes = None, 0

    def _note_calm(self, now_s: float) -> None:
        if not self.is_active:
            self._bad_since_s, self._bad_scrapes = None, 0
            return
        self._calm_since_s = now_s if self._calm_since_s is None else self._calm_since_s
        self._calm_scrapes += 1
        if _passed(self.calm, self._calm_scrapes, now_s - self._calm_since_s):
            self.is_active = False
            self._forget_times()

    def _forget_times(self) -> None:
        """After a jump of the clock, or at the end: durations are counted anew."""
        self._bad_since_s = self._calm_since_s = None
        self._bad_scrapes = self._calm_scrapes = 0

    def _finding(self, window: Window, now_s: float, condition: Condition | None) -> DetectorFinding:
        shown = self._last_bad = condition if condition is not None and condition.is_bad else self._last_bad
        return DetectorFinding(
            kind=self.kind,
            server=window.server,
            severity=shown.severity or self.severity,
            title=shown.title or self.title,
            reason=shown.reason,
            since_s=now_s if self._bad_since_s is None else self._bad_since_s,
            time_s=now_s,
            numbers=shown.numbers,
            engine=shown.engine,
            cause=self.cause,
            entry=self.entry,
            situation=self.situation,
            restart_helps=self.restart_helps if shown.restart_helps is None else shown.restart_helps,
            is_seen_now=shown is condition,
        )

    _last_bad: Condition = Condition(False, True)


def _passed(hold: Hold, looks: int, seconds: float) -> bool:
    return looks >= hold.samples and seconds >= hold.seconds * _JITTER


def worst_condition(conditions: Sequence[Condition]) -> Condition | None:
    """A server's condition: that of its first engine in trouble, and calm only where all are. None without any."""
    if not conditions:
        return None
    calm = Condition(False, all(condition.is_calm for condition in conditions))
    return next((condition for condition in conditions if condition.is_bad), calm)


def engine_label(engine: tuple[str, str], window: Window) -> str:
    """How to call an engine; nothing where the server has but one."""
    if window.latest is None or len(window.latest.engines) < 2:
        return ""
    model, rank = engine
    models = {sample.model for sample in window.latest.engines}
    return f"{model} engine {rank}" if len(models) > 1 else f"engine {rank}"


def counted(number: float, noun: str) -> str:
    """`1 request`, `12 requests`."""
    return f"{number:,.0f} {noun}" if round(number) == 1 else f"{number:,.0f} {noun}s"
