"""Recordings of a real vLLM 0.32.0, made by legroom's own recorder (tests/real_vllm/provoked_incidents.py), replayed.

Each trouble is found and a healthy half hour is left in peace, at any speed of replay.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from legroom.live.detectors import DetectorFinding, Watcher
from legroom.live.metrics.sample import Sample
from legroom.live.metrics.scrape_recording import replay
from legroom.live.remedies import remedies_for

FOLDER = Path(__file__).parents[1] / "fixtures/live"
TROUBLES = {
    "backlog": "queue_backlog",
    "thrash": "preemption_thrash",
    "low_hit_rate": "prefix_cache_waste",
    "stuck_engine": "stuck_engine",
    "crash": "unreachable",
}


def watched(name: str) -> tuple[Watcher, dict[str, tuple[int, DetectorFinding]]]:
    """A watcher that saw the whole recording, and each kind's first finding with the number of its look."""
    looks = list(replay(FOLDER / f"{name}.jsonl.zst"))
    watcher = Watcher(looks[0].server)
    first: dict[str, tuple[int, DetectorFinding]] = {}
    for number, look in enumerate(looks):
        for finding in watcher.take(look):
            first.setdefault(finding.kind, (number, finding))
    return watcher, first


@pytest.mark.parametrize(("name", "kind"), TROUBLES.items())
def test_a_recorded_trouble_is_found_and_answered(name: str, kind: str) -> None:
    watcher, findings = watched(name)
    assert kind in findings, sorted(findings)
    finding = findings[kind][1]
    assert any(letter.isdigit() for letter in finding.reason)
    assert remedies_for(finding, watcher.window)[0].why


def test_thrash_is_answered_with_the_batch_that_this_pool_holds() -> None:
    watcher, findings = watched("thrash")
    flags = remedies_for(findings["preemption_thrash"][1], watcher.window)[0].flags
    # 3,072 tokens of pool and requests that reach several hundred: a handful at once.
    assert 1 <= flags["max_num_seqs"] <= 12


def test_a_full_pool_that_nobody_waits_for_is_left_in_peace() -> None:
    watcher, findings = watched("full_pool")
    assert findings == {}
    assert max(engine.kv_use or 0 for step in watcher.window.steps for engine in step.engines) >= 0.95


def test_half_an_hour_of_a_healthy_mixed_load_finds_nothing() -> None:
    looks = list(replay(FOLDER / "healthy.jsonl.zst"))
    watcher = Watcher(looks[0].server)
    findings = [finding for look in looks for finding in watcher.take(look)]
    assert findings == []
    assert looks[-1].time_s - looks[0].time_s >= 30 * 60
    last = looks[-1]
    assert isinstance(last, Sample) and (last.total("finished") or 0) > 1000


def test_the_recordings_are_small() -> None:
    assert sum(file.stat().st_size for file in FOLDER.glob("*.zst")) < 300_000
