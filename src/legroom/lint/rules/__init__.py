"""The rules, a file each: every module of this package that has `RULES` and `check(subject, context)` is one."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from legroom.lint.rule import Context, LintFinding, Rule


class RuleModule(Protocol):
    RULES: tuple[Rule, ...]

    def check(self, subject: Any, context: Context) -> Iterator[LintFinding]:
        """What is wrong with one thing that a reader found."""


@cache
def modules() -> tuple[RuleModule, ...]:
    """Every rule module, by the alphabet: findings are sorted by their place, so no order is better."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(importlib.import_module(f"{__name__}.{name}") for name in names)


@cache
def rules() -> dict[str, Rule]:
    return {rule.id: rule for module in modules() for rule in module.RULES}
