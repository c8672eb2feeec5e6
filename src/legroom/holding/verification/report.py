"""What a verification found, as plain records."""

from __future__ import annotations

from typing import Any

from legroom.holding.verification.load import Pool
from legroom.holding.verification.server import Outcome, Served
from legroom.holding.verification.watching import Point
from legroom.records import dataclass


@dataclass(frozen=True)
class Check:
    """One thing that was checked. `ok` is None where it could not be measured or judged."""

    name: str
    ok: bool | None
    text: str


@dataclass(frozen=True)
class LoadRun:
    """The load as it went."""

    name: str
    asked: int
    concurrency: int
    outcomes: tuple[Outcome, ...]
    points: tuple[Point, ...]
    seconds: float
    preemptions: int | None
    interrupted: str = ""
    """Why it ended early: the user, the time; empty where it did not."""

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """Requests that were not answered to the end."""
        return tuple(outcome for outcome in self.outcomes if not outcome.ok)

    @property
    def peak_kv_use(self) -> float | None:
        """The highest share of the pool that was seen."""
        return max((point.kv_use for point in self.points if point.kv_use is not None), default=None)


@dataclass(frozen=True)
class Verification:
    """Everything that was seen, and the verdict."""

    server: str
    """Without credentials."""
    served: Served | None
    pool: Pool | None
    checks: tuple[Check, ...]
    load: LoadRun | None = None
    memory_what: str = ""
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Verified: nothing that was checked failed, and nothing was cut short."""
        finished = self.load is None or not self.load.interrupted
        return finished and bool(self.checks) and all(check.ok is not False for check in self.checks)

    def text(self, style: Any = None) -> str:
        """The page, as a terminal shows it."""
        from legroom.holding.verification.page import verification_text  # noqa: PLC0415
        from legroom.render.terminal import PLAIN  # noqa: PLC0415

        return verification_text(self, style or PLAIN)

    def svg(self) -> str:
        """KV use and queue over time, as a drawing."""
        from legroom.holding.verification.page import verification_svg  # noqa: PLC0415

        return verification_svg(self)

    def json(self) -> dict[str, Any]:
        """The document that `legroom verify --json` prints."""
        from legroom.holding.verification.document import verification_json  # noqa: PLC0415

        return verification_json(self)
