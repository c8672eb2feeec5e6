"""Every level and duration that a detector or an alert uses, each with its reason. The one home of these numbers.

Times of a detector come in samples and in seconds, and both must have passed: three scrapes and ten seconds are the
same at the usual interval of five, and neither a fast nor a slow watcher is hasty. An alert rule has no samples, and
people are woken by it, so its times (`alert_*`) are longer.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from legroom.errors import LegroomError
from legroom.records import dataclass

LONGEST_INTERVAL_S = 300.0
"""Between two scrapes. What Prometheus itself calls stale: more than that shows nothing in time."""


@dataclass(frozen=True, slots=True)
class Hold:
    """How long a condition must hold: this many samples in a row, and this long."""

    samples: int = 3
    """Two could be one queue that was caught twice; three in a row are a state."""
    seconds: float = 10.0
    """Three samples at the usual interval."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The levels. Names end in their unit; `*_ratio` is 0..1."""

    interval_s: float = 5.0
    """Between two scrapes: a third of Prometheus' usual fifteen seconds, and 1 % of a core for a dozen servers."""
    hold: Hold = Hold()
    """For what hurts requests now."""
    calm: Hold = Hold(6, 30.0)
    """How long the calm must last before a finding ends: load swings, and two reports of one trouble are noise."""

    pool_full_ratio: float = 0.95
    """Of the pool in use. A request is admitted only when all blocks of its next chunk are free, so a pool that can
    take nothing more stops short of 1, by a chunk at most."""
    pool_calm_ratio: float = 0.85
    """Below this there is room again for requests of a tenth of the pool."""
    alert_pool_for_s: float = 120.0
    """A burst of two minutes passes by itself; one that lasts longer needs a person."""

    preemption_share_ratio: float = 0.05
    """Of all computed tokens that were computed before: one in twenty is work for nothing that throughput shows, and
    more than the odd preemption of a busy server."""
    preemption_calm_ratio: float = 0.01
    preemptions_least: float = 3.0
    """In that minute: fewer are chance, whatever share they are on a quiet server."""
    preemptions_per_request: float = 0.2
    """Where tokens cannot be told: one preemption to five finished requests."""
    preemption_over_s: float = 60.0
    """The counter lags until the victim runs again, so it is scraped over a minute, not between two samples."""
    alert_preemptions_per_s: float = 0.2
    """Twelve a minute: each throws away a whole context."""
    alert_preemption_for_s: float = 120.0

    queue_wait_s: float = 10.0
    """Time that a new request would wait at the present service rate. Ten seconds is where people give up on a page,
    and longer than any burst the batch takes in its stride."""
    queue_ahead_s: float = 15.0
    """How far ahead a growing queue is judged: three scrapes, the time it takes to be sure of it."""
    queue_calm_s: float = 3.0
    queue_per_running_ratio: float = 1.0
    """Waiting against running: at one the whole batch must turn over before the last of them starts."""
    queue_least: float = 4.0
    """Fewer waiting requests are no queue, however slow the server."""
    alert_queue_for_s: float = 120.0

    hit_rate_low_ratio: float = 0.05
    """Below one token in twenty the prefix cache saves less than the hashing and the scrape-ups cost."""
    hit_rate_calm_ratio: float = 0.1
    hit_rate_pool_ratio: float = 0.9
    """A cache of unused blocks is worth having while the pool has room; it is worth nothing when requests need it."""
    hit_rate_least_pools: float = 0.5
    """Prompt tokens, in pools: a cache nobody had time to fill has no hit rate yet."""
    hit_rate_over_s: float = 300.0

    creep_least_hours: float = 2.0
    """Below two hours, warm-up and the first long prompts look like a leak."""
    creep_bytes_per_h: float = 64 * 1024 * 1024
    """Smaller growth takes a week to 10 GiB and is within what caches and graphs take over days."""
    creep_share_ratio: float = 0.7
    """Of all pairs of points, those that rise: a leak rises nearly always, a sawtooth half the time."""

    fragmentation_ratio: float = 0.15
    """Reserved by PyTorch's allocator but not allocated, of what is reserved. The pool is one part of what is
    allocated and stays so, which makes this share small unless the rest is in pieces: 1 to 7 % on an H200 after start
    and under load (Llama 3.1 8B, half and a fifth of the card)."""
    fragmentation_bytes: int = 1 << 30
    """Less than a GiB is no activation peak's worth, whatever share it is."""
    fragmentation_calm_ratio: float = 0.1
    fragmentation_hold: Hold = Hold(6, 300.0)
    """The allocator keeps what a burst needed for a while; what is still there after five minutes stays."""

    neighbour_bytes: int = 1 << 30
    """Twice the context of a process that does nothing, and what a step with log-probabilities or top-p may need."""
    neighbour_calm_bytes: int = 1 << 29
    neighbour_settled_s: float = 900.0
    """A server that was put beside this one on purpose has loaded its weights and made its pool by then."""

    memory_burst_over_s: float = 60.0
    """A burst is of a moment; what came of it is told for a minute, and so is the next one as the same."""
    memory_burst_growth_bytes: int = 1 << 30
    """Above what was in use at the first scrape: from here on something keeps memory, and no step explains that."""

    long_prompt_pool_ratio: float = 0.1
    """Ten such prompts fill the pool."""
    long_prompt_least: float = 3.0
    """One long prompt is no burst."""
    long_prompt_times: float = 3.0
    """Times the mean prompt of the time before: a server that always gets long prompts is not bursting."""
    long_prompt_over_s: float = 30.0
    long_prompt_before_s: float = 60.0
    """Time before the burst that must have been seen: what is usual is not known at the first scrape."""

    stuck_hold: Hold = Hold(3, 10.0)
    """A step is a batch of a few thousand tokens, far from ten seconds, and even one long prompt moves the pool's use
    with every chunk of it."""
    stuck_first_s: float = 120.0
    """Before an engine that has computed nothing yet counts as failing: its first request may wait for kernels to be
    compiled (Triton, FlashInfer, DeepGEMM), and a restart would begin that anew."""
    alert_stuck_for_s: float = 60.0

    unreachable_hold: Hold = Hold(3, 10.0)
    """A lost packet and a slow answer under load cost one scrape each."""
    alert_unreachable_for_s: float = 60.0

    crash_restarts: int = 3
    crash_over_s: float = 900.0
    """Three starts in a quarter of an hour: a big model takes minutes to load, so that is all it did."""

    switch_least: int = 3
    """A rolling update switches once; three times is a balancer."""
    switch_over_s: float = 600.0

    no_traffic_s: float = 600.0
    """Ten minutes without a request; nothing is wrong with that."""

    drift_pool_ratio: float = 0.05
    """Pool against plan, where the plan gives no band of its own. More is another GPU, another flag or a neighbour."""
    drift_hold: Hold = Hold(2, 0.0)
    """The pool is of one size from start to end: a second scrape only confirms the first."""

    forecast_over_s: float = 300.0
    forecast_least_steps: int = 12
    """A minute of samples: fewer show noise."""
    forecast_farthest_s: float = 3600.0
    """Load does not keep a trend for longer than an hour."""

    @property
    def longest_over_s(self) -> float:
        """How far back the steps of a server are asked for."""
        return max(
            self.preemption_over_s,
            self.hit_rate_over_s,
            self.long_prompt_over_s + self.long_prompt_before_s,
            self.stuck_first_s,
            self.forecast_over_s,
        )

    def changed(self, settings: dict[str, Any]) -> Thresholds:
        """These thresholds with some of them set from a file; a name or type that is none is said."""
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        changes: dict[str, Any] = {}
        for name, value in settings.items():
            old = known.get(name)
            if old is None:
                raise LegroomError(f"there is no threshold named {name}", f"one of: {', '.join(known)}")
            changes[name] = _checked(name, value, old)
        return replace(self, **changes)


def _checked(name: str, value: Any, old: Any) -> Any:
    if isinstance(old, Hold):
        if isinstance(value, dict) and set(value) <= {"samples", "seconds"}:
            samples = _count(f"{name}.samples", value.get("samples", old.samples))
            return Hold(samples, _number(f"{name}.seconds", value.get("seconds", old.seconds)))
        raise LegroomError(f"threshold {name} needs samples and seconds", f"{name} = {{ samples = 3, seconds = 10 }}")
    if isinstance(old, int):
        return _count(name, value)
    number = _number(name, value)
    if name.endswith("_ratio") and number > 1 and name != "queue_per_running_ratio":
        raise LegroomError(f"threshold {name} is a share: {number:g} is above 1", "write 0.95 for 95 %")
    return number


def _count(name: str, value: Any) -> int:
    number = _number(name, value)
    if number < 1 or number != int(number):
        raise LegroomError(f"threshold {name} is a count: it must be a whole number of at least 1, not {value!r}")
    return int(number)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise LegroomError(f"threshold {name} must be a number of at least 0, not {value!r}")
    return value


DEFAULT = Thresholds()
