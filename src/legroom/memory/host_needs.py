"""A server's needs on its host: memory, page cache while loading, /dev/shm and CPU cores. Torch's caching host
allocator rounds pinned tensors up to a power of two, so a buffer may take nearly twice the size that a flag gives."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from legroom.facts.gpus import Gpu
from legroom.facts.model import Model
from legroom.facts.releases import Release
from legroom.memory.deployment_memory import DeploymentMemory
from legroom.memory.layout import Failure
from legroom.memory.weights.loaded import SHARD_BYTES, offloaded_tensors, on_one_card, weight_segments, weights
from legroom.records import dataclass
from legroom.units import GIB, MIB, gib
from legroom.vllm.args import EngineSettings, ServeArgs, env_flag, is_given, json_value, other_value
from legroom.vllm.traits import traits

API_SERVER_BYTES, ENGINE_BYTES, WORKER_BYTES = 2 * GIB, 2 * GIB, 5 * GIB
"""Allowances per process. The CPU build of 0.32 holds 0.6 GiB in each; a worker on a GPU adds the driver's host
memory, compiled code, staging buffers and NCCL."""
LEAST_PROCESS_BYTES, LEAST_WORKER_BYTES = 600 * MIB, 2 * GIB
"""Minimum per process: the imports (measured on the CPU build of 0.32), and the host memory of a CUDA context."""
BROADCAST_QUEUE_BYTES = 10 * 16 * MIB
RESPONSE_QUEUE_BYTES = 10 * 24 * MIB
"""Ring buffers of vLLM's multiprocess executor, ten chunks each: one queue to the workers, one from every worker."""
NCCL_BYTES = 256 * MIB
"""An upper bound of a worker's part of NCCL's shared-memory transport."""
MEDIA_CACHE_GIB, EARLY_MEDIA_CACHE_GIB = 4, 8
"""--mm-processor-cache-gb, and VLLM_MM_INPUT_CACHE_GIB before there was the flag; 8 in 0.8.0 and 0.8.1."""

SHARED_REGION_SINCE = "0.27.0"
"""The first release whose native KV offload is one file in /dev/shm for all ranks; before, pinned tensors per rank."""


@dataclass(frozen=True, slots=True)
class HostSettings:
    """The inputs of `host_needs`."""

    args: ServeArgs
    release: Release
    gpus: int
    """The ranks on this host."""
    engines: int = 1
    has_media: bool = False
    swaps: bool = False
    """Whether --swap-space is pinned for every GPU (V0 engine)."""
    checkpoint_bytes: int = 0
    weights_bytes: int = 0
    """Weights of one rank."""
    kv_tensors: int = 1
    """KV tensors of a rank that are offloaded separately; 1 where all layers share one."""
    swap_tensors: int = 1
    asleep_bytes: int = 0
    """Pinned memory of a sleeping rank; 0: that of its weights."""
    offloaded_bytes: int = 0
    """Pinned memory of a rank's parameters that --cpu-offload-gb keeps on the host; 0: the flag's."""


@dataclass(frozen=True, slots=True)
class HostShare:
    """One part of the host memory."""

    what: str
    bytes: int


@dataclass(frozen=True, slots=True)
class HostNeeds:
    """The host resources of a server."""

    shares: tuple[HostShare, ...]
    """Unreclaimable memory: processes, pinned and shared memory."""
    loading_bytes: int
    """Page cache while loading, which the kernel can reclaim."""
    checkpoint_bytes: int
    shm_bytes: int
    cpus: int
    least_bytes: int = 0
    """The minimum to run: processes at their smallest, and the pinned memory of the flags."""
    given_limit_bytes: int | None = None
    """The memory limit that the user gave."""

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory that cannot be reclaimed, in total."""
        return sum(share.bytes for share in self.shares)

    @property
    def request_bytes(self) -> int:
        """The Kubernetes memory request: held memory and the page cache of loading, rounded up to whole GiB."""
        return whole_gib(self.held_bytes + min(self.loading_bytes, self.checkpoint_bytes))

    @property
    def limit_bytes(self) -> int:
        """The container's limit: held memory and checkpoint, or the user's if lower; never below `request_bytes`."""
        wanted = max(whole_gib(self.held_bytes + self.checkpoint_bytes), self.request_bytes)
        return max(min(wanted, self.given_limit_bytes or wanted), self.request_bytes)

    def sentence(self) -> str:
        """A sentence that lists the parts of the host memory in GiB."""
        parts = ", ".join(f"{share.what} {share.bytes / GIB:.1f}" for share in self.shares)
        loading = f"loading passes up to {self.loading_bytes / GIB:.1f} through the page cache"
        return f"Host memory in GiB: {parts}; {loading}"


def read_bytes(model: Model, gpu: Gpu, settings: EngineSettings, memory: DeploymentMemory) -> int:
    """Bytes that start-up reads from disk: the checkpoint's, or if unknown the weights' of all ranks, each once."""
    if model.checkpoint_bytes:
        return model.checkpoint_bytes
    is_shared = traits(model).moe and settings.data_parallel_size * settings.prefill_context_parallel_size > 1
    if is_shared or settings.given.cpu_offload_gb:
        return weights(model, on_one_card(settings), gpu).bytes
    return sum(rank.weights.bytes for rank in memory.ranks) * settings.tensor_parallel_size


def deployment_host(model: Model, gpu: Gpu, settings: EngineSettings, memory: DeploymentMemory) -> HostNeeds:
    """The host memory and CPUs of one node: the ranks of eight GPUs at most, or of one engine where that has more."""
    ranks = settings.given.engine_ranks
    gpus = min(ranks * settings.data_parallel_size, max(8, ranks))
    weights = max(rank.weights.bytes for rank in memory.ranks)
    layers = [len(group.layers) for group in memory.kv.shape.groups]
    sleeps = is_given(settings.given, "--enable-sleep-mode")
    single = len(layers) == 1 and settings.release.at_least("0.12.0")
    return host_needs(
        HostSettings(
            args=settings.given,
            release=settings.release,
            gpus=gpus,
            engines=max(gpus // ranks, 1),
            has_media=bool(model.modalities),
            swaps=settings.engine == "V0",
            checkpoint_bytes=read_bytes(model, gpu, settings, memory),
            weights_bytes=weights,
            kv_tensors=1 if single else max(layers, default=1),
            swap_tensors=max(len(model.layers) // settings.pipeline_parallel_size, 1),
            asleep_bytes=sum(map(pinned_bytes, weight_segments(model, settings, gpu))) if sleeps else 0,
            offloaded_bytes=sum(map(pinned_bytes, offloaded_tensors(model, settings, gpu))),
        )
    )


def host_failure(needs: HostNeeds, limit_bytes: int) -> Failure | None:
    """The failure of a server whose host memory limit is `limit_bytes`; None where that is enough to run."""
    if limit_bytes >= needs.least_bytes:
        return None
    return Failure(
        "host_ram_oom",
        f"Killed (exit code 137, OOMKilled): the server holds at least {gib(needs.least_bytes)} of the host's memory "
        f"and may use {gib(limit_bytes)}",
        needs.least_bytes,
        limit_bytes,
    )


def whole_gib(size_bytes: float) -> int:
    """The bytes rounded up to whole GiB, in bytes."""
    return math.ceil(size_bytes / GIB) * GIB


def pinned_bytes(size_bytes: float) -> int:
    """Bytes that torch's caching host allocator takes for a pinned tensor: the next power of two of its size."""
    return 1 << max(math.ceil(size_bytes) - 1, 0).bit_length() if size_bytes > 0 else 0


def host_needs(settings: HostSettings) -> HostNeeds:
    """Host memory from flags and environment variables, and allowances for the processes."""
    gpus, engines = settings.gpus, settings.engines
    fronts = api_servers(settings)
    pinned = list(_pinned_parts(settings))
    shm = shm_bytes(settings)
    cores = engines if gpus > engines else 0  # the worker of an engine with one rank is the engine's own process
    processes = HostShare("processes", fronts * API_SERVER_BYTES + cores * ENGINE_BYTES + gpus * WORKER_BYTES)
    at_least = (fronts + engines) * LEAST_PROCESS_BYTES + gpus * LEAST_WORKER_BYTES
    in_shm = math.ceil(_shm_offload_bytes(settings))
    shares = [processes, *pinned]
    if (media_gib := media_cache_gib(settings)) and not _media_in_shm(settings):
        holders = fronts + engines  # every API server and every engine has a cache
        shares.append(HostShare(f"media cache ({media_gib:g} x {holders} processes)", int(media_gib * GIB * holders)))
    shares.append(HostShare("/dev/shm", shm))
    return HostNeeds(
        tuple(shares),
        gpus * SHARD_BYTES,
        settings.checkpoint_bytes,
        shm,
        # Every API server, engine and worker keeps a core busy.
        fronts + engines + gpus,
        at_least + in_shm + sum(share.bytes for share in pinned if "asleep" not in share.what),
    )


def api_servers(settings: HostSettings) -> int:
    """The number of API server processes: --api-server-count, else 1 (from 0.15.0 on one per data-parallel engine)."""
    given = int(_number_of_flag(settings.args, "--api-server-count"))
    return given or (settings.engines if settings.release.at_least("0.15.0") else 1)


def shm_bytes(settings: HostSettings) -> int:
    """Bytes of /dev/shm in whole GiB: 1 GiB, message queues and NCCL between ranks, and what flags place there."""
    gpus = settings.gpus
    queues = BROADCAST_QUEUE_BYTES + gpus * (RESPONSE_QUEUE_BYTES + NCCL_BYTES) if gpus > 1 else 0
    media = media_cache_gib(settings) * GIB if _media_in_shm(settings) else 0
    return whole_gib(GIB + queues + _shm_offload_bytes(settings) + media)


def media_cache_gib(settings: HostSettings) -> float:
    """GiB of one process's media cache: by flag, VLLM_MM_INPUT_CACHE_GIB, or 4 (8 up to 0.8.1); 0 if off or text."""
    args, release = settings.args, settings.release
    given = other_value(args, "--mm-processor-cache-gb")
    if given is not None:
        return number_of(given)
    off = is_given(args, "--disable-mm-preprocessor-cache") or args.language_model_only
    if not settings.has_media or off or release.before("0.8.0"):
        return 0.0
    usual = EARLY_MEDIA_CACHE_GIB if release.before("0.8.2") else MEDIA_CACHE_GIB
    return number_of(args.env.get("VLLM_MM_INPUT_CACHE_GIB", str(usual)))


def _media_in_shm(settings: HostSettings) -> bool:
    """Whether --mm-processor-cache-type keeps the media cache in shared memory."""
    return other_value(settings.args, "--mm-processor-cache-type") == "shm"


def _pinned_parts(settings: HostSettings) -> Iterator[HostShare]:
    """Page-locked host memory: offloaded weights, swap space, offloaded KV cache, and weights in sleep mode."""
    args, gpus = settings.args, settings.gpus
    if args.cpu_offload_gb:
        each = settings.offloaded_bytes or int(args.cpu_offload_gb * GIB)
        yield HostShare(f"offloaded weights ({each / GIB:.3g} x {gpus})", each * gpus)
    if settings.swaps:
        swap = 4.0 if args.swap_space is None else args.swap_space
        each = settings.swap_tensors * pinned_bytes(swap * GIB / settings.swap_tensors)
        if each:
            yield HostShare(f"swap space ({swap:g} x {gpus})", each * gpus)
    yield from _offloaded_kv(settings)
    if is_given(args, "--enable-sleep-mode"):
        # Level 1 copies the weights of every card to pinned memory, which torch keeps.
        yield HostShare("weights while asleep", (settings.asleep_bytes or settings.weights_bytes) * gpus)


def _offloaded_kv(settings: HostSettings) -> Iterator[HostShare]:
    """Pinned buffers of KV connectors that offload blocks to the host; a shared region counts as /dev/shm."""
    offloaded = _offload_bytes(settings)
    if offloaded and not _shm_offload_bytes(settings):
        ranks = settings.gpus // settings.engines
        each = offloaded / max(ranks, 1)
        if not _registers_plain_memory(settings):
            each = settings.kv_tensors * pinned_bytes(each / settings.kv_tensors)
        label = f"offloaded KV cache ({offloaded / GIB:g} x {settings.engines})"
        yield HostShare(label, int(each * ranks) * settings.engines)
    if _kv_transfer_config(settings.args).get("kv_connector") == "LMCacheConnectorV1":
        size = number_of(settings.args.env.get("LMCACHE_MAX_LOCAL_CPU_SIZE", "5.0"))  # GiB of every worker
        yield HostShare(f"LMCache ({size:g} x {settings.gpus})", int(size * GIB * settings.gpus))


def _offload_bytes(settings: HostSettings) -> float:
    """Bytes of one engine's native KV offload, by --kv-offloading-size or the connector's own setting; else 0."""
    args = settings.args
    size = _number_of_flag(args, "--kv-offloading-size") * GIB
    if size and other_value(args, "--kv-offloading-backend") == "lmcache":
        return 0.0  # LMCache's own server holds it
    connector = _kv_transfer_config(args)
    if not size and connector.get("kv_connector") in ("OffloadingConnector", "SimpleCPUOffloadConnector"):
        extra = connector.get("kv_connector_extra_config")
        size = number_of(str(extra.get("cpu_bytes_to_use", 0))) if isinstance(extra, Mapping) else 0.0
    return size


def _shm_offload_bytes(settings: HostSettings) -> float:
    """Bytes of offloaded KV cache in /dev/shm for all engines; 0 where the connector uses other memory."""
    if settings.release.before(SHARED_REGION_SINCE) or _registers_plain_memory(settings):
        return 0.0
    return _offload_bytes(settings) * settings.engines


def _registers_plain_memory(settings: HostSettings) -> bool:
    """Whether SimpleCPUOffloadConnector is in use (by config or variable), which pins memory without rounding it up."""
    simple = _kv_transfer_config(settings.args).get("kv_connector") == "SimpleCPUOffloadConnector"
    return simple or bool(env_flag(settings.args, "VLLM_USE_SIMPLE_KV_OFFLOAD"))


def _kv_transfer_config(args: ServeArgs) -> Mapping[str, Any]:
    """--kv-transfer-config as a mapping; empty where it is not given or not a JSON object."""
    return json_value(args, "--kv-transfer-config") or {}


def _number_of_flag(args: ServeArgs, flag: str) -> float:
    """The flag's value as a number of 0 or more; 0 where it is not given or unreadable."""
    return number_of(other_value(args, flag) or "0")


def number_of(text: str) -> float:
    """The text as a finite number of 0 or more; 0 where it is negative or unreadable."""
    try:
        size = float(text)
    except ValueError:
        return 0.0
    return max(0.0, size) if math.isfinite(size) else 0.0
