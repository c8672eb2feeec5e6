"""A rehearsal plays what was seen through the same detectors and policy, and touches nothing."""

import json
from contextlib import closing
from dataclasses import replace

import pytest

from legroom.actions.systemd_platform import SystemdUnit
from legroom.errors import LegroomError
from legroom.live.journal.journal import Journal
from legroom.live.metrics.endpoint import endpoint
from legroom.live.metrics.sample import EngineSample, Sample, ScrapeFailure
from legroom.live.metrics.scrape_recording import Recorder
from legroom.sidecar.policy_dry_run import dry_run
from legroom.sidecar.watch_config import ServerConfig, simple_config

START_S = 1_800_000_000.0
SERVER = "http://a:8000"


def hanging(minutes):
    """Five healthy minutes, then requests that run and get no token."""
    for at in range(12 * minutes):
        tokens = float(min(at, 60) * 100)
        engine = EngineSample(
            "m",
            "0",
            kv_use=0.3,
            running=2.0,
            waiting=0.0,
            preemptions=0.0,
            prompt_tokens=tokens,
            generation_tokens=tokens,
            finished=tokens / 100,
        )
        yield Sample(START_S + 5.0 * at, SERVER, (engine,))


def config_of(act=(), **server):
    """One server that a platform restarts."""
    place = ServerConfig(endpoint(SERVER), "default", **{"platform": SystemdUnit("vllm.service"), **server})
    return replace(simple_config([], act), servers=(place,))


@pytest.fixture
def recording(tmp_path):
    path = tmp_path / "seen.jsonl"
    with closing(Recorder(path)) as recorder:
        for sample in hanging(10):
            recorder.add(sample)
        recorder.add(ScrapeFailure(START_S + 601, SERVER, "timeout", "did not answer"))
    return path


def test_it_says_what_would_have_been_done(recording):
    told = dry_run(recording, config_of(["restart"]))
    assert [event.what for event in told.events][:2] == ["opened", "restart"]
    assert told.events[1].text == "would restart: a restart cures stuck_engine"
    assert (told.looks, told.servers, len(told.actions)) == (121, 1, 1)
    assert json.loads(json.dumps(told.to_json()))["actions"] == 1


def test_by_default_nothing_would_have_been_done(recording):
    told = dry_run(recording, simple_config([SERVER]))
    assert told.actions == ()
    assert "told to act" in told.events[1].text


def test_it_refuses_what_the_sidecar_must_refuse(recording):
    told = dry_run(recording, config_of(["restart", "drain"], platform=None))
    assert told.actions == ()
    assert f"no platform is named for {SERVER}" in told.events[1].text


def test_the_journal_can_be_rehearsed_too(tmp_path):
    path = tmp_path / "journal.db"
    with Journal.open(path) as journal:
        journal.add_samples(list(hanging(10)))
    before = path.read_bytes()
    told = dry_run(path, config_of(["restart"]))
    assert [event.what for event in told.actions] == ["restart"]
    assert path.read_bytes() == before


def test_every_server_of_a_journal_is_rehearsed_by_itself(tmp_path):
    path, other = tmp_path / "journal.db", "http://b:8000"
    with Journal.open(path) as journal:
        for sample in hanging(10):
            journal.add_samples([sample, replace(sample, server=other, engines=())])
    told = dry_run(path, config_of(["restart"]))
    assert (told.looks, told.servers) == (240, 2)
    assert {event.server for event in told.actions} == {SERVER}


def test_budgets_hold_in_a_rehearsal(tmp_path):
    path = tmp_path / "seen.jsonl"
    with closing(Recorder(path)) as recorder:
        for turn in range(8):  # it hangs, recovers, hangs ...
            for sample in hanging(10):
                recorder.add(Sample(sample.time_s + turn * 600, SERVER, sample.engines, process_start_s=1000.0 * turn))
    told = dry_run(path, config_of(["restart"]))
    assert 1 <= len(told.actions) <= 6
    assert any("backing off" in event.text or "budget" in event.text for event in told.events)


def test_what_is_neither_is_refused(tmp_path):
    (tmp_path / "x").write_text("hello\n")
    with pytest.raises(LegroomError, match="not a recording"):
        dry_run(tmp_path / "x", simple_config([SERVER]))
    with pytest.raises(LegroomError, match="cannot be read"):
        dry_run(tmp_path / "none", simple_config([SERVER]))
