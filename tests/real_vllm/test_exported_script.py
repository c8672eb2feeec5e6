"""The exported start script on a real vLLM: it starts, is waited for while it works, and ends in order."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from free_ports import free_port
from metrics_page import RUNNING, metric
from tiny_models import SERVE_ENV, serve_words, write_model

from legroom import plan
from legroom.exports.deploy.environment import EnvVariable
from legroom.exports.deploy.exported_server import ExportedServer, metrics_drain, planned_server
from legroom.exports.deploy.script import script_text
from legroom.exports.deploy.serve_command import parse_command
from legroom.facts.releases import release
from legroom.planning.plan_document import plan_from_json

PATIENCE_S = 600.0


def described(words: list[str], env: Mapping[str, str]) -> ExportedServer:
    """A server of exactly these words, which runs on a CPU: of the plan only the times are used."""
    command = parse_command(words, release("0.32.0"))
    return replace(
        planned_server(plan_from_json(plan("llama-3.1-8b", "l4", vllm="0.32.0", advice=False).json())),
        model=command.model,
        words=command,
        phrases=command.phrases,
        env=tuple(EnvVariable(name, value, "as given") for name, value in env.items()),
        secrets=(),
    )


class Started:
    """A server that runs below its exported script."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.port, self.model = free_port(), write_model(folder / "tiny")
        served = serve_words(
            python,
            self.model,
            self.port,
            "--shutdown-timeout",
            "60",
            "--max-model-len",
            "2048",
            "--kv-cache-memory-bytes",
            "16M",
        )
        self.words = ["vllm", *served[served.index("serve") :]]
        self.log = folder / "log"
        script = folder / "start.sh"
        script.write_text(script_text(described(self.words, SERVE_ENV)))
        env = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(["bash", str(script)], stdout=log, stderr=log, env=env)

    def until_ready(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while True:
            assert self.process.poll() is None, self.log.read_text("utf-8", "replace")[-2000:]
            assert time.monotonic() < end
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2).close()
                return
            except OSError:
                time.sleep(0.5)

    def ask(self, tokens: int) -> int:
        body = json.dumps({"model": str(self.model), "prompt": "x" * 32, "max_tokens": tokens, "ignore_eos": True})
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        asked = urllib.request.Request(url, body.encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=120) as answer:
            return int(answer.status)

    def running(self, tokens: int) -> tuple[threading.Thread, list[int]]:
        """A request on its way, once the server works on it."""
        answered: list[int] = []
        thread = threading.Thread(target=lambda: answered.append(self.ask(tokens)))
        thread.start()
        end = time.monotonic() + 120
        while time.monotonic() < end:
            if metric(f"http://127.0.0.1:{self.port}", RUNNING) > 0:
                return thread, answered
        raise AssertionError("the request was never seen to run")

    def description(self) -> ExportedServer:
        return described(self.words, {})


@pytest.fixture(scope="module")
def server(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    started = Started(vllm_python, tmp_path_factory.mktemp("exported"))
    try:
        started.until_ready()
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait()


def test_the_drain_line_waits_for_what_runs(server: Started) -> None:
    thread, answered = server.running(1200)
    line = metrics_drain(server.description()).replace("sleep 10;", "").replace("seq 30)", "seq 60)")
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    thread.join(timeout=60)
    assert answered == [200]


def test_sigterm_lets_what_runs_end_and_then_it_leaves(server: Started) -> None:
    thread, answered = server.running(1200)
    server.process.terminate()
    thread.join(timeout=200)
    assert answered == [200]
    server.process.wait(timeout=120)


def test_the_flags_of_a_planned_server_are_read_by_the_real_parser(vllm_python: Path) -> None:
    flags: dict[str, object] = {"kv_cache_dtype": "fp8", "max_model_len": 8192, "cpu_offload_gb": 2}
    made = plan("llama-3.1-8b", "l4", vllm="0.32.0", advice=False, **flags).json()
    words = planned_server(plan_from_json(made)).words.words()[2:]
    read = (
        "import sys\n"
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "args = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])\n"
        "print(args.max_model_len, args.shutdown_timeout, args.kv_cache_dtype, args.max_num_seqs)\n"
    )
    done = subprocess.run(
        [str(vllm_python), "-c", read, *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **SERVE_ENV},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-4:-1] == ["8192", "60", "fp8"]
