"""Containers with too little shared memory, host memory or GPUs for their ranks."""

from dataclasses import replace

from legroom.deployments.container_images import is_published_by_vllm, kubernetes_bytes
from legroom.deployments.subjects import StartedServer
from legroom.drawing.text import plural
from legroom.facts import read_data
from legroom.lint.rule import Context, Findings, checks, finding, flag_place, flag_word, has_open_words
from legroom.lint.server_plan import plan_of_server
from legroom.memory.host_needs import LEAST_PROCESS_BYTES, HostSettings, host_needs, number_of, whole_gib
from legroom.units import GIB, MIB, human_bytes
from legroom.vllm.args import ServeArgs


@checks(StartedServer, "shm-missing")
def too_little_shared_memory(server: StartedServer, context: Context) -> Findings:
    """A container with several ranks and less than 512 MiB of /dev/shm."""
    args = context.parsed_args(server).args
    ranks = min(args.engine_ranks, server.gpu_count or args.engine_ranks)  # those of other nodes have their own
    if not server.in_container or ranks < 2 or not server.runs_on_gpus:
        return
    suggestion = read_data("lint_rules.json")["advice"]["shm-missing"].get(server.runs, "")
    if server.shm is None:
        yield finding("shm-missing", server.place, f"{ranks} ranks share 64 MiB of /dev/shm", suggestion)
        return
    size = kubernetes_bytes(server.shm)
    if size is not None and size < 512 * MIB:
        message = f"{ranks} ranks share {human_bytes(size)} of /dev/shm: message queues alone are larger"
        yield finding("shm-missing", server.place, message, suggestion)


@checks(StartedServer, "host-memory")
def host_memory_limit_too_low(server: StartedServer, context: Context) -> Findings:
    """A container memory limit below the host memory that the server's processes hold."""
    if not server.memory_limit_bytes:
        return
    args, gpus = context.parsed_args(server).args, server.gpu_count or 1
    ranks = min(args.engine_ranks, gpus)
    engines = max(min(args.gpus_needed, gpus) // ranks, 1)
    needs = host_needs(HostSettings(args, context.release_of(server), ranks * engines, engines))
    if server.memory_limit_bytes >= needs.held_bytes:
        yield from _limit_findings(server, context, server.memory_limit_bytes, needs.held_bytes)
        return
    is_short = server.memory_limit_bytes < needs.least_bytes
    if not is_short and server.gpu_count is None:
        return  # how many ranks it starts is not known
    limit, held = human_bytes(server.memory_limit_bytes), needs.least_bytes if is_short else needs.held_bytes
    count, verb = ranks * engines, "hold at least" if is_short else "may come to hold"
    ranks_text = f"{count} ranks {verb}" if count > 1 else f"one rank {verb.replace('hold at', 'holds at')}"
    message = f"the container may use {limit} of the host's memory, and {ranks_text} {human_bytes(held)}"
    suggestion = f"allow at least {human_bytes(needs.request_bytes)}"
    # A launcher chooses the processes itself.
    yield finding("host-memory", server.place, message, suggestion, is_certain=is_short and not server.launcher)


def _limit_findings(server: StartedServer, context: Context, limit: int, held: int) -> Findings:
    """Findings where the memory `limit` (bytes) exceeds `held`, but not with CPU weights, page cache or /dev/shm."""
    own = plan_of_server(server, context.release_of(server))
    size = own.checkpoint_bytes if own is not None else 0
    space = number_of(server.env["VLLM_CPU_KVCACHE_SPACE"].text) * GIB if "VLLM_CPU_KVCACHE_SPACE" in server.env else 0
    in_ram = size + space + 2 * LEAST_PROCESS_BYTES  # of the API server and the engine
    if "cpu" in server.device_words and limit < in_ram and (size or space):
        message = f"weights, KV cache and processes take {human_bytes(in_ram)} of the host's memory, and the container "
        message += f"may use {human_bytes(limit)}"
        yield finding("host-memory", server.place, message, f"allow at least {human_bytes(whole_gib(in_ram))}")
    elif size > limit:
        message = f"the checkpoint has {human_bytes(size)}, more than the {human_bytes(limit)} of the "
        message += "host's memory: its pages are dropped while it loads, and another rank or start reads them again"
        found = finding("host-memory", server.place, message, "raise the limit", is_certain=False)
        is_read_once = context.parsed_args(server).args.engine_ranks == 1
        yield replace(found, severity="note") if is_read_once else found
    shm = server.shm if server.runs == "kubernetes" else None
    shm_bytes = kubernetes_bytes(shm or "")
    is_counted = bool(shm) and not str(shm).startswith(("host", "KubeRay", "the runtime", "mounted"))
    if is_counted and limit <= held + (shm_bytes or held):
        what = f"{human_bytes(shm_bytes) if shm_bytes else 'all'} of the {human_bytes(limit)}"
        message = f"what is written to /dev/shm counts into the memory limit, and may take {what}"
        found = finding("host-memory", server.place, message, "raise the limit, and give the emptyDir a sizeLimit")
        yield replace(found, severity="note")


_MULTI_NODE = ("--distributed-executor-backend", "--nnodes")  # Flags that put ranks on other machines.
_PARTS = ("size-local", "rank", "start-rank", "address", "backend", "external-lb", "hybrid-lb")
_DATA_PARALLEL_NODES = ("--headless", *(f"--data-parallel-{part}" for part in _PARTS))
"""Flags that put data-parallel engines on other machines."""
_SIZES = tuple(f"--{kind}-parallel-size" for kind in ("tensor", "pipeline", "prefill-context", "data"))


@checks(StartedServer, "gpus-too-few")
def more_ranks_than_gpus(server: StartedServer, context: Context) -> Findings:
    """A server whose parallel sizes need more GPUs than its container or environment gives it."""
    looks_for_ray = context.release_of(server).before("0.11.1")
    if server.launcher or (looks_for_ray and context.uses_ray):
        return  # a launcher spreads ranks over nodes itself
    gpus = server.gpu_count
    args = context.parsed_args(server).args
    ranks = args.engine_ranks if flag_word(server, *_DATA_PARALLEL_NODES) else args.gpus_needed
    if not gpus or ranks <= gpus or flag_word(server, *_MULTI_NODE):
        return
    what = "looks for the others in a Ray cluster" if looks_for_ray else "does not start"
    message = f"{ranks} ranks are asked for, and {gpus} GPU{'s are' if gpus > 1 else ' is'} given: vLLM {what}"
    suggestion = "give it a GPU for each rank, or ask for fewer; for a Ray cluster --distributed-executor-backend ray"
    # A GPU request (`count: all`) overrides NVIDIA_VISIBLE_DEVICES.
    is_counted = server.gpus is not None or "CUDA_VISIBLE_DEVICES" in server.env
    is_certain = context.is_release_certain(server) and is_counted
    yield finding("gpus-too-few", flag_place(server, *_SIZES), message, suggestion, is_certain=is_certain)


_CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"


@checks(StartedServer, "gpus-too-few", "gpus-idle")
def gpus_not_used(server: StartedServer, context: Context) -> Findings:
    """A container without a GPU, with a CUDA_VISIBLE_DEVICES beyond its GPUs, or with more GPUs than its ranks use."""
    if not server.runs_on_gpus or not server.in_container:
        return
    # A controller such as KServe may add to the resources of its own kinds.
    is_plain = server.read_as.startswith(("Kubernetes Deployment", "Kubernetes StatefulSet", "Kubernetes Pod"))
    is_whole = is_plain if server.runs == "kubernetes" else server.mounts is not None
    is_told = is_whole and "NVIDIA_VISIBLE_DEVICES" not in server.env and not has_open_words(server)
    if server.has_no_gpu and is_told and is_published_by_vllm(server.image):
        suggestion = read_data("lint_rules.json")["advice"]["gpus-too-few"].get(server.runs, "")
        # Where NVIDIA's runtime is the default the container sees every GPU: common with Docker, not on nodes.
        found = finding("gpus-too-few", server.place, "the container gets no GPU", suggestion, is_certain=False)
        yield found if server.runs == "kubernetes" else replace(found, severity="note")
    word, gpus = server.env.get(_CUDA_DEVICES), server.gpus
    shown = [part.strip() for part in word.text.split(",")] if word is not None else []
    if word is not None and gpus and all(map(str.isdecimal, shown)) and max(map(int, shown)) >= gpus:
        message = f"{_CUDA_DEVICES}={word.text} in a container with {plural(gpus, 'GPU')}, which count from 0"
        suggestion = "leave it out, and choose the GPU in its reservation"
        yield finding("gpus-too-few", server.place_of(word), message, suggestion)
        return
    args, problems = context.parsed_args(server).args, context.parsed_args(server).problems
    is_sliced = "gpu-slices" in context.platform_signs and not server.gpu_ids  # several are of one card
    if is_sliced or any(problem.stops_vllm for problem in problems):
        return  # the flag that uses them is refused
    is_spread = server.launcher or context.uses_ray or flag_word(server, *_MULTI_NODE, *_DATA_PARALLEL_NODES)
    count = len(shown) if shown else gpus
    is_open = has_open_words(server, ServeArgs.__dataclass_fields__)
    if gpus and count and count > args.gpus_needed and not is_spread and not is_open and args.model:
        raised = "raise --tensor-parallel-size or --data-parallel-size, or reserve fewer"
        message = f"{gpus} GPUs are given and {args.gpus_needed} used"
        yield finding("gpus-idle", flag_place(server, *_SIZES), message, raised)
