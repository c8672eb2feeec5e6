"""`legroom doctor`: the process table, the network and the log are real; nvidia-smi and vLLM itself are stand-ins."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from free_ports import free_port

from legroom.cli.main import main
from legroom.drawing.terminal import PLAIN
from legroom.recover.machine_snapshot import read_machine

ROOT = Path(__file__).parents[2]
FAILED_LOG = ROOT / "docs/samples/kv-too-small.log"
SERVER = """\
import sys
sys.path.insert(0, {tests!r})
from metrics_server import Answering, Metrics
from http.server import ThreadingHTTPServer

class Handler(Answering):
    def do_GET(self):
        answers = {{"/version": b'{{"version": "0.32.0"}}', "/v1/models": b'{{"data": [{{"id": "tiny"}}]}}'}}
        self.answer(answers.get(self.path, Metrics().text().encode()), 404 if "server_info" in self.path else 200)

server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler)
print("ready", file=sys.stderr, flush=True)
server.serve_forever()
"""
"""A stand-in for vLLM: it has vLLM's command line and answers as its API server does."""


@pytest.fixture(autouse=True)
def own_processes(monkeypatch):
    """Of the real process table only what this test started: other tests run servers of their own."""

    def read():
        snapshot = read_machine()
        return replace(snapshot, processes={each.pid: each for each in snapshot.tree(os.getpid())}, segments=())

    monkeypatch.setattr("legroom.api.doctor_report.read_machine", read)


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A program that prints what nvidia-smi prints of one L4, for a machine without NVML."""
    monkeypatch.setattr("legroom.verify.node_preflight.nvml_devices", tuple)
    program = tmp_path / "bin/nvidia-smi"
    program.parent.mkdir()

    def write(used_mib, *processes):
        apps = "\n".join(f"GPU-aaa, {pid}, {size}" for pid, size in processes)
        card = f"0, NVIDIA L4, GPU-aaa, 23034, {used_mib}, 575.51.03"
        program.write_text(
            f'#!/bin/sh\ncase "$1" in -L) ;; --query-gpu*) echo "{card}" ;; --query-compute*) echo "{apps}" ;; esac\n'
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)

    return write


@pytest.fixture
def server(tmp_path):
    """Starts the stand-in with these flags and its output in this file: its PID."""
    started = []
    script = tmp_path / "vllm"
    script.write_text(SERVER.format(tests=str(ROOT / "tests")))

    def start(*flags, log):
        command = [sys.executable, str(script), "serve", *flags, "--port", str(free_port())]
        with log.open("a") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE)
        started.append(process)
        assert process.stderr.readline() == b"ready\n"
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.communicate()


def report(capsys, code):
    assert main(["doctor", "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_without_a_gpu_it_says_what_it_could_not_look_at(monkeypatch, capsys):
    monkeypatch.setattr("legroom.verify.node_preflight.nvml_devices", tuple)
    monkeypatch.setattr("legroom.verify.node_preflight.shutil.which", lambda _: None)
    seen = report(capsys, 3)
    assert (seen["ok"], seen["machine"]["gpus"]) == (False, [])
    assert {each["about"] for each in seen["findings"] if each["rank"] == "not read"} >= {"GPU", "servers"}


def test_a_server_that_serves_as_planned_has_nothing_wrong(nvidia_smi, server, tmp_path, capsys):
    pid = server("Qwen/Qwen3-8B", "--max-model-len", "8192", log=tmp_path / "vllm.log")
    nvidia_smi(21000, (pid, 20500))
    seen = report(capsys, 0)
    (found,) = [each for each in seen["servers"] if each["pid"] == pid]
    assert (found["model"], found["vllm"], found["state"]) == ("Qwen/Qwen3-8B", "0.32.0", "healthy")
    assert found["held_bytes"] == 20500 << 20
    assert abs(found["planned_bytes"] - found["held_bytes"]) < 2 << 30
    assert [each for each in seen["findings"] if each["rank"] == "wrong"] == []


def test_what_another_process_holds_makes_the_next_start_fail_and_the_log_is_read(nvidia_smi, server, tmp_path, capsys):
    log = tmp_path / "vllm.log"
    log.write_bytes(FAILED_LOG.read_bytes())
    pid = server("Qwen/Qwen3-8B", "--max-model-len", "8192", "--api-key", "s3cr3t-word", log=log)
    nvidia_smi(22000, (pid, 10000), (1, 12000))
    seen = report(capsys, 1)
    wrong = [each["message"] for each in seen["findings"] if each["rank"] == "wrong" and each["about"] == f"PID {pid}"]
    assert any(message.startswith("memory: the next start: vLLM would stop with") for message in wrong)
    assert any("kv_too_small_for_max_len" in message for message in wrong)
    assert seen["servers"][0]["planned_bytes"] < 22 << 30  # without what the other holds
    assert "s3cr3t-word" not in json.dumps(seen)


def test_the_text_has_at_most_ten_lines():
    from legroom.api.doctor_report import DoctorFinding, DoctorReport
    from legroom.verify.node_preflight import NodeState

    findings = tuple(DoctorFinding("watch", "PID 1", f"message {number}") for number in range(30))
    lines = DoctorReport(NodeState(()), (), findings).text(PLAIN).splitlines()
    assert (len(lines), lines[-1].split()) == (10, ["more", "23", "more", "lines", "in", "--json"])
