"""The alerts that a server must raise, and those it must not: each case says what differs from a healthy server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from scraped_servers import HEALTHY, IDLE, MINUTES, STILL, Latency, Server, growing, in_turn, lasting, level, second

TARGETS = {"ttft_p99": "2s", "inter_token_p99": "150ms"}

_THREE_STARTS = "1000x17 2000x3 3000x3 4000x9"
_RESTARTED = replace(HEALTHY, other={"up": level(1)}).but(prompt_tokens="100+3000x17 0+3000x6 0+3000x9")


_LONG = 80
_STOP = 60
_ENDED = {
    "e2e_latency": Latency(30, "5", _STOP, Latency(0, "5", _LONG - _STOP)),
    "kv_use": f"0.55x{_STOP} 0x{_LONG - _STOP}",
    "running": f"8x{_STOP} 0x{_LONG - _STOP}",
    **dict.fromkeys(
        ("prompt_tokens", "generation_tokens", "request_success"), f"100+30x{_STOP} {100 + 30 * _STOP}x{_LONG - _STOP}"
    ),
}
_SELDOM = {
    "e2e_latency": Latency(0, "5", _LONG),
    "kv_use": level(0, _LONG),
    "running": level(0, _LONG),
    **dict.fromkeys(("prompt_tokens", "generation_tokens"), f"100+30x20 {100 + 30 * 20}x{_LONG - 20}"),
    "request_success": f"0+0.2x20 4x{_LONG - 20}",
}
"""A few requests an hour ago, none since."""


def _answered(status: str) -> str:
    return f'http_requests_total{{handler="/v1/chat/completions",status="{status}"}}'


@dataclass(frozen=True)
class Case:
    """Servers, and the alerts that fire at the end."""

    says: str
    servers: tuple[Server, ...]
    fires: frozenset[str] = frozenset()
    options: Mapping[str, str] = field(default_factory=dict)
    minutes: int = MINUTES
    every_minutes: int = 1
    """Between two scrapes."""
    rules_every_minutes: int = 5
    """Between two evaluations of the rules: what promtool spends its time on."""
    since: str = ""
    """The release from which on it can be told."""


def case(says: str, *servers: Server, fires: str = "", **more: Any) -> Case:
    return Case(says, servers, frozenset(fires.split()), **more)


_QUICK = 245
_SLOW = 20
_BEFORE = lasting(HEALTHY, _QUICK + _SLOW)
"""Four quiet hours to compare with; the rules look at the day that ended an hour ago."""

COARSE_MINUTES = 10
WEEK = (7 * 24 * 60 + 90) // COARSE_MINUTES
_GAP = WEEK - 24
"""A week is four hours, two at each end: between them this server was not scraped."""
_LOOKS_OF_A_WEEK = {"every_minutes": COARSE_MINUTES, "rules_every_minutes": 30, "minutes": WEEK * COARSE_MINUTES}


def week_apart(server: Server, per_sample_then: float) -> Server:
    """A server a week ago, which finished requests then, and now, when it has none."""

    def both(value: float) -> str:
        return f"{value:g}x11 _x{_GAP} {value:g}x12"

    measures = {
        role: both(0) for role in ("kv_use", "running", "waiting", "preemptions", "prompt_tokens", "generation_tokens")
    }
    finished = f"0+{per_sample_then:g}x11 _x{_GAP} {per_sample_then * 12:g}x12"
    return replace(server, measures={**measures, "request_success": finished}, other={"up": both(1)})


STARTING = Server({}, other={"up": level(0)})
FROM_ZERO = lasting(HEALTHY, 8)
_HOURS = 100
"""Minutes in which an hour ago can be compared."""


def _fleet(*minutes: int, last: Server = HEALTHY) -> tuple[Server, ...]:
    """Servers that were scraped until these minutes."""
    return tuple(
        replace(lasting(last, until), instance=f"10.0.0.{number}:8000") for number, until in enumerate(minutes)
    )


_SCALED = {"minutes": _HOURS, "rules_every_minutes": 5}
_IDLE_AT_LAST = lasting(HEALTHY, 60).but(running="8x50 0x10", kv_use="0.5x50 0x10")
SCALED = (
    case("scaled down from six to two, one by one", *_fleet(_HOURS, _HOURS, 50, 60, 70, 80), **_SCALED),
    case("scaled down from four to one at once", *_fleet(_HOURS, 60, 60, 60), **_SCALED),
    case("scaled to zero when idle", replace(_IDLE_AT_LAST, instance="z:8000"), **_SCALED),
    case(
        "scaled up from one to four",
        *_fleet(_HOURS),
        *(replace(_fleet(_HOURS - 60)[0], from_minute=60, instance=f"10.0.1.{number}:8000") for number in range(3)),
        **_SCALED,
    ),
    case("discovery lost every busy server", *_fleet(80, 80, 80), fires="VllmTargetsMissing", **_SCALED),
)

_REPLACED = "a group that is made anew again and again, at another address each time"
CASES = (
    case("a healthy server", HEALTHY),
    case("an idle server", IDLE),
    case("a full pool that nobody waits for", HEALTHY.but(kv_use=level(1.0))),
    case("a full pool with a queue", HEALTHY.but(kv_use=level(0.96), waiting=level(3)), fires="VllmKvPressure"),
    case(
        "a full pool that preempts",
        HEALTHY.but(kv_use=level(0.97), preemptions=growing(6)),
        fires="VllmKvPressure",
        since="0.5.5",
    ),
    case("pressure of a minute", HEALTHY.but(kv_use="0.5x28 0.99x4", waiting="0x28 20x4")),
    case("pressure that is over", HEALTHY.but(kv_use="0.99x15 0.5x20", waiting="20x15 0x20")),
    case("a queue with room in the pool", HEALTHY.but(waiting=level(5))),
    case(
        "as many waiting as running in a full pool",
        HEALTHY.but(kv_use=level(0.99), waiting=level(12)),
        fires="VllmKvPressure VllmKvPressureCritical",
    ),
    case(
        "a full pool, looked at now and then while one request makes room for the next",
        HEALTHY.but(kv_use=in_turn((1.0, 0.25, 1.0, 0.5)), running=in_turn((4, 1, 4, 2)), waiting=level(40)),
        fires="VllmKvPressure VllmKvPressureCritical",
        rules_every_minutes=2,
    ),
    case(
        "a pool with room for one more at every look and a long queue",
        HEALTHY.but(kv_use=in_turn((0.75, 0.5)), running=in_turn((4, 3)), waiting=level(40)),
        fires="VllmQueueBacklog",
    ),
    case(
        "fewer waiting than running in a full pool",
        HEALTHY.but(kv_use=level(0.99), waiting=level(5)),
        fires="VllmKvPressure",
    ),
    case(
        "a preemption for each finished request",
        HEALTHY.but(preemptions=growing(30)),
        fires="VllmPreemptionThrash",
        since="0.5.5",
    ),
    case("a preemption for each tenth request", HEALTHY.but(preemptions=growing(3))),
    case("a long queue with room in the pool", HEALTHY.but(waiting=level(40)), fires="VllmQueueBacklog"),
    case(
        "large requests: no room for one more well below a full pool",
        HEALTHY.but(kv_use=level(0.8), running=level(3), waiting=level(2)),
        fires="VllmKvPressure",
    ),
    case(
        "a long queue that moves quickly",
        HEALTHY.but(waiting=level(40), request_success=growing(600), e2e_latency=Latency(1200, "5")),
    ),
    case("a short queue behind little work", HEALTHY.but(kv_use=level(0.3), running=level(1), waiting=level(3))),
    case(
        "a long queue for a full pool is no backlog of another kind",
        HEALTHY.but(kv_use=level(0.98), waiting=level(40)),
        fires="VllmKvPressure VllmKvPressureCritical",
    ),
    case("requests and no tokens", HEALTHY.but(**STILL), fires="VllmEngineStuck"),
    case(
        "one long prefill on an idle server: its blocks grow before its first token is counted",
        HEALTHY.but(**STILL, kv_use=f"0+0.01x{MINUTES}", running=level(1)),
        rules_every_minutes=2,
    ),
    case("a request that can never be scheduled", IDLE.but(waiting=level(1)), fires="VllmEngineStuck"),
    case(
        "a silence of a minute",
        HEALTHY.but(**dict.fromkeys(("prompt_tokens", "generation_tokens"), "100+3000x28 87100x2")),
    ),
    case(
        "five restarts in a quarter of an hour",
        HEALTHY.but({"process_start_time_seconds": "1000x17 2000x1 3000x1 4000x1 5000x1 6000x9"}),
        fires="VllmCrashLoop",
    ),
    case(
        "three planned restarts in a quarter of an hour",
        HEALTHY.but(
            {"process_start_time_seconds": "1000x17 _ 2000x2 _ 3000x2 _ 4000x9", "up": "1x17 0 1x2 0 1x2 0 1x9"}
        ),
    ),
    case(
        "three restarts of which the sidecar knows that nobody asked for them",
        HEALTHY.but({"process_start_time_seconds": _THREE_STARTS}),
        Server({}, other={'legroom_incidents_open{job="legroom-watch",kind="crash_loop"}': level(1)}),
        fires="VllmCrashLoop",
    ),
    case(
        "three restarts of which the guard below legroom run says that nobody asked for them",
        HEALTHY.but({"process_start_time_seconds": _THREE_STARTS, "legroom_guard_start_requested": "1x17 0x15"}),
        fires="VllmCrashLoop",
    ),
    case(
        "two crashes between four restarts that somebody asked for",
        HEALTHY.but(
            {
                "process_start_time_seconds": "1000x17 2000x1 3000x1 4000x1 5000x1 6000x1 7000x7",
                "legroom_guard_start_requested": "1x17 0x1 1x1 1x1 0x1 1x1 1x7",
            }
        ),
    ),
    case(
        "four servers behind the address of one Service",
        HEALTHY.but({"process_start_time_seconds": in_turn((100, 200, 300, 400, 100, 300, 200, 400))}),
    ),
    case(
        _REPLACED,
        *(
            replace(Server({}, other={f'up{{pod="{_REPLACED}/0"}}': times}), instance=f"10.0.0.{number}:8000")
            for number, times in enumerate(("_x16 0x1", "_x19 0x1", "_x22 0x1", "_x25 0x5"))
        ),
        fires="VllmCrashLoop",
    ),
    case(
        "a group that three updates made anew, each time it served",
        *(
            replace(Server({}, other={'up{pod="updated/0"}': times}), instance=f"10.0.0.{number}:8000")
            for number, times in enumerate(("1x17", "_x18 0 1x2", "_x22 0 1x2", "_x26 0 1x9"))
        ),
        fires="VllmMetricsMissing",
    ),
    case(
        "a pod that an update replaced",
        replace(HEALTHY, other={'up{pod="a pod that an update replaced/0"}': "1x15"}),
        replace(HEALTHY, other={'up{pod="a pod that an update replaced/0"}': "_x17 1x14"}, instance="b:8000"),
    ),
    case("one restart", HEALTHY.but({"process_start_time_seconds": "1000x20 2000x20"})),
    case("restarts of half an hour ago", HEALTHY.but({"process_start_time_seconds": "1000x2 2000x2 3000x2 4000x30"})),
    case(
        "an embedder's counters that begin again five times, without a start time",
        replace(HEALTHY, other={"up": level(1)}).but(
            prompt_tokens="100+3000x17 0+3000x1 0+3000x1 0+3000x1 0+3000x1 0+3000x9",
            generation_tokens=growing(0, start=0),
        ),
        fires="VllmCrashLoop",
    ),
    case(
        "counters that begin again once",
        replace(HEALTHY, other={"up": level(1)}).but(prompt_tokens="100+3000x20 0+3000x20"),
    ),
    case("a server that never came up", Server({}, other={"up": level(0)}), fires="VllmDown"),
    case(
        "a server that was up and is gone for four minutes",
        Server({}, other={"up": "1x25 0x4"}),
        fires="VllmDown",
        rules_every_minutes=2,
    ),
    case("a server that restarts within a minute", HEALTHY.but({"up": "1x20 0 1x9"})),
    case("a first start", Server({}, other={"up": "_x22 0x8"})),
    case("a replica that starts beside one that serves", HEALTHY, replace(STARTING, from_minute=22, instance="b:8000")),
    case("from zero: the first replica loads and serves", replace(FROM_ZERO, from_minute=15)),
    case(
        "four servers in one pod",
        *(
            replace(HEALTHY.but({'up{pod="four-0"}': level(1)}), instance=f"10.0.0.9:800{number}")
            for number in range(4)
        ),
    ),
    *SCALED,
    case(
        "requests deferred for their adapter are no queue for the pool",
        HEALTHY.but(
            kv_use=level(0.96), waiting=level(6), waiting_by_reason={"capacity": level(0), "deferred": level(6)}
        ),
        since="0.20.0",
    ),
    case(
        "a server that served until a quarter of an hour ago beside one that still does",
        lasting(HEALTHY, _LONG).but(**_ENDED),
        replace(lasting(HEALTHY, _LONG), instance="b:8000"),
        fires="VllmTrafficStopped",
        minutes=_LONG,
        rules_every_minutes=5,
    ),
    case(
        "a quiet replica of a sticky router",
        lasting(HEALTHY, _LONG).but(**_SELDOM),
        replace(lasting(HEALTHY, _LONG), instance="b:8000"),
        minutes=_LONG,
        rules_every_minutes=5,
    ),
    case("a replica that a sticky router never chose", IDLE, replace(HEALTHY, instance="b:8000")),
    case(
        "every request ends with an error",
        HEALTHY.but(request_success={"error": growing(30), "stop": growing(0)}),
        fires="VllmRequestsFail",
        since="0.8.0",
    ),
    case(
        "one request in ten ends with an error",
        HEALTHY.but(request_success={"error": growing(3), "stop": growing(27)}),
        since="0.8.0",
    ),
    case(
        "requests that clients abort",
        HEALTHY.but(request_success={"abort": growing(30), "stop": growing(0)}),
        since="0.8.0",
    ),
    case(
        "a dead engine whose gauges read 0 while its web server answers with errors",
        IDLE.but({_answered("5xx"): growing(60)}),
        fires="VllmEngineDead",
    ),
    case("a busy server with a few errors", HEALTHY.but({_answered("5xx"): growing(60)})),
    case("an idle server that turns clients away for their mistakes", IDLE.but({_answered("4xx"): growing(60)})),
    case("all series renamed while the scrape works", Server({}, other={"up": level(1)}), fires="VllmMetricsMissing"),
    case("a server that was scraped for the first time", Server({}, other={"up": "_x28 1x2"})),
    case(
        "an offline batch at full KV cache by design",
        HEALTHY.but(kv_use=level(0.99), waiting=level(400)),
        options={"batch": 'model_name="an offline batch at full KV cache by design"'},
    ),
    case("two idle servers at night", IDLE, replace(IDLE, instance="b:8000")),
    case(
        "slow first tokens against the target",
        HEALTHY.but(ttft=Latency(30, "5")),
        fires="VllmTimeToFirstTokenHigh",
        options=TARGETS,
    ),
    case("first tokens within the target", HEALTHY.but(ttft=Latency(30, "1")), options=TARGETS),
    case("three slow first tokens", HEALTHY.but(ttft=Latency(0.1, "5")), options=TARGETS),
    case(
        "slow streams against the target",
        HEALTHY.but(inter_token=Latency(3000, "0.5")),
        fires="VllmInterTokenLatencyHigh",
        options=TARGETS,
    ),
    case("streams within the target", HEALTHY.but(inter_token=Latency(3000, "0.1")), options=TARGETS),
    case(
        "first tokens far slower than the day before",
        _BEFORE.but(ttft=Latency(30, "0.25", _QUICK, Latency(30, "5", _SLOW))),
        fires="VllmTimeToFirstTokenHigh",
        minutes=_QUICK + _SLOW,
        rules_every_minutes=5,
    ),
    case(
        "first tokens far slower than in the first minutes of a server that came an hour ago",
        lasting(HEALTHY, 80).but(ttft=Latency(30, "0.25", 60, Latency(30, "5", 20))),
        minutes=80,
        rules_every_minutes=5,
    ),
    case(
        "first tokens as slow as for twenty minutes of the day before",
        _BEFORE.but(
            ttft=Latency(30, "0.25", 100, Latency(30, "5", 20, Latency(30, "0.25", 125, Latency(30, "5", 20))))
        ),
        minutes=_QUICK + _SLOW,
        rules_every_minutes=5,
    ),
    case(
        "streams far slower than the day before",
        _BEFORE.but(inter_token=Latency(3000, "0.05", _QUICK, Latency(3000, "0.5", _SLOW))),
        fires="VllmInterTokenLatencyHigh",
        minutes=_QUICK + _SLOW,
        rules_every_minutes=5,
    ),
    case(
        "a little slower than the day before",
        _BEFORE.but(ttft=Latency(30, "0.25", _QUICK, Latency(30, "0.5", _SLOW))),
        minutes=_QUICK + _SLOW,
        rules_every_minutes=5,
    ),
    case("two healthy engines", HEALTHY, second(HEALTHY), since="0.9.0"),
    case(
        "one engine is full, the other has the queue",
        HEALTHY.but(kv_use=level(1.0)),
        second(HEALTHY, waiting=level(5)),
        since="0.9.0",
    ),
    case(
        "one of two engines is full with a queue",
        HEALTHY,
        second(HEALTHY, kv_use=level(1.0), waiting=level(5)),
        fires="VllmKvPressure",
        since="0.9.0",
    ),
    case("one of two engines hangs", HEALTHY, second(HEALTHY, **STILL), fires="VllmEngineStuck", since="0.9.0"),
    case("one of two engines has nothing to do", HEALTHY, second(IDLE), since="0.9.0"),
    case("two engines that began again twice, together", _RESTARTED, second(_RESTARTED), since="0.9.0"),
    case(
        "counters that begin again under load",
        HEALTHY.but(
            {"process_start_time_seconds": "1000x15 2000x20"},
            preemptions="500+1x14 0+1x20",
            request_success="9000+15x14 0+15x20",
            **dict.fromkeys(("prompt_tokens", "generation_tokens"), "90000+3000x14 0+3000x20"),
        ),
    ),
    case("always slow, and no target named", HEALTHY.but(ttft=Latency(30, "5"), inter_token=Latency(3000, "0.5"))),
)

WEEK_CASES = (
    case(
        "an idle server that was busy at this time last week",
        week_apart(IDLE, 150),
        fires="VllmTrafficStopped",
        **_LOOKS_OF_A_WEEK,
    ),
    case("an idle server that was idle at this time last week", week_apart(IDLE, 0), **_LOOKS_OF_A_WEEK),
)

GIB = 1 << 30


def own(**series: str) -> Server:
    """A healthy server with series of legroom's own; `__` stands before a label: rejected_total__reason__queue_full."""
    return HEALTHY.but({_own_name(name): values for name, values in series.items()})


def _own_name(name: str) -> str:
    metric, *label = name.split("__")
    return f'legroom_{metric}{{{label[0]}="{label[1]}"}}' if label else f"legroom_{metric}"


def _up(job: str) -> str:
    return f'up{{job="{job}",instance="{job}:1"}}'


_GUARD = {
    "guard_admitted_total": growing(60),
    "guard_rejected_total__reason__queue_full": growing(0),
    "guard_rejected_total__reason__prompt_too_long": growing(30),
    "guard_draining": level(0),
    "guard_fail_open": level(0),
    "guard_policy_reload_errors_total": growing(0),
}

OWN_CASES = (
    case("a guard that refuses what no pool could hold", own(**_GUARD)),
    case(
        "a guard that turns one in four away",
        own(**_GUARD | {"guard_rejected_total__reason__queue_full": growing(20)}),
        fires="LegroomGuardTurnsAway",
    ),
    case(
        "a guard that turns one in sixty away", own(**_GUARD | {"guard_rejected_total__reason__queue_full": growing(1)})
    ),
    case(
        "a guard whose server is gone",
        own(**_GUARD | {"guard_rejected_total__reason__upstream_down": growing(60)}),
        fires="LegroomGuardUpstreamDown",
    ),
    case("one 502 among thousands", own(**_GUARD | {"guard_rejected_total__reason__upstream_down": "0x27 1x9"})),
    case(
        "a guard whose server restarts within a minute and a half while clients retry",
        own(
            **_GUARD
            | {"guard_rejected_total__reason__upstream_down": "0x25 200 300x9", "guard_upstream_up": "1x25 0x1 1x9"}
        ),
    ),
    case(
        "a guard whose server is gone while nobody asks",
        own(**_GUARD | {"guard_upstream_up": "1x20 0x15"}, guard_rejected_total__reason__upstream_down=level(0)),
        fires="LegroomGuardUpstreamDown",
    ),
    case("a guard whose server has its first start", own(**_GUARD | {"guard_upstream_up": "_x24 0x15"})),
    case("a guard that is gone", HEALTHY.but({_up("legroom-guard"): "1x20 0x15"}), fires="LegroomGuardUpstreamDown"),
    case("a sidecar that is gone", HEALTHY.but({_up("legroom-watch"): "1x20 0x15"}), fires="LegroomWatchDown"),
    case("a sidecar that restarts", HEALTHY.but({_up("legroom-watch"): "1x27 0x2 1x9"})),
    case(
        "two of eight turned away in a quiet quarter of an hour",
        own(
            **_GUARD | {"guard_admitted_total": "0+0.5x30", "guard_rejected_total__reason__queue_full": "0x23 1x2 2x9"}
        ),
    ),
    case("a guard that fails open", own(**_GUARD | {"guard_fail_open": level(1)}), fires="LegroomGuardFailsOpen"),
    case("a guard that fails open while the server starts", own(**_GUARD | {"guard_fail_open": "1x3 0x60"})),
    case("a drain that was forgotten", own(**_GUARD | {"guard_draining": level(1)}), fires="LegroomGuardDraining"),
    case("a drain of ten minutes", own(**_GUARD | {"guard_draining": "0x19 1x12"})),
    case(
        "a policy with an error",
        own(**_GUARD | {"guard_policy_reload_errors_total": "0x15 1x30"}),
        fires="LegroomGuardPolicyBroken",
    ),
    case(
        "memory that creeps",
        lasting(own(worker_used_bytes__rank__0=f"{60 * GIB}+3000000x30"), 150),
        fires="VllmMemoryCreep",
        minutes=150,
        rules_every_minutes=5,
    ),
    case(
        "host memory that creeps",
        lasting(own(worker_host_rss_bytes__rank__0=f"{20 * GIB}+3000000x30"), 150),
        fires="VllmHostMemoryCreep",
        minutes=150,
        rules_every_minutes=5,
    ),
    case(
        "host memory that stays",
        lasting(own(worker_host_rss_bytes__rank__0=f"{20 * GIB}x30"), 150),
        minutes=150,
        rules_every_minutes=5,
    ),
    case(
        "memory that warms up",
        lasting(own(worker_used_bytes__rank__0=f"_x50 {60 * GIB}+3000000x99"), 150),
        minutes=150,
        rules_every_minutes=5,
    ),
    case(
        "memory that stays",
        lasting(own(worker_used_bytes__rank__0=f"{60 * GIB}x30"), 150),
        minutes=150,
        rules_every_minutes=5,
    ),
    case(
        "an allocator in pieces",
        own(worker_reserved_bytes__rank__0=level(70 * 10**9), worker_allocated_bytes__rank__0=level(50 * 10**9)),
        fires="VllmAllocatorFragmentation",
    ),
    case(
        "an allocator with a little to spare",
        own(worker_reserved_bytes__rank__0=level(70 * 10**9), worker_allocated_bytes__rank__0=level(66 * 10**9)),
    ),
    case("an incident only the sidecar sees", own(incidents_open__kind__plan_drift=level(1)), fires="LegroomIncident"),
    case("an incident that the rules see themselves", own(incidents_open__kind__pool_pressure=level(1))),
    case("a journal that cannot be written", own(journal_writable=level(0)), fires="LegroomJournalNotWritable"),
    case("a journal that can", own(journal_writable=level(1))),
)


def _kube(name: str, labels: str = 'container="vllm"') -> str:
    return f'kube_{name}{{job="kube-state-metrics",pod="a-5d9f7-x2k",{labels}}}'


_READY, _RESTARTS = _kube("pod_container_status_ready"), _kube("pod_container_status_restarts_total")
_LOOPS = _kube("pod_container_status_waiting_reason", 'container="vllm",reason="CrashLoopBackOff"')
_NO_IMAGE = _kube("pod_container_status_waiting_reason", 'container="vllm",reason="ImagePullBackOff"')
_BACK_OFF = {_LOOPS: "_x3 1x2 _x3 1x3 _x3 1x5 _x3 1x9", _RESTARTS: "0x3 1x5 2x6 3x17", _READY: level(0)}
_HOURS = 80
_PENDING = {
    'kube_deployment_status_replicas_unavailable{job="kube-state-metrics",deployment="a"}': level(1, _HOURS),
    'kube_deployment_status_replicas_available{job="kube-state-metrics",deployment="a"}': level(0, _HOURS),
    _kube("pod_container_resource_requests"): level(1, _HOURS),
}


def _unscraped(series: Mapping[str, str], **changed: str) -> Server:
    """A pod of which only Kubernetes tells."""
    return Server({}, other={name: changed.get(name.partition("{")[0], values) for name, values in series.items()})


NEVER_STARTED = (
    case("a pod that crashes since its first start", _unscraped(_BACK_OFF), fires="VllmNeverStarted"),
    case("a first start of half an hour", _unscraped({_RESTARTS: level(0), _READY: level(0)})),
    case(
        "a first start that a probe killed twice",
        _unscraped(_BACK_OFF, kube_pod_container_status_restarts_total="0x9 1x9 2x12"),
    ),
    case(
        "a pod that was ready before it crashed", _unscraped(_BACK_OFF, kube_pod_container_status_ready="0x3 1x2 0x25")
    ),
    case("a pod that started after three crashes", _unscraped(_BACK_OFF, kube_pod_container_status_ready="0x24 1x6")),
    case(
        "another program that crashes",
        _unscraped({name.replace("vllm", "redis"): values for name, values in _BACK_OFF.items()}),
    ),
    case("an image that nobody can pull", _unscraped({_NO_IMAGE: "_x3 1x27"}), fires="VllmNeverStarted"),
    case("a pod that finds no node", _unscraped(_PENDING), fires="VllmNeverStarted", minutes=_HOURS),
    case(
        "a Deployment of another program",
        _unscraped({name.replace('container="vllm"', 'container="web"'): values for name, values in _PENDING.items()}),
        minutes=_HOURS,
    ),
    case(
        "a Deployment that starts for fifty minutes",
        _unscraped(_PENDING, kube_deployment_status_replicas_unavailable="0x30 1x50"),
        minutes=_HOURS,
    ),
)
