"""`legroom watch` at a look, as a stream, recorded and replayed; and the incidents it leaves in the journal."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from metrics_server import Metrics, serving

import legroom
from legroom.cli.incidents import seconds_ago
from legroom.cli.main import main
from legroom.errors import LegroomError
from legroom.live.journal.journal import Journal
from legroom.live.metrics.recording import Recorder
from legroom.live.metrics.sample import EngineSample, Sample, ScrapeFailure
from legroom.sidecar.config import simple_config
from legroom.sidecar.watch import WatchSession

SERVER = "http://gpu1:8000"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def sample(number: int, kv_use=0.4, running=8.0, waiting=0.0, preemptions=0.0, server=SERVER) -> Sample:
    engine = EngineSample(
        "tiny", "0", kv_use=kv_use, running=running, waiting=waiting, waiting_for_capacity=waiting,
        preemptions=preemptions, prompt_tokens=5000.0 * number, generation_tokens=1000.0 * number,
        finished=10.0 * number, num_blocks=1001, block_size=16, prefix_queries=5000.0 * number, prefix_hits=100.0,
    )  # fmt: skip
    return Sample(1_700_000_000.0 + 5 * number, server, (engine,))


def trouble(count: int = 20, start: int = 0) -> list[Sample]:
    """A pool that is full while requests wait and are preempted."""
    return [sample(start + n, 0.99, 30, 60, preemptions=6.0 * n) for n in range(1, count + 1)]


def calm(count: int, start: int) -> list[Sample]:
    preempted = 120.0 if start > 10 else 0.0
    return [sample(start + n, preemptions=preempted) for n in range(1, count + 1)]


# One look


def test_a_healthy_server_is_one_look_and_0(capsys):
    with serving(Metrics()) as url:
        assert main(["watch", url, "--once", "--interval", "0.1"]) == 0
    out = capsys.readouterr().out
    assert "healthy" in out and "42.0% of 1,001 blocks" in out and "serving 8 requests" in out
    assert "tokens/s" in out and "prefix hits" in out


def test_a_full_pool_with_a_queue_is_1(capsys):
    with serving(Metrics(kv_use=0.99, waiting=40)) as url:
        assert main(["watch", url, "--once", "--interval", "0.1"]) == 1
    assert "LR" in capsys.readouterr().out


def test_a_full_pool_alone_is_healthy():
    with serving(Metrics(kv_use=0.99)) as url:
        assert main(["watch", url, "--once", "--interval", "0.1"]) == 0


@pytest.mark.parametrize("token", [b"\xff\xfe\x00", b"one\ntwo\n"])
def test_a_file_that_holds_no_token_is_named(token, tmp_path, capsys):
    file = tmp_path / "token"
    file.write_bytes(token)
    assert main(["watch", "http://127.0.0.1:9", "--once", "--token-file", str(file)]) == 2
    assert str(file) in capsys.readouterr().err


def test_a_server_that_is_down_is_3(capsys):
    assert main(["watch", "http://127.0.0.1:9", "--once", "--interval", "0.1"]) == 3
    assert "unreachable" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "instead"), [("stdin", None), ("stdin", io.StringIO), ("stdout", io.StringIO), ("stderr", io.StringIO)]
)
def test_a_page_needs_a_terminal_to_read_and_to_draw_on(name, instead, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for one in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, one, Terminal())
    monkeypatch.setattr("legroom.cli.watch._page", lambda args, config: 99)
    words = ["watch", "http://127.0.0.1:9", "--interval", "0.1"]
    assert main(words) == 99
    monkeypatch.setattr(sys, name, instead and instead())
    assert main(words) == 3


def test_without_a_terminal_it_looks_once_and_writes_no_journal(home, capsys):
    with serving(Metrics()) as url:
        assert main(["watch", url, "--interval", "0.1"]) == 0
    assert not (home / "journal.db").exists()


def test_once_as_json_is_one_document(capsys):
    with serving(Metrics()) as url, serving(Metrics(running=0)) as other:
        assert main(["watch", url, other, "--once", "--json", "--interval", "0.1"]) == 0
    servers = json.loads(capsys.readouterr().out)["servers"]
    assert [one["state"] for one in servers] == ["healthy", "idle"]
    assert servers[0]["generation_tokens_per_s"] > 0


@pytest.mark.parametrize("words", [["--prometheus", "http://127.0.0.1:9"], ["--kubernetes", "app=vllm"]], ids="".join)
def test_a_list_of_servers_that_cannot_be_read_is_3(words, capsys, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", "/no/such/file")
    assert main(["watch", *words, "--once", "--interval", "0.1"]) == 3
    assert capsys.readouterr().err.startswith("error:")


def test_a_server_that_is_given_twice_is_looked_at_once_a_round(capsys):
    metrics = Metrics()
    with serving(metrics) as url:
        bare = url.removeprefix("http://")
        assert main(["watch", url, bare, f"{url}/metrics", "--once", "--json", "--interval", "0.1"]) == 0
    (server,) = json.loads(capsys.readouterr().out)["servers"]
    assert server["generation_tokens_per_s"] > 0
    assert metrics.looks == 3
    assert [server.name for server in simple_config(["h:1", "http://h:1", "http://h:1/metrics"]).servers] == [
        "http://h:1"
    ]


def test_thresholds_and_plans_of_a_watch_file_count_without_the_sidecar(tmp_path, capsys):
    plan, config = tmp_path / "plan.json", tmp_path / "watch.toml"
    plan.write_text('{"kv": {"num_blocks": 5000, "block_size": 16}, "layout": {}}')
    with serving(Metrics(kv_use=0.6, waiting=40)) as url:
        config.write_text(f'[[servers]]\nurl = "{url}"\nplan = "{plan}"\n[thresholds]\npool_full_ratio = 0.5\n')
        assert main(["watch", "--config", str(config), "--once", "--json", "--interval", "0.1"]) == 1
    (server,) = json.loads(capsys.readouterr().out)["servers"]
    kinds = [one["kind"] for one in server["findings"]]
    assert kinds.index("pool_pressure") < kinds.index("plan_drift"), "the gravest first"


def test_credentials_in_an_address_never_show(capsys):
    with serving(Metrics()) as url:
        main(["watch", url.replace("://", "://user:very-secret@"), "--once", "--interval", "0.1"])
    captured = capsys.readouterr()
    assert "very-secret" not in captured.out + captured.err


def test_a_name_that_the_terminal_has_no_letters_for_is_shown_with_numbers(tmp_path, monkeypatch):
    file = tmp_path / "r.jsonl"
    with Recorder(file) as recorder:
        recorder.add(replace(sample(1), engines=(replace(sample(1).engines[0], model="modèle"),)))

    def written(*more: str) -> bytes:
        ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", ascii_only)
        assert main(["watch", "--replay", str(file), *more]) == 0
        return ascii_only.buffer.getvalue()

    assert rb"mod\xe8le" in written()
    assert json.loads(written("--json"))["models"] == ["modèle"]


@pytest.mark.parametrize(
    "words",
    [[], ["http://h:1", "--interval", "0"], ["http://h:1", "--interval", "301"],
     ["http://h:1", "--act", "restart"], ["--replay", "/no/file"],
     ["http://h:1", "--plan", "/no/plan"], ["http://h:1", "--token-file", "/no/token"], ["ftp://h"],
     ["--daemon", "--config", "/no/watch.toml"], ["http://h:1", "--daemon", "--act", "explode"]],
    ids=" ".join,
)  # fmt: skip
def test_a_wrong_call_says_so(words, capsys):
    assert main(["watch", *words]) in (2, 3)
    assert capsys.readouterr().err.startswith("error:")


# From Python


def test_a_look_from_python_also_inside_an_event_loop():
    async def in_a_notebook(url: str) -> list[str]:
        return [look.state for look in legroom.watch(url, interval_s=0.1, once=True)]

    with serving(Metrics()) as url:
        assert asyncio.run(in_a_notebook(url)) == ["healthy"]


@pytest.mark.parametrize(("servers", "interval_s"), [([], 5.0), (["http://h:1"], 0.0), (["http://h:1"], 1e4)])
def test_watching_nothing_or_at_no_pace_is_refused(servers, interval_s):
    with pytest.raises(LegroomError, match=r"which server|interval"):
        legroom.watch(*servers, interval_s=interval_s)


# A stream


def test_the_stream_is_one_object_a_look(home):
    with serving(Metrics()) as url:
        words = [sys.executable, "-m", "legroom", "watch", url, "--json", "--interval", "0.2"]
        running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert running.stdout
        looks = [json.loads(running.stdout.readline()) for _ in range(3)]
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=120)
    assert [look["kv_use"] for look in looks] == [0.42] * 3
    assert looks[0]["time_s"] < looks[2]["time_s"]
    assert "Traceback" not in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stream_that_is_told_to_end_closes_what_it_has_open(number, tmp_path):
    path = tmp_path / "r.jsonl"
    with serving(Metrics()) as url:
        words = [sys.executable, "-m", "legroom", "watch", url, "--json", "--interval", "0.2", "--record", str(path)]
        running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert running.stdout
        running.stdout.readline()
        running.send_signal(number)
        running.communicate(timeout=120)
    assert len(path.read_text().splitlines()) >= 2


def test_a_reader_who_leaves_ends_the_stream_quietly():
    with serving(Metrics()) as url:
        words = [sys.executable, "-m", "legroom", "watch", url, "--json", "--interval", "0.1"]
        running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert running.stdout and running.stderr
        running.stdout.readline()
        running.stdout.close()
        assert running.wait(120) == 0
        assert running.stderr.read() == ""


# Recording and replay


def recording(path: Path, looks) -> Path:
    with Recorder(path) as recorder:
        for look in looks:
            recorder.add(look)
    return path


def test_a_replay_tells_what_began_and_what_ended(tmp_path, capsys):
    looks = [*calm(4, 0), *trouble(20, 4), *calm(30, 24)]
    assert main(["watch", "--replay", str(recording(tmp_path / "r.jsonl", looks))]) == 1
    out = capsys.readouterr().out
    assert "54 looks" in out
    assert ": over" in out


def test_a_calm_replay_is_0_and_as_json_an_object_a_look(tmp_path, capsys):
    path = recording(tmp_path / "r.jsonl.zst", calm(12, 0))
    assert main(["watch", "--replay", str(path), "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 12


def test_a_record_of_a_look_can_be_replayed(tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    with serving(Metrics()) as url:
        main(["watch", url, "--once", "--interval", "0.1", "--record", str(path)])
    assert main(["watch", "--replay", str(path)]) == 0
    assert "3 looks" in capsys.readouterr().out


def test_a_rehearsal_says_what_would_have_been_done(tmp_path, capsys):
    path = recording(tmp_path / "r.jsonl", [*calm(4, 0), *trouble(20, 4)])
    assert main(["watch", SERVER, "--daemon", "--rehearse", str(path)]) == 0
    assert "24 checks of 1 server; 0 actions" in capsys.readouterr().out


# The session and the journal


def test_an_incident_is_journalled_with_its_samples_and_what_helps(tmp_path):
    with Journal.open(tmp_path / "j.db") as journal:
        session = WatchSession(journal=journal)
        for look in [*calm(4, 0), *trouble(20, 4), *calm(30, 24)]:
            session.take(look)
        session.close()
        listed = journal.incidents()
        assert listed
        assert all(one.closed_s is not None for one in listed)
        whole = journal.incident(listed[-1].id)
        assert whole and any(note.detail.get("answers") for note in whole.notes)
        assert len(journal.samples(SERVER, 1_700_000_000.0, 1_700_001_000.0)) > 40


def test_what_another_watcher_keeps_already_is_not_journalled_twice(tmp_path):
    with Journal.open(tmp_path / "j.db") as journal:
        for _ in range(2):
            session = WatchSession(journal=journal)
            for look in trouble():
                session.take(look)
        kinds = [one.kind for one in journal.incidents()]
        assert len(kinds) == len(set(kinds))


def test_what_a_killed_watcher_left_open_is_closed_and_hides_nothing(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with Journal.open(tmp_path / "j.db") as journal:
        left = journal.open_incident(SERVER, "pool_pressure", "t", {"by": "watch", "pid": ended.pid}, 1.6e9, "left")
        session = WatchSession(journal=journal)
        for look in trouble():
            session.take(look)
        found = [one for one in journal.incidents() if one.kind == "pool_pressure"]
        assert [one.closed_s is None for one in sorted(found, key=lambda one: one.id)] == [False, True]
        stale = journal.incident(left)
        assert stale and stale.outcome == "lasted when its watcher was ended"


def test_what_a_sidecar_keeps_is_left_to_it(tmp_path):
    with Journal.open(tmp_path / "j.db") as journal:
        journal.open_incident(SERVER, "pool_pressure", "t", {"by": "sidecar"}, 1.6e9, "kept")
        session = WatchSession(journal=journal)
        for look in trouble():
            session.take(look)
        session.close()
        assert [one.closed_s for one in journal.incidents() if one.kind == "pool_pressure"] == [None]


def test_a_full_disk_is_said_and_watching_goes_on(tmp_path, monkeypatch):
    from legroom.live.journal.journal import JournalUnavailable

    said: list[str] = []
    with Journal.open(tmp_path / "j.db") as journal:

        def full(*_: object, **__: object) -> int:
            raise JournalUnavailable("the disk under the journal is full")

        monkeypatch.setattr(journal, "open_incident", full)
        session = WatchSession(journal=journal, say=said.append)
        for look in trouble():
            session.take(look)
    assert session.open_incidents
    assert said == ["the disk under the journal is full: watching without it"]


def test_a_server_that_stops_answering_keeps_its_place():
    session = WatchSession()
    session.take(sample(1))
    view = session.take(ScrapeFailure(1_700_000_010.0, SERVER, "timeout", "did not answer within 4 s"))
    assert (view.state, view.sentence) == ("unreachable", "did not answer within 4 s")
    assert session.take(sample(3)).state == "healthy"


def test_a_rising_pool_is_forecast():
    session = WatchSession()
    view = None
    for number in range(30):
        view = session.take(sample(number, kv_use=0.2 + 0.01 * number))
    assert view and view.forecast and "pool full in" in view.sentence


# legroom incidents, legroom incident


@pytest.fixture
def journalled(home):
    with Journal.open() as journal:
        session = WatchSession(journal=journal)
        for look in [*calm(4, 0), *trouble(20, 4), *calm(30, 24)]:
            session.take(look)
        session.close()
        return journal.incidents()[0].id


def test_incidents_are_listed(journalled, capsys):
    assert main(["incidents"]) == 0
    assert "gpu1:8000" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["/proc/self/mem", "/dev/null", "/tmp", __file__])
@pytest.mark.parametrize("command", [["incidents"], ["incident", "1"]], ids=" ".join)
def test_a_file_that_is_no_journal_is_said_to_be_none(command, name, capsys):
    assert main([*command, "--journal", name]) == 2
    assert f"{name} is not a journal" in capsys.readouterr().err


def test_incidents_as_json(journalled, capsys):
    assert main(["incidents", "--json", "--server", SERVER]) == 0
    listed = json.loads(capsys.readouterr().out)["incidents"]
    assert {one["server"] for one in listed} == {SERVER}
    assert all("detail" in one for one in listed)


@pytest.mark.parametrize("name", ["gpu1:8000", "http://gpu1:8000/metrics"])
def test_incidents_of_a_server_are_found_by_its_address(name, journalled, capsys):
    assert main(["incidents", "--json", "--server", name, "--limit", "99999999999999999999"]) == 0
    assert json.loads(capsys.readouterr().out)["incidents"]


@pytest.mark.parametrize("name", ["a:1", "prod/vllm-0"])
def test_incidents_of_a_server_are_found_by_the_name_it_is_listed_under(name, home, capsys):
    with Journal.open() as journal:
        journal.open_incident(name, "pool_pressure", "t", {}, 1.7e9, "k")
    assert main(["incidents", "--json", "--server", name]) == 0
    assert [one["server"] for one in json.loads(capsys.readouterr().out)["incidents"]] == [name]


def test_a_journal_is_read_where_nothing_can_be_written_beside_it(journalled, home, capsys):
    (home / "journal.db-shm").mkdir()  # what SQLite would have to write
    assert main(["incidents", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["incidents"]
    assert main(["incident", str(journalled)]) == 0


def test_incidents_of_another_server_or_time_are_left_out(journalled, capsys):
    main(["incidents", "--server", "http://other:1"])
    main(["incidents", "--open"])
    assert capsys.readouterr().out == "No incidents.\n" * 2


def test_without_a_journal_there_are_none_and_none_is_made(home, capsys):
    assert main(["incidents"]) == 0
    assert "No incidents" in capsys.readouterr().out
    assert not home.exists()


def test_the_story_of_one_incident(journalled, capsys):
    assert main(["incident", str(journalled)]) == 0
    out = capsys.readouterr().out
    for part in ("What was seen", "KV use", "What was diagnosed", "What was done", "What is recommended"):
        assert part in out


def test_the_story_as_json_and_as_a_picture(journalled, tmp_path, capsys):
    picture = tmp_path / "i.svg"
    assert main(["incident", f"#{journalled}", "--json", "--svg", str(picture)]) == 0
    story = json.loads(capsys.readouterr().out)
    assert story["samples"] and story["recommended"] and story["notes"]
    assert "began" in "".join(ET.fromstring(picture.read_text()).itertext())


@pytest.mark.parametrize("number", ["99999", "x", "-1", "9" * 30, "²"])
def test_an_incident_that_is_not_there(number, journalled, capsys):
    assert main(["incident", number]) == 2
    assert capsys.readouterr().err.startswith("error:")


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("5min", 300), ("5m", 300), ("1.5h", 5400), ("2d", 172800)])
def test_times_ago_as_people_write_them(text, seconds):
    assert seconds_ago(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "2 fortnights", "-1d", "1e999h"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(LegroomError):
        seconds_ago(text)


def test_the_public_api_gives_one_look_and_a_stream():
    import legroom

    with serving(Metrics()) as url:
        (look,) = legroom.watch(url, once=True, interval_s=0.1)
        assert (look.state, look.json()["kv_use"]) == ("healthy", 0.42)
        assert "serving 8 requests" in str(look)
        looks = legroom.watch(url, interval_s=0.2)
        assert [next(looks).view.running for _ in range(2)] == [8.0, 8.0]
        looks.close()


def test_the_sidecar_is_started_serves_its_health_and_stops_when_told(tmp_path, home):
    import socket
    import urllib.request

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = tmp_path / "watch.toml"
    with serving(Metrics()) as url:
        config.write_text(f'interval_s = 0.5\nport = {port}\n[[servers]]\nurl = "{url}"\n')
        words = [sys.executable, "-m", "legroom", "watch", "--daemon", "--config", str(config)]
        running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        health = None
        for _ in range(100):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=2) as answer:
                    health = json.loads(answer.read())
                if health["servers"]:
                    break
            except OSError:
                pass
            time.sleep(0.1)
        running.terminate()
        _, errors = running.communicate(timeout=120)
    assert health and health["ok"] and health["servers"] == 1
    assert running.returncode == 0, errors
    assert (home / "journal.db").exists()
