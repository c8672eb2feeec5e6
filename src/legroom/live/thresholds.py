"""Every level and duration of the detectors and alerts. watch.toml's `[thresholds]` changes them by name.

On the seven recordings of tests/fixtures/live, halving or doubling any level changes no detection; halving or doubling
`hold`, `stuck_hold` or `unreachable_hold` moves when three of them begin.
A duration is in samples and in seconds, and both must pass, so that slow and fast scrape intervals behave alike. Alert
rules have no samples and wake people, so `alert_*` durations are longer.
"""

from legroom.records import dataclass

LONGEST_INTERVAL_S = 300.0
"""Prometheus' staleness limit: a longer scrape interval shows nothing in time."""


@dataclass(frozen=True, slots=True)
class Hold:
    """How long a condition must hold: this many samples in a row, and this long."""

    samples: int = 3
    """Two could be one short queue, sampled twice."""
    seconds: float = 10.0
    """Three samples at the default interval."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Names end in their unit; `*_ratio` is 0..1."""

    interval_s: float = 5.0
    """Scrape interval: a third of Prometheus' usual 15 s."""
    hold: Hold = Hold()
    """Before a finding begins."""
    calm: Hold = Hold(6, 30.0)
    """Before a finding ends: load swings, and a second report of one problem is noise."""

    pool_full_ratio: float = 0.95
    """KV use. vLLM admits a request only when all blocks of its next chunk are free, so a full pool stays below 1."""
    pool_calm_ratio: float = 0.85
    """KV use below which the batch limit, not the pool, holds a queue back."""
    alert_pool_for_s: float = 120.0
    """Bursts of two minutes pass."""

    preemption_share_ratio: float = 0.05
    """Recomputed tokens as a share of all computed ones: 5 % is visible in throughput."""
    preemptions_least: float = 3.0
    """Per minute; fewer are chance on a quiet server."""
    preemptions_per_request: float = 0.2
    """Where recomputed tokens are unknown: one preemption to five finished requests."""
    preemption_over_s: float = 60.0
    """vLLM counts a preemption when its victim runs again, so a minute is compared, not two samples."""
    alert_preemptions_per_s: float = 0.2
    """Twelve a minute, each recomputing a whole context."""
    alert_preemption_for_s: float = 120.0

    queue_wait_s: float = 10.0
    """Wait of a new request at the present service rate; people give up on a page after about ten seconds."""
    queue_ahead_s: float = 15.0
    """How far a growing queue is extrapolated: three scrapes, the time until the finding begins."""
    queue_per_running_ratio: float = 1.0
    """Waiting to running: at 1 the whole batch must finish before the last waiting request starts."""
    queue_least: float = 4.0
    """Fewer waiting requests are no queue."""
    alert_queue_for_s: float = 120.0
    refused_ratio: float = 0.05
    """Of the requests of a minute: one in twenty."""
    refused_over_s: float = 60.0

    hit_rate_low_ratio: float = 0.05
    """Below 5 % the prefix cache saves less than hashing costs."""
    hit_rate_pool_ratio: float = 0.9
    """KV use; below it cached blocks take no room from requests."""
    hit_rate_least_pools: float = 0.5
    """Queried tokens, in pools: a cache that was not filled yet has no hit rate."""
    hit_rate_over_s: float = 300.0

    creep_least_hours: float = 2.0
    """In the first two hours, warm-up and the first long prompts look like a leak."""
    creep_bytes_per_h: float = 64 * 1024 * 1024
    """Slower growth takes a week to 10 GiB, which caches and graphs also take."""
    creep_share_ratio: float = 0.7
    """Share of point pairs that rise: nearly all for a leak, half for a sawtooth."""

    fragmentation_ratio: float = 0.15
    """Reserved but not allocated, of reserved: 1 to 7 % on an H200 (Llama 3.1 8B on a half and a fifth of it)."""
    fragmentation_bytes: int = 1 << 30
    """Less than a GiB is smaller than an activation peak."""
    fragmentation_hold: Hold = Hold(6, 300.0)
    """The allocator keeps what a burst needed for minutes."""

    neighbour_bytes: int = 1 << 30
    """Twice an idle process's CUDA context, and what a step with log-probabilities or top-p may need."""
    neighbour_settled_s: float = 900.0
    """By then a server that was placed beside this one has loaded its weights and made its pool."""

    memory_burst_over_s: float = 60.0
    """How long an allocator retry is reported."""
    memory_burst_growth_bytes: int = 1 << 30
    """Growth since the first scrape that explains a retry."""

    long_prompt_pool_ratio: float = 0.1
    """Mean prompt, in pools: ten such prompts fill the pool."""
    long_prompt_least: float = 3.0
    """One long prompt is no burst."""
    long_prompt_times: float = 3.0
    """Times the mean prompt before."""
    long_prompt_over_s: float = 30.0
    long_prompt_before_s: float = 60.0
    """How much earlier traffic is needed to know the usual length."""

    stuck_hold: Hold = Hold(3, 10.0)
    """A step takes far less than ten seconds, and each chunk of a long prompt changes the KV use."""
    stuck_first_s: float = 120.0
    """For an engine that has computed nothing yet: its first request may wait for kernels to be compiled (Triton,
    FlashInfer, DeepGEMM), which a restart would repeat."""
    alert_stuck_for_s: float = 60.0

    unreachable_hold: Hold = Hold(3, 10.0)
    """A lost packet or a slow answer costs one scrape."""
    alert_unreachable_for_s: float = 60.0

    crash_restarts: int = 3
    crash_over_s: float = 900.0
    """A large model loads for minutes, so three starts in 15 minutes leave no time to serve."""

    switch_least: int = 3
    """A rolling update switches the process once; a balancer again and again."""
    switch_over_s: float = 600.0

    no_traffic_s: float = 600.0
    """Longer than pauses between requests of a server in use."""

    drift_pool_ratio: float = 0.05
    """Pool against plan, where the plan's own band is narrower."""
    drift_hold: Hold = Hold(2, 0.0)
    """The pool never changes its size; the second scrape confirms the first."""

    forecast_over_s: float = 300.0
    forecast_least_steps: int = 12
    """A minute of samples."""
    forecast_farthest_s: float = 3600.0
    """Load does not keep a trend for more than an hour."""

    @property
    def longest_over_s(self) -> float:
        """The longest time window in seconds that a detector reads."""
        windows_s = (self.preemption_over_s, self.hit_rate_over_s, self.stuck_first_s, self.forecast_over_s)
        return max(*windows_s, self.long_prompt_over_s + self.long_prompt_before_s)


DEFAULT = Thresholds()
