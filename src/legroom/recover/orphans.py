"""Decides which memory holders belong to a dead vLLM server; a holder is dead only where that is proven.

When the API server of vLLM is killed (0.32), `VLLM::EngineCore` is adopted by init and keeps its `VLLM::Worker...`
children, all GPU memory and its ring buffers in /dev/shm. Engine cores and workers are started by a Python process, so
a parent that is not Python has adopted them. A parent PID of 1 alone proves nothing: in a container it is the server.
"""

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Literal

from legroom.records import dataclass
from legroom.recover.machine_snapshot import MachineSnapshot, ProcessInfo, SharedMemorySegment
from legroom.units import MIB

HolderState = Literal["dead", "suspect", "in use", "zombie", "unseen"]

_PART = re.compile(r"(?!ray::)(?P<prefix>[^:\s]+)::(?P<part>EngineCore|Worker|DPCoordinator)(_\w+)?$")
"""Process titles of vLLM with any VLLM_PROCESS_NAME_PREFIX; Ray ends its own actors, `ray::...`."""
_SERVER = re.compile(r"\bvllm serve\b|vllm\.entrypoints|::APIServer|api_server")
_SPAWNED = re.compile(r"multiprocessing\.spawn\b.*spawn_main")
_TRACKER = re.compile(r"multiprocessing\.(resource|semaphore)_tracker")
_SYSTEM_DAEMONS = re.compile(r"systemd-journal|rsyslogd|dbus-daemon|nscd|sssd|nvidia-")
"""Daemons that any process is connected to (logging, CUDA MPS); a connection to them is no use."""
_RING_CHUNKS = (10, 6)  # max_chunks of vLLM's ShmRingBuffer: 10 in a MessageQueue, 6 in a group of ranks.
_MIN_SEGMENT_AGE_S = 60.0  # A segment is created shortly before it is mapped, so younger ones are left alone.


@dataclass(frozen=True)
class Holder:
    """A process or segment that holds memory, with its state and the reason for it."""

    state: HolderState
    what: str
    reason: str
    process: ProcessInfo | None = None
    segment: SharedMemorySegment | None = None
    gpu_bytes: int = 0
    top: int = 0
    """PID of its engine core, which ends its workers when it ends."""
    owner: str = ""
    """The user it belongs to, where we may not read it."""

    @property
    def bytes(self) -> int:
        """Host memory in bytes: a process's resident memory, or a segment's file."""
        return self.segment.bytes if self.segment else self.process.resident_bytes if self.process else 0


def classify_holders(snapshot: MachineSnapshot) -> tuple[Holder, ...]:
    """What holds memory of vLLM or on a GPU, by state (dead, suspect, unseen in /proc, zombie, in use), then size."""
    holders = [*_process_holders(snapshot), *_unseen_holders(snapshot)]
    holders += _segment_holders(snapshot, holders)
    order = {state: rank for rank, state in enumerate(("dead", "suspect", "unseen", "zombie", "in use"))}
    return tuple(sorted(holders, key=lambda holder: (order[holder.state], -holder.gpu_bytes, -holder.bytes)))


def engine_part(process: ProcessInfo) -> str:
    """The part of vLLM that a process is: `EngineCore`, `Worker`, `DPCoordinator`, `process` if unclear, else empty."""
    title = _PART.match(process.title)
    if title and process.is_python and (title["prefix"] == "VLLM" or process.loads_vllm):
        return title["part"]
    if _SPAWNED.search(process.title) and process.loads_vllm:
        return "process"  # older releases, and without setproctitle
    return ""


def _process_holders(snapshot: MachineSnapshot) -> Iterator[Holder]:
    """vLLM's zombies, engine processes and API servers, and every other process with GPU memory."""
    for process in snapshot.processes.values():
        gpu_bytes = snapshot.gpu_bytes(process.pid)
        if process.status == "zombie":
            if "::" in process.name or "vllm" in process.name.lower():
                reason = f"has ended; its entry goes when its parent (PID {process.parent}) collects it or ends"
                yield Holder("zombie", process.name, reason, process, gpu_bytes=gpu_bytes)
        elif engine_part(process):
            state, reason, top = _engine_state(snapshot, process)
            hidden = _unreadable_member(snapshot, top) if state == "suspect" else None
            owner = (hidden.user or "another user") if hidden else ""
            yield Holder(state, process.title, reason, process, gpu_bytes=gpu_bytes, top=top, owner=owner)
        elif _SERVER.search(process.title) and process.is_python and process.loads_vllm:
            yield _server_holder(snapshot, process, gpu_bytes)
        elif gpu_bytes:
            reason = "a living process that is not a part of vLLM"
            yield Holder("in use", process.title or process.name, reason, process, gpu_bytes=gpu_bytes)


def _server_holder(snapshot: MachineSnapshot, process: ProcessInfo, gpu_bytes: int) -> Holder:
    """The holder of an API server: in use, or suspect where it may be an engine core, forked, that lost its server."""
    parent = snapshot.processes.get(process.parent)
    if gpu_bytes and parent is not None and not parent.is_python and not process.peers and "::" not in process.title:
        # Up to 0.10 a forked engine core had the command line of its server.
        reason = "holds GPU memory, was adopted, and talks to nobody; but it looks like a server, so judge yourself"
        return Holder("suspect", process.title, reason, process, gpu_bytes=gpu_bytes)
    return Holder("in use", process.title, "an API server that lives", process, gpu_bytes=gpu_bytes)


def _engine_state(snapshot: MachineSnapshot, process: ProcessInfo) -> tuple[HolderState, str, int]:
    """(State of an engine process, the reason, PID of the topmost engine process above it or itself)."""
    top = process
    while (above := snapshot.processes.get(top.parent)) is not None and engine_part(above):
        top = above
    if above is not None and above.is_python:
        is_apart = snapshot.knows_peers and above.is_readable and above.pid not in top.peers
        if above.pid == 1 and is_apart and not (_SERVER.search(above.title) or above.loads_vllm):
            why = f"PID 1 ({above.name}) is its parent and does not talk to it: it may have adopted it"
            return "suspect", why, top.pid
        return "in use", f"belongs to {_process_name(snapshot, above.pid)}, which lives", top.pid
    group = snapshot.tree(top.pid)
    if not snapshot.knows_peers:
        return "suspect", "its server is gone, but whom it talks to cannot be asked of this system", top.pid
    if hidden := _unreadable_member(snapshot, top.pid):
        whose = hidden.user or "another user"
        return "suspect", f"its server is gone, but PID {hidden.pid} of {whose} cannot be looked into", top.pid
    inside = {member.pid for member in group}
    daemons = {process.pid for process in snapshot.processes.values() if _SYSTEM_DAEMONS.match(process.name)}
    outside = {peer for member in group for peer in member.peers} - inside - daemons - _resource_tracker_pids(snapshot)
    if outside:
        named = ", ".join(_process_name(snapshot, pid) for pid in sorted(outside)[:3])
        return "in use", f"its parent is gone, but {named} talks to it", top.pid
    if any(member.has_unseen_peer for member in group):
        return "suspect", "its server is gone, but it is connected to something that cannot be seen from here", top.pid
    adopter = f"adopted by {above.name} (PID {above.pid})" if above else "without a parent"
    which = "it is" if process is top else f"its engine core (PID {top.pid}) is"
    return "dead", f"its API server is gone: {which} {adopter}, and no process talks to it", top.pid


def _unreadable_member(snapshot: MachineSnapshot, top: int) -> ProcessInfo | None:
    """The first of process `top` and its descendants that cannot be inspected; None where all can."""
    return next((member for member in snapshot.tree(top) if not member.is_readable), None)


def _resource_tracker_pids(snapshot: MachineSnapshot) -> set[int]:
    """PIDs of Python's resource trackers, which remove leftover shared memory."""
    return {process.pid for process in snapshot.processes.values() if _TRACKER.search(process.title)}


def _process_name(snapshot: MachineSnapshot, pid: int) -> str:
    """`PID 42 (title)` for a message; the PID alone where the process is gone."""
    process = snapshot.processes.get(pid)
    return f"PID {pid} ({process.title[:60] or process.name})" if process else f"PID {pid}"


def _unseen_holders(snapshot: MachineSnapshot) -> Iterator[Holder]:
    """A holder for each PID that the GPU driver lists and /proc does not show."""
    reason = "the driver names it, but no such process can be seen: another container's, or one just gone"
    for card in snapshot.gpus:
        for pid, used in card.processes:
            if pid not in snapshot.processes:
                yield Holder("unseen", f"PID {pid} on GPU {card.index}", reason, gpu_bytes=used or 0)


def _segment_holders(snapshot: MachineSnapshot, holders: list[Holder]) -> Iterator[Holder]:
    """A holder for each /dev/shm segment of vLLM: in use or dead like the processes that map it, else by age."""
    users: dict[str, list[int]] = {}
    for process in snapshot.processes.values():
        for path in process.shared:
            users.setdefault(path, []).append(process.pid)
    dead = {holder.process.pid: holder.top for holder in holders if holder.state == "dead" and holder.process}
    dead |= dict.fromkeys(_resource_tracker_pids(snapshot), 0)
    for segment in snapshot.segments:
        origin = _vllm_origin(segment)
        if not origin:
            continue
        mapped_by, name = users.get(segment.path, []), PurePath(segment.path).name
        if alive := [pid for pid in mapped_by if pid not in dead]:
            yield Holder("in use", name, f"mapped by {_process_name(snapshot, alive[0])}", segment=segment)
        elif mapped_by:
            top = next((dead[pid] for pid in mapped_by if dead[pid]), 0)
            yield Holder("dead", name, f"{origin}; mapped by dead weight alone", segment=segment, top=top)
        else:
            yield _unmapped_holder(snapshot, segment, origin)


def _unmapped_holder(snapshot: MachineSnapshot, segment: SharedMemorySegment, origin: str) -> Holder:
    """A segment that no visible process maps: in use if young, suspect if processes are hidden, else dead."""
    name, age_s = PurePath(segment.path).name, snapshot.time_s - segment.modified_s
    if age_s < _MIN_SEGMENT_AGE_S:
        reason = f"{origin}; {age_s:.0f} s old, so somebody may be about to map it"
        return Holder("in use", name, reason, segment=segment)
    if not snapshot.sees_every_process or not segment.is_accounted:
        reason = f"{origin}; nobody seen from here maps it, but not every process can be seen from here"
        owner = segment.owner if not segment.is_accounted else ""
        return Holder("suspect", name, reason, segment=segment, owner=owner)
    return Holder("dead", name, f"{origin}; no process maps it", segment=segment)


def _vllm_origin(segment: SharedMemorySegment) -> str:
    """Why a segment is certainly vLLM's, in words; empty where another program may have created it."""
    name = PurePath(segment.path).name
    if name.startswith(("vllm_", "vllm-")):
        return "vLLM's by its name"
    # A ShmRingBuffer is chunks of whole MiB, each with 2 to 65 bytes of flags.
    whole_mib, spare = divmod(segment.length, MIB)
    possible = (chunks for chunks in _RING_CHUNKS if spare % chunks == 0 and whole_mib % chunks == 0)
    is_ring_buffer = segment.length > MIB and any(2 <= spare // chunks <= 65 for chunks in possible)
    return "a ring buffer of vLLM's by its size" if name.startswith("psm_") and is_ring_buffer else ""
