"""The environment of a planned server: its given variables, and settings that it needs."""

from collections.abc import Mapping

from legroom.exports.deploy.serve_command import ServeCommand
from legroom.exports.deploy.start_times import StartTimes
from legroom.facts.flags import env_default
from legroom.facts.release_support import ENDPOINTS_SWITCH
from legroom.masking import is_secret
from legroom.planning.plan_document import PlanDocument
from legroom.records import dataclass
from legroom.units import gib

_OF_ONE_MACHINE = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "PWD", "SHELL", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "PYTHONPATH"}
)
"""Variables with paths of one machine."""
_WHY = {ENDPOINTS_SWITCH: "opens the endpoints that put the server to sleep and wake it"}
ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@dataclass(frozen=True, slots=True)
class EnvVariable:
    name: str
    value: str
    why: str


def server_environment(
    plan: PlanDocument, words: ServeCommand, given: Mapping[str, str], times: StartTimes
) -> tuple[tuple[EnvVariable, ...], tuple[str, ...]]:
    """(Variables with reasons: given ones, engine start timeout, allocator setting; comments on those left out)."""
    own, broken, lines = [name for name in given if name in _OF_ONE_MACHINE], _why_broken(plan, words), []
    remarks = [f"{', '.join(own)}: given, but left out, because it names places on one machine."] if own else []
    for name, value in given.items():
        if name in own or is_secret(name, value):
            continue
        kept = value
        if broken and name in ALLOCATOR_NAMES:
            parts = value.split(",")
            kept = ",".join(part for part in parts if part.replace(" ", "").lower() != "expandable_segments:true")
        if kept != value:
            remarks.append(f"{name} was given with expandable_segments, which is left out: {broken}.")
        if kept or not value:
            lines.append(EnvVariable(name, kept, _WHY.get(name, "as given")))
    ready = "VLLM_ENGINE_READY_TIMEOUT_S"
    default_s = env_default(ready, plan.release)
    if default_s is not None and times.limit_s > default_s and ready not in given:
        why = f"vLLM gives up on its engine after {default_s} s; {times.short_sentence()}"
        lines.append(EnvVariable(ready, str(times.limit_s), why))
    if given.keys().isdisjoint(ALLOCATOR_NAMES):
        spare, burst = gib(plan.layout.headroom_bytes), gib(plan.layout.activation_bytes)
        if objection := broken or _allocator_objection(plan):
            remarks.append(f"No allocator settings: {objection}.")
        else:
            why = f"only {spare} of the card stays free beside {burst} of activations, so PyTorch's cache must not "
            lines.append(EnvVariable("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", f"{why}fragment"))
    return tuple(lines), tuple(remarks)


def _allocator_objection(plan: PlanDocument) -> str:
    """A sentence on why expandable segments would not help this plan; empty where they would."""
    if not plan.gpu.name.startswith("NVIDIA"):
        return "expandable segments are known to work on NVIDIA cards only"
    spare, burst = plan.layout.headroom_bytes, plan.layout.activation_bytes
    if spare < burst:
        return ""
    more = f"more than the {gib(burst)} that a burst of activations takes"
    return f"{gib(spare)} of the card stays free, {more}, so fragmentation does no harm"


def _why_broken(plan: PlanDocument, words: ServeCommand) -> str:
    """Why expandable segments break this server (all-reduce, sleep mode, KV connector); empty if they do not."""
    ranks = int(plan.args.get("tensor_parallel_size") or 1)
    if ranks > 1 and words.get("--disable-custom-all-reduce") is None:
        return f"custom all-reduce of {ranks} ranks cannot share memory of expandable segments"
    if words.get("--enable-sleep-mode") is not None and plan.release.before("0.20.1"):
        return "sleep mode asserts against expandable segments before vLLM 0.20.1"
    if words.get("--kv-transfer-config") is not None or words.get("--kv-offloading-size") is not None:
        return "KV connectors pin addresses that expandable segments may move"
    return ""
