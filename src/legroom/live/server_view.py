"""The state of one server with its figures, as every surface of `watch` shows it."""

from dataclasses import asdict
from typing import Any, Literal

from legroom.live.detectors import DetectorFinding, Watcher
from legroom.live.forecast import Forecast, pool_forecast
from legroom.live.metrics.sample import EngineSample, Sample
from legroom.live.thresholds import DEFAULT, Thresholds
from legroom.records import dataclass

State = Literal["healthy", "idle", "warning", "critical", "unreachable"]
RATE_OVER_S = 30.0
"""Six scrapes at the default interval."""
LATENCY_OVER_S = 60.0


@dataclass(frozen=True, slots=True)
class ServerView:
    """A server's figures. None: not reported by its release, or too few scrapes."""

    server: str
    time_s: float
    state: State
    sentence: str
    models: tuple[str, ...] = ()
    kv_use: float | None = None
    running: float | None = None
    waiting: float | None = None
    preemptions_per_s: float | None = None
    hit_rate: float | None = None
    prompt_tokens_per_s: float | None = None
    generation_tokens_per_s: float | None = None
    first_token_p50_s: float | None = None
    first_token_p99_s: float | None = None
    latency_p50_s: float | None = None
    latency_p99_s: float | None = None
    memory_used_bytes: int | None = None
    num_blocks: int | None = None
    forecast: Forecast | None = None
    findings: tuple[DetectorFinding, ...] = ()
    notes: tuple[str, ...] = ()
    avg_blocks_per_request: float | None = None
    """KV blocks per running request."""
    room_for_requests: int | None = None
    """How many more such requests fit the free blocks, whatever `max_num_seqs` is."""
    host_rss_bytes: int | None = None

    @property
    def has_incident(self) -> bool:
        """Whether any finding is worse than info."""
        return any(finding.severity != "info" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        ahead = self.forecast
        return asdict(self) | {"forecast": None if ahead is None else {**asdict(ahead), "text": ahead.text}}


def server_view(watcher: Watcher, levels: Thresholds = DEFAULT) -> ServerView:
    """The server's figures, state and findings after its last scrape; state `unreachable` if that failed."""
    window, findings = watcher.window, watcher.findings
    ahead = pool_forecast(window, levels)
    now_s = window.last_scrape_s or 0.0
    if not window.is_answering:
        sentence = window.failures[-1].message if window.failures else "not scraped yet"
        if findings:
            sentence = f"{findings[0].title}: {findings[0].reason}"
        return ServerView(window.server, now_s, "unreachable", sentence, findings=findings)
    latest = window.latest
    assert latest is not None  # as it answers
    first_token_p50_s, first_token_p99_s = window.quantiles("ttft", (0.5, 0.99), LATENCY_OVER_S)
    latency_p50_s, latency_p99_s = window.quantiles("e2e_latency", (0.5, 0.99), LATENCY_OVER_S)
    return ServerView(
        server=window.server,
        time_s=now_s,
        state=_server_state(latest, findings, bool(window.increase("finished", RATE_OVER_S))),
        sentence=_summary_sentence(latest, findings, ahead),
        models=tuple(dict.fromkeys(engine.model for engine in latest.engines)),
        kv_use=latest.kv_use,
        running=latest.running,
        waiting=latest.waiting,
        preemptions_per_s=window.rate("preemptions", LATENCY_OVER_S),
        hit_rate=window.hit_rate(),
        prompt_tokens_per_s=window.rate("prompt_tokens", RATE_OVER_S),
        generation_tokens_per_s=window.rate("generation_tokens", RATE_OVER_S),
        first_token_p50_s=first_token_p50_s,
        first_token_p99_s=first_token_p99_s,
        latency_p50_s=latency_p50_s,
        latency_p99_s=latency_p99_s,
        memory_used_bytes=latest.memory_used_bytes,
        num_blocks=latest.num_blocks,
        avg_blocks_per_request=_blocks_per_request(latest),
        room_for_requests=_room_for_requests(latest),
        host_rss_bytes=latest.host_rss_bytes,
        forecast=ahead,
        findings=findings,
        notes=latest.notes,
    )


def _blocks_per_request(sample: Sample) -> float | None:
    """Mean KV blocks of a running request over all engines; None without one or without a reported pool."""
    busy = [engine for engine in sample.engines if engine.running and engine.kv_use is not None and engine.num_blocks]
    used = sum(_usable_blocks(engine) * (engine.kv_use or 0.0) for engine in busy)
    return used / sum(engine.running or 0.0 for engine in busy) if used else None


def _room_for_requests(sample: Sample) -> int | None:
    """How many more requests of the mean size fit the KV pools; None where nothing runs or no pool is reported."""
    each = _blocks_per_request(sample)
    pools = [engine for engine in sample.engines if engine.kv_use is not None and engine.num_blocks]
    if each is None or not pools:
        return None
    return sum(int(_usable_blocks(engine) * (1.0 - (engine.kv_use or 0.0)) / each + 1e-6) for engine in pools)


def _usable_blocks(engine: EngineSample) -> int:
    """Usable blocks: all but vLLM's null block."""
    return max((engine.num_blocks or 0) - 1, 0)


def _server_state(latest: Sample, findings: tuple[DetectorFinding, ...], finished_lately: bool) -> State:
    """The worst finding's severity if above info; else `healthy` with requests now or lately, `idle` without."""
    grave = {finding.severity for finding in findings}
    if "critical" in grave:
        return "critical"
    if "warning" in grave:
        return "warning"
    return "healthy" if latest.running or latest.waiting or finished_lately else "idle"


def _summary_sentence(latest: Sample, findings: tuple[DetectorFinding, ...], ahead: Forecast | None) -> str:
    """The first warning or critical finding as a sentence, else the forecast, else the number of requests."""
    grave = [finding for finding in findings if finding.severity != "info"]
    if grave:
        more = f" (and {len(grave) - 1} more)" if len(grave) > 1 else ""
        return f"{grave[0].title}: {grave[0].reason}{more}"
    if ahead is not None:
        return ahead.text
    running, waiting = latest.running or 0, latest.waiting or 0
    if not running and not waiting:
        return "no requests right now"
    use = f", the pool {latest.kv_use:.0%} in use" if latest.kv_use is not None else ""
    queue = f", {waiting:,.0f} waiting" if waiting else ""
    return f"serving {running:,.0f} request{'s' if running != 1 else ''}{queue}{use}"
