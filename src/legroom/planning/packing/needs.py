"""One server to pack: its options, its memory on each of its cards, and the bounds of its KV cache."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count

from legroom.errors import LegroomError
from legroom.memory.cudagraph_memory import graph_bytes
from legroom.memory.kv.kv_plan import plan_of_shape
from legroom.memory.kv.shape import KvShape, kv_shape
from legroom.memory.overhead import charges_device_wide, held_at_start
from legroom.memory.server_states import residue
from legroom.planning.plan import Policy, Target
from legroom.planning.search_space import CapacityGoal, blocks_of_request
from legroom.records import dataclass
from legroom.units import cdiv, parse_length, parse_whole
from legroom.vllm.args import EngineSettings, ServeArgs, other_value
from legroom.vllm.resolve import resolve, served_model
from legroom.vllm.traits import is_pooling

SERVER_OPTIONS = ("--want-context", "--want-concurrency", "--weight", "--name")
_OPTION = re.compile(rf"(?<!\S)({'|'.join(SERVER_OPTIONS)})(?:=|\s+)(\S+)")


@dataclass(frozen=True, slots=True)
class PackedServer:
    """One server to pack."""

    name: str
    target: Target
    args: ServeArgs
    weight: float = 1.0
    """Its weight when free memory is divided among KV caches."""
    goal: CapacityGoal | None = None
    sleep_level: int = 1
    """Its sleep level in shifts in which it is not awake."""

    @property
    def gpus(self) -> int:
        """Cards that the server's parallel sizes take, at least one."""
        return max(self.args.gpus_needed, 1)


def default_name(args: ServeArgs) -> str:
    """The served model name, or the last part of the model's: lower-case letters, digits and hyphens."""
    named = other_value(args, "--served-model-name") or args.model.rstrip("/").rpartition("/")[2]
    plain = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in named.lower())
    return "-".join(part for part in plain.split("-") if part) or "server"


def with_own_names_and_ports(servers: Sequence[PackedServer]) -> list[PackedServer]:
    """The servers with distinct names (NAME, NAME-2 ...) and, where several, ports: those without get free ones from
    vLLM's default 8000 on; LegroomError for a port given twice."""
    given = [other_value(server.args, "--port") for server in servers]
    for twice in {port for port in given if port is not None and given.count(port) > 1}:
        raise LegroomError(f"two servers have --port {twice}", "give each its own")
    free = (str(port) for port in count(8000) if str(port) not in given)
    seen: dict[str, int] = {}
    named = []
    for server, port in zip(servers, given, strict=True):
        seen[server.name] = number = seen.get(server.name, 0) + 1
        others = server.args.others if port or len(servers) == 1 else (*server.args.others, "--port", next(free))
        name = server.name if number == 1 else f"{server.name}-{number}"
        named.append(replace(server, name=name, args=replace(server.args, others=others)))
    return named


@dataclass(frozen=True, slots=True)
class OtherProgram:
    """A program that is not vLLM: a trainer, an embedder, a desktop."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class ServerNeeds:
    """The memory of a server on each of its cards."""

    server: PackedServer
    settings: EngineSettings
    fixed_bytes: int
    """Everything but the KV pool, at the peak."""
    context_bytes: int
    """The part of `fixed_bytes` that exists before vLLM's first memory snapshot."""
    counted_bytes: int
    """The part of `fixed_bytes` that the release counts into its budget on a first start."""
    starting_bytes: int
    """The peak before the KV cache is allocated."""
    spread_bytes: int
    """The upper side of the 90 % band of `fixed_bytes`."""
    least_pool_bytes: int
    most_pool_bytes: int
    """The KV cache of max_num_seqs full-length requests; of a pooling model, of what one step reads."""
    block_bytes: int
    """0: the model has no KV cache."""
    requested_bytes: int = 0
    """Free memory that the start-up check requires beside the KV cache; 0 where it requires none."""
    asleep_bytes: int = 0

    def footprint_bytes(self, pool_bytes: int) -> int:
        """Peak memory on the card, in start-up and serving, with a KV cache of `pool_bytes`."""
        return max(self.fixed_bytes + pool_bytes, self.starting_bytes, self.requested_bytes + pool_bytes)

    @property
    def least_bytes(self) -> int:
        """Peak memory on a card with the smallest KV cache that the server can start with."""
        return self.footprint_bytes(self.least_pool_bytes)


def takes_pool_bytes(settings: EngineSettings) -> bool:
    """Whether the release and its engine have --kv-cache-memory-bytes."""
    return settings.engine == "V1" and settings.release.at_least("0.10.2")


def server_needs(server: PackedServer, *, sleeps: bool = False) -> ServerNeeds:
    """The memory of one server, asleep too if it `sleeps`; LegroomError where its release refuses flags or model."""
    server = _with_goal(server)
    target, args = server.target, server.args
    # Packing sets these flags itself; given ones only bound the size of the KV cache.
    open_args = replace(args, kv_cache_memory_bytes=None, num_gpu_blocks_override=None, gpu_memory_utilization=None)
    settings = resolve(open_args, target.model, target.gpu, target.release)
    layouts = target.stage_layouts(settings)
    rank = max(layouts, key=lambda layout: layout.peak_used_bytes - max(layout.kv_cache.bytes, 0))
    first = target.stage_layouts(settings, cold=True)[rank.rank]
    context = held_at_start(target.model, settings, target.gpu)
    graphs = graph_bytes(target.model, settings, target.gpu)
    counted = first.weights.bytes + first.activation.bytes + first.non_torch.bytes
    starting = context.bytes + max(counted, first.loading_peak_bytes)
    fixed = rank.peak_used_bytes - max(rank.kv_cache.bytes, 0)
    # At the upper ends of the bands, graphs are captured beside a larger CUDA context.
    capturing = context.high + rank.weights.bytes + rank.non_torch.bytes + graphs.high
    least, most, block = _pool_bounds(server, settings, kv_shape(target.model, settings, target.gpu))
    # 0.9.1+ checks free memory against the budget; utilizations are written to a thousandth.
    return ServerNeeds(
        server,
        settings,
        fixed_bytes=fixed,
        context_bytes=context.bytes,
        counted_bytes=counted + first.cuda_graph.bytes,
        starting_bytes=starting,
        spread_bytes=max(
            int(math.hypot(rank.kv_cache.bytes - rank.kv_cache.low, rank.outside.high - rank.outside.bytes)),
            capturing - fixed,
        ),
        least_pool_bytes=least,
        most_pool_bytes=most,
        block_bytes=block,
        requested_bytes=0
        if takes_pool_bytes(settings) or charges_device_wide(settings) or target.release.before("0.9.1")
        else context.bytes + (counted + first.cuda_graph.bytes) + target.gpu.total_bytes // 1000,
        asleep_bytes=residue(target.model, target.gpu, settings, graphs).bytes if sleeps else 0,
    )


def _with_goal(server: PackedServer) -> PackedServer:
    """The server with its goal as flags: context as max_model_len unless given, max_num_seqs for its concurrency."""
    goal, target = server.goal, server.target
    if goal is None:
        return server
    args = replace(server.args, max_model_len=server.args.max_model_len or goal.context)
    usual = resolve(args, target.model, target.gpu, target.release).max_num_seqs
    if usual < goal.concurrency:
        args = replace(args, max_num_seqs=math.ceil(goal.concurrency))
    return replace(server, args=args)


def _pool_bounds(server: PackedServer, settings: EngineSettings, shape: KvShape) -> tuple[int, int, int]:
    """Bytes of (the least KV cache that starts, the largest useful one, one block); all 0 without a KV cache.
    LegroomError where the release does not support it."""
    if shape.is_empty:
        return 0, 0, 0
    if shape.unsupported is not None:
        raise LegroomError(f"{server.name}: {shape.unsupported}", "no card and no neighbour changes that")
    block = max(stage.bytes_per_block for stage in shape.stages)
    given = server.args.kv_cache_memory_bytes or (server.args.num_gpu_blocks_override or 0) * block
    length = min(settings.max_model_len, shape.block_size) if settings.auto_fit_len else settings.max_model_len
    fixed = replace(settings, max_model_len=length, auto_fit_len=False)
    request = blocks_of_request(shape, fixed)
    blocks = math.ceil((server.goal.concurrency if server.goal else 1.0) * request)
    for _ in range(3):  # until vLLM's start-up checks pass
        failure = plan_of_shape(shape, fixed, [blocks * block] * len(shape.stages)).failure
        if failure is None:
            break
        # 0.29+ holds the null block back.
        blocks = max(blocks, cdiv(failure.needed_bytes, block)) + 1
    useful = float(settings.max_num_seqs)
    if is_pooling(server.args, server.target.model):  # a text is gone with the step that reads its end
        useful = min(useful, settings.max_num_batched_tokens / length + 1)
    most = max(blocks, math.ceil(useful * request + 1)) * block
    return (given, given, block) if given else (blocks * block, most, block)


def split_command(command: str) -> tuple[dict[str, str], str]:
    """(the options of `legroom pack` in a server's command by name, the command without them)."""
    return dict(_OPTION.findall(command)), _OPTION.sub("", command)


def packed_server(
    options: Mapping[str, str], target: Target, args: ServeArgs, policy: Policy, sleep_level: int = 1
) -> PackedServer:
    """The server with its name, weight and goal; LegroomError for an option that cannot be read."""
    text = options.get("--weight", "1")
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0 < weight < 1e6:
        raise LegroomError(f"--weight {text} is not a share", "write it like --weight 2")
    goal = _capacity_goal(options, args, policy)
    return PackedServer(options.get("--name") or default_name(args), target, args, weight, goal, sleep_level)


def _capacity_goal(options: Mapping[str, str], args: ServeArgs, policy: Policy) -> CapacityGoal | None:
    """The context and concurrency that the server is to hold; None where the options state neither."""
    context, concurrency = (options.get(f"--want-{name}") for name in ("context", "concurrency"))
    if context is None and concurrency is None:
        return None
    usual = args.max_model_len or served_model(args).max_position_embeddings
    tokens = parse_length(context, "--want-context") if context else usual
    return CapacityGoal(tokens, float(parse_whole(concurrency or "1", "--want-concurrency", 1, 10**6)), policy=policy)
