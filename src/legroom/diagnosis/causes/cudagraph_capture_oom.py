"""CUDA-graph capture, or graph memory outside the budget, is what runs out."""

import re
from collections.abc import Iterator

from legroom.diagnosis.causes import Assessment, Case, Cause, Fix, FixPlanner, known_fix, proof, reason
from legroom.diagnosis.causes.runtime_activation_burst import steps_ran
from legroom.diagnosis.finding import Strength
from legroom.diagnosis.fixes.fix_planner import bytes_without_kv
from legroom.diagnosis.fixes.step_savings import reduced_limit
from legroom.units import GIB, gib

_GRAPH_BYTES = 3 * GIB
"""What a V0 engine says itself as it begins to capture: graphs take 1 to 3 GiB a GPU (vllm/worker/model_runner.py)."""


def examine(case: Case) -> Assessment | None:
    """Assesses any failed GPU allocation, and a log that ends as graphs are registered for all-reduce; else None."""
    notice = case.last("capturing")
    if not case.is_oom:
        if case.has("registering_graphs") and not case.has("server_ready", "engine_ready", "request_served"):
            why = reason("ends_in_registration")
            return Assessment(Strength.POSSIBLE, proof(case.last("registering_graphs"), case.last("profile_v0")), why)
        return None
    error = case.first("torch_oom", "cuda_oom", "torch_oom_unsized") or case.first_failure
    return Assessment(_strength(case), proof(case.last("profile_v0"), notice, error), _explanation(case))


def _strength(case: Case) -> Strength:
    """How strongly the text shows that the allocation failed in CUDA graph capture."""
    if case.site == "graph_profile":
        return Strength.SHOWN
    if case.site == "graph" and (case.has_site_frame or case.has("capturing") or not steps_ran(case)):
        return Strength.SHOWN
    if (case.startup.graph_bytes or 0) > 3 * _GRAPH_BYTES // 2 and case.oom is None and not case.has_site_frame:
        return Strength.SHOWN  # far more than graphs take as a rule, and nothing else is sized
    total, share = case.startup.gpu_total_bytes or 0, case.startup.args.gpu_memory_utilization or 1
    if case.site == "kv" and total * (1 - share) > 2 * _GRAPH_BYTES and not case.has("capturing"):
        return Strength.FAINT  # more than any graphs take is left beside the budget
    if case.site == "kv" and not case.frames and (case.has("capturing") or (case.oom and case.oom.pools_bytes)):
        return Strength.SHOWN  # the pool was sized, and torch already has a private pool: capture had begun
    if not case.site and _captured_anyway(case):
        return Strength.SUGGESTED
    if case.oom is None and case.has("cuda_oom") and not case.site:
        return Strength.POSSIBLE  # the driver's own message without sizes: graphs are allocated past torch
    return Strength.FAINT


def is_ruled_out(planner: FixPlanner) -> bool:
    """Whether capture is ruled out: an allocation of printed size failed in eager mode, and nothing was captured."""
    case = planner.case
    is_sized = case.oom is not None  # without sizes the flag may be of another run
    return is_sized and bool(planner.known.args.enforce_eager) and not (_captured_anyway(case) or case.has("capturing"))


def _captured_anyway(case: Case) -> bool:
    """Whether graphs have a pool although eager mode is said to be on: the flag did not reach the engine."""
    return bool(case.startup.args.enforce_eager and case.oom and case.oom.pools_bytes)


def _explanation(case: Case) -> str:
    """Why capture ran out of memory, with the bytes that the budget leaves, or that were free."""
    startup, oom = case.startup, case.oom
    if case.site == "graph_profile":
        return reason("graphs_measured_first")
    total, share = startup.gpu_total_bytes, startup.args.gpu_memory_utilization
    room = ""
    if total and share:
        room = f" Outside the budget of {share:g} x {gib(total)} only {gib(round(total * (1 - share)))} are left."
    elif oom and oom.free_bytes is not None and oom.total_bytes:
        room = f" {gib(oom.free_bytes)} of {gib(oom.total_bytes)} were free."
    return reason("pool_before_graphs", {"room": room})


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes (None: not applicable): a lower utilization, fewer or smaller graphs, eager mode, V0, fewer sequences."""
    case, need = planner.case, _graph_shortage_bytes(planner)
    if _captured_anyway(case):
        yield known_fix("eager_did_not_arrive")
    room = planner.lower_utilization(need, "Graphs are captured beside the pool: a smaller pool leaves room for them.")
    flags, why, trades = {"enforce_eager": True}, "Without graphs nothing is captured.", "slower decoding"
    # Every check before the capture was passed, whatever the plan says of it.
    eager = planner.plan_change("eager_or_fewer_graphs", flags, why, trades=trades) or Fix(
        "eager_or_fewer_graphs", why, flags, trades=trades, proven=case.site == "graph" and case.has_site_frame
    )
    if case.site == "graph_profile":
        yield from (_smaller_captures_fix(planner), eager)
        return
    is_guess = not planner.utilization_known and case.has("capturing")  # the notice names eager mode itself
    if planner.failed_plan is None and (is_guess or 0 < (planner.accounting.pool_bytes or 0) < 2 * need):
        yield eager  # else half of the pool would go, or an unknown part
    yield room
    yield planner.pull_lever("fewer captured graphs", "Fewer and smaller graphs take less.")
    yield eager
    if case.engine.generation == "V1" and planner.release_is_within("0.8.0", "0.10.2"):
        yield known_fix("v0_captures_less")
    if planner.release_is_within("0.22.0", "") and case.startup.runner == "V2":
        yield known_fix("v1_runner_counts_graphs")
    yield planner.pull_lever("fewer sequences", "The largest graph follows the number of sequences.")


def _smaller_captures_fix(planner: FixPlanner) -> Fix:
    """Fix: a smaller max_cudagraph_capture_size, which is also the number of KV blocks while graphs are measured."""
    args, made = planner.known.args, planner.failed_plan
    printed = [int(size) for item in planner.case.all("capturing") for size in re.findall(r"largest=(\d+)", item.text)]
    given = args.max_cudagraph_capture_size or max((*printed, *(args.cudagraph_capture_sizes or ())), default=0)
    given = given or min(2 * (planner.in_force("max_num_seqs") or 256), 512)  # `_set_cudagraph_sizes` of vLLM's config
    size = reduced_limit(planner, given)
    if made is not None and made.memory.kv.num_blocks and made.layout.kv_cache.bytes > 0:
        room = made.layout.total_bytes - bytes_without_kv(made.layout)
        size = min(size, max(room // 2 * made.memory.kv.num_blocks // made.layout.kv_cache.bytes, 1))
    flags = {"max_cudagraph_capture_size": size}
    why = f"{size} instead of {given} as the largest captured batch: fewer graphs, and fewer KV blocks to measure them."
    return Fix("eager_or_fewer_graphs", why, flags, trades="larger batches run without a graph", is_unplanned=True)


def _graph_shortage_bytes(planner: FixPlanner) -> int:
    """Bytes to free for graphs: what the failed request lacked, or the estimated graphs less what the budget leaves."""
    case, total = planner.case, planner.total_bytes
    startup = case.startup
    piece = planner.case.ledger.shortage_bytes if case.oom else GIB
    usual = _GRAPH_BYTES if case.engine.generation == "V0" else GIB  # V1 captures in pieces: the lower end
    usual = 0 if startup.graph_bytes or planner.failed_plan is not None else usual
    # 0.18 and 0.19 print the estimate and do not reserve it.
    graphs = 0 if startup.graph_estimate_bytes else case.number("graph_estimate", "graphs_bytes") or usual
    outside = total - round(planner.utilization * total) if total else graphs
    return max(piece + (startup.graph_bytes or 0), graphs - outside, GIB // 4)


CAUSE = Cause(entry="LR302", phase="startup_graph", usual_at=("graph",))
