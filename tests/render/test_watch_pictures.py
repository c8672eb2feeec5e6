"""What watching, an incident and a verification look like, kept as text.

After a change that is meant: UPDATE_SNAPSHOTS=1 pytest tests/render.
"""

from __future__ import annotations

import os
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from legroom.drawing.terminal import Style
from legroom.live.detectors import DetectorFinding
from legroom.live.forecast import Forecast
from legroom.live.journal.journal_records import Action, ActionStage, Incident, Note
from legroom.live.journal.sample_store import JournalPoint
from legroom.live.server_view import ServerView
from legroom.render.incident_text import duration_text, incident_svg, incident_text, incidents_text
from legroom.render.verify_page import verification_svg, verification_text
from legroom.render.watch_text import seconds_text, servers_text
from legroom.verify.load_run import KvPool, LoadRun, LoadSample
from legroom.verify.openai_client import RequestOutcome, ServedModel
from legroom.verify.verification_checks import Check, Verification

SNAPSHOTS = Path(__file__).with_name("snapshots")
NOW = 1_700_000_000.0
PLAIN = Style(width=80)


@pytest.fixture(autouse=True)
def _one_time_zone(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def check(name: str, drawn: str) -> None:
    kept = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        kept.write_text(drawn, encoding="utf-8")
    assert drawn == kept.read_text(encoding="utf-8")


FINDING = DetectorFinding(
    "pool_pressure",
    "http://gpu1:8000",
    "warning",
    "The KV pool is full and requests wait for it",
    "the KV pool is 99% full (991 of 1,001 blocks) with 30 running, and 60 requests wait",
    NOW - 60,
    NOW,
    {"kv_use": 0.99, "waiting": 60.0},
    entry="LR403",
    cause="kv_preemption_thrash",
)
VIEWS = (
    ServerView(
        "http://gpu1:8000",
        NOW,
        "warning",
        f"{FINDING.title}: {FINDING.reason}",
        ("meta-llama/Llama-3.1-8B",),
        0.99,
        30,
        60,
        1.2,
        0.034,
        10_250.0,
        2_020.5,
        0.084,
        3.25,
        1.5,
        12.75,
        75_161_927_680,
        1001,
        None,
        (FINDING,),
    ),
    ServerView(
        "http://gpu2:8000",
        NOW,
        "healthy",
        "pool full in ~4 min at this trend",
        ("qwen",),
        0.61,
        12,
        0,
        0.0,
        num_blocks=1001,
        forecast=Forecast(240.0, 180.0, 400.0, 0.08),
    ),
    ServerView("http://gpu3:8000", NOW, "unreachable", "http://gpu3:8000: nothing listens there"),
)


def test_a_look_is_as_kept():
    check("watch_look", servers_text(VIEWS, PLAIN))


def test_a_look_without_unicode_is_plain_ascii():
    assert servers_text(VIEWS, Style(width=80, unicode=False)).isascii()


def point(number: int) -> JournalPoint:
    busy = 20 <= number < 50
    use, running, waiting = (0.98, 30.0, 25.0) if busy else (0.3 + number / 200, 8.0, 0.0)
    return JournalPoint(
        NOW + 10 * number,
        0,
        use,
        running,
        waiting,
        kv_use_max=use,
        running_max=running,
        waiting_max=waiting,
        preempted=3.0 if busy else 0.0,
    )


POINTS = tuple(point(number) for number in range(70))
INCIDENT = Incident(
    17,
    "http://gpu1:8000",
    "pool_pressure",
    FINDING.title,
    NOW + 200,
    NOW + 500,
    "over, after restart-with-flags (done)",
    {"finding": FINDING.to_json()},
    notes=(
        Note(NOW + 200, FINDING.reason, {}),
        Note(
            NOW + 201,
            "what helps: fewer at once",
            {
                "answers": [
                    {
                        "why": "40 requests like these fit the pool at their full length",
                        "flags": {"max_num_seqs": 40},
                        "command": ["vllm", "serve", "meta-llama/Llama-3.1-8B", "--max-num-seqs", "40"],
                        "steps": [],
                        "trades": "requests above 40 wait instead of being preempted",
                    }
                ]
            },
        ),
        Note(NOW + 260, "it has become critical", {}),
    ),
    actions=(
        Action(
            3,
            17,
            "default",
            "restart-with-flags",
            "done",
            NOW + 300,
            NOW + 420,
            {},
            (ActionStage(NOW + 340, "drained", {}),),
        ),
    ),
)


def test_a_recommended_variable_and_switch_can_be_copied():
    answer = {"why": "w", "flags": {"enable_prefix_caching": False}, "env": {"PYTORCH_CUDA_ALLOC_CONF": "a:True"}}
    story = incident_text(replace(INCIDENT, notes=(Note(NOW, "", {"answers": [answer]}),)), (), NOW, PLAIN)
    assert "flags: --no-enable-prefix-caching\n" in story
    assert "environment: PYTORCH_CUDA_ALLOC_CONF=a:True\n" in story


def test_the_story_of_an_incident_is_as_kept():
    check("incident", incident_text(INCIDENT, POINTS, NOW + 1000, PLAIN))


def test_an_incident_that_lasts_without_samples_or_actions_is_told_too():
    bare = Incident(1, "http://gpu1:8000", "crash", "It crashed", NOW, None, None, {})
    text = incident_text(bare, (), NOW + 3600, PLAIN)
    assert "lasts, for 60 min" in text and "No samples are kept" in text and "only told" in text


def test_a_server_that_died_is_told_with_its_last_lines_and_what_was_started_instead():
    died = Incident(
        4,
        "http://127.0.0.1:8000",
        "died_serving",
        "the server died after 300 s (exit 1)",
        NOW,
        NOW + 60,
        "up again",
        {
            "exit_code": 1,
            "lived_s": 300.0,
            "command": "vllm serve m",
            "lines": ["torch.OutOfMemoryError: CUDA out of memory"],
        },
        notes=(Note(NOW, "out of memory in a burst", {"cause": "runtime_activation_burst", "entry": "LR301"}),),
        actions=(
            Action(
                1,
                4,
                "g",
                "restart",
                "done",
                NOW + 1,
                NOW + 50,
                {"changed": "--max-num-seqs 64", "command": "vllm serve m --max-num-seqs 64"},
            ),
        ),
    )
    check("incident_died", incident_text(died, (), NOW + 1000, PLAIN))


def test_the_list_of_incidents_is_as_kept():
    lasting = Incident(18, "http://gpu2:8000", "stuck_engine", "The engine hangs", NOW + 900, None, None, {})
    check("incidents", incidents_text((lasting, INCIDENT), NOW + 1000, PLAIN))


def test_the_picture_of_an_incident_marks_what_happened():
    words = "".join(ET.fromstring(incident_svg(INCIDENT, POINTS, NOW + 1000)).itertext())
    assert all(word in words for word in ("began", "over", "restart-with-flags", "KV use", "--max-num-seqs 40"))


def verification(ok: bool) -> Verification:
    moments = tuple(
        LoadSample(n / 4, min(0.95, n / 50), min(13, n), max(0, n - 40) if not ok else 0, 0 if ok else n, 2**30)
        for n in range(60)
    )
    outcomes = (RequestOutcome(300, 60, 0.1, 1.2),) * 39 + (
        (RequestOutcome(300, 60, 0.3, 2.2),) if ok else (RequestOutcome(error="500: no"),)
    )
    run = LoadRun("300/60", 40, 13, outcomes, moments, 15.0, 0 if ok else 41)
    checks = (
        Check("health", True, "up, serves tiny; 2,048 tokens of context"),
        Check("full context", True, "a request of 2,048 tokens in 0.41 s"),
        Check("load", ok, "40 of 40 requests answered, 13 at a time" if ok else "1 of 40 requests failed: 500: no"),
        Check("preemptions", ok, "none" if ok else "41 preemptions"),
        Check("memory", None, "not measured: the server's processes cannot be seen from here"),
    )
    return Verification(
        "http://127.0.0.1:8000", ServedModel("tiny", 2048), KvPool(40, 128), checks, run, "", ("a remark",)
    )


@pytest.mark.parametrize("ok", [True, False], ids=["verified", "not_verified"])
def test_the_page_of_a_verification_is_as_kept(ok):
    check("verified" if ok else "not_verified", verification_text(verification(ok), PLAIN))


def test_the_picture_of_a_verification_is_whole():
    words = "".join(ET.fromstring(verification_svg(verification(False))).itertext())
    assert all(word in words for word in ("Not verified", "KV use", "waiting", "41 preemptions"))


@pytest.mark.parametrize(("value", "text"), [(0.0004, "0 ms"), (0.085, "85 ms"), (0.9999, "1.00 s"), (12.5, "12.50 s")])
def test_times_are_short(value, text):
    assert seconds_text(value) == text


@pytest.mark.parametrize(("value", "text"), [(5, "5 s"), (600, "10 min"), (9000, "2.5 h"), (5 * 86400, "5.0 days")])
def test_durations_are_as_people_say_them(value, text):
    assert duration_text(value) == text
