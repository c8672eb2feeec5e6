"""A server that the kernel killed for want of host memory: what it says, and the flag or the limit that cures it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from legroom.diagnosis.finding import Finding, Fix
from legroom.errors import LegroomError
from legroom.facts.flags import flags_of
from legroom.live.host_memory import KernelKill
from legroom.memory.host_needs import LEAST_PROCESS_BYTES, HostShare, whole_gib
from legroom.planning.machine import Machine, make_plan
from legroom.records import dataclass
from legroom.run.expectation import Gpus, cpu_pool_bytes
from legroom.run.server_command import ServerCommand
from legroom.units import GIB, MIB, gib
from legroom.vllm.args import other_value

if TYPE_CHECKING:
    from legroom.planning.plan import Plan

CAUSE, ENTRY = "host_ram_oom", "LR501"
_CERTAIN = 0.97
_CPU_PROCESSES = 3
"""API server, engine core and worker of the CPU build."""
_SPARE = 0.05
"""Of a limit, for what the estimate leaves out: pages of files, buffers of the kernel."""
_LEAST_POOL_BYTES = 64 * MIB
_ANY_CARD = "192GiB"


@dataclass(frozen=True)
class HostEstimate:
    """What a server holds of its host's memory, by the plan."""

    shares: tuple[HostShare, ...] = ()
    pool_bytes: int | None = None
    """The KV cache, where that is host memory: on a CPU."""

    @property
    def bytes(self) -> int:
        return sum(share.bytes for share in self.shares)


def kernel_finding(kill: KernelKill, command: ServerCommand, environ: Mapping[str, str], gpus: Gpus) -> Finding:
    """The finding that needs no line of the server's log: the kernel counted it."""
    estimate = host_estimate(command, environ, gpus)
    fixes = (*_lower_flags(kill, estimate, command, environ), _more_ram(kill, estimate))
    return Finding(CAUSE, ENTRY, _CERTAIN, (), _why(kill, estimate), fixes)


def host_estimate(command: ServerCommand, environ: Mapping[str, str], gpus: Gpus) -> HostEstimate:
    """By the plan on this card; on a CPU the processes, the weights and the KV cache. Empty where there is no plan."""
    try:
        return _planned(command, environ, gpus) if gpus.name else _on_cpu(command, environ)
    except (LegroomError, ArithmeticError, LookupError, TypeError, ValueError):
        return HostEstimate()


def _planned(command: ServerCommand, environ: Mapping[str, str], gpus: Gpus) -> HostEstimate:
    return HostEstimate(_plan(command, environ, Machine(gpus.name, max(gpus.count, 1))).host.shares)


def _on_cpu(command: ServerCommand, environ: Mapping[str, str]) -> HostEstimate:
    pool = cpu_pool_bytes(command, environ)
    shares = [HostShare("processes", _CPU_PROCESSES * LEAST_PROCESS_BYTES)]
    with contextlib.suppress(LegroomError):
        # Weights are as large on a CPU: any card that holds them tells.
        shares.append(HostShare("weights", _plan(command, environ, Machine(_ANY_CARD)).layout.weights.bytes))
    shares += [HostShare("KV cache", pool)] if pool else []
    return HostEstimate(tuple(shares), pool)


def _plan(command: ServerCommand, environ: Mapping[str, str], machine: Machine) -> Plan:
    args = replace(command.args, env={**environ, **command.env, **command.args.env})
    return make_plan(args, command.release, machine, advice=False)


def _why(kill: KernelKill, estimate: HostEstimate) -> str:
    who = kill.victim or "a process of this server"
    held = f", which held {gib(kill.victim_bytes)}," if kill.victim_bytes else ""
    if kill.limit_bytes is not None:
        peak = f", of which {gib(kill.peak_bytes)} were in use at the peak" if kill.peak_bytes is not None else ""
        full = f"its cgroup may use {gib(kill.limit_bytes)} ({kill.limit_file}){peak}"
    else:
        full = f"the machine's {gib(kill.machine_bytes)} of RAM were used up" if kill.machine_bytes else "RAM ran out"
    needs = ""
    if estimate.bytes:
        parts = ", ".join(f"{gib(share.bytes)} {share.what}" for share in estimate.shares)
        needs = f" By the plan it holds about {gib(estimate.bytes)} of host memory: {parts}."
    return f"The kernel killed {who}{held} because {full}. It is host memory, not the GPU's.{needs}"


def _lower_flags(
    kill: KernelKill, estimate: HostEstimate, command: ServerCommand, environ: Mapping[str, str]
) -> Iterator[Fix]:
    """Flags whose memory is the host's and can be less without another model or fewer cards."""
    if kill.limit_bytes is None:
        return  # others may hold the rest of the machine
    room = int(kill.limit_bytes * (1 - _SPARE))
    used = max(estimate.bytes, kill.limit_bytes)
    over = used - room
    if estimate.pool_bytes is not None:
        yield from _smaller_pool(room - (used - estimate.pool_bytes), estimate.pool_bytes, command, environ)
    offloaded_gib = _gib_of(other_value(command.args, "--kv-offloading-size"))
    if offloaded_gib * GIB > over:
        yield Fix(
            "cpu_offload",
            f"{offloaded_gib:g} GiB of host memory were asked for to keep KV blocks in.",
            flags={"kv_offloading_size": int((offloaded_gib * GIB - over) // GIB) or None},
            confidence=0.7,
        )


def _smaller_pool(room: int, pool: int, command: ServerCommand, environ: Mapping[str, str]) -> Iterator[Fix]:
    """On a CPU the KV cache is host memory: what the limit leaves beside everything else."""
    why = f"On a CPU the KV cache is host memory, and beside everything else {gib(max(room, 0))} are left for it."
    if not _LEAST_POOL_BYTES <= room < pool:
        return
    in_env = {**environ, **command.env}.get("VLLM_CPU_KVCACHE_SPACE") and command.args.kv_cache_memory_bytes is None
    if in_env and room >= GIB:
        yield Fix("kv_cache_memory_bytes", why, env={"VLLM_CPU_KVCACHE_SPACE": str(room // GIB)}, confidence=0.8)
    elif "--kv-cache-memory-bytes" in flags_of(command.release):
        whole_mib = room // MIB * MIB
        yield Fix("kv_cache_memory_bytes", why, flags={"kv_cache_memory_bytes": whole_mib}, confidence=0.8)


def _more_ram(kill: KernelKill, estimate: HostEstimate) -> Fix:
    wanted = whole_gib(max(estimate.bytes, kill.limit_bytes or 0) * (1 + _SPARE))
    if kill.limit_bytes is None:
        step = f"a machine with more RAM, or fewer other programs on it: this server alone holds {gib(estimate.bytes)}"
    else:
        step = f"raise the memory limit to {wanted // GIB} GiB or more (docker --memory {wanted // GIB}g, "
        step += f"resources.limits.memory: {wanted // GIB}Gi, MemoryMax={wanted // GIB}G)"
    return Fix("more_host_ram_or_shm", "It needs more host memory than it may use.", steps=(step,), confidence=0.8)


def _gib_of(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0
