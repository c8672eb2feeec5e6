"""Does this node hold the server? The plan of a command on the GPUs, the driver and the memory that are really here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from legroom.errors import UNREACHABLE, LegroomError
from legroom.facts.gpus import gpu
from legroom.facts.release_support import build_of, driver_is_older
from legroom.planning.machine import Machine, make_plan
from legroom.planning.plan import Plan
from legroom.planning.plan_json import plan_json
from legroom.records import dataclass
from legroom.units import MIB, gib, human_bytes

if TYPE_CHECKING:
    from legroom.facts.releases import Release
    from legroom.live.gpu_memory import GpuMemory
    from legroom.verify.node import NodeState
    from legroom.vllm.args import ServeArgs

CheckFinding = Literal["ok", "warning", "failure"]
_DOCKER_SHM_BYTES = 64 * MIB
"""What a container has where nothing is mounted: ranks that share it fail at once."""
_HIDDEN_HINT = "inside a container the GPUs are numbered from 0, whichever of the node's they are: leave it out there"
_NO_GPU = "this container sees no NVIDIA GPU"
_NO_GPU_HINT = "give it nvidia.com/gpu in its limits, as the server's own container has it, and check the node's driver"


@dataclass(frozen=True, slots=True)
class NodeCheck:
    name: Literal["gpus", "memory", "driver", "shm"]
    finding: CheckFinding
    message: str


@dataclass(frozen=True)
class Preflight:
    """The answer, with what it rests on."""

    node: NodeState
    checks: tuple[NodeCheck, ...]
    plan: Plan | None = None

    @property
    def ok(self) -> bool:
        return all(check.finding != "failure" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        node = self.node
        gpus = [
            {"name": card.name, "total_bytes": card.total_bytes, "used_bytes": card.used_bytes} for card in node.gpus
        ]
        return {
            "ok": self.ok,
            "node": {
                "gpus": gpus,
                "driver": node.driver,
                "shm_bytes": node.shm_bytes,
                "memory_limit_bytes": node.memory_limit_bytes,
            },
            "checks": [{"name": each.name, "finding": each.finding, "message": each.message} for each in self.checks],
            "plan": plan_json(self.plan) if self.plan is not None else None,
        }


def preflight(args: ServeArgs, release: Release, node: NodeState, host_memory: str | None = None) -> Preflight:
    """Hold the flags against the node; LegroomError where it has no GPU at all."""
    if not node.gpus and node.hidden_gpus:
        raise LegroomError(
            f"CUDA_VISIBLE_DEVICES hides all {node.hidden_gpus} GPUs of this container", _HIDDEN_HINT, UNREACHABLE
        )
    if not node.gpus:
        raise LegroomError(_NO_GPU, _NO_GPU_HINT, UNREACHABLE)
    needed = max(args.gpus_needed, 1)
    there = len(node.gpus)
    if needed > there:
        hidden = f" ({node.hidden_gpus} more are hidden by CUDA_VISIBLE_DEVICES)" if node.hidden_gpus else ""
        message = f"the flags ask for {needed} GPUs, and this container sees {there}{hidden}"
        return Preflight(node, (NodeCheck("gpus", "failure", message), *_driver(node, release)))
    limit = host_memory or (str(node.memory_limit_bytes) if node.memory_limit_bytes else None)
    fullest = max(node.gpus[:needed], key=lambda card: card.used_bytes)
    plan = make_plan(args, release, _machine(fullest, there, limit))
    checks = (_gpus(node, needed), _memory(plan, fullest), *_driver(node, release), *_shm(plan, node, needed))
    return Preflight(node, checks, plan)


def _machine(card: GpuMemory, count: int, host_memory: str | None) -> Machine:
    """The card by its name, less what others hold of it. NVML counts what the driver keeps for itself as used, and as
    a part of the total; CUDA, which vLLM asks, as neither."""
    try:
        known = gpu(card.name)
    except LegroomError:
        name = f"{card.total_bytes / MIB:.0f}MiB"
        return Machine(name, count, used=str(card.used_bytes), host_memory=host_memory)
    reserved = max(card.total_bytes - known.total_bytes, 0)
    return Machine(card.name, count, used=str(max(card.used_bytes - reserved, 0)), host_memory=host_memory)


def _gpus(node: NodeState, needed: int) -> NodeCheck:
    names = sorted({card.name for card in node.gpus})
    if len(names) > 1 and needed > 1:
        return NodeCheck("gpus", "warning", f"the GPUs differ ({', '.join(names)}): the smallest decides")
    return NodeCheck("gpus", "ok", f"{needed} of {len(node.gpus)} x {names[0]}")


def _memory(plan: Plan, card: GpuMemory) -> NodeCheck:
    from legroom.vllm.command_line import any_release_words

    free = f"{human_bytes(card.total_bytes - card.used_bytes)} of GPU {card.index} are free"
    if plan.verdict == "fits":
        return NodeCheck("memory", "ok", f"the server fits; {free}")
    fix = f"; {' '.join(any_release_words(plan.advice[0].flags))} would start" if plan.advice else ""
    if plan.verdict == "tight":
        return NodeCheck("memory", "warning", f"tight: {plan.reason}; {free}{fix}")
    failure = plan.memory.failure
    words = failure.message.partition(". ")[0].rstrip(".") if failure is not None else plan.reason
    return NodeCheck("memory", "failure", f"vLLM would stop with: {words}; {free}{fix}")


def _driver(node: NodeState, release: Release) -> Iterator[NodeCheck]:
    build = build_of(release)
    oldest = build.oldest_driver
    if not node.driver or oldest is None:
        return
    if driver_is_older(node.driver, oldest):
        yield NodeCheck(
            "driver",
            "warning",
            f"driver {node.driver} is older than {oldest}, which CUDA {build.cuda} of vLLM {release} was made for",
        )
    else:
        yield NodeCheck("driver", "ok", f"driver {node.driver} serves CUDA {build.cuda}")


def _shm(plan: Plan, node: NodeState, needed: int) -> Iterator[NodeCheck]:
    there, wanted = node.shm_bytes, plan.host.shm_bytes
    if there is None or needed < 2:
        return
    if there <= _DOCKER_SHM_BYTES:
        yield NodeCheck(
            "shm",
            "failure",
            f"/dev/shm has {human_bytes(there)}, and {needed} ranks talk through it: "
            f"mount an emptyDir with medium Memory of {gib(wanted, 0)}",
        )
    elif there < wanted:
        yield NodeCheck("shm", "warning", f"/dev/shm has {human_bytes(there)}, and {gib(wanted, 0)} may be used")
    else:
        yield NodeCheck("shm", "ok", f"/dev/shm has {human_bytes(there)}")
