"""Servers made of numbers: a clock, totals that grow, and what they would show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from legroom.live.detectors import Detector, DetectorFinding
from legroom.live.metrics.sample import EngineSample, FailureKind, Histogram, Sample, ScrapeFailure, ScrapeResult
from legroom.live.metrics.window import Window
from legroom.live.thresholds import DEFAULT, Thresholds
from legroom.planning.plan_document import plan_from_json

SERVER = "http://host:8000"
BOUNDS = (0.1, 1.0, 10.0, float("inf"))


def engine(**fields: Any) -> EngineSample:
    """An idle engine of 1,000 blocks of 16 tokens, changed as asked."""
    idle: dict[str, Any] = {
        "model": "m",
        "engine": "0",
        "kv_use": 0.0,
        "running": 0.0,
        "waiting": 0.0,
        "preemptions": 0.0,
        "prefix_queries": 0.0,
        "prefix_hits": 0.0,
        "prompt_tokens": 0.0,
        "generation_tokens": 0.0,
        "finished": 0.0,
        "num_blocks": 1000,
        "block_size": 16,
        "prefix_caching": True,
    }
    return EngineSample(**(idle | fields))


class FakeServer:
    """Feeds one detector, a scrape every five seconds."""

    def __init__(
        self,
        detector: type[Detector],
        plan: Mapping[str, Any] | None = None,
        levels: Thresholds = DEFAULT,
        interval_s: float = 5.0,
    ) -> None:
        self.window = Window(SERVER)
        self.detector = detector(levels, None if plan is None else plan_from_json(plan, needs=()))
        self.interval_s = interval_s
        self.time_s = 1_700_000_000.0
        self.totals: dict[str, float] = {}
        self.prompts = 0.0
        self.others: dict[str, Any] = {}

    def scrape(self, **figures: Any) -> DetectorFinding | None:
        """One scrape: gauges as given, `add_NAME` grows a counter, `prompts` counts first tokens."""
        gauges = {name: value for name, value in figures.items() if not name.startswith("add_") and name != "prompts"}
        for name, value in figures.items():
            if name.startswith("add_"):
                self.totals[name[4:]] = self.totals.get(name[4:], 0.0) + value
        self.prompts += figures.get("prompts", 0)
        ttft = Histogram(BOUNDS, (0.0, self.prompts, self.prompts, self.prompts), self.prompts)
        server = {name: gauges.pop(name) for name in list(gauges) if name.endswith(("_bytes", "_retries"))}
        sample = Sample(self.time_s, SERVER, (engine(ttft=ttft, **(self.totals | gauges)),))
        return self.take(replace(sample, **server, **self.others))

    def fail(self, kind: FailureKind = "refused") -> DetectorFinding | None:
        """A scrape that brings nothing."""
        return self.take(ScrapeFailure(self.time_s, SERVER, kind, f"{SERVER}: nothing listens there"))

    def take(self, look: ScrapeResult) -> DetectorFinding | None:
        self.window.add(look)
        finding = self.detector.update(self.window, self.time_s)
        self.time_s += self.interval_s
        return finding

    def scrapes(self, times: int, **figures: Any) -> list[DetectorFinding | None]:
        return [self.scrape(**figures) for _ in range(times)]
