"""The rules, a file each. A rule module has `RULES` and `check(subject, context)`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from legroom.lint.context import Context
    from legroom.lint.finding import LintFinding, Rule

NAMES = (
    "metric_unknown", "metric_hidden", "metric_grep", "alert_full_pool", "alert_no_traffic", "alert_never", "flags",
    "module_unknown", "env_unknown", "allocator", "block_size", "eager", "shm_missing", "gpus_too_few", "start_limit",
    "stop_limit", "kill_by_pattern", "gpu_reset", "empty_cache", "unit_orphans", "secret_written", "plan_differs",
)  # fmt: skip


class RuleModule(Protocol):
    """What a rule's file exposes."""

    RULES: tuple[Rule, ...]

    def check(self, subject: Any, context: Context) -> Iterator[LintFinding]:
        """What is wrong with one thing that a reader found."""


@cache
def modules() -> tuple[RuleModule, ...]:
    """Every rule module."""
    return tuple(importlib.import_module(f"{__name__}.{name}") for name in NAMES)


@cache
def rules() -> dict[str, Rule]:
    """Every rule by its id."""
    return {rule.id: rule for module in modules() for rule in module.RULES}
