"""How one server spreads over the nodes of a cluster, and the flags of each of its pods.

From vLLM's `engine/arg_utils.py` and `entrypoints/cli/serve.py`: with `--nnodes` (0.11.1 on) nodes share the ranks of
one copy or whole copies, and each has its `--node-rank` and the `--master-addr`. With `--data-parallel-size-local` each
node has whole copies and its `--data-parallel-start-rank`. Nodes without requests are `--headless`. With Ray the driver
starts the ranks of all nodes.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from legroom.errors import LegroomError
from legroom.exports.deploy.exported_server import ExportedServer, gpus_per_engine
from legroom.exports.deploy.serve_command import Phrase, ServeCommand, parse_command
from legroom.facts.flags import flags_of
from legroom.planning.plan_document import PlanDocument
from legroom.records import dataclass

_PER_POD_FLAGS = frozenset(
    {
        *("--node-rank", "--master-addr", "--headless", "--data-parallel-address", "--data-parallel-start-rank"),
        "--data-parallel-rank",
    }
)
"""Flags whose value differs for each pod."""
_NOT_HEADLESS = frozenset({"--api-server-count"})  # Flags that vLLM refuses with --headless.
_COLLECTIVES = (("--distributed-timeout-seconds", 600), ("--cpu-distributed-timeout-seconds", 1800))
"""PyTorch's default timeouts of collectives, for NCCL and gloo."""
_EXECUTOR = "--distributed-executor-backend"
_MANY_PORTS = "--data-parallel-multi-port-external-lb"
_LEADER = "$(LWS_LEADER_ADDRESS)"
_OWN = "$(VLLM_HOST_IP)"
_OWN_WHY = "Where the other nodes find it: its own address, because its name may not be known yet when it listens."
"""libzmq resolves a name once when it binds, and fails (`No such device`) where the cluster's DNS has none yet."""
_INDEX = "$(LWS_WORKER_INDEX)"
RPC_PORT = 29550
"""vLLM's own default for --data-parallel-rpc-port."""


@dataclass(frozen=True)
class NodeSpread:
    """How one server is distributed over nodes."""

    nodes: int = 1
    ray: bool = False
    engines_per_node: int = 0
    """Data-parallel engines on each node; 0: the nodes share the ranks by --nnodes."""
    answers_everywhere: bool = False
    """Whether every node receives requests (hybrid or external load balancing), not only the first."""
    external: bool = False

    @property
    def nodes_sentence(self) -> str:
        """A sentence for the manifest's head: the number of nodes, and what of the server each one runs."""
        if self.ray:
            return f"{self.nodes} nodes in a Ray cluster; the driver on its head starts the ranks of all of them."
        if self.engines_per_node:
            return f"{self.nodes} nodes with {self.engines_per_node} data-parallel copies each."
        return f"{self.nodes} nodes share the ranks."

    def leader_flags(self) -> tuple[Phrase, ...]:
        """The multi-node vLLM flags of the first pod alone; flags that all pods share are not among them."""
        if self.ray:
            return ()
        if not self.engines_per_node:
            first = Phrase("--node-rank", ("0",), "The first node of the group.")
            return first, Phrase("--master-addr", (_OWN,), _OWN_WHY)
        rank: tuple[Phrase, ...] = ()
        if self.external:
            rank = (Phrase("--data-parallel-rank", ("0",), "Its copy."),)
        elif self.answers_everywhere:
            rank = (Phrase("--data-parallel-start-rank", ("0",), "Its first copy."),)
        return (Phrase("--data-parallel-address", (_OWN,), _OWN_WHY), _RPC, *rank)

    def worker_flags(self) -> tuple[Phrase, ...]:
        """The multi-node vLLM flags of every pod but the first; flags that all pods share are not among them."""
        if self.ray:
            return ()
        headless = () if self.answers_everywhere else (_HEADLESS,)
        if not self.engines_per_node:
            rank = Phrase("--node-rank", (_INDEX,), "Which node of the group it is.")
            why = "The first pod, by the name that LeaderWorkerSet gives it."
            return (rank, Phrase("--master-addr", (_LEADER,), why), *headless)
        lines = (Phrase("--data-parallel-address", (_LEADER,), "Where the first node listens."), _RPC)
        if self.external:
            return (*lines, Phrase("--data-parallel-rank", (_INDEX,), "Its copy."))
        if self.engines_per_node == 1:
            return (*lines, Phrase("--data-parallel-start-rank", (_INDEX,), "Its copy."), *headless)
        return (*lines, *headless)

    @property
    def worker_shell_wrapper(self) -> str:
        """A shell line around a worker's command that adds its --data-parallel-start-rank; empty if not needed."""
        if self.ray or self.external or self.engines_per_node < 2:
            return ""
        return f'exec "$@" --data-parallel-start-rank "$((LWS_WORKER_INDEX * {self.engines_per_node}))"'


_RPC = Phrase("--data-parallel-rpc-port", (str(RPC_PORT),), "The port of that address.")
_HEADLESS = Phrase("--headless", (), "It computes for the first pod and takes no requests itself.")


def spread_over_nodes(plan: PlanDocument, gpus_per_node: int) -> tuple[PlanDocument, NodeSpread]:
    """(The plan with multi-node flags, its spread over nodes); LegroomError if nodes would not be alike."""
    words = parse_command(plan.command, plan.release)
    ranks, copies = gpus_per_engine(plan.args), int(plan.args.get("data_parallel_size") or 1)
    if words.get(_MANY_PORTS):
        hint = "say --data-parallel-hybrid-lb: every node takes requests for its own copies, on one port"
        raise LegroomError(f"{_MANY_PORTS} opens a port for every copy, and one Service has one port", hint)
    flags = ("--distributed-executor-backend", "--data-parallel-backend")
    if any((phrase := words.get(flag)) is not None and phrase.value == "ray" for flag in flags):
        nodes = max(1, math.ceil(ranks * copies / gpus_per_node))
        return plan, NodeSpread(nodes, ray=nodes > 1)
    everywhere = any(words.get(f"--data-parallel-{kind}-lb") for kind in ("hybrid", "external"))
    external = words.get("--data-parallel-external-lb") is not None or words.get("--data-parallel-rank") is not None
    if (nodes := words.count("--nnodes") or 1) > 1:
        _check_gpus_divide_among_nodes(ranks * copies, nodes)
        return plan, NodeSpread(nodes, answers_everywhere=everywhere)
    local = 1 if external else words.count("--data-parallel-size-local")
    if local == 0:
        hint = "leave it out: every node of a group has the same number of copies"
        raise LegroomError("--data-parallel-size-local 0 computes nothing on the first node", hint)
    if local is not None and local < copies:
        if copies % local:
            hint = "choose a --data-parallel-size-local that divides"
            raise LegroomError(f"{copies} copies do not make whole nodes of {local}", hint)
        return plan, NodeSpread(copies // local, False, local, everywhere or external, external)
    return _split_over_nodes(plan, words, ranks, copies, gpus_per_node)


def _split_over_nodes(
    plan: PlanDocument, words: ServeCommand, ranks: int, copies: int, gpus_per_node: int
) -> tuple[PlanDocument, NodeSpread]:
    """(The plan, with multi-node flags where its `copies` (data-parallel engines) of `ranks` GPUs each need more than
    one node; its spread over nodes); LegroomError where they cannot be split."""
    if ranks * copies <= gpus_per_node:
        return plan, NodeSpread()
    if ranks <= gpus_per_node:
        local = max(each for each in range(1, gpus_per_node // ranks + 1) if copies % each == 0)
        added = Phrase("--data-parallel-size-local", (str(local),))
        _check_release_has_flag(added.flag, plan)
        return replace(plan, command=(*plan.command, *added.words)), NodeSpread(copies // local, engines_per_node=local)
    nodes = math.ceil(ranks / gpus_per_node)
    if copies > 1:
        why = f"{copies} copies of {ranks} cards each, on nodes of {gpus_per_node}: a group of nodes holds one of them"
        raise LegroomError(why, f"leave out --data-parallel-size and say --replicas {copies}")
    _check_gpus_divide_among_nodes(ranks, nodes)
    _check_release_has_flag("--nnodes", plan)
    return replace(plan, command=(*plan.command, "--nnodes", str(nodes))), NodeSpread(nodes)


def _check_gpus_divide_among_nodes(gpus: int, nodes: int) -> None:
    """Raises LegroomError unless each node gets the same number of GPUs."""
    if gpus % nodes:
        hint = "choose parallel sizes whose product does"
        raise LegroomError(f"{gpus} cards do not divide into {nodes} nodes alike", hint)


def _check_release_has_flag(flag: str, plan: PlanDocument) -> None:
    """Raises LegroomError, with the advice to use Ray, where the plan's vLLM release lacks the flag."""
    if flag not in flags_of(plan.release):
        hint = "add --distributed-executor-backend ray, or use a release from 0.11.1 on"
        raise LegroomError(f"vLLM {plan.release} has no {flag}, so it spans nodes only with Ray", hint)


def server_of_node(server: ExportedServer, spread: NodeSpread, args: Mapping[str, Any]) -> ExportedServer:
    """The server with one node's GPUs, without flags whose value differs per pod; `args`: the plan's vLLM arguments."""
    if spread.nodes == 1:
        return server
    phrases = tuple(phrase for phrase in server.phrases if phrase.flag not in _PER_POD_FLAGS)
    ranks = gpus_per_engine(args)
    if not spread.engines_per_node:
        cards = ranks * int(args.get("data_parallel_size") or 1)
        server = replace(server, gpus=math.ceil(cards / spread.nodes))
    return replace(server, phrases=(*phrases, *_collective_timeouts(server, ranks)))


def _collective_timeouts(server: ExportedServer, engine_ranks: int) -> Iterator[Phrase]:
    """Longer collective timeouts where loading exceeds the default; for one GPU per engine also executor `mp`."""
    load_s = math.ceil((server.times.download_s + server.times.checkpoint_read_s) / 60) * 60
    for flag, default_s in _COLLECTIVES:
        if load_s > default_s and flag in flags_of(server.release) and server.words.get(flag) is None:
            why = f"Nodes load apart; the first to be done waits for the last, not {default_s} s but a whole load."
            yield Phrase(flag, (str(load_s),), why)
    if load_s > _COLLECTIVES[0][1] and engine_ranks == 1 and server.words.get(_EXECUTOR) is None:
        yield Phrase(_EXECUTOR, ("mp",), "Ends a step that hangs after 300 s, not after a whole load.")


def headless(server: ExportedServer) -> ExportedServer:
    """The server without flags that vLLM refuses together with --headless."""
    return replace(server, phrases=tuple(phrase for phrase in server.phrases if phrase.flag not in _NOT_HEADLESS))
