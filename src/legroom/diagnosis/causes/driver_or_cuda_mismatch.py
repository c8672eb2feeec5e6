"""Toolkit, driver, torch and GPU generation do not go together. What each message means is data: `lookalikes.json`."""

from collections.abc import Iterator

from legroom.diagnosis.causes import Assessment, Case, Cause, Fix, FixPlanner, known_fix
from legroom.diagnosis.lookalike_causes import assess_lookalike, lookalike_fixes

_LABEL = "driver_or_cuda_mismatch"


def examine(case: Case) -> Assessment | None:
    """Assesses errors that name the driver, CUDA toolkit, a missing library or the GPU's capability; else None."""
    return assess_lookalike(case, _LABEL)


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """The fixes in `lookalikes.json` for the driver or CUDA error that the log shows."""
    yield from tuple(lookalike_fixes(planner, _LABEL)) or (known_fix("one_cuda"),)


CAUSE = Cause(entry="LR902", domain="other")
