"""A real vLLM verified under load, and its remains recovered after its API server was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from metrics_page import RUNNING, metric
from tiny_models import SERVE_ENV, serve_words, write_model

from legroom.cli.main import main
from legroom.recover.free_memory import free_dead_holders
from legroom.recover.machine_snapshot import read_machine
from legroom.recover.orphans import classify_holders
from legroom.verify.verification_run import VerificationRequest, verify

PORT = 18310
URL = f"http://127.0.0.1:{PORT}"
BLOCKS, BLOCK_SIZE, CONTEXT = 40, 128, 2048


@pytest.fixture(scope="module")
def server(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    """One server with a pool of 39 blocks of 128 tokens."""
    folder = tmp_path_factory.mktemp("verify")
    model = write_model(folder / "llama")
    words = serve_words(
        vllm_python,
        model,
        PORT,
        "--max-model-len",
        str(CONTEXT),
        "--num-gpu-blocks-override",
        str(BLOCKS),
        "--kv-cache-memory-bytes",
        "16M",
        "--max-num-seqs",
        "64",
    )
    log = (folder / "vllm.log").open("wb")
    started = subprocess.Popen(words, env=os.environ | SERVE_ENV, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_until_healthy(started, folder / "vllm.log")
        yield started
    finally:
        for pid in _group(started.pid):
            os.kill(pid, signal.SIGKILL)
        started.wait(20)


def _wait_until_healthy(started: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 600
    while time.monotonic() < until and started.poll() is None:
        try:
            with urllib.request.urlopen(f"{URL}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(log.read_text()[-2000:])


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def _group(leader: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if os.getpgid(int(folder.name)) == leader:
                    found.append(int(folder.name))
            except ProcessLookupError:
                continue
    return found


def test_a_server_tells_an_upgrade_its_release_model_and_flags(server, capsys):
    version = json.loads(urllib.request.urlopen(f"{URL}/version").read())["version"]
    main(["upgrade", "0.30.0", "--url", URL, "--gpu", "24GiB", "--json"])
    told = json.loads(capsys.readouterr().out)["from"]
    assert version.startswith(told["vllm"])
    assert told["args"]["max_model_len"] == CONTEXT
    assert (told["args"]["num_gpu_blocks_override"], told["kv"]["num_blocks"]) == (BLOCKS, BLOCKS)


def test_a_server_that_holds_its_load_is_verified(server, tmp_path, capsys):
    picture, plan = tmp_path / "v.svg", tmp_path / "plan.json"
    plan.write_text(
        json.dumps(
            {
                "kv": {"num_blocks": BLOCKS, "block_size": BLOCK_SIZE},
                "layout": {"kv_cache_bytes": 1},
                "args": {"max_num_seqs": 64, "max_model_len": CONTEXT, "num_gpu_blocks_override": BLOCKS},
            }
        )
    )
    words = [
        "verify",
        URL,
        "--plan",
        str(plan),
        "--load",
        "300/60",
        "--requests",
        "40",
        "--svg",
        str(picture),
        "--json",
    ]
    code = main(words)
    found = json.loads(capsys.readouterr().out)
    passed = {check["name"]: check["ok"] for check in found["checks"]}
    assert (code, found["verified"]) == (0, True), found["checks"]
    assert passed["full context"] and passed["pool"] and passed["load"] and passed["preemptions"] and passed["kv use"]
    assert found["load"]["concurrency"] == (BLOCKS - 1) // 3  # 360 tokens take 3 blocks
    assert found["load"]["output_tokens"] == 40 * 60
    assert picture.read_text().startswith("<svg")


def test_a_load_that_the_pool_does_not_hold_is_not_verified(server):
    found = verify(VerificationRequest(URL, load="120/300", concurrency=24, requests=30, timeout_s=600))
    passed = {check.name: check.ok for check in found.checks}
    assert (found.ok, passed["load"], passed["preemptions"]) == (False, True, False)
    assert found.load and found.load.preemptions and found.load.preemptions > 0


def test_an_interrupt_ends_the_open_requests_and_shows_what_was_seen(server):
    words = [
        sys.executable,
        "-m",
        "legroom",
        "verify",
        URL,
        "--load",
        "100/1500",
        "--requests",
        "60",
        "--concurrency",
        "4",
    ]
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    written = metric(URL, "vllm:generation_tokens_total") + 300
    _until(lambda: metric(URL, "vllm:generation_tokens_total") > written)  # well into the ramp
    running.send_signal(signal.SIGINT)
    out, errors = running.communicate(timeout=200)
    assert running.returncode == 130, errors
    assert "interrupted" in out and "full context" in out
    assert "Traceback" not in errors
    _until(lambda: metric(URL, RUNNING) == 0)


def test_a_look_at_the_server_shows_its_pool_and_its_latencies(server, tmp_path, capsys):
    recording = tmp_path / "look.jsonl.zst"
    assert main(["watch", URL, "--once", "--json", "--record", str(recording)]) == 0
    (seen,) = json.loads(capsys.readouterr().out)["servers"]
    assert (seen["state"], seen["num_blocks"], seen["kv_use"]) == ("idle", BLOCKS, 0.0)
    assert main(["watch", "--replay", str(recording)]) == 0
    assert "3 scrapes, 0 incidents" in capsys.readouterr().out


def test_a_look_while_the_pool_is_too_small_names_the_incident(server, capsys):
    words = ["verify", URL, "--load", "120/500", "--concurrency", "32", "--requests", "200"]
    loading = subprocess.Popen(
        [sys.executable, "-m", "legroom", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        codes = []
        while loading.poll() is None and 1 not in codes:
            codes.append(main(["watch", URL, "--once"]))
        assert 1 in codes
        assert "legroom explain LR" in capsys.readouterr().out
    finally:
        loading.send_signal(signal.SIGINT)
        loading.wait(60)


def test_nothing_of_a_living_server_is_dead_weight(server):
    members = set(_group(server.pid))
    judged = {holder.process.pid: holder for holder in classify_holders(read_machine()) if holder.process}
    assert members & set(judged)
    assert not [holder for pid, holder in judged.items() if pid in members and holder.state == "dead"]
    assert {judged[server.pid].state} == {"in use"}


def test_when_its_api_server_is_killed_the_rest_is_dead_weight_and_is_freed(server):
    """The last test: it ends the server."""
    server.kill()
    server.wait(20)
    time.sleep(1)
    left = set(_group(server.pid))
    dead = [
        holder
        for holder in classify_holders(read_machine())
        if holder.process and holder.process.pid in left and holder.state == "dead"
    ]
    assert {holder.what.partition("::")[2][:6] for holder in dead} == {"Engine", "Worker"}
    segments = [
        holder
        for holder in classify_holders(read_machine())
        if holder.segment and holder.state == "dead" and holder.top
    ]
    assert segments
    outcome = free_dead_holders([*dead, *segments])
    assert all(one.is_free for one in outcome), outcome
    assert not [pid for pid in _group(server.pid) if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"VLLM::")]
    assert not [holder.segment.path for holder in segments if holder.segment and Path(holder.segment.path).exists()]
    assert {one.holder.process.pid for one in outcome if one.holder.process} <= left
