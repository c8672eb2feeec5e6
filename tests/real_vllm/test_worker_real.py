"""The plugin inside a real vLLM (its CPU build): gauges of host memory, a record on request, and one of a failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from free_ports import free_port
from tiny_models import SERVE_ENV, beside_vllm, serve_words, write_model

from legroom.black_box import BlackBox, read_record
from legroom.cli.main import main
from legroom.diagnosis.fixes.failed_run import Hints
from legroom.diagnosis.log_diagnosis import read_log
from legroom.live.metrics.exposition import parse_sample
from legroom.vllm_logs.log_sources import pieces_of_file

FAILING = """
import os
from pathlib import Path

def register():
    from legroom.worker import plugin
    plugin.register()
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    real = CPUModelRunner.execute_model
    def execute_model(self, scheduler_output, *arguments, **others):
        if Path(os.environ["FAIL_FILE"]).exists() and scheduler_output.total_num_scheduled_tokens:
            import torch
            torch.empty(1 << 50, dtype=torch.uint8)  # no machine has a petabyte
        return real(self, scheduler_output, *arguments, **others)
    if real.__name__ != execute_model.__name__ or real.__module__ != execute_model.__module__:
        CPUModelRunner.execute_model = execute_model
"""
"""legroom's plugin, and a model step that asks for more memory than there is once a file is there."""


class PluginServer:
    def __init__(self, folder: Path, port: int, child: subprocess.Popen[bytes]) -> None:
        self.folder, self.url, self.child = folder, f"http://127.0.0.1:{port}", child

    def page(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=20) as answer:
            return str(answer.read().decode())

    def ask(self) -> None:
        body = {"model": "tiny", "prompt": list(range(5, 45)), "max_tokens": 4, "ignore_eos": True, "logprobs": 2}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            urllib.request.urlopen(request, timeout=60).read()
        except urllib.error.HTTPError:
            return

    def records(self, trigger: str) -> list[BlackBox]:
        records = [read_record(path) for path in sorted((self.folder / "records").glob("*.json"))]
        return [record for record in records if record.trigger == trigger]


def until(there: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.3)


@pytest.fixture(scope="module")
def server(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PluginServer]:
    folder = tmp_path_factory.mktemp("worker")
    beside = Path(beside_vllm(folder))
    (beside / "failing_plugin.py").write_text(FAILING)
    (entries,) = beside.glob("legroom-*/entry_points.txt")
    entries.write_text(entries.read_text().replace("legroom.worker.plugin:register", "failing_plugin:register"))
    port = free_port()
    words = serve_words(
        vllm_python,
        write_model(folder / "tiny"),
        port,
        "--served-model-name",
        "tiny",
        "--max-model-len",
        "256",
        "--kv-cache-memory-bytes",
        "16M",
    )
    env = (
        os.environ
        | SERVE_ENV
        | {
            "PYTHONPATH": str(beside),
            "LEGROOM_WORKER_MEMORY": "1",
            "LEGROOM_BLACKBOX_DIR": str(folder / "records"),
            "TMPDIR": str(folder),
            "FAIL_FILE": str(folder / "fail"),
        }
    )
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    serving = PluginServer(folder, port, child)

    def healthy() -> bool:
        assert child.poll() is None, (folder / "log").read_text()[-3000:]
        try:
            return bool(urllib.request.urlopen(f"{serving.url}/health", timeout=2))
        except OSError:
            return False

    try:
        until(healthy, 240)
        yield serving
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def test_a_worker_without_a_gpu_publishes_its_host_memory(server: PluginServer) -> None:
    until(lambda: 'legroom_worker_host_rss_bytes{gpu="cpu",rank="0"}' in server.page())
    rows = [line for line in server.page().splitlines() if line.startswith("legroom_worker_host_rss_bytes")]
    assert float(rows[0].split()[-1]) > 100e6


def test_fragments_of_a_live_server_without_a_gpu_tell_its_workers_memory(
    server: PluginServer, capsys: pytest.CaptureFixture[str]
) -> None:
    until(lambda: "legroom_worker_host_rss_bytes{" in server.page())
    assert main(["fragments", server.url, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == [
        "allocated_bytes",
        "reserved_bytes",
        "largest_free_bytes",
        "fragmentation_ratio",
        "would_expandable_segments_help",
        "parts",
    ]
    assert document["allocated_bytes"] > 100e6


def test_the_api_servers_own_host_memory_needs_no_plugin(server: PluginServer) -> None:
    sample = parse_sample(server.page(), time.time(), server.url)
    assert sample.api_server_rss_bytes is not None and sample.api_server_rss_bytes > 100e6


def test_a_signal_to_the_server_makes_its_worker_write_a_record(server: PluginServer) -> None:
    until(lambda: "legroom_worker_host_rss_bytes{" in server.page())
    server.child.send_signal(signal.SIGUSR2)
    until(lambda: server.records("asked"))
    (record,) = server.records("asked")
    assert record.settings["max_model_len"] == 256
    assert record.history and record.host is not None and record.host.rss_bytes


def test_a_step_that_runs_out_of_memory_leaves_a_record_and_its_step(server: PluginServer) -> None:
    (server.folder / "fail").touch()
    server.ask()
    until(lambda: server.records("out_of_memory"))
    (record,) = server.records("out_of_memory")
    assert record.request is not None and record.step is not None
    assert record.worker.rank == 0 and record.request.wanted_bytes == 1 << 50
    assert "memory" in str(record.request.message) and record.request.frames[-1].function == "execute_model"
    assert (record.step.requests, record.step.tokens) == (1, 40)
    assert record.step.largest[0].logprobs == 2
    log = str(server.folder / "log")
    assert "black box written to" in Path(log).read_text()
    assert read_log(pieces_of_file(log), log, Hints()).runs[0].findings
