"""What is called dead weight of a dead server, on made-up looks at a machine, and on real orphans.

NVML is stood in for by hand-made `GpuMemory` records: the machine that runs these tests may have no GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from dataclasses import replace
from multiprocessing import shared_memory

import pytest

from legroom.live.gpu_memory import GpuMemory
from legroom.recover.machine_snapshot import (
    ELSEWHERE,
    MachineSnapshot,
    ProcessInfo,
    SharedMemorySegment,
    read_machine,
    socket_peers,
    tcp_peers,
)
from legroom.recover.orphans import classify_holders, engine_part
from legroom.units import GIB, MIB

NOW = 1_000_000.0
INIT = ProcessInfo(1, 1.0, 0, "systemd", "/sbin/init", is_python=False)
SERVER = ProcessInfo(100, 5.0, 1, "vllm", "python3 /bin/vllm serve m", is_python=True, loads_vllm=True)
CORE = ProcessInfo(200, 6.0, 1, "VLLM::EngineCor", "VLLM::EngineCore", is_python=True, loads_vllm=True)
WORKER = ProcessInfo(300, 7.0, 200, "VLLM::Worker_TP", "VLLM::Worker_TP0", is_python=True, peers=frozenset({200}))
RING_BYTES = 10 * 16 * MIB + 10 * 2


def machine(*facts: ProcessInfo, **more) -> MachineSnapshot:
    return MachineSnapshot(NOW, {process.pid: process for process in (INIT, *facts)}, **more)


def states(snapshot: MachineSnapshot) -> dict[int | str, str]:
    return {
        holder.process.pid if holder.process else holder.what: holder.state for holder in classify_holders(snapshot)
    }


def ring(path="/dev/shm/psm_1", length=RING_BYTES, age_s=3600.0, **more) -> SharedMemorySegment:
    return SharedMemorySegment(path, length, 4096, 1, NOW - age_s, **more)


def test_an_adopted_engine_core_and_its_workers_that_nobody_talks_to_are_dead():
    assert states(machine(CORE, WORKER)) == {200: "dead", 300: "dead"}


def test_a_dead_worker_names_the_engine_core_to_end_first():
    assert {holder.top for holder in classify_holders(machine(CORE, WORKER))} == {200}


def test_nothing_of_a_living_server_is_dead():
    holders = states(machine(SERVER, replace(CORE, parent=100, peers=frozenset({100})), WORKER))
    assert holders == {100: "in use", 200: "in use", 300: "in use"}


def test_a_server_that_is_pid_1_of_its_container_keeps_its_engine_core():
    first = replace(SERVER, pid=1, parent=0)
    snapshot = MachineSnapshot(NOW, {1: first, 200: replace(CORE, parent=1), 300: WORKER})
    assert set(states(snapshot).values()) == {"in use"}


def test_an_adopted_engine_core_that_an_api_server_still_talks_to_is_in_use():
    worker = ProcessInfo(150, 5.5, 1, "VLLM::APIServer", "VLLM::APIServer_0", is_python=True, loads_vllm=True)
    assert states(machine(worker, replace(CORE, peers=frozenset({150}))))[200] == "in use"


def test_a_log_daemon_and_a_resource_tracker_are_no_use():
    journal = ProcessInfo(50, 1.0, 1, "systemd-journal", "/usr/lib/systemd/systemd-journald", is_python=False)
    tracker = ProcessInfo(
        60, 5.0, 1, "python3", "python3 -c from multiprocessing.resource_tracker import main;main(3)", True
    )
    assert states(machine(journal, tracker, replace(CORE, peers=frozenset({50, 60}))))[200] == "dead"


@pytest.mark.parametrize(
    "core",
    [replace(CORE, has_unseen_peer=True), replace(CORE, is_readable=False, user="bob")],
    ids=["a peer elsewhere", "not readable"],
)
def test_what_cannot_be_seen_is_not_called_dead(core):
    assert states(machine(core))[200] == "suspect"


def test_without_the_kernels_word_on_peers_nothing_is_dead():
    assert states(machine(CORE, knows_peers=False))[200] == "suspect"


def test_a_python_supervisor_as_pid_1_may_have_made_it():
    first = ProcessInfo(1, 1.0, 0, "python3", "python3 supervise.py", is_python=True)
    assert states(MachineSnapshot(NOW, {1: first, 200: CORE}))[200] == "suspect"


def test_a_program_that_only_borrows_the_name_is_not_vllm():
    assert engine_part(replace(CORE, is_python=False)) == ""


def test_actors_of_ray_are_rays_to_end():
    assert engine_part(replace(CORE, title="ray::Worker")) == ""


def test_a_server_may_call_its_processes_by_another_name_if_they_are_vllms():
    assert states(machine(replace(CORE, title="chat::EngineCore"))) == {200: "dead"}
    assert states(machine(replace(CORE, title="queue::Worker_7", loads_vllm=False))) == {}


def test_a_spawned_process_without_a_title_is_known_by_the_code_it_loads():
    title = "python3 -c from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5, pipe_handle=7)"
    assert states(machine(replace(CORE, title=title))) == {200: "dead"}
    assert states(machine(replace(CORE, title=title, loads_vllm=False))) == {}


def test_another_program_on_the_gpu_is_in_use():
    other = ProcessInfo(400, 5.0, 1, "python3", "python3 train.py", is_python=True)
    cards = (GpuMemory(0, "H100", "u", 80 * GIB, 30 * GIB, ((400, 30 * GIB), (999, GIB))),)
    holders = {holder.state: holder for holder in classify_holders(machine(other, gpus=cards))}
    assert holders["in use"].gpu_bytes == 30 * GIB
    assert holders["unseen"].what == "PID 999 on GPU 0"


def test_a_zombie_is_shown_with_the_parent_that_has_to_collect_it():
    holders = classify_holders(machine(SERVER, replace(CORE, parent=100, title="", status="zombie")))
    assert [(holder.state, "100" in holder.reason) for holder in holders if holder.process.pid == 200] == [
        ("zombie", True)
    ]


def test_a_ring_buffer_that_nobody_maps_is_dead():
    assert states(machine(segments=(ring(),))) == {"psm_1": "dead"}


def test_a_mapped_segment_is_in_use():
    holder = replace(SERVER, shared=frozenset({"/dev/shm/psm_1"}))
    assert states(machine(holder, segments=(ring(),)))["psm_1"] == "in use"


def test_a_segment_that_only_dead_weight_maps_is_dead():
    core = replace(CORE, shared=frozenset({"/dev/shm/psm_1"}))
    assert states(machine(core, segments=(ring(),)))["psm_1"] == "dead"


def test_a_young_segment_is_left_to_whoever_makes_it():
    assert states(machine(segments=(ring(age_s=2),))) == {"psm_1": "in use"}


@pytest.mark.parametrize("more", [{"sees_every_process": False}, {}], ids=["a container", "another user's"])
def test_a_segment_whose_users_may_be_hidden_is_not_called_dead(more):
    segment = ring(is_accounted=bool(more))
    assert states(machine(segments=(segment,), **more)) == {"psm_1": "suspect"}


@pytest.mark.parametrize("length", [10 * 24 * MIB + 20, 10 * 16 * MIB + 30, 6 * 4 * MIB + 12])
def test_ring_buffers_of_a_real_vllm_are_known_by_their_size(length):
    assert states(machine(segments=(ring(length=length),))) == {"psm_1": "dead"}


@pytest.mark.parametrize("length", [4096, 8 * MIB, 10 * MIB, 10 * 16 * MIB + 7, 1_000_000])
def test_shared_memory_of_other_programs_is_not_vllms(length):
    assert states(machine(segments=(ring(length=length),))) == {}


def test_the_kernel_names_the_peer_of_a_real_unix_socket():
    here, there = socket.socketpair()
    with here, there:
        peers = socket_peers()
        assert peers is not None
        inodes = [os.fstat(end.fileno()).st_ino for end in (here, there)]
        assert peers[inodes[0]] == inodes[1]


def test_a_look_finds_the_process_at_the_other_end_of_a_connection():
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(target=theirs.recv)
    child.start()
    try:
        theirs.close()
        seen = read_machine().processes
        assert child.pid in seen[os.getpid()].peers
        assert os.getpid() in seen[child.pid].peers
    finally:
        ours.send(0)
        child.join()


def test_a_look_sees_which_process_maps_a_segment():
    made = shared_memory.SharedMemory(create=True, size=4096)
    try:
        snapshot = read_machine()
        assert f"/dev/shm/{made.name}" in snapshot.processes[os.getpid()].shared
        assert f"/dev/shm/{made.name}" in {segment.path for segment in snapshot.segments}
    finally:
        made.close()
        made.unlink()


def test_established_connections_are_paired_and_others_lead_elsewhere():
    lines = [
        "0: 0100007F:1F90 0100007F:C350 01 0 0 0 0 0 11 1",
        "1: 0100007F:C350 0100007F:1F90 01 0 0 0 0 0 12 1",
        "2: 0500000A:C350 0600000A:1F90 01 0 0 0 0 0 13 1",
        "3: 0100007F:1F90 00000000:0000 0A 0 0 0 0 0 14 1",
        "4: 0000000000000000FFFF00000100007F:1F91 0000000000000000FFFF00000100007F:C351 01 0 0 0 0 0 15 1",
        "5: 0100007F:C351 0100007F:1F91 01 0 0 0 0 0 16 1",
    ]
    assert tcp_peers(lines) == {11: 12, 12: 11, 13: ELSEWHERE, 15: 16, 16: 15}


def test_a_process_whose_command_line_is_no_text_is_looked_at_like_any_other():
    words = [sys.executable.encode(), b"-c", b"print(flush=True); input()", b"na\xefve"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as strange:
        strange.stdout.readline()
        seen = read_machine().processes[strange.pid]
        strange.stdin.close()
    assert seen.title.endswith("na?ve")


def test_what_only_its_owner_may_look_into_is_said_to_be_theirs():
    holders = classify_holders(machine(replace(CORE, is_readable=False, user="bob")))
    assert [(holder.state, holder.owner) for holder in holders] == [("suspect", "bob")]


def test_a_segment_of_another_user_is_said_to_be_theirs():
    holders = classify_holders(machine(segments=(ring(is_accounted=False, owner="bob"),)))
    assert [(holder.state, holder.owner) for holder in holders] == [("suspect", "bob")]
