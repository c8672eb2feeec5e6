"""NVML, with and without a driver."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from legroom.live import nvml


class NVMLError(Exception):
    pass


def fake(**changes: Any) -> SimpleNamespace:
    def refuse(*_: Any) -> None:
        raise NVMLError

    def device(index: int) -> int:
        return refuse() if index == 1 else index  # type: ignore[return-value]

    made = {
        "NVMLError": NVMLError, "nvmlInit": lambda: None, "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 3, "nvmlDeviceGetHandleByIndex": device,
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=80, used=30),
        "nvmlDeviceGetName": lambda _: b"A card", "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=100 + handle, usedGpuMemory=None)],
    }  # fmt: skip
    return SimpleNamespace(**(made | changes))


def test_without_a_driver_there_are_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise NVMLError

    monkeypatch.setitem(sys.modules, "pynvml", fake(nvmlInit=no_driver))
    assert nvml.devices() == ()


def test_a_device_that_cannot_be_asked_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake())
    gpus = nvml.devices()
    assert [gpu.index for gpu in gpus] == [0, 2]
    assert gpus[0] == nvml.GpuMemory(0, "A card", "GPU-0", 80, 30, ((100, 0),))


def test_a_servers_memory_is_that_of_the_gpus_its_processes_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake())
    assert nvml.used_by(frozenset({102, 7})) == 30
    assert nvml.used_by(frozenset({7})) is None


def shared(*processes: tuple[int, int], used: int = 70) -> tuple[nvml.GpuMemory, ...]:
    return (nvml.GpuMemory(0, "A card", "GPU-0", 80, used, processes),)


def test_a_neighbours_memory_is_not_the_servers() -> None:
    assert nvml.held_by(frozenset({10}), shared((10, 40), (20, 5))) == 40
    assert nvml.held_by(frozenset({10}), shared((10, 40), (20, 25))) == 40


def test_where_the_driver_does_not_say_a_gpu_of_ones_own_counts_whole_and_a_shared_one_not_at_all() -> None:
    assert nvml.held_by(frozenset({10}), shared((10, 0))) == 70
    assert nvml.held_by(frozenset({10}), shared((10, 0), (20, 0))) is None
    assert nvml.held_by(frozenset({7}), shared((10, 40))) is None
