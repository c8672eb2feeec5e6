"""What is added to scrapes at servers of this machine. NVML and the sockets are stood in for."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from legroom.live import gpu_memory
from legroom.live.gpu_memory import GpuMemory, LocalServers
from legroom.live.metrics.sample import Sample, ScrapeFailure
from legroom.process_table import resident_bytes
from legroom.units import GIB

HERE = "http://127.0.0.1:8000"
CARDS = (
    GpuMemory(0, "H100", "a", 80 * GIB, 70 * GIB, ((10, 69 * GIB),)),
    GpuMemory(1, "H100", "b", 80 * GIB, 5 * GIB, ((99, 4 * GIB),)),
)


class Machine:
    patch: pytest.MonkeyPatch

    def __init__(self, cards=CARDS):
        self.cards, self.now_s, self.reads, self.finds = cards, 0.0, 0, 0
        self.stopped: set[int] = set()

    def read(self):
        self.reads += 1
        return self.cards

    def find(self, port):
        self.finds += 1
        return (9, 10) if port == 8000 else ()

    def servers(self) -> LocalServers:
        def resident(pids):
            return sum(pids) * GIB

        for name, stand_in in {
            "nvml_devices": self.read,
            "server_processes": self.find,
            "time": SimpleNamespace(monotonic=lambda: self.now_s),
            "is_stopped": self.stopped.__contains__,
            "resident_bytes": resident,
        }.items():
            self.patch.setattr(gpu_memory, name, stand_in)
        return LocalServers()


@pytest.fixture(autouse=True)
def patched_machine(monkeypatch):
    Machine.patch = monkeypatch


def test_a_server_of_this_machine_gets_the_memory_that_its_processes_hold():
    look = Machine().servers().with_process_figures(Sample(1.0, HERE, ()))
    assert isinstance(look, Sample)
    assert look.memory_used_bytes == 69 * GIB


def test_a_remote_server_a_failure_and_an_unknown_port_stay_as_they_are():
    servers = Machine().servers()
    for look in (
        Sample(1.0, "http://gpu7:8000", ()),
        ScrapeFailure(1.0, HERE, "timeout", "no"),
        Sample(1.0, "http://[::1]:9", ()),
    ):
        assert servers.with_process_figures(look) is look


def test_without_a_driver_it_is_asked_once():
    machine = Machine(cards=())
    servers = machine.servers()
    for number in range(5):
        machine.now_s = 10.0 * number
        assert servers.with_process_figures(Sample(1.0, HERE, ())).memory_used_bytes is None
    assert machine.reads == 1


def test_one_reading_serves_a_round_and_processes_are_kept_for_a_minute():
    machine = Machine()
    servers = machine.servers()
    for tenth in range(300):
        machine.now_s = tenth / 10
        servers.with_process_figures(Sample(1.0, HERE, ()))
    assert machine.reads <= 16
    assert machine.finds == 1


def test_a_stopped_process_of_a_server_is_counted_with_a_driver_and_without():
    for machine in (Machine(), Machine(cards=())):
        servers = machine.servers()
        machine.stopped |= {10, 11}
        assert servers.with_process_figures(Sample(1.0, HERE, ())).stopped_engines == 1


def test_a_server_whose_processes_all_run_keeps_what_its_guard_says():
    servers = Machine(cards=()).servers()
    assert servers.with_process_figures(Sample(1.0, HERE, (), stopped_engines=2)).stopped_engines == 2


def test_a_server_without_a_plugin_gets_the_host_memory_of_what_is_below_its_api_server():
    servers = Machine(cards=()).servers()
    assert servers.with_process_figures(Sample(1.0, HERE, ())).host_rss_bytes == 10 * GIB
    assert servers.with_process_figures(Sample(1.0, HERE, (), host_rss_bytes=3 * GIB)).host_rss_bytes == 3 * GIB


def test_the_host_memory_of_a_process_is_what_is_resident_and_an_ended_one_counts_nothing():
    own_bytes = resident_bytes((os.getpid(), 1 << 22))
    assert own_bytes is not None
    assert own_bytes > 1 << 20
    assert resident_bytes((1 << 22,)) is None


def test_after_a_failed_look_the_processes_are_looked_for_again():
    machine = Machine()
    servers = machine.servers()
    for look in (Sample(1.0, HERE, ()), ScrapeFailure(2.0, HERE, "refused", "no"), Sample(3.0, HERE, ())):
        servers.with_process_figures(look)
    assert machine.finds == 2
