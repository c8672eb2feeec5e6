"""What a planned server takes of its host: memory, shared memory, cores.

GPU memory is the plan's; this is the part that a container's limit, /dev/shm and the scheduler of a cluster ask for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from legroom.exports.deploy.words import ServerWords
from legroom.records import dataclass
from legroom.units import GIB, MIB

if TYPE_CHECKING:
    from legroom.facts.releases import Release
    from legroom.planning.plan_document import PlanDocument

API_SERVER_BYTES = 2 * GIB
ENGINE_BYTES = 2 * GIB
WORKER_BYTES = 5 * GIB
"""Allowances a process, not measured on a GPU. The CPU build of 0.32 holds 0.6 GiB in each; a worker on a GPU adds the
driver's host side, compiled code, staging buffers and NCCL."""
SHARD_BYTES = 5 * 10**9
"""The largest file of a checkpoint that was saved with the Hub's defaults; each rank reads through its own."""
BROADCAST_QUEUE_BYTES = 10 * 16 * MIB
RESPONSE_QUEUE_BYTES = 10 * 24 * MIB
"""Ring buffers of the multiprocess executor, ten chunks each: one queue to the workers, one back from every worker."""
NCCL_BYTES = 256 * MIB
"""A worker's share of NCCL's shared-memory transport, generously."""
SHM_BASE_BYTES = GIB
MEDIA_CACHE_GIB, EARLY_MEDIA_CACHE_GIB = 4, 8
"""--mm-processor-cache-gb, and VLLM_MM_INPUT_CACHE_GIB before there was the flag; 8 in 0.8.0 and 0.8.1."""


@dataclass(frozen=True, slots=True)
class Share:
    """One part of the host memory and why it is there."""

    what: str
    bytes: int


@dataclass(frozen=True, slots=True)
class HostNeeds:
    """What the host must give."""

    shares: tuple[Share, ...]
    """Held all the time: processes, pinned and shared memory."""
    loading_bytes: int
    """Page cache that loading works through; it is given back under pressure."""
    checkpoint_bytes: int
    shm_bytes: int
    cpus: int

    @property
    def held_bytes(self) -> int:
        """What cannot be given back."""
        return sum(share.bytes for share in self.shares)

    @property
    def request_bytes(self) -> int:
        """What a scheduler should set aside, in whole GiB."""
        return whole_gib(self.held_bytes + min(self.loading_bytes, self.checkpoint_bytes))

    @property
    def limit_bytes(self) -> int:
        """Above which the kernel may end it: the checkpoint fits into the page cache beside what is held."""
        return max(whole_gib(self.held_bytes + self.checkpoint_bytes), self.request_bytes)

    def sentence(self) -> str:
        """The working, for a comment."""
        parts = ", ".join(f"{share.what} {share.bytes / GIB:.1f}" for share in self.shares)
        loading = f"loading passes up to {self.loading_bytes / GIB:.1f} through the page cache"
        return f"Host memory in GiB: {parts}; {loading}"


def whole_gib(bytes_: float) -> int:
    """Rounded up."""
    return math.ceil(bytes_ / GIB) * GIB


def host_needs(
    words: ServerWords, gpus: int, engines: int, checkpoint_bytes: int, plan: PlanDocument, given: Mapping[str, str]
) -> HostNeeds:
    """Everything that the flags and the variables say about host memory, and allowances for the processes."""
    media_gib = media_cache_gib(words, plan, given)
    in_shm = _value(words, "--mm-processor-cache-type") == "shm"
    shm = shm_bytes(words, gpus, media_gib if in_shm else 0.0)
    fronts = api_servers(words, engines, plan.release)
    shares = [
        Share("processes", fronts * API_SERVER_BYTES + engines * ENGINE_BYTES + gpus * WORKER_BYTES),
        *_pinned(words, gpus, plan.args),
    ]
    if words.get("--enable-sleep-mode") is not None:
        # Level 1 keeps the weights of every card in pinned memory until it is woken.
        asleep = plan.layout.weights_bytes * gpus
        shares.append(Share("weights while asleep", asleep))
    if media_gib and not in_shm:
        # Every process that reads requests may fill one, and so may every engine.
        size = int(media_gib * GIB * (fronts + engines))
        shares.append(Share(f"media cache ({media_gib:g} x {fronts + engines} processes)", size))
    shares.append(Share("/dev/shm", shm))
    # Every API server, every engine and a worker a GPU keep a core busy.
    return HostNeeds(tuple(shares), gpus * SHARD_BYTES, checkpoint_bytes, shm, fronts + engines + gpus)


def media_cache_gib(words: ServerWords, plan: PlanDocument, given: Mapping[str, str]) -> float:
    """How much processed media a process keeps, where the model takes any: a flag from 0.10.1 on, a variable from
    0.8.0; before that a number of items, of which nobody knows the size."""
    phrase = words.get("--mm-processor-cache-gb")
    if phrase is not None:
        return number_of(phrase.value)
    off = ("--disable-mm-preprocessor-cache", "--language-model-only")
    if not plan.modalities or any(words.get(flag) for flag in off):
        return 0.0
    if plan.release.before("0.8.0"):
        return 0.0
    usual = EARLY_MEDIA_CACHE_GIB if plan.release.before("0.8.2") else MEDIA_CACHE_GIB
    return number_of(given.get("VLLM_MM_INPUT_CACHE_GIB", str(usual)))


def shm_bytes(words: ServerWords, gpus: int, media_gib: float = 0.0) -> int:
    """The size of /dev/shm: message queues and NCCL of the ranks, and what flags put there."""
    queues = BROADCAST_QUEUE_BYTES + gpus * (RESPONSE_QUEUE_BYTES + NCCL_BYTES) if gpus > 1 else 0
    offload = _number(words, "--kv-offloading-size") * GIB
    return whole_gib(SHM_BASE_BYTES + queues + offload + media_gib * GIB)


def _pinned(words: ServerWords, gpus: int, args: Mapping[str, Any]) -> Iterator[Share]:
    offload = _number(words, "--cpu-offload-gb")
    if offload:
        yield Share(f"offloaded weights ({offload:g} x {gpus})", int(offload * GIB * gpus))
    swap = _number(words, "--swap-space")
    # The V1 engine never swaps; V0 pins the space for every GPU.
    if args.get("engine") == "V0":
        swap = swap or (0.0 if words.get("--swap-space") else 4.0)
        if swap:
            yield Share(f"swap space ({swap:g} x {gpus})", int(swap * GIB * gpus))


def api_servers(words: ServerWords, engines: int, release: Release) -> int:
    """How many processes read requests: as many as are said, else one, from 0.15.0 on one for each data-parallel
    engine."""
    given = int(_number(words, "--api-server-count"))
    return given or (engines if release.at_least("0.15.0") else 1)


def _number(words: ServerWords, flag: str) -> float:
    phrase = words.get(flag)
    return number_of(phrase.value) if phrase else 0.0


def _value(words: ServerWords, flag: str) -> str:
    phrase = words.get(flag)
    return phrase.value if phrase else ""


def number_of(text: str) -> float:
    """A size as a flag or a variable says it; 0 where it is none."""
    try:
        return max(0.0, float(text))
    except ValueError:
        return 0.0
