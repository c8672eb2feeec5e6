"""`legroom recover`: what it shows, when it asks, when it only shows, what to start instead. NVML is stood in for."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from legroom.cli.main import main
from legroom.drawing.terminal import Style
from legroom.errors import LegroomError
from legroom.live.gpu_memory import GpuMemory
from legroom.recover import free_memory as action
from legroom.recover import machine_snapshot, restart_command
from legroom.recover.machine_snapshot import MachineSnapshot, ProcessInfo, SharedMemorySegment
from legroom.recover.restart_command import CrashedServer, last_killed_run, restart_after
from legroom.render.recover_text import snapshot_text
from legroom.units import GIB, MIB

INIT = ProcessInfo(1, 1.0, 0, "systemd", "/sbin/init", is_python=False)
CORE = ProcessInfo(200, 6.0, 1, "VLLM::EngineCor", "VLLM::EngineCore", True, resident_bytes=2 * GIB, user="ann")
OTHER = ProcessInfo(400, 5.0, 1, "python3", "python3 train.py --api-key [masked]", True, user="bob")
CARD = GpuMemory(0, "NVIDIA H100 80GB HBM3", "u", 80 * GIB, 75 * GIB, ((200, 70 * GIB), (400, 4 * GIB), (999, GIB)))
SEGMENTS = tuple(SharedMemorySegment(f"/dev/shm/psm_{n}", 10 * 16 * MIB + 20, MIB, n, 0.0) for n in range(20))
LOG = Path(__file__).parents[2] / "docs/samples/kv-too-small.log"

GONE = 2**22 + 1
"""No PID of Linux is as high."""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def machine(monkeypatch):
    """A machine with a dead engine core, somebody else's training, and leftovers; nothing of it real."""
    seen = MachineSnapshot(1e6, {1: INIT, 200: CORE, 400: OTHER}, (CARD,), SEGMENTS)
    asked: list[object] = []

    def free(dead, journal=None, **_):
        asked.append([holder.what for holder in dead])
        return tuple(action.Freed(holder, "ended" if holder.process else "removed") for holder in dead)

    monkeypatch.setattr("legroom.cli.recover.read_machine", lambda *_: seen)
    monkeypatch.setattr("legroom.cli.recover.free_dead_holders", free)
    return asked


def test_without_a_terminal_it_is_a_dry_run(machine, capsys):
    assert main(["recover"]) == 1
    captured = capsys.readouterr()
    assert machine == []
    assert "dry run" in captured.err and "1 process and 20 segments" in captured.err
    assert "70.00 GiB" in captured.out and "PID 400" in captured.out


def test_yes_frees_the_dead_and_nothing_else(machine, capsys):
    assert main(["recover", "--yes"]) == 0
    assert machine == [["VLLM::EngineCore", *(f"psm_{n}" for n in range(20))]]
    assert "20 segments" in capsys.readouterr().out


@pytest.mark.parametrize(("answer", "freed"), [("y", 1), ("yes", 1), ("", 0), ("n", 0), ("nonsense", 0)])
def test_on_a_terminal_it_asks_first(machine, monkeypatch, answer, freed):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: answer)
    main(["recover"])
    assert len(machine) == freed


def test_one_that_may_not_be_ended_is_said_and_ends_with_1(machine, monkeypatch, capsys):
    monkeypatch.setattr(
        "legroom.cli.recover.free_dead_holders",
        lambda dead, *_, **__: tuple(action.Freed(one, "not permitted", "PID 200 belongs to ann") for one in dead),
    )
    assert main(["recover", "--yes"]) == 1
    assert "PID 200" in capsys.readouterr().out


def test_as_json_it_is_one_document(machine, capsys):
    assert main(["recover", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    states = {holder["pid"]: holder["state"] for holder in document["holders"] if holder["pid"]}
    assert states == {200: "dead", 400: "in use"}
    assert document["gpus"][0]["used_bytes"] == 75 * GIB


def test_the_reset_command_is_printed_with_its_conditions_and_not_run(machine, capsys):
    main(["recover"])
    out = capsys.readouterr().out
    assert "nvidia-smi --gpu-reset -i 0" in out


def test_without_a_driver_it_says_so():
    seen = MachineSnapshot(1e6, {1: INIT}, notes=(machine_snapshot.NO_NVML,))
    text = snapshot_text(seen, (), Style())
    assert "NVIDIA driver" in text
    assert "Nothing here is dead weight" in text


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (
            MachineSnapshot(1e6, {1: INIT, 200: replace(CORE, is_readable=False, user="bob")}),
            "1 process: 2.00 GiB of bob cannot be",
        ),
        (MachineSnapshot(1e6, {7: OTHER}, hides_others=True), "the processes of other users are hidden"),
    ],
)
def test_what_may_not_be_looked_into_is_said_and_ends_with_1(seen, said, monkeypatch, capsys):
    monkeypatch.setattr("legroom.cli.recover.read_machine", lambda: seen)
    assert main(["recover"]) == 1
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("width", [66, 80, 100])
def test_no_line_is_wider_than_the_terminal(width):
    from legroom.recover.orphans import classify_holders

    long = replace(OTHER, title="python3 " + "x" * 300)
    seen = MachineSnapshot(1e6, {1: INIT, 200: CORE, 400: long}, (CARD,), SEGMENTS)
    assert max(map(len, snapshot_text(seen, classify_holders(seen), Style(width=width)).splitlines())) <= width


# What to start instead


def test_a_command_that_does_not_fit_becomes_one_that_does():
    line = "vllm serve llama-3.1-8b --max-model-len 131072"
    restart = restart_after(CrashedServer(line, gpu="l4", vllm="0.11.0"))
    assert restart.plan and restart.plan.verdict == "fits"
    assert restart.command[:2] == ("vllm", "serve")
    assert restart.plan.settings.max_num_seqs <= max(1, int(restart.plan.memory.kv.max_concurrency))


def test_a_command_that_fits_only_gets_as_many_requests_as_always_fit():
    restart = restart_after(CrashedServer("vllm serve llama-3.1-8b --max-model-len 32768", gpu="h100"))
    assert restart.plan
    assert restart.plan.settings.max_model_len == 32768
    assert 8 <= restart.plan.settings.max_num_seqs <= restart.plan.memory.kv.max_concurrency


def test_after_a_crash_no_more_of_the_card_is_taken_than_before():
    line = "vllm serve Qwen/Qwen3-8B --max-model-len 32768"
    restart = restart_after(CrashedServer(line, gpu="rtx4090", vllm="0.32.0"))
    assert "--gpu-memory-utilization" not in restart.command
    assert restart.plan is not None and restart.plan.verdict == "fits"
    assert "; 1 request at a time" in restart.why


def test_the_log_knows_better_than_the_command():
    restart = restart_after(CrashedServer("vllm serve something-else", log=str(LOG)))
    assert restart.command[-2:] == ("--max-model-len", "40960")


def test_without_a_gpu_it_asks_for_one(monkeypatch):
    monkeypatch.setattr("legroom.live.gpu_memory.nvml_devices", lambda: ())
    with pytest.raises(LegroomError, match="which GPU"):
        restart_after(CrashedServer("vllm serve llama-3.1-8b"))


def test_the_gpu_that_the_driver_shows_is_taken(monkeypatch):
    monkeypatch.setattr("legroom.live.gpu_memory.nvml_devices", lambda: (CARD,))
    restart = restart_after(CrashedServer("vllm serve llama-3.1-8b --max-model-len 8192"))
    assert restart.plan and restart.plan.target.gpu.total_bytes == 80 * GIB


@pytest.mark.parametrize("line", ["vllm serve", "python train.py", "vllm serve llama-3.1-8b --no-such-flag", "'"])
def test_a_line_that_is_no_server_is_refused(line, machine, capsys):
    assert main(["recover", "--command", line, "--gpu", "h100"]) == 2
    assert capsys.readouterr().err.count("error:") == 1


def test_a_wrong_line_is_refused_before_anything_is_freed(machine):
    assert main(["recover", "--yes", "--command", "vllm serve llama-3.1-8b --no-such-flag", "--gpu", "h100"]) == 2
    assert machine == []


def test_a_log_without_a_failure_keeps_nothing_from_being_freed(machine, tmp_path, capsys):
    log = tmp_path / "killed.log"
    log.write_text(
        "INFO 11-15 07:00:00 [api_server.py:1] vLLM API server version 0.26.0\nApplication startup complete.\n"
    )
    assert main(["recover", "--yes", "--log", str(log)]) == 0
    assert machine and "no command" in capsys.readouterr().err


def test_the_last_run_is_remembered(home):
    (home / "runs").mkdir(parents=True)
    (home / "runs/8000.json").write_text(
        json.dumps({"pid": GONE, "command": ["vllm", "serve", "m x"], "log": "/no/log"})
    )
    (home / "runs/8000.flags.json").write_text("{}")
    (home / "runs/9000.json").write_text("half a fi")
    crashed = last_killed_run()
    assert crashed and (crashed.command, crashed.log) == ("vllm serve 'm x'", None)


def noted(home, port=8000, **said):
    """The note of a run, as `legroom run` leaves it."""
    (home / "runs").mkdir(parents=True, exist_ok=True)
    note = {"pid": GONE, "started_s": time.time(), "command": ["vllm", "serve", "llama-3.1-8b"], "env": {}} | said
    (home / f"runs/{port}.json").write_text(json.dumps(note))


def test_a_run_that_lives_needs_no_replacement(home):
    noted(home, pid=os.getpid())
    assert last_killed_run() is None
    noted(home, port=9000, command=["vllm", "serve", "dead"])
    assert (crashed := last_killed_run()) and crashed.command == "vllm serve dead"


def test_a_pid_that_another_process_has_now_is_not_the_run(home):
    noted(home, pid=os.getpid(), started_s=1.0)
    assert last_killed_run() is not None


def test_the_variables_of_the_run_stand_before_the_new_command_and_its_keys_are_not_shown(home, machine, capsys):
    given = {"CUDA_VISIBLE_DEVICES": "3", "HF_TOKEN": "hush1"}
    noted(home, env=given, command=["vllm", "serve", "llama-3.1-8b", "--max-model-len", "8192", "--api-key", "hush2"])
    main(["recover", "--gpu", "h100", "--json"])
    command = json.loads(capsys.readouterr().out)["restart"]["command"]
    assert command[:4] == ["CUDA_VISIBLE_DEVICES=3", "HF_TOKEN=YOUR_HF_TOKEN", "vllm", "serve"]
    assert "hush" not in " ".join(command)


def test_a_fix_from_the_log_keeps_the_variables_too():
    restart = restart_after(CrashedServer("OMP_NUM_THREADS=4 vllm serve llama-3.1-8b", log=str(LOG), gpu="l4"))
    assert restart.command[:3] == ("OMP_NUM_THREADS=4", "vllm", "serve")


def test_without_runs_there_is_none(home):
    assert restart_command.last_killed_run() is None
