"""PromQL over vLLM's metrics by what they measure, in the names of one release or so that a rename does not matter.

A release can show one measure under two names: the V0 and the V1 engine differ, and for a while an old name stays
beside the new one. `a or b` over aggregates takes what `a` has and adds from `b` only the servers that `a` does not
have, so nothing is counted twice; aggregating first removes the name and the labels in which the two differ.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from legroom.exports.prometheus.alert_levels import AlertLevels
from legroom.facts.metrics import metrics_of, name_of, names_of, role_of
from legroom.facts.releases import Release, known_releases, release
from legroom.records import dataclass

IDENTITY = ("model_name", "engine", "le")
"""Labels of servers, engines and buckets; every other label splits one measure into parts."""


@dataclass(frozen=True)
class Measures:
    """PromQL expressions of the measures of one release, or of any release (None)."""

    release: Release | None
    selector: str = ""
    """Label matchers of every series, without braces: `job="vllm"`."""
    keep: str = ""
    """The aggregation's labels (`by (instance)`); empty: all but those that split a measure into parts."""

    def has(self, role: str) -> bool:
        """Whether the release has a series for the role (`kv_use`, `running` ...)."""
        return bool(self.series(role))

    def series(self, role: str) -> tuple[str, ...]:
        """The series names of a role (`kv_use`, `running` ...), the preferred one first."""
        if self.release is None:
            return names_of(role)
        names = (name_of(role, self.release, engine) for engine in ("v1", "v0"))
        return tuple(dict.fromkeys(name for name in names if name))

    def value(self, role: str, aggregation: str = "sum") -> str:
        """PromQL of the current value of gauge `role`, aggregated over a server's engines."""
        return self.aggregated(role, aggregation)

    def peak(self, role: str, window: str, aggregation: str = "sum") -> str:
        """PromQL of the maximum of gauge `role` within a window such as `5m`, aggregated over engines."""
        return self.aggregated(role, aggregation, "max_over_time", window)

    def mean(self, role: str, window: str, aggregation: str = "sum") -> str:
        """PromQL of the average of gauge `role` over a window such as `5m`, aggregated over engines."""
        return self.aggregated(role, aggregation, "avg_over_time", window)

    def queued(self) -> str:
        """PromQL of requests that wait for capacity; before 0.20.0, also of those that wait for other reasons."""
        if not self.has("waiting_by_reason"):
            return self.value("waiting")
        for_capacity = self.with_matcher('reason="capacity"').value("waiting_by_reason")
        return first_with_value(for_capacity, self.value("waiting"))

    def rate(self, role: str, window: str) -> str:
        """PromQL of the increase per second of the counter `role` over a window such as `5m`, summed."""
        return self.aggregated(role, "sum", "rate", window)

    def quantile(self, role: str, quantile: float, window: str) -> str:
        """PromQL of a quantile (0.99) of histogram `role`, from rates over a window such as `5m`."""
        labels = self._by_labels(role).replace("by (", "by (le, ")
        inner = f"_bucket{self._label_selector()}[{window}]"
        return self._first_of_series(
            role, lambda name: f"histogram_quantile({quantile:g}, sum {labels} (rate({name}{inner}))) >= 0"
        )

    def prefix_hit_ratio(self, window: str) -> str:
        """PromQL of the share of queried prompt tokens found in the prefix cache, by V1's counters or V0's gauge."""
        hits, queries = self.series("prefix_hits"), self.series("prefix_queries")
        labels, inner = self._by_labels("prefix_hits"), f"{self._label_selector()}[{window}]"
        ratios = [
            f"sum {labels} (rate({hit}{inner})) / (sum {labels} (rate({query}{inner})) > 0)"
            for hit, query in zip(hits, queries, strict=True)
        ]
        if self.has("prefix_hit_rate"):
            # V0 says -1 where prefix caching is off.
            ratios.append(self.value("prefix_hit_rate", "avg") + " >= 0")
        return first_with_value(*ratios)

    def finished(self, function: str, window: str) -> str:
        """PromQL of `function` (`rate`) over finished requests, counted in 0.4.0 and 0.4.1 by a latency histogram."""
        observed = self.aggregated("e2e_latency", "sum", function, window, "_count")
        if not self.has("request_success"):
            return observed
        known = self.aggregated("request_success", "sum", function, window)
        return first_with_value(known, observed) if self.release is None else known

    def aggregated(self, role: str, aggregation: str, function: str = "", window: str = "", suffix: str = "") -> str:
        """PromQL of `aggregation` over series of `role` with `suffix`, or of `function` over their `window`."""
        labels, inner = self._by_labels(role), f"{suffix}{self._label_selector()}{f'[{window}]' if window else ''}"
        if not function:
            return self._first_of_series(role, lambda name: f"{aggregation} {labels} ({name}{inner})")
        return self._first_of_series(role, lambda name: f"{aggregation} {labels} ({function}({name}{inner}))")

    def with_matcher(self, matcher: str) -> "Measures":
        """The same measures with one more label matcher."""
        return replace(self, selector=", ".join(filter(None, (self.selector, matcher))))

    def _first_of_series(self, role: str, expression: Callable[[str], str]) -> str:
        """PromQL of `expression(name)` for the first of the role's series names that has a value."""
        return first_with_value(*(expression(name) for name in self.series(role)))

    def _label_selector(self) -> str:
        return f"{{{self.selector}}}" if self.selector else ""

    def _by_labels(self, role: str) -> str:
        """PromQL's `by` clause of the labels to keep, else `without` the labels that split the role's series."""
        return self.keep or f"without ({', '.join(_splitting_labels().get(role, ()))})"


def first_with_value(*expressions: str) -> str:
    """PromQL that takes, per label set, the first of the expressions with a value (`or`)."""
    return "\nor\n".join(expressions)


def in_parens(expression: str) -> str:
    """The expression in parentheses where it contains `or`."""
    return f"({expression})" if "\nor\n" in expression else expression


@cache
def _splitting_labels() -> dict[str, tuple[str, ...]]:
    """Role -> labels that split it into parts in any release, such as `finished_reason` of finished requests."""
    by_role: dict[str, dict[str, None]] = {}
    for version in known_releases():
        for metric in metrics_of(release(version)):
            parts = [label for label in metric.labels if label not in IDENTITY]
            if parts and (role := role_of(metric.series)):
                by_role.setdefault(role, {}).update(dict.fromkeys(parts))
    return {role: tuple(parts) for role, parts in by_role.items()}


# Recorded series: one name a measure, whatever the release calls it; the alerts read these. It begins with the level
# that it is kept at: `engine:` one series an engine, `instance:` one a server, `model:` one a model of a job.
KV_USE = "engine:legroom_vllm_kv_use:ratio"
RUNNING = "engine:legroom_vllm_running:count"
WAITING = "engine:legroom_vllm_waiting:count"
QUEUED = "engine:legroom_vllm_queued:count"
PREEMPTIONS = "engine:legroom_vllm_preemptions:rate"
FAILED = "engine:legroom_vllm_failed:rate"
FINISHED = "engine:legroom_vllm_finished:rate"
FINISHED_COUNT = "engine:legroom_vllm_finished:count"
PROMPT_TOKENS = "engine:legroom_vllm_prompt_tokens:rate"
GENERATION_TOKENS = "engine:legroom_vllm_generation_tokens:rate"
PROGRESS = "engine:legroom_vllm_progress:rate"
PREFIX_HITS = "engine:legroom_vllm_prefix_hit:ratio"
RECOMPUTED = "engine:legroom_vllm_recomputed:ratio"
SERVER_ERRORS = "instance:legroom_vllm_server_errors:rate"
RESTARTS = "instance:legroom_vllm_restarts:count"
CRASHES = "instance:legroom_vllm_crashes:count"
FAILED_STARTS = "instance:legroom_vllm_failed_starts:count"
MODEL_RUNNING = "model:legroom_vllm_running:sum"
_MODEL = "cluster, namespace, job, model_name"
_MODEL_LEVEL = {
    "model:legroom_vllm_kv_use:avg": f"avg by ({_MODEL}) ({KV_USE})",
    MODEL_RUNNING: f"sum by ({_MODEL}) ({RUNNING})",
    "model:legroom_vllm_queued:sum": f"sum by ({_MODEL}) ({QUEUED})",
    "model:legroom_vllm_generation_tokens:rate": f"sum by ({_MODEL}) ({GENERATION_TOKENS})",
}
"""Aggregates over the servers of a model."""
_LATENCIES = {"ttft": "ttft", "inter_token": "inter_token", "e2e_latency": "e2e", "queue_time": "queue_time"}
BY_INSTANCE = "by (cluster, namespace, job, instance)"


def latency_series(role: str, percentile: str) -> str:
    """The name of the recording rule for a `percentile` ("p50", "p99" ...) of the latency `role`."""
    return f"engine:legroom_vllm_{_LATENCIES[role]}_seconds:{percentile}"


def observation_series(role: str) -> str:
    """The name of the recording rule that counts the observations of the latency `role`."""
    return f"engine:legroom_vllm_{_LATENCIES[role]}:count"


def recorded_expressions(measures: Measures, levels: AlertLevels, job: str) -> dict[str, str]:
    """Recording rule -> PromQL, for all rules that the release has metrics for; `job`: the scrape job."""
    window = levels.time(levels.rate_window_s)
    records = {
        KV_USE: measures.value("kv_use", "max"),
        RUNNING: measures.value("running"),
        WAITING: measures.value("waiting"),
        QUEUED: measures.queued(),
        **_rate_rules(measures, levels, window),
    }
    if measures.has("prefix_hits") or measures.has("prefix_hit_rate"):
        records[PREFIX_HITS] = measures.prefix_hit_ratio(window)
    over = levels.time(levels.latency_window_s)
    for role in filter(measures.has, _LATENCIES):
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            records[latency_series(role, name)] = measures.quantile(role, share, over)
        records[observation_series(role)] = measures.aggregated(role, "sum", "increase", over, "_count")
    # Changed process start times, else resets of the prompt counter, else pods that were recreated.
    crash_window = levels.time(levels.crash_window_s)
    started = f'process_start_time_seconds{{job="{job}"}}[{crash_window}]'
    seen = f'max_over_time(up{{job="{job}", pod!=""}}[{crash_window}])'
    records[RESTARTS] = first_with_value(
        # A start time that goes back is that of another server behind the same address.
        f"max {BY_INSTANCE} (changes({started}) * (resets({started}) == bool 0))",
        replace(measures, keep=BY_INSTANCE).aggregated("prompt_tokens", "max", "resets", crash_window),
        _replaced_pods_query(seen),
    )
    # The guard inside `legroom run` knows starts that follow no crash: 0 instead of a start time with its sign changed,
    # which every crash lowers.
    asked = f'max {BY_INSTANCE} (legroom_guard_start_requested{{job="{job}"}} == bool 0)'
    unasked = f'-max {BY_INSTANCE} (process_start_time_seconds{{job="{job}"}})\n*\n{asked}'
    one_server = f"max {BY_INSTANCE} (resets({started}) == bool 0)"
    records[CRASHES] = f"resets((\n{unasked}\n)[{crash_window}:])\n*\n{one_server}"
    records[FAILED_STARTS] = _replaced_pods_query(f"{seen} == 0")
    # vLLM counts HTTP 5xx even when its engine is dead.
    records[SERVER_ERRORS] = f'sum {BY_INSTANCE} (rate(http_requests_total{{job="{job}", status=~"5.*"}}[{window}]))'
    return records | _MODEL_LEVEL


def _rate_rules(measures: Measures, levels: AlertLevels, window: str) -> dict[str, str]:
    """Recording rule -> PromQL of the requests, tokens and preemptions per second over `window`, if counted."""
    records = {}
    if measures.has("preemptions"):
        records[PREEMPTIONS] = measures.rate("preemptions", window)
    records[FINISHED] = measures.finished("rate", window)
    if measures.has("request_success"):
        records[FAILED] = measures.with_matcher('finished_reason="error"').rate("request_success", window)
    prompts, outputs = (measures.rate(role, window) for role in ("prompt_tokens", "generation_tokens"))
    records[FINISHED_COUNT] = measures.finished("increase", levels.time(levels.detect.no_traffic_s))
    records[PROMPT_TOKENS] = prompts
    records[GENERATION_TOKENS] = outputs
    records[PROGRESS] = f"{in_parens(prompts)}\n+\n{in_parens(outputs)}"
    if measures.has("prompt_tokens_recomputed"):
        again = measures.rate("prompt_tokens_recomputed", window)
        records[RECOMPUTED] = f"{in_parens(again)}\n/\n({in_parens(prompts)} > 0)"
    return records


def _replaced_pods_query(up_query: str) -> str:
    """PromQL of how often a pod in `up_query` came back under its name with a new IP (LeaderWorkerSet)."""
    host = f'label_replace({up_query}, "host", "$1", "instance", "(.+?)(?::[0-9]+)?")'
    addresses = f"count by (cluster, namespace, job, pod, host) ({host})"
    again = f"(count by (cluster, namespace, job, pod) ({addresses}) > 1) - 1"
    return f'max {BY_INSTANCE} (label_replace({again}, "instance", "$1", "pod", "(.+)"))'
