"""The causes, one file each. A file defines `CAUSE`; being in this folder is all it takes to be asked."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from legroom.diagnosis.cause import Cause


@cache
def causes() -> tuple[Cause, ...]:
    """Every cause, in the order in which equally likely ones are named."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    every: list[Cause] = [module.CAUSE for module in modules]
    return tuple(sorted(every, key=lambda cause: (cause.priority, cause.entry)))


def cause_of(label: str) -> Cause:
    return next(cause for cause in causes() if cause.label == label)
