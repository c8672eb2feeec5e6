"""GPU memory of servers on this machine. NVML and the table of sockets are stood in for: there may be no GPU here."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from legroom.live.local_memory import LocalMemory, port_of, server_processes
from legroom.live.metrics.sample import Sample, ScrapeFailure
from legroom.live.nvml import GpuMemory
from legroom.units import GIB

HERE = "http://127.0.0.1:8000"
CARDS = (
    GpuMemory(0, "H100", "a", 80 * GIB, 70 * GIB, ((10, 69 * GIB),)),
    GpuMemory(1, "H100", "b", 80 * GIB, 5 * GIB, ((99, 4 * GIB),)),
)


class Machine:
    def __init__(self, cards=CARDS):
        self.cards, self.now_s, self.reads, self.finds = cards, 0.0, 0, 0

    def read(self):
        self.reads += 1
        return self.cards

    def find(self, port):
        self.finds += 1
        return (9, 10) if port == 8000 else ()

    def memory(self) -> LocalMemory:
        return LocalMemory(self.read, self.find, lambda: self.now_s)


def test_a_server_of_this_machine_gets_the_memory_that_its_processes_hold():
    look = Machine().memory().added(Sample(1.0, HERE, ()))
    assert isinstance(look, Sample)
    assert look.memory_used_bytes == 69 * GIB


def test_a_remote_server_a_failure_and_an_unknown_port_stay_as_they_are():
    memory = Machine().memory()
    for look in (
        Sample(1.0, "http://gpu7:8000", ()),
        ScrapeFailure(1.0, HERE, "timeout", "no"),
        Sample(1.0, "http://[::1]:9", ()),
    ):
        assert memory.added(look) is look


def test_without_a_driver_it_is_asked_once():
    machine = Machine(cards=())
    memory = machine.memory()
    for number in range(5):
        machine.now_s = 10.0 * number
        assert memory.added(Sample(1.0, HERE, ())).memory_used_bytes is None
    assert machine.reads == 1


def test_one_reading_serves_a_round_and_processes_are_kept_for_a_minute():
    machine = Machine()
    memory = machine.memory()
    for tenth in range(300):
        machine.now_s = tenth / 10
        memory.added(Sample(1.0, HERE, ()))
    assert machine.reads <= 16
    assert machine.finds == 1


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
