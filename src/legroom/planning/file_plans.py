"""Plans of every server of a deployment file, on each GPU that the file allows."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from legroom.deployments.deployment import Deployment, deployment_of
from legroom.deployments.server_words import has_variable
from legroom.deployments.source_text import Unread
from legroom.deployments.subjects import InvokedCommand, StartedServer
from legroom.errors import LegroomError
from legroom.facts.flags import dest_name
from legroom.facts.releases import Release, latest
from legroom.planning.machine import Machine, make_plan
from legroom.planning.plan import Plan
from legroom.records import dataclass
from legroom.vllm.args import ServeArgs, is_given, other_value
from legroom.vllm.flag_problems import FlagProblem
from legroom.vllm.setting_checks import RefusedByVllm

FileVerdict = Literal["fits", "tight", "does_not_fit", "unknown"]
_MOST_GPUS = 6  # The most kinds of GPU that one server is planned for.
_MULTI_NODE_FLAGS = (
    *("--nnodes", "--node-rank", "--data-parallel-address", "--data-parallel-start-rank"),
    *("--data-parallel-external-lb", "--data-parallel-rank"),
)
"""Flags of a server that spans several pods."""


@dataclass(frozen=True)
class FileServer:
    """One server of a file, with its plan on every GPU that it may run on."""

    name: str
    what: Deployment | None = None
    plans: tuple[Plan, ...] = ()
    unknown: str = ""
    """Why there is no plan."""
    hint: str = ""
    refused_flags: tuple[FlagProblem, ...] = ()
    """Flags that its release refuses."""
    refusal: RefusedByVllm | None = None
    """The release's error about the values of its flags."""
    gpus_short: int = 0
    """GPUs that its flags need beyond those of its container."""

    @property
    def failing_plans(self) -> tuple[Plan, ...]:
        """The plans, one per possible GPU, on which the server does not fit."""
        return tuple(plan for plan in self.plans if plan.verdict == "does_not_fit")

    @property
    def verdict(self) -> FileVerdict:
        """`does_not_fit`: refused, or on every possible GPU; `fits`: on every one; `unknown`: no plan; else `tight`."""
        if self.refused_flags or self.refusal or self.gpus_short:
            return "does_not_fit"
        if not self.plans:
            return "unknown"
        if len(self.failing_plans) == len(self.plans):
            return "does_not_fit"
        return "fits" if all(plan.verdict == "fits" for plan in self.plans) else "tight"

    @property
    def gpus_idle(self) -> int:
        """GPUs of its container that no rank uses; 0 where their number is unknown or the server spans nodes."""
        what = self.what
        if what is None or what.gpu_count is None or _spans_nodes(what):
            return 0
        return max(what.gpu_count - what.args.gpus_needed, 0)

    @property
    def shown(self) -> Plan | None:
        """The plan to show: of those with the best verdict, the one on the smallest card; None without plans."""
        order = {"fits": 0, "tight": 1, "does_not_fit": 2}
        return min(self.plans, key=lambda plan: (order[plan.verdict], plan.target.gpu.total_bytes), default=None)


def started_servers(
    path: str, text: str, release: Release | None = None
) -> tuple[list[StartedServer], list[InvokedCommand], Unread | None]:
    """(the servers that the file `path` with this text starts, its other commands, why it was unreadable or None)."""
    from legroom.deployments.file_reader import read_file  # only files need YAML and the like

    parts = list(read_file(path, text, release or latest()))
    unread = next((part.unread for part in parts if part.is_whole and part.unread), None)
    commands = [each for part in parts for each in part.subjects if isinstance(each, InvokedCommand)]
    return [server for part in parts for server in part.servers], commands, unread


def planned_servers(
    servers: list[StartedServer],
    machine: Machine | None = None,
    release: Release | None = None,
    *,
    advice: bool = True,
    override_gpu: bool = False,
) -> Iterator[FileServer]:
    """Each server planned on the GPUs that its file names, else on `machine`; with `override_gpu` always on that."""
    for server in servers:
        try:
            what = deployment_of(server, release)
            what.require_gpus()
        except LegroomError as error:
            yield FileServer(server.read_as, unknown=error.message, hint=error.hint)
            continue
        if override_gpu and machine is not None:
            what = replace(what, gpu_names=(machine.gpu,))
        yield _planned_server(server.read_as, what, machine, advice)


def _planned_server(name: str, what: Deployment, machine: Machine | None, advice: bool) -> FileServer:
    """The server of a file, named `name`, with a plan for each GPU it may run on, or the reason why there is none."""
    open_values = [problem for problem in what.problems if has_variable(problem.value) or has_variable(problem.flag)]
    of_memory = (problem for problem in open_values if dest_name(problem.flag) in ServeArgs.__dataclass_fields__)
    if (undecided := next(of_memory, None)) is not None:
        why = f"{undecided.flag} is {undecided.value}, which is known only where it runs"
        return FileServer(name, what, unknown=why, hint="a value that stands in the file itself can be checked")
    fatal = tuple(problem for problem in what.problems if problem.stops_vllm and problem not in open_values)
    if fatal and what.release_hint is not None and what.is_vllms_own:
        return FileServer(name, what, refused_flags=fatal)
    if not what.args.model:
        hint = "the model may come from a variable or a script"
        return FileServer(name, what, unknown="it names no model", hint=hint)
    given = what.gpu_count if machine is None or machine.gpus is None else machine.gpus
    if given is not None and what.args.gpus_needed > given and not _spans_nodes(what):
        return FileServer(name, what, gpus_short=what.args.gpus_needed - given)
    names = what.gpu_names or ((machine.gpu,) if machine is not None and machine.gpu else ())
    if not names:
        return FileServer(name, what, unknown="nothing says which GPU it runs on", hint=_GPU_HINT)
    try:
        plans = tuple(_plan_on_gpu(what, machine, gpu, given, advice) for gpu in names[:_MOST_GPUS])
    except LegroomError as error:
        if isinstance(error, RefusedByVllm) and what.release_hint is not None:
            return FileServer(name, what, refusal=error)
        return FileServer(name, what, unknown=error.message, hint=error.hint)
    return FileServer(name, what, plans)


_GPU_HINT = "a node selector such as nvidia.com/gpu.product, or the annotation legroom/gpu, names it"


def _spans_nodes(what: Deployment) -> bool:
    """Whether the command uses Ray or a flag of a multi-node deployment."""
    on_ray = other_value(what.args, "--distributed-executor-backend") == "ray"
    return on_ray or any(is_given(what.args, flag) for flag in _MULTI_NODE_FLAGS)


def _plan_on_gpu(what: Deployment, machine: Machine | None, gpu: str, given: int | None, advice: bool) -> Plan:
    """The plan on `given` GPUs named `gpu`, or more if the flags need more (None: what they need), with file notes."""
    base = machine or Machine(gpu)
    limit = base.host_memory or (str(what.memory_limit_bytes) if what.memory_limit_bytes else None)
    count = None if given is None else max(given, what.args.gpus_needed)
    made = make_plan(what.args, what.release, replace(base, gpu=gpu, gpus=count, host_memory=limit), advice=advice)
    notes = (*what.notes, *(problem.message for problem in what.problems), *made.notes)
    return replace(made, notes=tuple(dict.fromkeys(notes)))
