"""Cards that share one memory with the host (GB10, Jetson, APUs): what the host holds of it, and what must stay free.

There a start that fills the card takes the machine down with it: the kernel, vLLM's other processes and the cached
files of the checkpoint live in the same memory. The constants are in `facts/data/fit.json`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.facts.fit import constants
from legroom.facts.releases import release as known_release
from legroom.figures import Term
from legroom.units import MIB, gib

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.vllm.args import EngineSettings


def host_terms(gpu: Gpu) -> tuple[Term, ...]:
    """What the host holds of the card's memory beside vLLM's worker; nothing where the host has enough of its own."""
    if not gpu.unified:
        return ()
    own = max(0, gpu.host_total_bytes - gpu.total_bytes)
    system, servers = _system_bytes(gpu), _servers_bytes()
    system_share = max(0, system - own)
    servers_share = max(0, servers - max(0, own - system))
    return tuple(
        term
        for term in (
            Term("the system", system_share, "shares this memory: kernel, services, desktop"),
            Term("vLLM's other processes", servers_share, "the API server and its tokenizer share this memory too"),
        )
        if term.bytes
    )


def system_bytes(gpu: Gpu) -> int:
    """What the system holds of the card before vLLM starts."""
    own = max(0, gpu.host_total_bytes - gpu.total_bytes)
    return max(0, _system_bytes(gpu) - own) if gpu.unified else 0


def reserve_bytes(gpu: Gpu) -> int:
    """What must stay free, or the kernel thrashes and kills: the loader's pages and every other program need it."""
    if not gpu.unified:
        return 0
    own = max(0, gpu.host_total_bytes - gpu.total_bytes)
    wanted = int(max(gpu.total_bytes, gpu.host_total_bytes) * constants()["unified"]["reserve_share"])
    return max(0, wanted - max(0, own - _system_bytes(gpu) - _servers_bytes()))


def loader_bytes(gpu: Gpu, weights_bytes: int) -> int:
    """Pages of the file that is being read, beside the weights that are on the card already."""
    if not gpu.unified:
        return 0
    return min(weights_bytes, int(constants()["unified"]["shard_mib"] * MIB))


def file_cache_bytes(gpu: Gpu, checkpoint_bytes: int) -> int:
    """What the checkpoint's files hold of the card's memory once they were read: the kernel keeps them cached, and the
    driver does not always get that memory back. Every machine of a tensor-parallel group reads all of them."""
    if not gpu.unified:
        return 0
    return max(0, checkpoint_bytes - max(0, gpu.host_total_bytes - gpu.total_bytes))


def charged_to_vllm(gpu: Gpu) -> int:
    """Host memory of the worker that the release counts as its own: free memory is the machine's on NVIDIA's chips."""
    if not gpu.unified or gpu.vendor != "nvidia":
        return 0
    return int(constants()["unified"]["charged_mib"] * MIB)


def host_note(settings: EngineSettings, gpu: Gpu) -> str:
    """What the reader should know of a card that shares the machine's memory; empty for other cards."""
    if not gpu.unified:
        return ""
    held = sum(term.bytes for term in host_terms(gpu))
    counted = f"{gib(held, 1)} are counted for the system, and " if held else ""
    note = f"CPU and GPU share this memory: {counted}{gib(reserve_bytes(gpu), 1)} should stay free"
    if gpu.vendor == "nvidia" and known_release(settings.release).before("0.11.1"):
        # Free memory was MemFree until then.
        return note + "; this release counts cached files as used: drop the page cache before a start"
    return note + "; cached files are in the way of large allocations: drop the page cache before a start"


def _system_bytes(gpu: Gpu) -> int:
    fit = constants()["unified"]
    whole = max(gpu.total_bytes, gpu.host_total_bytes)
    return max(int(fit["system_least_mib"] * MIB), int(whole * fit["system_share"]))


def _servers_bytes() -> int:
    return int(constants()["unified"]["servers_mib"] * MIB)
