"""Which holders of memory are the remains of a dead vLLM server. Nothing is called dead that is not proven to be.

What a vLLM server leaves behind when its API server is killed (seen with 0.32): `VLLM::EngineCore` lives on, adopted by
init, with its `VLLM::Worker...` children, all GPU memory and its ring buffers in /dev/shm; nothing ever ends it.
Engine cores and workers are children of a Python process by construction (`multiprocessing`), so a parent that is not
Python has adopted them; ppid 1 alone proves nothing, since a container's vLLM server is PID 1 itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Literal

from legroom.records import dataclass
from legroom.recover.holders import Holdings, ProcessFact, SharedMemorySegment
from legroom.units import MIB

HolderState = Literal["dead", "suspect", "in use", "zombie", "unseen"]

_PART = re.compile(r"(?!ray::)(?P<prefix>[^:\s]+)::(?P<part>EngineCore|Worker|DPCoordinator)(_\w+)?$")
"""How vLLM titles its processes (VLLM_PROCESS_NAME_PREFIX can be any); Ray's actors are `ray::...` and Ray's to end."""
_SERVER = re.compile(r"\bvllm serve\b|vllm\.entrypoints|::APIServer|api_server")
_SPAWNED = re.compile(r"multiprocessing\.spawn\b.*spawn_main")
_TRACKER = re.compile(r"multiprocessing\.(resource|semaphore)_tracker")
_FOR_ALL = re.compile(r"systemd-journal|rsyslogd|dbus-daemon|nscd|sssd|nvidia-")
"""Daemons that any process may be connected to (a log, CUDA's MPS): that is no use of it."""
_RING_CHUNKS = (10, 6)
"""Chunks of the ring buffers between engine core and workers: a message queue has 10, that of groups of ranks 6."""
_YOUNG_S = 60.0
"""A segment is made a moment before it is mapped: one this young is left alone."""


@dataclass(frozen=True)
class Holder:
    """Something that holds memory, and what to make of it."""

    state: HolderState
    what: str
    reason: str
    process: ProcessFact | None = None
    segment: SharedMemorySegment | None = None
    gpu_bytes: int = 0
    top: int = 0
    """PID of the engine core that this belongs to; ending that one ends the rest."""
    owner: str = ""
    """Whose it is, where only they or root could tell what it is."""

    @property
    def bytes(self) -> int:
        """Memory of the host: resident, or in /dev/shm."""
        return self.segment.bytes if self.segment else self.process.resident_bytes if self.process else 0


def judge(holdings: Holdings) -> tuple[Holder, ...]:
    """Every holder worth showing, the dead first, then by how much they hold."""
    holders = [*_processes(holdings), *_unseen(holdings)]
    holders += _segments(holdings, holders)
    order = {state: rank for rank, state in enumerate(("dead", "suspect", "unseen", "zombie", "in use"))}
    return tuple(sorted(holders, key=lambda holder: (order[holder.state], -holder.gpu_bytes, -holder.bytes)))


def part_of(fact: ProcessFact) -> str:
    """`EngineCore`, `Worker` ... where the process is a part of a vLLM engine, else nothing."""
    title = _PART.match(fact.title)
    if title and fact.is_python and (title["prefix"] == "VLLM" or fact.loads_vllm):
        return title["part"]
    if _SPAWNED.search(fact.title) and fact.loads_vllm:
        return "process"  # before vLLM gave its processes titles, and where setproctitle is missing
    return ""


def _processes(holdings: Holdings) -> Iterator[Holder]:
    for fact in holdings.processes.values():
        gpu_bytes = holdings.gpu_bytes(fact.pid)
        if fact.status == "zombie":
            if "::" in fact.name or "vllm" in fact.name.lower():
                reason = f"has ended; its entry goes when its parent (PID {fact.parent}) collects it or ends"
                yield Holder("zombie", fact.name, reason, fact, gpu_bytes=gpu_bytes)
        elif part_of(fact):
            state, reason, top = _verdict(holdings, fact)
            owner = _hidden_owner(holdings, top) if state == "suspect" else ""
            yield Holder(state, fact.title, reason, fact, gpu_bytes=gpu_bytes, top=top, owner=owner)
        elif _SERVER.search(fact.title) and fact.is_python and fact.loads_vllm:
            yield _server(holdings, fact, gpu_bytes)
        elif gpu_bytes:
            yield Holder(
                "in use",
                fact.title or fact.name,
                "a living process that is not a part of vLLM",
                fact,
                gpu_bytes=gpu_bytes,
            )


def _server(holdings: Holdings, fact: ProcessFact, gpu_bytes: int) -> Holder:
    parent = holdings.processes.get(fact.parent)
    if gpu_bytes and parent is not None and not parent.is_python and not fact.peers and "::" not in fact.title:
        # Up to 0.10 a forked engine core carried the command line of its server.
        reason = "holds GPU memory, was adopted, and talks to nobody; but it looks like a server, so judge yourself"
        return Holder("suspect", fact.title, reason, fact, gpu_bytes=gpu_bytes)
    return Holder("in use", fact.title, "an API server that lives", fact, gpu_bytes=gpu_bytes)


def _verdict(holdings: Holdings, fact: ProcessFact) -> tuple[HolderState, str, int]:
    top = fact
    while (above := holdings.processes.get(top.parent)) is not None and part_of(above):
        top = above
    if above is not None and above.is_python:
        return _with_parent(holdings, top, above)
    group = holdings.tree(top.pid)
    if not holdings.knows_peers:
        return "suspect", "its server is gone, but whom it talks to cannot be asked of this system", top.pid
    if hidden := _hidden(group):
        whose = _hidden_owner(holdings, top.pid)
        return "suspect", f"its server is gone, but PID {hidden.pid} of {whose} cannot be looked into", top.pid
    inside = {member.pid for member in group}
    outside = {peer for member in group for peer in member.peers} - inside - _bystanders(holdings)
    if outside:
        named = ", ".join(_named(holdings, pid) for pid in sorted(outside)[:3])
        return "in use", f"its parent is gone, but {named} talks to it", top.pid
    if any(member.has_unseen_peer for member in group):
        return "suspect", "its server is gone, but it is connected to something that cannot be seen from here", top.pid
    adopter = f"adopted by {above.name} (PID {above.pid})" if above else "without a parent"
    which = "it is" if fact is top else f"its engine core (PID {top.pid}) is"
    return "dead", f"its API server is gone: {which} {adopter}, and no process talks to it", top.pid


def _hidden(group: Sequence[ProcessFact]) -> ProcessFact | None:
    return next((member for member in group if not member.is_readable), None)


def _hidden_owner(holdings: Holdings, top: int) -> str:
    hidden = _hidden(holdings.tree(top))
    return (hidden.user or "another user") if hidden is not None else ""


def _with_parent(holdings: Holdings, top: ProcessFact, above: ProcessFact) -> tuple[HolderState, str, int]:
    """A Python parent has most likely made it; one that adopts (a supervisor as PID 1) has no connection to it."""
    if (
        above.pid == 1
        and holdings.knows_peers
        and above.is_readable
        and above.pid not in top.peers
        and not (_SERVER.search(above.title) or above.loads_vllm)
    ):
        return "suspect", f"PID 1 ({above.name}) is its parent and does not talk to it: it may have adopted it", top.pid
    return "in use", f"belongs to {_named(holdings, above.pid)}, which lives", top.pid


def _bystanders(holdings: Holdings) -> set[int]:
    return _trackers(holdings) | {fact.pid for fact in holdings.processes.values() if _FOR_ALL.match(fact.name)}


def _trackers(holdings: Holdings) -> set[int]:
    return {fact.pid for fact in holdings.processes.values() if _TRACKER.search(fact.title)}


def _named(holdings: Holdings, pid: int) -> str:
    fact = holdings.processes.get(pid)
    return f"PID {pid} ({fact.title[:60] or fact.name})" if fact else f"PID {pid}"


def _unseen(holdings: Holdings) -> Iterator[Holder]:
    """PIDs that the driver names and this machine does not show."""
    for card in holdings.gpus:
        for pid, used in card.processes:
            if pid not in holdings.processes:
                yield Holder(
                    "unseen",
                    f"PID {pid} on GPU {card.index}",
                    "the driver names it, but no such process can be seen: another container's, or one just gone",
                    gpu_bytes=used or 0,
                )


def _segments(holdings: Holdings, judged: list[Holder]) -> Iterator[Holder]:
    users: dict[str, list[int]] = {}
    for fact in holdings.processes.values():
        for path in fact.shared:
            users.setdefault(path, []).append(fact.pid)
    dead = {holder.process.pid: holder.top for holder in judged if holder.state == "dead" and holder.process}
    dead |= dict.fromkeys(_trackers(holdings), 0)
    for segment in holdings.segments:
        made_by = _maker(segment)
        if not made_by:
            continue
        mapped_by, name = users.get(segment.path, []), PurePath(segment.path).name
        if alive := [pid for pid in mapped_by if pid not in dead]:
            yield Holder("in use", name, f"mapped by {_named(holdings, alive[0])}", segment=segment)
        elif mapped_by:
            top = next((dead[pid] for pid in mapped_by if dead[pid]), 0)
            yield Holder("dead", name, f"{made_by}; mapped by dead weight alone", segment=segment, top=top)
        else:
            yield _unmapped(holdings, segment, made_by)


def _unmapped(holdings: Holdings, segment: SharedMemorySegment, made_by: str) -> Holder:
    name, age_s = PurePath(segment.path).name, holdings.time_s - segment.modified_s
    if age_s < _YOUNG_S:
        reason = f"{made_by}; {age_s:.0f} s old, so somebody may be about to map it"
        return Holder("in use", name, reason, segment=segment)
    if not holdings.sees_every_process or not segment.is_accounted:
        reason = f"{made_by}; nobody seen from here maps it, but not every process can be seen from here"
        owner = segment.owner if not segment.is_accounted else ""
        return Holder("suspect", name, reason, segment=segment, owner=owner)
    return Holder("dead", name, f"{made_by}; no process maps it", segment=segment)


def _maker(segment: SharedMemorySegment) -> str:
    """What of vLLM made a segment; nothing for those that other programs make too (Python's semaphores, 32 bytes)."""
    name = PurePath(segment.path).name
    if name.startswith(("vllm_", "vllm-")):
        return "vLLM's by its name"
    if name.startswith("psm_") and _is_ring(segment.length):
        return "a ring buffer of vLLM's by its size"
    return ""


def _is_ring(length: int) -> bool:
    """Chunks of whole MiB, and for each a byte for the writer and one for every reader (up to 64 a machine)."""
    spare = length % MIB
    return any(
        spare % chunks == 0 and 2 <= spare // chunks <= 65 and (length - spare) // MIB % chunks == 0 and length > MIB
        for chunks in _RING_CHUNKS
    )
