"""The alerts: their conditions and texts (`facts/data/alerts.json`); the thresholds are in `alert_levels.py`."""

import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from legroom.exports.prometheus import measures as record
from legroom.exports.prometheus.alert_levels import AlertLevels, duration
from legroom.exports.prometheus.measures import Measures
from legroom.facts import read_data
from legroom.facts.metrics import role_of
from legroom.facts.releases import Release
from legroom.planning.plan_document import PlanDocument
from legroom.records import dataclass
from legroom.units import human_bytes

_GROUP = "cluster, namespace, job"
_SERVER = f"{_GROUP}, instance, model_name"
_BY_INSTANCE = record.BY_INSTANCE
NO_ROOM_REASONS = "queue_full|queue_timeout"
"""Reasons of `legroom_guard_rejected_total` that say the pool, not the request, was the limit."""
_NO_ROOM = f'legroom_guard_rejected_total{{reason=~"{NO_ROOM_REASONS}"}}'
GUARD_JOB, WATCH_JOB = "legroom-guard", "legroom-watch"
_UPSTREAM_REASONS = "upstream_down|upstream_timeout"
_UNSEEN_KINDS = "fragmentation|gpu_neighbour|host_memory_creep|memory_burst|memory_creep|plan_drift|prefix_cache_waste"
"""Incidents of the sidecar that no rule over vLLM's metrics can detect."""
_MISSING = "VllmMetricsMissing"
_SLOT = re.compile(r"<([a-z0-9_]+)>")
_RATE = 'printf "%.2f"'  # `humanize` would print 100m for a tenth.
_WHERE = (
    "{{ $labels.model_name }} on {{ $labels.instance }}"
    '{{ with $labels.engine }}{{ if ne . "0" }}, engine {{ . }}{{ end }}{{ end }}'
)
"""The engine is named only where it is not 0, the number of a single engine."""
_DAY_S, _HOUR_S, _WEEK_S = 86_400, 3_600, 604_800
_SUBQUERY_S = 300  # The resolution of subqueries over a day.
_CONTAINER = 'container=~".*vllm.*|kserve-container"'  # KServe names the container of a predictor so.
_REFUSED = "ErrImagePull|ImagePullBackOff|InvalidImageName|CreateContainerConfigError|CreateContainerError"
_WANTED = (
    '{__name__=~"kube_horizontalpodautoscaler_status_desired_replicas|kube_deployment_spec_replicas|'
    'kube_statefulset_replicas"}'
)
"""Metrics of kube-state-metrics with the wanted number of pods (docs/metrics/workload of
github.com/kubernetes/kube-state-metrics). KEDA scales through a HorizontalPodAutoscaler."""


@dataclass(frozen=True)
class AlertCondition:
    name: str
    expr: str
    for_s: float


@cache
def alert_texts() -> Mapping[str, Mapping[str, Any]]:
    """Summary, description and runbook texts of every alert, by alert name."""
    return read_data("alerts.json")["alerts"]  # type: ignore[no-any-return]


def vllm_conditions(measures: Measures, levels: AlertLevels, job: str, batch: str = "") -> tuple[AlertCondition, ...]:
    """The alerts on vLLM metrics of the release; `batch`: label matchers of servers whose pool is meant to be full."""
    ttft = _latency_query("ttft", levels.ttft_p99_s, levels.ttft_floor_s, levels)
    inter_token = _latency_query("inter_token", levels.inter_token_p99_s, levels.inter_token_floor_s, levels)
    return (
        *_pool_alerts(measures, levels, batch),
        *_engine_alerts(levels, job),
        _traffic_alert(levels),
        *_failure_alerts(measures, levels),
        *_missing_target_alerts(levels, job),
        AlertCondition("VllmNeverStarted", _never_started_query(levels), levels.missing_for_s),
        AlertCondition("VllmTimeToFirstTokenHigh", ttft, levels.latency_for_s),
        AlertCondition("VllmInterTokenLatencyHigh", inter_token, levels.latency_for_s),
    )


def _pool_alerts(measures: Measures, levels: AlertLevels, batch: str) -> list[AlertCondition]:
    """Alerts on KV cache pressure, queue and preemptions; `batch`: matchers of servers meant to be full."""
    counted = measures.has("preemptions")  # not before 0.5.5
    detect = levels.detect
    # The maximum over the rate window: freed blocks stay free until the next request is computed, and a sample in
    # that gap would restart the alert's `for`.
    window = levels.time(levels.rate_window_s)
    use, running = (f"max_over_time({name}[{window}])" for name in (record.KV_USE, record.RUNNING))
    one_more = f"{use} * (1 + 1 / {running}) > 1"
    full = f"({use} >= {detect.pool_full_ratio:g} or ({use} > 0.5 and {one_more}))"
    by_design = f"\nunless\n{record.RUNNING}{{{batch}}}" if batch else ""
    suffering = f"{record.QUEUED} > 0"
    if counted:
        suffering += f" or {record.PREEMPTIONS} >= {detect.preemptions_least / detect.preemption_over_s:g}"
    per_running = f"{record.QUEUED} >= {detect.queue_per_running_ratio:g} * {record.RUNNING}"
    long = f"{record.QUEUED} >= {detect.queue_least:g} and {per_running}"
    slow = f"{record.QUEUED} > {detect.queue_wait_s:g} * {record.FINISHED}"
    backlog = f"({long} and {slow} and {record.KV_USE})\nunless\n{full}{by_design}"
    critical = f"{full}\nand\n({long} and {slow}){by_design}"
    conditions = [
        AlertCondition("VllmKvPressure", f"{full}\nand\n({suffering}){by_design}", detect.alert_pool_for_s),
        AlertCondition("VllmKvPressureCritical", critical, detect.alert_pool_for_s + detect.alert_queue_for_s),
        AlertCondition("VllmQueueBacklog", backlog, detect.alert_queue_for_s),
    ]
    if counted:
        # A server that finishes nothing at all still gets a ratio: one request in ten minutes.
        ratio = f"{record.PREEMPTIONS} / clamp_min({record.FINISHED}, 1 / 600)"
        many = f"{record.PREEMPTIONS} >= {detect.alert_preemptions_per_s:g}"
        expr = f"{ratio} >= {detect.preemptions_per_request:g}\nand\n{many}"
        conditions.append(AlertCondition("VllmPreemptionThrash", expr, detect.alert_preemption_for_s))
    return conditions


def _engine_alerts(levels: AlertLevels, job: str) -> list[AlertCondition]:
    """Alerts on a stuck engine, a crash loop and a server that is down; `job` is the scrape job."""
    there = f"{record.RUNNING} + {record.WAITING} > 0"
    # A prompt counts with its first output token (0.32): during a long prefill only the KV use changes.
    still = f"changes({record.KV_USE}[{levels.time(levels.rate_window_s)}]) == 0"
    stuck = f"({there})\nand\n{record.PROGRESS} == 0\nand\n{still}"
    few, many = levels.detect.crash_restarts, levels.unexplained_restarts
    # The sidecar, and the guard of a server below `legroom run`, know which starts somebody asked for.
    found = f'{record.RESTARTS} >= {few}\nand on (cluster, namespace) legroom_incidents_open{{kind="crash_loop"}} > 0'
    unknown = f"({record.RESTARTS} >= {many} unless {record.CRASHES})"
    crashes = f"{unknown}\nor\n{record.CRASHES} >= {few}\nor\n{record.FAILED_STARTS} >= {few}\nor\n({found})"
    return [
        AlertCondition("VllmEngineStuck", stuck, levels.detect.alert_stuck_for_s),
        AlertCondition("VllmCrashLoop", crashes, 0),
        AlertCondition("VllmDown", _down_query(f'up{{job="{job}"}}', levels), levels.down_for_s),
    ]


def _down_query(up_selector: str, levels: AlertLevels) -> str:
    """PromQL of series of `up_selector` that are 0, and were 1 within the start limit or existed before it."""
    start = levels.time(levels.start_limit_s - levels.down_for_s)
    return f"{up_selector} == 0\nand\n(max_over_time({up_selector}[{start}]) == 1 or {up_selector} offset {start})"


def _traffic_alert(levels: AlertLevels) -> AlertCondition:
    """The alert on a server without requests that had some a week ago, or whose model's other servers have some."""
    served = f"sum by ({_SERVER}) ({record.FINISHED_COUNT})"
    week = f"sum by ({_SERVER}) ({record.FINISHED_COUNT} offset {levels.time(_WEEK_S)}) >= {levels.traffic_least:g}"
    busiest = f"max by ({_GROUP}, model_name) ({served})"
    others = f"0 * {served} + on ({_GROUP}, model_name) group_left () {busiest} >= {levels.traffic_least:g}"
    usually = f"quantile_over_time(0.5, {record.FINISHED_COUNT}[{levels.time(_HOUR_S)}])"
    steady = f"sum by ({_SERVER}) ({usually}) >= {levels.traffic_least:g}"
    idle = f"sum by ({_SERVER}) ({record.RUNNING} + {record.WAITING}) == 0"
    expr = f"(\n{week}\nor\n({others} and {steady})\n)\nand\n{served} == 0\nand\n{idle}"
    return AlertCondition("VllmTrafficStopped", expr, levels.rate_window_s)


def _failure_alerts(measures: Measures, levels: AlertLevels) -> list[AlertCondition]:
    """Alerts on requests that fail in the engine, or before it because it is dead."""
    stopped = f"sum {_BY_INSTANCE} ({record.PROGRESS}) == 0"
    dead = f"{record.SERVER_ERRORS} >= {levels.failed_least_per_s:.4g}\nand\n{stopped}"
    conditions = [AlertCondition("VllmEngineDead", dead, levels.detect.alert_unreachable_for_s)]
    if measures.has("request_success"):
        ratio = f"{record.FAILED} / ({record.FINISHED} > 0) >= {levels.failed_ratio:g}"
        failing = f"{ratio}\nand\n{record.FAILED} >= {levels.failed_least_per_s:.4g}"
        conditions.insert(0, AlertCondition("VllmRequestsFail", failing, levels.detect.alert_queue_for_s))
    return conditions


def _missing_target_alerts(levels: AlertLevels, job: str) -> list[AlertCondition]:
    """Alerts on groups with fewer targets than before, and on scraped servers without the expected series."""
    targets = f'count by ({_GROUP}) (up{{job="{job}"}})'
    before = f'count by ({_GROUP}) (up{{job="{job}"}} offset {levels.time(_HOUR_S)})'
    none = f"(0 * {before} unless {targets})"
    some = f"({none} or {targets} < {levels.missing_ratio:g} * {before})"
    hour, day = (_lowered_query(levels.time(seconds)) for seconds in (_HOUR_S, _DAY_S))
    # Without kube-state-metrics a scale-down is known by this: servers are left, or the last one was idle.
    # Fewer targets than a group had constantly for a day; deciles, as rolling updates add pods briefly.
    lately = f"({targets})[{levels.time(_DAY_S)}:{levels.time(_SUBQUERY_S)}] offset {levels.time(_HOUR_S)}"
    low, usual, high = (f"quantile_over_time({share:g}, {lately})" for share in (0.1, 0.5, 0.9))
    fewer = f"({targets} < {usual} and {low} == {high})"
    busy = f"max by ({_GROUP}) (last_over_time({record.MODEL_RUNNING}[{levels.time(_HOUR_S)}])) > 0"
    gone = (
        f"({some}\nand on (cluster, namespace) {_WANTED}\nunless on (cluster, namespace) ({hour}))\n"
        f"or\n({fewer}\nand on (cluster, namespace) {_WANTED}\n"
        f"unless on (cluster, namespace) ({day}))\nor\n({none} and ({busy})\nunless on (cluster, namespace) ({hour}))"
    )
    return [
        AlertCondition("VllmTargetsMissing", gone, levels.missing_for_s),
        AlertCondition(_MISSING, _missing_series_query(job), levels.missing_for_s),
    ]


def _never_started_query(levels: AlertLevels) -> str:
    """PromQL, on kube-state-metrics, of containers and Deployments that were not ready for a day and cannot start."""
    day, limit = levels.time(_DAY_S), levels.time(levels.first_start_limit_s)
    waits = f"kube_pod_container_status_waiting_reason{{{_CONTAINER}, reason"
    crashed = f"kube_pod_container_status_restarts_total{{{_CONTAINER}}} >= {levels.detect.crash_restarts}"
    never = f"max_over_time(kube_pod_container_status_ready{{{_CONTAINER}}}[{day}]) == 0"
    # A container that starts again is not waiting meanwhile.
    loops = f'max_over_time({waits}="CrashLoopBackOff"}}[{levels.time(levels.crash_window_s)}])'
    refused = f'max by ({_GROUP}, pod, container) ({waits}=~"{_REFUSED}"}}) == 1'
    # A pod that finds no node has no status of containers: its Deployment has, whose name the pod's begins with.
    asking = f"kube_pod_container_resource_requests{{{_CONTAINER}}}"
    named = f'label_replace({asking}, "deployment", "$1", "pod", "(.+)-[^-]+-[^-]+")'
    unavailable = "kube_deployment_status_replicas_unavailable"
    idle = f"max_over_time(kube_deployment_status_replicas_available[{day}]) == 0"
    late = f"min_over_time({unavailable}[{limit}]) > 0 and {unavailable} offset {limit} and {idle}"
    return (
        f"max by ({_GROUP}, pod, container) ({crashed} and {never} and ignoring (reason) {loops})\nor\n{refused}\nor\n"
        f"max by ({_GROUP}, deployment) ({late} and on (cluster, namespace, deployment) {named})"
    )


def _lowered_query(window: str) -> str:
    """PromQL of workloads that were scaled down or deleted within a window such as `1d`."""
    by_workload = f"max by ({_GROUP}, horizontalpodautoscaler, deployment, statefulset)"
    most = f"{by_workload} (max_over_time({_WANTED}[{window}]))"
    return f"{most} unless {by_workload} ({_WANTED}) >= {most}"


def _missing_series_query(job: str) -> str:
    """PromQL of targets of a scrape job without a series that alerts read, as where a release renamed it."""
    by_server = f"on ({_GROUP}, instance)"
    known = f"({record.RUNNING} and {record.KV_USE})"
    silent = f"({record.GENERATION_TOKENS} > 0 unless {record.observation_series('inter_token')})"
    scraped = f'up{{job="{job}"}} == 1'
    return f"({scraped} unless {by_server} {known})\nor\n({scraped} and {by_server} {silent})"


def _latency_query(role: str, target_s: float | None, floor_s: float, levels: AlertLevels) -> str:
    """PromQL for a p99 over `target_s` or, if None, over `floor_s` and over a multiple of the day's worst."""
    p99 = record.latency_series(role, "p99")
    enough = f"{record.observation_series(role)} >= {levels.latency_least}"
    if target_s is not None:
        return f"{p99} > {target_s:g}\nand\n{enough}"
    day, hour = levels.time(_DAY_S), levels.time(_HOUR_S)
    worst = f"quantile_over_time({levels.latency_quantile:g}, {p99}[{day}] offset {hour})"
    is_old = f"count_over_time({p99}[{day}] offset {levels.time(levels.latency_history_s)})"
    return f"{p99} > {floor_s:g}\nand\n{p99} > {levels.latency_factor:g} * {worst}\nand\n{is_old}\nand\n{enough}"


def legroom_conditions(levels: AlertLevels) -> tuple[AlertCondition, ...]:
    """The alerts on metrics of guard, sidecar and workers; always written, as a missing metric never fires."""
    detect, guard_for_s = levels.detect, levels.guard_for_s
    window, hour = levels.time(guard_for_s), levels.time(3600)
    refused = f"sum {_BY_INSTANCE} (increase({_NO_ROOM}[{window}])) >= {detect.queue_least:g}"
    turned_away = f"{turned_away_share(window)} >= {detect.refused_ratio:g}\nand\n{refused}"
    broken = f"sum {_BY_INSTANCE} (increase(legroom_guard_policy_reload_errors_total[{hour}]))"
    incidents = f'sum by ({_GROUP}, instance, kind) (legroom_incidents_open{{kind=~"{_UNSEEN_KINDS}"}})'
    alerts = {
        "LegroomGuardTurnsAway": (turned_away, guard_for_s),
        "LegroomGuardUpstreamDown": (_upstream_query(levels), levels.down_for_s),
        "LegroomGuardFailsOpen": (f"max {_BY_INSTANCE} (legroom_guard_fail_open) == 1", guard_for_s),
        "LegroomGuardDraining": (f"max {_BY_INSTANCE} (legroom_guard_draining) == 1", levels.drain_for_s),
        "LegroomGuardPolicyBroken": (f"{broken} > 0", 0),
        "LegroomIncident": (f"{incidents} > 0", detect.alert_unreachable_for_s),
        "LegroomJournalNotWritable": (f"max {_BY_INSTANCE} (legroom_journal_writable) == 0", guard_for_s),
        "LegroomWatchDown": (f'up{{job="{WATCH_JOB}"}} == 0', guard_for_s),
    }
    return (*_memory_alerts(levels), *(AlertCondition(name, expr, for_s) for name, (expr, for_s) in alerts.items()))


def _upstream_query(levels: AlertLevels) -> str:
    """PromQL of guards that do not answer, or whose server is down, or fails most requests now and earlier."""

    def failing_requests(window: str) -> str:
        """PromQL of guards whose server failed most requests within a range such as `[2m] offset 5m`."""
        failed = f'sum {_BY_INSTANCE} (rate(legroom_guard_rejected_total{{reason=~"{_UPSTREAM_REASONS}"}}{window}))'
        # A request that fails in the server was admitted before.
        share = f"{failed} >= {levels.failed_ratio:g} * sum {_BY_INSTANCE} (rate(legroom_guard_admitted_total{window}))"
        return f"{share}\nand\n{failed} >= {levels.failed_least_per_s:.4g}"

    window = f"[{levels.time(levels.rate_window_s)}]"
    # By then the failures of a short restart have left the window.
    before = f"{window} offset {levels.time(levels.guard_for_s - levels.down_for_s)}"
    down = _down_query("legroom_guard_upstream_up", levels)
    requests = f"({failing_requests(window)}\nand\n{failing_requests(before)})"
    return f'max {_BY_INSTANCE} (\n{requests}\nor\n({down})\nor\nup{{job="{GUARD_JOB}"}} == 0\n)'


def turned_away_share(window: str, by_clause: str = _BY_INSTANCE) -> str:
    """PromQL of the share of requests that the guard refused for lack of KV cache, grouped by `by_clause`."""
    refused = f"sum {by_clause} (rate({_NO_ROOM}[{window}]))"
    admitted = f"sum {by_clause} (rate(legroom_guard_admitted_total[{window}]))"
    return f"{refused} / ({refused} + {admitted} > 0)"


def fragmentation_share() -> str:
    """PromQL of the share of PyTorch's reserved memory that is not allocated."""
    reserved = "legroom_worker_reserved_bytes"
    return f"({reserved} - legroom_worker_allocated_bytes) / ({reserved} > 0)"


def _memory_alerts(levels: AlertLevels) -> list[AlertCondition]:
    """Alerts on growing GPU and host memory and on allocator fragmentation, from the workers' series."""
    detect = levels.detect
    window = levels.time(detect.creep_least_hours * 3600)
    used, reserved = 'legroom_worker_used_bytes{gpu!="cpu"}', "legroom_worker_reserved_bytes"
    # The value of two hours ago must exist, because the warm-up after a start is no leak.
    growing, host = (
        f"3600 * deriv({series}[{window}]) >= {detect.creep_bytes_per_h:.0f}\nand\n{series} offset {window}"
        for series in (used, "legroom_worker_host_rss_bytes")
    )
    large = f"{reserved} - legroom_worker_allocated_bytes >= {detect.fragmentation_bytes}"
    pieces = f"{fragmentation_share()} >= {detect.fragmentation_ratio:g}\nand\n{large}"
    return [
        AlertCondition("VllmMemoryCreep", growing, levels.rate_window_s),
        AlertCondition("VllmHostMemoryCreep", host, levels.rate_window_s),
        AlertCondition("VllmAllocatorFragmentation", pieces, detect.fragmentation_hold.seconds),
    ]


def fill_slots(text: str, slots: Mapping[str, str]) -> str:
    """Replace each `<name>` in the text by its value in `slots`."""
    return _SLOT.sub(lambda match: slots[match[1]], text)


def threshold_texts(levels: AlertLevels) -> dict[str, str]:
    """The thresholds as text, by the name of the `<slot>` in alert texts."""
    detect = levels.detect
    return {
        "pool_full": f"{detect.pool_full_ratio:.0%}",
        "preemptions_least": f"{detect.preemptions_least:g}",
        "preemption_over": duration(detect.preemption_over_s),
        "preemptions_per_request": f"{detect.preemptions_per_request:g}",
        "preemptions_per_s": f"{detect.alert_preemptions_per_s:g}",
        "queue_least": f"{detect.queue_least:g}",
        "queue_wait": f"{detect.queue_wait_s:g} s",
        "stuck_for": duration(levels.rate_window_s + detect.alert_stuck_for_s),
        "restarts": str(detect.crash_restarts),
        "unexplained_restarts": str(levels.unexplained_restarts),
        "restart_window": duration(levels.crash_window_s),
        "down_for": duration(levels.down_for_s),
        "start_limit": duration(levels.start_limit_s),
        "first_start_limit": duration(levels.first_start_limit_s),
        "traffic_window": duration(detect.no_traffic_s),
        "creep_per_hour": human_bytes(detect.creep_bytes_per_h),
        "creep_hours": f"{detect.creep_least_hours:g} hours",
        "fragmentation": f"{detect.fragmentation_ratio:.0%}",
        "fragmentation_least": human_bytes(detect.fragmentation_bytes),
        "turned_away": f"{levels.detect.refused_ratio:.0%}",
        "failed": f"{levels.failed_ratio:.0%}",
        "missing": f"{levels.missing_ratio:.0%}",
        "drain_for": duration(levels.drain_for_s),
        "ttft_level_words": _latency_limit(levels.ttft_p99_s, levels.ttft_floor_s, levels),
        "inter_token_level_words": _latency_limit(levels.inter_token_p99_s, levels.inter_token_floor_s, levels),
    }


def alert_slots(levels: AlertLevels, plan: PlanDocument | None = None) -> dict[str, str]:
    """Values of the `<name>` slots in alert texts: thresholds, and templates that Prometheus fills in when firing."""
    return {
        **threshold_texts(levels),
        **_plan_placeholders(plan),
        "where": _WHERE,
        "value": "{{ $value | humanize }}",
        "rate": "{{ $value | " + _RATE + " }}",
        "percent": "{{ $value | humanizePercentage }}",
        "size": "{{ $value | humanize1024 }}B",
        "seconds": "{{ $value | humanizeDuration }}",
        "waiting": _lookup_template(record.QUEUED),
        "running": _lookup_template(record.RUNNING),
        "preemptions": _lookup_template(record.PREEMPTIONS, _RATE),
    }


def _plan_placeholders(plan: PlanDocument | None) -> dict[str, str]:
    """`plan_pool` and `plan_batch`: sentences with the planned KV pool and batch limit; empty without a plan."""
    if plan is None:
        return {"plan_pool": "", "plan_batch": ""}
    full = f"{plan.kv.max_concurrency:.1f} requests of {plan.args['max_model_len']:,} tokens"
    each = " of an engine" if plan.engines > 1 else ""
    pool = f" By the plan the pool{each} holds {plan.kv.tokens:,} tokens: {full}."
    return {
        "plan_pool": pool if plan.kv.num_blocks else "",
        "plan_batch": f" By the plan {plan.args['max_num_seqs']:,}{each} may run at once (--max-num-seqs).",
    }


def _lookup_template(series: str, formatter: str = "humanize") -> str:
    """An alert template that prints `series` of the firing server, or 0; `formatter`: Prometheus's function."""
    labels = ("cluster", "namespace", "job", "instance", "model_name", "engine")
    selector = ",".join(f"{label}=%q" for label in labels)
    values = " ".join(f"$labels.{label}" for label in labels)
    query = f'printf "{series}{{{selector}}}" {values} | query'
    return f"{{{{ with {query} }}}}{{{{ . | first | value | {formatter} }}}}{{{{ else }}}}0{{{{ end }}}}"


def _latency_limit(target_s: float | None, floor_s: float, levels: AlertLevels) -> str:
    """The latency limit in words: the target or, without one, the floor and a multiple of the day before."""
    limit_s = floor_s if target_s is None else target_s
    limit = f"{limit_s * 1000:g} ms" if limit_s < 1 else f"{limit_s:g} s"
    if target_s is not None:
        return f"the target is {limit}"
    return f"more than {levels.latency_factor:g} times the worst of its own day before, and more than {limit}"


def silenced_alerts(old: Release, vanished: Collection[str]) -> tuple[str, ...]:
    """Names of `old`'s exported alerts that read a series which an upgrade removes; `vanished`: removed series."""
    measures, levels = Measures(old), AlertLevels()
    records = record.recorded_expressions(measures, levels, "vllm")
    broken = {name for name, expr in records.items() if _has_lost_measure(expr, measures, vanished)}
    # VllmMetricsMissing fires where a series is missing.
    conditions = (condition for condition in vllm_conditions(measures, levels, "vllm") if condition.name != _MISSING)
    return tuple(condition.name for condition in conditions if any(name in condition.expr for name in broken))


def _has_lost_measure(expr: str, measures: Measures, vanished: Collection[str]) -> bool:
    """Whether the PromQL reads a measure of which all series names are in `vanished`."""
    roles = {role_of(name) for name in re.findall(r"vllm:[a-z0-9_]+", expr)} - {None}
    return any(role and all(name in vanished for name in measures.series(role)) for role in roles)
