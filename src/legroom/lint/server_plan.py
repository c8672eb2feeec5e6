"""The plan of a server from its file alone: its model, flags and GPU."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from legroom.deployments.subjects import StartedServer
from legroom.errors import LegroomError
from legroom.facts import pattern
from legroom.facts.bundled import find, mirrored
from legroom.facts.model_sources import load
from legroom.facts.releases import Release
from legroom.isolation import isolated
from legroom.lint.rule import has_open_words
from legroom.records import dataclass
from legroom.vllm.args import ServeArgs
from legroom.vllm.parse import parse_flags
from legroom.vllm.setting_checks import RefusedByVllm

if TYPE_CHECKING:
    from legroom.planning.file_plans import FileServer
    from legroom.planning.plan import Plan

_SLICE = pattern("server_plan.slice")
_ANY_GPU = "h200"  # Used where no GPU is named: weights and host memory do not depend on it.


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """A server's plan from its file."""

    plan: Plan
    is_gpu_known: bool
    """Whether the file names the GPU; otherwise only weights and host memory of the plan are valid."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the model's weights on one GPU, without those of a draft model."""
        return min(self.plan.memory.tightest.weights.bytes, self.checkpoint_bytes)

    @property
    def least_gpu_bytes(self) -> float:
        """Least memory of one GPU: the weights, and the KV cache of one request of max_model_len."""
        kv = self.plan.memory.kv
        per_request = self.plan.layout.kv_cache.bytes / kv.max_concurrency if kv.max_concurrency else 0
        return self.held_bytes + per_request

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the model's whole checkpoint."""
        return self.plan.host.checkpoint_bytes


def plan_of_server(server: StartedServer, release: Release) -> ServerPlan | None:
    """The server's plan, made without the network; None where the model or a value is unknown, or vLLM refuses it."""
    made = _plan_or_refusal(server, release)
    return made if isinstance(made, ServerPlan) else None


def refusal_of_server(server: StartedServer, release: Release) -> RefusedByVllm | None:
    """Why the release does not start these flags on the GPU the file names; None where it does or is unknown."""
    made = _plan_or_refusal(server, release)
    return made if isinstance(made, RefusedByVllm) else None


def file_plan_of(server: StartedServer, release: Release) -> FileServer | None:
    """The plans of a server on each GPU that its file names, without network; None for a template or Python call."""
    from legroom.planning.file_plans import planned_servers

    if server.call is not None or has_open_words(server, ServeArgs.__dataclass_fields__):
        return None
    with isolated():
        return next(planned_servers([server], release=release, advice=False))


def _plan_or_refusal(server: StartedServer, release: Release) -> ServerPlan | RefusedByVllm | None:
    """The server's plan, or vLLM's refusal to start; None where the command is not fully known."""
    words = tuple(word.text for word in server.words)
    if server.call is not None or has_open_words(server, ServeArgs.__dataclass_fields__):
        return None
    gpu_name = server.gpu_names[0] if len(server.gpu_names) == 1 else ""
    return _plan_of_words(words, release, gpu_name, server.gpu_count)


def _is_known(model: str) -> bool:
    """Whether the model is known without the network, by its id or by the name of its folder."""
    if find(model) is not None or mirrored(model) is not None:
        return True
    try:
        with isolated():
            return load(model).known
    except LegroomError:
        return False


@lru_cache(maxsize=256)
def _plan_of_words(
    words: tuple[str, ...], release: Release, gpu_name: str, gpus: int | None
) -> ServerPlan | RefusedByVllm | None:
    """The plan of a command or vLLM's refusal, on the named GPU, else on a stand-in; None if neither can be made."""
    from legroom.planning.machine import Machine, make_plan  # only where a model is known

    parsed = parse_flags(words, release)
    has_bad_flag = any(problem.stops_vllm for problem in parsed.problems)
    model = parsed.args.model
    if not model or not _is_known(model):
        return None
    is_gpu_known = bool(gpu_name) and not _SLICE.search(gpu_name)
    for name in (gpu_name, _ANY_GPU) if is_gpu_known else (_ANY_GPU,):
        try:
            plan = make_plan(parsed.args, release, Machine(name, gpus if name == gpu_name else None), advice=False)
        except RefusedByVllm as refusal:
            return None if has_bad_flag else refusal
        except LegroomError:
            continue
        return ServerPlan(plan, name == gpu_name)
    return None
