"""The causes, one file each. A file defines `CAUSE`; being in this folder is all it takes to be asked."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path

from legroom.diagnosis.cause import Cause


@cache
def causes() -> tuple[Cause, ...]:
    """Every cause, in the order in which equally likely ones are named."""
    names = (path.stem for folder in __path__ for path in Path(folder).glob("[a-z]*.py"))
    every: list[Cause] = [importlib.import_module(f"{__name__}.{name}").CAUSE for name in names]
    return tuple(sorted(every, key=lambda cause: (cause.priority, cause.entry)))


def cause_of(label: str) -> Cause:
    return next(cause for cause in causes() if cause.label == label)
