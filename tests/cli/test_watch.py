"""`legroom watch` at a scrape, as a stream, recorded and replayed."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from free_ports import free_port
from made_up_looks import SERVER, calm, sample, trouble
from metrics_server import Metrics, serving

import legroom
from legroom.cli.main import main
from legroom.errors import LegroomError
from legroom.live.metrics.scrape_recording import Recorder
from legroom.sidecar.watch_config import simple_config


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


# One scrape


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


def test_an_idle_engine_that_is_stopped_is_1(capsys):
    class Stopped(Metrics):
        def text(self) -> str:
            return super().text() + "legroom_guard_stopped_engines 1\n"

    stopped = Stopped(running=0, kv_use=0.0)
    stopped.per_look = {}
    with serving(stopped) as url:
        assert main(["watch", url, "--once", "--interval", "0.1"]) == 1
    assert "The engine is stopped: a process of it is stopped (SIGSTOP)" in capsys.readouterr().out


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
    monkeypatch.setattr("legroom.cli.watch._run_page", lambda args, config: 99)
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
    with closing(Recorder(file)) as recorder:
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
    [
        [],
        ["http://h:1", "--interval", "0"],
        ["http://h:1", "--interval", "301"],
        ["http://h:1", "--act", "restart"],
        ["--replay", "/no/file"],
        ["http://h:1", "--plan", "/no/plan"],
        ["http://h:1", "--token-file", "/no/token"],
        ["ftp://h"],
        ["--daemon", "--config", "/no/watch.toml"],
        ["http://h:1", "--daemon", "--act", "explode"],
    ],
    ids=" ".join,
)
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
    with closing(Recorder(path)) as recorder:
        for look in looks:
            recorder.add(look)
    return path


def test_a_replay_tells_what_began_and_what_ended(tmp_path, capsys):
    looks = [*calm(4, 0), *trouble(20, 4), *calm(30, 24)]
    assert main(["watch", "--replay", str(recording(tmp_path / "r.jsonl", looks))]) == 1
    out = capsys.readouterr().out
    assert "54 scrapes" in out
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
    assert "3 scrapes" in capsys.readouterr().out


def test_a_rehearsal_says_what_would_have_been_done(tmp_path, capsys):
    path = recording(tmp_path / "r.jsonl", [*calm(4, 0), *trouble(20, 4)])
    assert main(["watch", SERVER, "--daemon", "--rehearse", str(path)]) == 0
    assert "24 checks of 1 server; 0 actions" in capsys.readouterr().out


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
    import urllib.request

    port = free_port()
    config = tmp_path / "watch.toml"
    with serving(Metrics()) as url:
        config.write_text(f'interval_s = 0.5\nport = {port}\n[[servers]]\nurl = "{url}"\n')
        words = [sys.executable, "-m", "legroom", "watch", "--daemon", "--config", str(config)]
        running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        health = None
        for _ in range(900):
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
