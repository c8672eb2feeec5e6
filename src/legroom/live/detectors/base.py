"""The interface of all detectors. A finding begins after a minimum duration and ends after a calm one."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from legroom.live.metrics.window import Window
from legroom.live.thresholds import DEFAULT, Hold, Thresholds
from legroom.planning.plan_document import PlanDocument
from legroom.records import dataclass, field

Severity = Literal["info", "warning", "critical"]
Situation = Literal["start-up", "burst", "chronic", "prefix-cache", ""]
"""Which of the four memory situations a finding is about; empty for none of them."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What a detector measured in one scrape."""

    is_bad: bool
    reason: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    engine: str = ""
    severity: Severity | None = None
    """Overrides the detector's own, like `restart_helps` and `title`."""
    restart_helps: bool | None = None
    title: str | None = None
    is_calm: bool = True
    """False: not bad, and not good enough to end a finding."""
    is_certain: bool = False
    """Whether `watch --once` reports it from a single scrape."""


GOOD = Condition(False)
AT_ONCE = Hold(1, 0.0)


@dataclass(frozen=True, slots=True)
class DetectorFinding:
    """A problem of one server while it lasts."""

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
    """The catalog entry, for `legroom explain`."""
    situation: Situation = ""
    restart_helps: bool = False
    is_seen_now: bool = True
    """False when the last scrape no longer showed it."""

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"numbers": dict(self.numbers)}


class Detector(ABC):
    """Watches one server for one kind of problem. Call `update` after every scrape."""

    kind: ClassVar[str]
    title: ClassVar[str]
    severity: ClassVar[Severity] = "warning"
    cause: ClassVar[str] = ""
    entry: ClassVar[str] = ""
    situation: ClassVar[Situation] = ""
    restart_helps: ClassVar[bool] = False
    """Whether a restart with the same flags can end this."""
    begins_after: ClassVar[Hold | str] = "hold"
    """How long it must be bad before the finding begins: a duration, or the name of a threshold."""
    ends_after: ClassVar[Hold | str] = "calm"
    """How long it must not be bad before the finding ends; a threshold in seconds is the window of counted events."""

    def __init__(self, thresholds: Thresholds = DEFAULT, plan: PlanDocument | None = None) -> None:
        self.levels, self.plan = thresholds, plan
        self._bad_since_s: float | None = None
        self._calm_since_s: float | None = None
        self._bad_scrapes = self._calm_scrapes = self._unknown_scrapes = 0
        self._last_s: float | None = None
        self._last_bad = GOOD
        self.is_active = False

    @abstractmethod
    def measure(self, window: Window, now_s: float) -> Condition | None:
        """The condition in the last scrape; None where the server does not report what is needed."""

    def _as_hold(self, hold_or_name: Hold | str) -> Hold:
        """The `Hold` (minimum scrapes and seconds) given or named in Thresholds; plain seconds need one scrape."""
        duration = getattr(self.levels, hold_or_name) if isinstance(hold_or_name, str) else hold_or_name
        return duration if isinstance(duration, Hold) else Hold(1, duration)

    @property
    def warm_up_s(self) -> float:
        """Seconds of watching after which no finding means no problem: what rates, durations and counts need."""
        return max(60.0 + self._as_hold(self.begins_after).seconds, self._as_hold(self.ends_after).seconds)

    def update(self, window: Window, now_s: float) -> DetectorFinding | None:
        """Evaluates the last scrape; the active finding, with the last bad scrape's numbers, or None without one."""
        if self._last_s is not None and now_s < self._last_s:
            self.reset_durations()
        self._last_s = now_s
        condition = self.measure(window, now_s)
        self._unknown_scrapes = self._unknown_scrapes + 1 if condition is None else 0
        if condition is not None and condition.is_bad:
            self._calm_since_s, self._calm_scrapes = None, 0
            self._bad_since_s = now_s if self._bad_since_s is None else self._bad_since_s
            self._bad_scrapes += 1
            hold, seconds = self._as_hold(self.begins_after), now_s - self._bad_since_s
            self.is_active = self.is_active or _has_held(hold, self._bad_scrapes, seconds)
        elif condition is not None and self.is_active and not condition.is_calm:
            self._calm_since_s, self._calm_scrapes = None, 0
        elif condition is not None or self.is_active or self._unknown_scrapes >= 2:  # one lost scrape changes nothing
            self._count_calm(now_s)
        if not self.is_active:
            return None
        shown = self._last_bad = condition if condition is not None and condition.is_bad else self._last_bad
        since_s = now_s if self._bad_since_s is None else self._bad_since_s
        return replace(self.finding(window, now_s, shown), since_s=since_s, is_seen_now=shown is condition)

    def _count_calm(self, now_s: float) -> None:
        """Counts a calm scrape: ends an active finding after `ends_after`, else forgets the bad scrapes before."""
        if not self.is_active:
            self._bad_since_s, self._bad_scrapes = None, 0
            return
        self._calm_since_s = now_s if self._calm_since_s is None else self._calm_since_s
        self._calm_scrapes += 1
        if _has_held(self._as_hold(self.ends_after), self._calm_scrapes, now_s - self._calm_since_s):
            self.is_active = False
            self.reset_durations()

    def reset_durations(self) -> None:
        """Forgets for how long the condition has been bad or calm."""
        self._bad_since_s = self._calm_since_s = None
        self._bad_scrapes = self._calm_scrapes = 0

    def finding(self, window: Window, now_s: float, condition: Condition) -> DetectorFinding:
        """This detector's finding for a bad condition, starting at `now_s`."""
        return DetectorFinding(
            kind=self.kind,
            server=window.server,
            severity=condition.severity or self.severity,
            title=condition.title or self.title,
            reason=condition.reason,
            since_s=now_s,
            time_s=now_s,
            numbers=condition.numbers,
            engine=condition.engine,
            cause=self.cause,
            entry=self.entry,
            situation=self.situation,
            restart_helps=self.restart_helps if condition.restart_helps is None else condition.restart_helps,
        )


def _has_held(hold: Hold, scrapes: int, seconds: float) -> bool:
    """Whether a condition lasted for the scrapes and seconds of `hold`; nine tenths of the seconds are enough."""
    return scrapes >= hold.samples and seconds >= 0.9 * hold.seconds


def worst_condition(conditions: Sequence[Condition]) -> Condition | None:
    """Of the engines' conditions the first bad one, else the first not calm, else the first; None without any."""
    return min(conditions, key=lambda condition: (not condition.is_bad, condition.is_calm), default=None)


def engine_label(engine: tuple[str, str], window: Window) -> str:
    """`engine 1`, with its model if the server has several; empty if the server has a single engine."""
    if window.latest is None or len(window.latest.engines) < 2:
        return ""
    model, rank = engine
    models = {sample.model for sample in window.latest.engines}
    return f"{model} engine {rank}" if len(models) > 1 else f"engine {rank}"


def counted(number: float, noun: str) -> str:
    """A number with its noun: `1 request`, `12 requests`."""
    return f"{number:,.0f} {noun}" if round(number) == 1 else f"{number:,.0f} {noun}s"
