"""GPU memory of this machine and its servers. NVML and the sockets are stood in for: there may be no GPU here."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from legroom.live.gpu_memory import GpuMemory, bytes_held_by, bytes_on_gpus_of, nvml_devices, server_processes
from legroom.live.metrics.endpoint import port_of
from legroom.units import GIB

CARDS = (
    GpuMemory(0, "H100", "a", 80 * GIB, 70 * GIB, ((10, 69 * GIB),)),
    GpuMemory(1, "H100", "b", 80 * GIB, 5 * GIB, ((99, 4 * GIB),)),
)


def test_the_process_behind_a_port_is_found():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert os.getpid() in server_processes(server.getsockname()[1])
    assert server_processes(1) == ()


def test_the_port_of_an_address():
    assert [port_of(text) for text in ("host:81", "http://h", "https://h", "http://[::1]:9/v1")] == [81, 80, 443, 9]


def test_one_of_several_api_servers_leads_to_the_engines_beside_it():
    # A title stands over the whole command line: here it is the last word of it.
    api = (
        "import socket; one = socket.create_server(('127.0.0.1', 0)); print(one.getsockname()[1], flush=True); input()"
    )
    code = (
        "import subprocess, sys\n"
        "held = lambda *words: subprocess.Popen([sys.executable, '-c', *words], stdin=subprocess.PIPE)\n"
        "engine = held('input()', 'VLLM::EngineCore'); print(engine.pid, flush=True)\n"
        "api = held(sys.argv[1], 'VLLM::APIServer_0'); api.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code, api], stdout=subprocess.PIPE, text=True) as server:
        try:
            engine, port = int(server.stdout.readline()), int(server.stdout.readline())
            assert {server.pid, engine} < set(server_processes(port))
        finally:
            server.kill()  # the others read the end of what they wait for


# NVML, with and without a driver


class NVMLError(Exception):
    pass


def fake(**changes: Any) -> SimpleNamespace:
    def refuse(*_: Any) -> None:
        raise NVMLError

    def device(index: int) -> int:
        return refuse() if index == 1 else index  # type: ignore[return-value]

    made = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlDeviceGetHandleByIndex": device,
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=80, used=30),
        "nvmlDeviceGetName": lambda _: b"A card",
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=100 + handle, usedGpuMemory=None)],
    }
    return SimpleNamespace(**(made | changes))


def test_without_a_driver_there_are_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise NVMLError

    monkeypatch.setitem(sys.modules, "pynvml", fake(nvmlInit=no_driver))
    assert nvml_devices() == ()


def test_a_device_that_cannot_be_asked_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake())
    gpus = nvml_devices()
    assert [gpu.index for gpu in gpus] == [0, 2]
    assert gpus[0] == GpuMemory(0, "A card", "GPU-0", 80, 30, ((100, 0),))


def test_a_card_that_is_cut_is_its_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(handle: int) -> tuple[int, int]:
        return (1, 1) if handle == 0 else (0, 0)

    def part(card: int, at: int) -> int:
        if at == 2:
            raise NVMLError
        return 10 + at

    slices = {
        "nvmlDeviceGetMigMode": cut,
        "nvmlDeviceGetMaxMigDeviceCount": lambda _: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": lambda card, at: part(card, min(at, 2)),
        "nvmlDeviceGetUUID": lambda handle: f"MIG-{handle}" if handle >= 10 else f"GPU-{handle}",
    }
    monkeypatch.setitem(sys.modules, "pynvml", fake(**slices))
    assert [(gpu.index, gpu.uuid) for gpu in nvml_devices()] == [(0, "MIG-10"), (0, "MIG-11"), (2, "GPU-2")]


def test_a_servers_memory_is_that_of_the_gpus_its_processes_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake())
    assert bytes_on_gpus_of(frozenset({102, 7})) == 30
    assert bytes_on_gpus_of(frozenset({7})) is None


def shared(*processes: tuple[int, int], used: int = 70) -> tuple[GpuMemory, ...]:
    return (GpuMemory(0, "A card", "GPU-0", 80, used, processes),)


def test_a_neighbours_memory_is_not_the_servers() -> None:
    assert bytes_held_by(frozenset({10}), shared((10, 40), (20, 5))) == 40
    assert bytes_held_by(frozenset({10}), shared((10, 40), (20, 25))) == 40


def test_where_the_driver_does_not_say_a_gpu_of_ones_own_counts_whole_and_a_shared_one_not_at_all() -> None:
    assert bytes_held_by(frozenset({10}), shared((10, 0))) == 70
    assert bytes_held_by(frozenset({10}), shared((10, 0), (20, 0))) is None
    assert bytes_held_by(frozenset({7}), shared((10, 40))) is None
