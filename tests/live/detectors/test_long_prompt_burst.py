from __future__ import annotations

from fake_server import BOUNDS, SERVER, FakeServer, engine

from legroom.live.detectors import DetectorFinding
from legroom.live.detectors.long_prompt_burst import LongPromptBurst
from legroom.live.metrics.sample import Histogram, Sample

USUAL = {"running": 4.0, "prompts": 3, "add_prompt_tokens": 600.0}
LONG = {"running": 4.0, "prompts": 3, "add_prompt_tokens": 12_000.0}


def test_prompts_far_longer_than_usual_are_said() -> None:
    server = FakeServer(LongPromptBurst)
    server.scrapes(20, **USUAL)
    findings = server.scrapes(6, **LONG)
    assert findings[-1] is not None
    assert "fill the KV pool" in findings[-1].reason and "times the usual 200" in findings[-1].reason


def test_a_server_that_always_gets_long_prompts_does_not_burst() -> None:
    assert FakeServer(LongPromptBurst).scrapes(60, **LONG) == [None] * 60


def test_long_prompts_to_a_server_that_was_idle_are_a_burst() -> None:
    server = FakeServer(LongPromptBurst)
    server.scrapes(20)
    assert server.scrapes(4, **LONG)[-1] is not None


def test_one_long_prompt_is_no_burst() -> None:
    server = FakeServer(LongPromptBurst)
    server.scrapes(20, **USUAL)
    first = server.scrape(running=1, prompts=1, add_prompt_tokens=12_000)
    assert [first, *server.scrapes(10)] == [None] * 11


def test_prompts_that_are_longer_but_small_to_the_pool_are_none() -> None:
    server = FakeServer(LongPromptBurst)
    server.scrapes(20, **USUAL)
    assert server.scrapes(10, running=4, prompts=3, add_prompt_tokens=2400) == [None] * 10


def test_a_prompt_is_measured_by_the_pool_of_one_engine() -> None:
    server = FakeServer(LongPromptBurst)

    def look(tokens: float) -> DetectorFinding | None:
        totals = server.totals["prompt_tokens"] = server.totals.get("prompt_tokens", 0.0) + tokens
        server.prompts += 3
        ttft = Histogram(BOUNDS, (0.0, *[server.prompts] * 3), server.prompts)
        busy = [engine(engine=str(rank), ttft=ttft, running=4.0, prompt_tokens=totals) for rank in range(16)]
        return server.take(Sample(server.time_s, SERVER, tuple(busy)))

    assert not any(look(600.0) for _ in range(20))
    finding = [look(12_000.0) for _ in range(6)][-1]
    assert finding is not None and finding.reason.endswith("4 of them fill the KV pool of an engine")
