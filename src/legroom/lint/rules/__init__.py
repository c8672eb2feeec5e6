"""The rules, by topic: every module of this package registers its checks with `legroom.lint.rule.checks`."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legroom.lint.rule import Check


@cache
def all_checks() -> tuple[Check, ...]:
    """The checks of every rule module, by module name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    from legroom.lint.rule import CHECKS

    return tuple(sorted(CHECKS, key=lambda check: check.find.__module__))
