"""The kernel's account of memory: a real cgroup where one can be made, beside it files as the kernel shows them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_cgroup import LIMIT_BYTES, limited_cgroup

from legroom.live.kernel_memory import Cgroup, KernelAccount, kernel_kill

EATER = """
import os, pathlib, sys
pathlib.Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
print("inside", flush=True)
sys.stdin.readline()
bytearray(1 << 30)
"""


@pytest.fixture
def own_cgroup() -> Iterator[Path]:
    with limited_cgroup() as folder:
        yield folder


@pytest.fixture
def eater(own_cgroup) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", EATER, own_cgroup], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


def test_a_process_that_a_real_cgroup_kills_is_named_with_limit_and_peak(eater):
    before = KernelAccount.of(eater.pid)
    assert kernel_kill(before) is None
    eater.communicate("go\n")
    kill = kernel_kill(before)
    assert (eater.returncode, kill is not None) == (-9, True)
    assert kill.limit_bytes == LIMIT_BYTES
    assert kill.peak_bytes is None or kill.peak_bytes > 0.9 * LIMIT_BYTES


def test_a_process_that_somebody_else_kills_is_not_the_kernels(eater):
    before = KernelAccount.of(eater.pid)
    eater.kill()
    eater.wait()
    assert kernel_kill(before) is None


class Machine:
    """Files as a kernel with version 2 shows them in a container: not a real cgroup."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.group, self.kmsg = folder / "proc", folder / "cgroup/pod/server", folder / "kmsg"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "7").mkdir()
        self.group.mkdir(parents=True)
        (self.proc / "7/cgroup").write_text("0::/pod/server\n")
        (self.proc / "self/mountinfo").write_text(f"31 24 0:27 / {folder}/cgroup rw - cgroup2 cgroup rw\n")
        (self.proc / "meminfo").write_text("MemTotal:       65536000 kB\n")
        (self.group / "memory.current").write_text("1\n")
        (self.group / "memory.max").write_text("max\n")
        (self.group.parent / "memory.max").write_text(f"{8 << 30}\n")
        (self.group.parent / "memory.peak").write_text(f"{8 << 30}\n")
        self.kills(0)

    def kills(self, count: int) -> None:
        (self.group / "memory.events").write_text(f"low 0\nhigh 0\nmax 12\noom {count}\noom_kill {count}\n")
        (self.proc / "vmstat").write_text(f"nr_free_pages 5\noom_kill {count}\n")

    def account(self) -> KernelAccount:
        return KernelAccount.of(7, self.proc)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_tightest_limit_counts_also_where_it_is_set_further_up(machine):
    before = machine.account()
    machine.kills(1)
    kill = kernel_kill(before, machine.proc, machine.kmsg)
    assert (kill.limit_bytes, kill.peak_bytes) == (8 << 30, 8 << 30)
    assert kill.limit_file == str(machine.group.parent / "memory.max")


def test_a_machine_that_is_full_is_not_the_containers_limit(machine):
    before = machine.account()
    machine.kills(1)
    (machine.group.parent / "memory.peak").write_text(f"{2 << 30}\n")
    kill = kernel_kill(before, machine.proc, machine.kmsg)
    assert (kill.limit_bytes, kill.machine_bytes) == (None, 65536000 * 1024)


def test_a_kernel_that_keeps_no_peak_still_names_the_limit(machine):
    (machine.group.parent / "memory.peak").unlink()  # before 5.19
    before = machine.account()
    machine.kills(1)
    kill = kernel_kill(before, machine.proc, machine.kmsg)
    assert (kill.limit_bytes, kill.peak_bytes) == (8 << 30, None)


def test_in_a_cgroup_namespace_the_servers_own_folder_is_the_top(machine):
    (machine.proc / "7/cgroup").write_text("0::/\n")
    (machine.proc / "self/mountinfo").write_text(f"31 24 0:27 / {machine.group} rw - cgroup2 cgroup rw\n")
    (machine.group / "memory.max").write_text(f"{2 << 30}\n")
    (machine.group / "memory.peak").write_text(f"{2 << 30}\n")
    before = machine.account()
    machine.kills(1)
    kill = kernel_kill(before, machine.proc, machine.kmsg)
    assert (kill.limit_bytes, kill.limit_file) == (2 << 30, str(machine.group / "memory.max"))


def test_the_kernels_log_says_who_was_killed_and_what_it_held(machine):
    before = machine.account()
    machine.kills(1)
    line = "Memory cgroup out of memory: Killed process 41 (VLLM::EngineCor) total-vm:9kB, anon-rss:2097152kB, file-rss"
    stamp = int((before.time_s + 1) * 1e6)
    machine.kmsg.write_text(f"3,812,{stamp},-;{line}\n")
    kill = kernel_kill(before, machine.proc, machine.kmsg)
    assert (kill.victim, kill.victim_bytes) == ("VLLM::EngineCor", 2 << 30)


def test_a_line_of_the_kernels_log_from_before_is_of_another_kill(machine):
    before = machine.account()
    machine.kills(1)
    machine.kmsg.write_text("3,812,5,-;Out of memory: Killed process 41 (other) total-vm:9kB, anon-rss:2097152kB\n")
    assert kernel_kill(before, machine.proc, machine.kmsg).victim == ""


def test_without_cgroups_the_machines_own_counter_tells(machine):
    (machine.proc / "self/mountinfo").write_text("")
    before = machine.account()
    assert before.cgroup is None
    machine.kills(1)
    assert kernel_kill(before, machine.proc, machine.kmsg).limit_bytes is None


def test_a_system_that_shows_nothing_says_nothing(tmp_path):
    nothing = tmp_path / "proc"
    assert kernel_kill(KernelAccount.of(7, nothing), nothing, tmp_path / "kmsg") is None


def test_this_process_has_a_place_in_a_real_hierarchy():
    cgroup = Cgroup.of(os.getpid())
    if cgroup is None:
        pytest.skip("no memory cgroup is shown here")
    assert Path(cgroup.folder).is_dir()
