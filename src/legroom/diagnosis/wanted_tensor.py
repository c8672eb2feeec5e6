"""Which tensor of the model the failed allocation was, and when it is allocated."""

from legroom.diagnosis.fixes.failed_run import NOT_PLANNABLE
from legroom.diagnosis.fixes.fix_planner import FixPlanner
from legroom.diagnosis.ledger import possible_moments
from legroom.facts import read_data
from legroom.facts.flags import flag_name
from legroom.memory.tensors import Tensor, printed_request, score_tensors, tensors, tensors_of_size
from legroom.units import GIB

_SITES = read_data("evidence.json")["tensor_sites"]  # Sites at which a tensor of each moment is allocated.
_ORDER = ("startup_load", "startup_profile", "startup_kv", "startup_graph", "serving")


def wanted_tensors(planner: FixPlanner) -> tuple[Tensor, ...]:
    """The planned run's tensors of the failed allocation's size, rounded as torch prints it; empty without a plan."""
    case, plan = planner.case, planner.failed_plan or planner.plan_by_config
    if case.oom is None or plan is None:
        return ()
    settings, kv = plan.settings, plan.memory.kv
    is_exact = settings.num_gpu_blocks_override or settings.kv_cache_memory_bytes or case.startup.blocks
    try:
        every = tuple(tensors(plan.target.model, settings, plan.target.gpu, kv if is_exact else None))
        every += tuple(score_tensors(plan.target.model, settings)) if case.has("frame_scores") else ()
    except NOT_PLANNABLE:
        return ()
    same = tensors_of_size(case.oom.wanted_bytes, iter(every))
    if not planner.known.ranks_known and any(tensor.moment != "load" or tensor.bytes < GIB for tensor in same):
        return ()  # a whole weight of more than a GiB is on one rank; other sizes may be of several
    if case.has_site_frame:
        return tuple(tensor for tensor in same if case.site in _SITES[tensor.moment])
    is_loading = case.phase_reached in (None, "startup_load") and not (case.has("forward_frame") or case.was_ready)
    return tuple(tensor for tensor in same if is_loading or tensor.moment != "load")


def site_by_size(planner: FixPlanner, wanted: tuple[Tensor, ...]) -> str:
    """Where in the code (as `Case.site`) the failed allocation happened, by its size and the planned memory; empty if a
    traceback shows it or several places are possible. `wanted`: the planned tensors that have exactly that size."""
    case, plan = planner.case, planner.failed_plan
    if case.oom is None or case.has_site_frame or not (planner.known.ranks_known or wanted):
        return ""
    if plan is None:  # the card is not known: a whole weight is allocated once
        is_weight = bool(wanted) and all(tensor.moment == "load" for tensor in wanted)
        return "build" if is_weight and case.phase_reached in (None, "startup_load") else ""
    if case.has("frame_scores"):
        return "" if case.site else "profile"  # attention runs after the weights are loaded
    computes = case.has("forward_frame")  # nothing is computed before the weights are there
    if plan.layout.weights.low > plan.layout.total_bytes and case.phase_reached in (None, "startup_load"):
        return "" if computes else "build"
    moments = possible_moments(case.ledger, plan.layout) - ({"load"} if computes else frozenset())
    if wanted and {tensor.moment for tensor in wanted} == {"kv"}:
        return "kv"
    if wanted:
        sites = {site for tensor in wanted for site in _SITES[tensor.moment]}
        moments = moments & {"load" if site == "build" else site for site in sites}
    if len(moments) != 1:
        return ""
    moment = next(iter(moments))
    if moment == "serving":
        samples = wanted and all(tensor.moment == "sampling" for tensor in wanted) and not case.was_ready
        return "sampler" if samples else "serving" if wanted else ""
    printed = (item.phase for item in case.milestones if not item.is_told)
    reached = max((_ORDER.index(phase) for phase in printed if phase in _ORDER), default=0)
    if reached > (0 if moment == "load" else 1):
        return ""
    return "build" if moment == "load" else moment


def tensor_sentence(wanted: tuple[Tensor, ...], size_bytes: int) -> str:
    """A sentence: which tensors (`wanted`) have the failed size, as products of dimensions; empty where none has."""
    if not wanted:
        return ""
    names = " or ".join(f"{tensor.name} ({tensor.how})" for tensor in wanted[:2])
    settings = dict.fromkeys(flag_name(tensor.setting) for tensor in wanted if tensor.setting)
    lever = f" {' and '.join(settings)} changes it." if len(settings) == 1 else ""
    return f"{printed_request(size_bytes)} is the size of {names}.{lever}"


def lever_of(wanted: tuple[Tensor, ...]) -> str:
    """The vLLM setting that scales all tensors of the failed size; empty where they depend on different ones."""
    settings = {tensor.setting for tensor in wanted}
    return next(iter(settings)) if len(settings) == 1 else ""
