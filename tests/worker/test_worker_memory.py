"""Memory from inside vLLM's workers: stand-ins for torch, vLLM and NVML, because none of them is here."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from legroom.live import gpu_memory
from legroom.worker import plugin, telemetry, worker_memory
from legroom.worker.page import WorkerCollector
from legroom.worker.recorder import BlackBoxRecorder
from legroom.worker.telemetry import TelemetryFolder
from legroom.worker.worker_memory import WorkerMemory

UUID = "5c3d8f4e-0000-0000-0000-000000000001"


def in_worker(monkeypatch, rank=0, cuda=None):
    monkeypatch.setitem(
        sys.modules, "vllm.distributed.parallel_state", SimpleNamespace(_WORLD=SimpleNamespace(rank=rank))
    )
    torch = SimpleNamespace(cuda=cuda or SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", torch)


def cards(*reserved, allocated=0):
    """A torch.cuda that sees these cards and holds that much of each."""
    counts = [{"reserved_bytes.all.current": size, "allocated_bytes.all.current": allocated} for size in reserved]
    return SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: len(reserved),
        memory_stats=lambda device: counts[device],
        get_device_properties=lambda device: SimpleNamespace(uuid=f"{UUID[:-1]}{device}"),
    )


def test_a_process_that_is_no_worker_has_nothing_to_say(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", SimpleNamespace(_WORLD=None))
    assert worker_memory.read_worker_memory() == ()


def test_a_worker_without_a_gpu_tells_what_it_holds_of_the_host(monkeypatch):
    in_worker(monkeypatch, rank=3)
    (memory,) = worker_memory.read_worker_memory()
    assert (memory.rank, memory.gpu, memory.reserved_bytes) == (3, "cpu", None)
    assert memory.used_bytes and memory.used_bytes < psutil.virtual_memory().total


def test_a_worker_tells_of_the_card_it_holds_memory_of(monkeypatch):
    in_worker(monkeypatch, rank=1, cuda=cards(0, 5000, allocated=4000))
    seen = (
        gpu_memory.GpuMemory(6, "a", f"GPU-{UUID[:-1]}0", 9999, 1),
        gpu_memory.GpuMemory(7, "a", f"GPU-{UUID}", 9999, 6000),
    )
    monkeypatch.setattr(gpu_memory, "nvml_devices", lambda: seen)
    (memory,) = worker_memory.read_worker_memory()
    assert memory == WorkerMemory(1, "7", 6000, 5000, 4000, host_rss_bytes=memory.host_rss_bytes)


def test_without_nvml_the_allocator_still_speaks(monkeypatch):
    in_worker(monkeypatch, cuda=cards(5000, allocated=4000))
    monkeypatch.setattr(gpu_memory, "nvml_devices", tuple)
    (memory,) = worker_memory.read_worker_memory()
    assert memory == WorkerMemory(0, "0", None, 5000, 4000, host_rss_bytes=memory.host_rss_bytes)


def shown(folder):
    registry = CollectorRegistry()
    registry.register(WorkerCollector(folder.read))
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_what_workers_write_is_on_the_page_with_one_row_a_card(tmp_path):
    TelemetryFolder(tmp_path).write((WorkerMemory(0, "0", 6000, 5000, 4000), WorkerMemory(1, "1", 7000)))
    assert shown(TelemetryFolder(tmp_path)) == [
        'legroom_worker_used_bytes{gpu="0",rank="0"} 6000.0',
        'legroom_worker_used_bytes{gpu="1",rank="1"} 7000.0',
        'legroom_worker_reserved_bytes{gpu="0",rank="0"} 5000.0',
        'legroom_worker_allocated_bytes{gpu="0",rank="0"} 4000.0',
    ]


def test_engines_that_count_their_ranks_alike_are_added_up(tmp_path):
    TelemetryFolder(tmp_path).write((WorkerMemory(0, "cpu", 6000), WorkerMemory(0, "cpu", 1000)))
    assert shown(TelemetryFolder(tmp_path)) == ['legroom_worker_used_bytes{gpu="cpu",rank="0"} 7000.0']


def test_the_dead_the_late_and_the_broken_are_left_out(tmp_path):
    folder = TelemetryFolder(tmp_path)
    folder.write((WorkerMemory(0, "0", 6000),))
    own = tmp_path / f"{os.getpid()}.json"
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / f"{gone.pid}.json").write_text(own.read_text())
    (tmp_path / "1.json").write_text("[{")
    assert folder.read(30) == (WorkerMemory(0, "0", 6000),)
    long_ago = time.time() - 60
    os.utime(own, (long_ago, long_ago))
    assert folder.read(30) == ()


def test_a_removed_folder_ends_the_reports(tmp_path, monkeypatch):
    in_worker(monkeypatch)
    folder = TelemetryFolder(tmp_path / "gone")
    telemetry.report_until_removed(folder, BlackBoxRecorder(), every_s=0)
    assert not folder.path.exists()


def test_folders_of_killed_servers_are_removed_and_others_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(telemetry.tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen(["true"])
    gone.wait()
    old, other = tmp_path / f"{telemetry.PREFIX}{gone.pid}-x", tmp_path / f"{telemetry.PREFIX}{os.getppid()}-y"
    old.mkdir()
    other.mkdir()
    new = TelemetryFolder.create()
    assert set(tmp_path.iterdir()) == {other, new.path}
    assert new.path.stat().st_mode & 0o077 == 0


def test_vllm_finds_the_plugin_by_its_entry_point():
    (ours,) = (point for point in entry_points(group="vllm.general_plugins") if point.name.startswith("legroom"))
    assert ours.load() is plugin.register


@pytest.mark.parametrize("value", [None, "", "0", "off"])
def test_nothing_happens_unless_it_is_asked_for(monkeypatch, value):
    if value is None:
        monkeypatch.delenv(plugin.SWITCH, raising=False)
    else:
        monkeypatch.setenv(plugin.SWITCH, value)
    monkeypatch.setattr(telemetry, "start", lambda: pytest.fail("joined"))
    plugin.register()


def test_a_plugin_that_fails_does_not_stop_the_server(monkeypatch, caplog):
    def fail():
        raise OSError("no space left")

    monkeypatch.setenv(plugin.SWITCH, "1")
    monkeypatch.setattr(telemetry, "start", fail)
    plugin.register()
    assert "no space left" in caplog.text


SERVER = """
import os, sys, time, types
from legroom.worker import plugin
plugin.register()
import prometheus_client
read, write = os.pipe()
if os.fork() == 0:  # an engine that is forked: nobody calls the plugin again
    world = types.SimpleNamespace(rank=4)
    sys.modules["vllm.distributed.parallel_state"] = types.SimpleNamespace(_WORLD=world)
    os.close(write)
    os.read(read, 1)
    os._exit(0)
while b'rank="4"' not in prometheus_client.generate_latest():
    time.sleep(0.05)
print(os.environ["LEGROOM_WORKER_BOARD"])
os.close(write)
os.wait()
"""


def test_a_forked_worker_reports_and_nothing_is_left_behind(tmp_path):
    quick = "import legroom.worker.telemetry as t; t.report_until_removed.__defaults__ = (0.05,)\n"
    env = os.environ | {plugin.SWITCH: "1", "TMPDIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", quick + SERVER], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert Path(run.stdout.strip()).parent == tmp_path
    assert list(tmp_path.iterdir()) == []
