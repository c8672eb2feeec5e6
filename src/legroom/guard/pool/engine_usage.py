"""What the engine itself says is in use: the truth behind what admission expects to be in use.

Prefixes that requests share are held once, and texts have fewer tokens than bytes: neither is seen in a request, and
both in three gauges. Two counters tell how long its steps take.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections import deque
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from legroom.facts import metrics
from legroom.guard.pool.step_clock import LONGEST_GAP_S

_GAUGES, _COUNTERS = ("kv_use", "running", "waiting"), ("prompt_tokens", "generation_tokens")
_STEPS, _STEP_TOKENS = "iteration_tokens_count", "iteration_tokens_sum"


LOOKS = 4
"""At the engine, that must agree that less is in use than expected."""
SURELY_LESS, LEAST_USE = 0.75, 0.1


class UsedShare:
    """Blocks in use over those expected: prefixes that requests share are held once, texts are shorter than bytes. The
    largest lately, and 1 where it is near that: how far requests have come is only reckoned, and who followed every
    difference would let in ever more.
    """

    __slots__ = ("_looked_s", "_shares")

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=LOOKS)
        self._looked_s = -math.inf

    def learn(self, share: float, now_s: float) -> None:
        if now_s - self._looked_s > LONGEST_GAP_S:
            self._shares.clear()
        self._looked_s = now_s
        self._shares.append(share)

    def ratio(self, now_s: float) -> float:
        is_known = len(self._shares) == LOOKS and now_s - self._looked_s <= LONGEST_GAP_S
        most = max(self._shares) if is_known else 1.0
        return max(LEAST_USE, most) if most < SURELY_LESS else 1.0


class EngineUsage(NamedTuple):
    """At one moment, over all engines of a server."""

    kv_share: float
    """Of the pool: 0..1."""
    running: float
    waiting: float
    steps: float = 0.0
    """Since it started; 0 where no release says it."""
    prompt_tokens: float = 0.0
    """That were computed: those that the prefix cache had are left out where the release says so."""
    engines: int = 1
    """Over which these are summed."""


@cache
def _roles_by_name() -> dict[str, str]:
    names = {name: role for role in _GAUGES + _COUNTERS for name in metrics.names_of(role)}
    for name in metrics.names_of("iteration_tokens"):
        names |= {f"{name}_count": _STEPS, f"{name}_sum": _STEP_TOKENS}
    return names


@cache
def _line() -> re.Pattern[str]:
    names = "|".join(sorted(map(re.escape, _roles_by_name()), key=len, reverse=True))
    return re.compile(rf"^({names})(?:\{{.*\}})? ([-+.\deE]+|NaN)$", re.MULTILINE)


def usage_of_page(page: str) -> EngineUsage | None:
    """What a metrics page says; None where it lacks one of the series."""
    return _use((name, float(value)) for name, value in _line().findall(page))


def usage_of_registry() -> EngineUsage | None:
    """The same, inside vLLM's API server. With several of them the registry of one does not know it all."""
    prometheus = sys.modules.get("prometheus_client")
    if prometheus is None or "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        return None
    try:
        families = prometheus.REGISTRY.restricted_registry(list(_roles_by_name())).collect()
        return _use((sample.name, sample.value) for family in families for sample in family.samples)
    except Exception:  # another release of the library: then admission goes by what it expects
        return None


def _use(samples: Iterable[tuple[str, float]]) -> EngineUsage | None:
    values: dict[str, dict[str, list[float]]] = {}
    for name, value in samples:
        role = _roles_by_name().get(name)
        if role is not None and value >= 0:
            values.setdefault(role, {}).setdefault(name, []).append(value)
    if not all(role in values for role in _GAUGES):
        return None
    # Where a release exposes an old and a new name, both say the same.
    kv, running, waiting = (next(iter(values[role].values())) for role in _GAUGES)
    use = EngineUsage(sum(kv) / len(kv), sum(running), sum(waiting), engines=len(kv))
    counted = {role: sum(next(iter(series.values()))) for role, series in values.items()}
    if _STEPS not in counted or "prompt_tokens" not in counted:
        return use
    prompt_tokens = counted["prompt_tokens"]
    if _STEP_TOKENS in counted and "generation_tokens" in counted:
        prompt_tokens = max(0.0, counted[_STEP_TOKENS] - counted["generation_tokens"])
    return use._replace(steps=counted[_STEPS], prompt_tokens=prompt_tokens)
