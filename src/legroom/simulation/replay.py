"""`simulate`: a trace and settings in, a timeline out."""

from __future__ import annotations

from collections.abc import Callable

from legroom.simulation.reference import Reference
from legroom.simulation.settings import SchedulerSettings
from legroom.simulation.timeline import Step, Timeline
from legroom.simulation.trace import Trace


def simulate(
    trace: Trace, settings: SchedulerSettings, on_step: Callable[[Step], None] | None = None, engine: str = "auto"
) -> Timeline:
    """Replay `trace` through vLLM's scheduling decisions; `on_step` sees every step in which something ran."""
    return Reference(trace.checked(), settings, on_step).run()
