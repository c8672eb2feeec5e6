"""Alerts that fall silent on another release unless their rules are exported anew for it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from legroom.exports.prometheus.alerts import vllm_conditions
from legroom.exports.prometheus.levels import AlertLevels
from legroom.exports.prometheus.promql import Measures
from legroom.exports.prometheus.recording import recordings
from legroom.facts.metrics import role_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from legroom.facts.releases import Release

_JOB = "vllm"
_SERIES = re.compile(r"vllm:[a-z0-9_]+")


def silenced_alerts(old: Release, vanished: Collection[str]) -> tuple[str, ...]:
    """The alerts of `legroom export prometheus` for one release that read a measure whose every series of that release
    is among the vanished ones: they raise no error, and never fire again."""
    measures, levels = Measures(old), AlertLevels()
    broken = {
        rule.record for rule in recordings(measures, levels, _JOB) if _has_lost_measure(rule.expr, measures, vanished)
    }
    conditions = vllm_conditions(measures, levels, _JOB)
    return tuple(condition.name for condition in conditions if any(name in condition.expr for name in broken))


def _has_lost_measure(expr: str, measures: Measures, vanished: Collection[str]) -> bool:
    roles = {role_of(name) for name in _SERIES.findall(expr)} - {None}
    return any(role and all(name in vanished for name in measures.series(role)) for role in roles)
