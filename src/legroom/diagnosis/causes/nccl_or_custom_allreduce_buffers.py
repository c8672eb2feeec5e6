"""Communication buffers: NCCL, custom all-reduce, expert-parallel exchange."""

from collections.abc import Iterator
from dataclasses import replace

from legroom.diagnosis.causes import Assessment, Case, Cause, Fix, FixPlanner, known_fix, proof, reason
from legroom.diagnosis.finding import Strength
from legroom.units import GIB

_SET_BY_VLLM = ("0.4.3", "0.10.1.1")
"""Releases that set NCCL_CUMEM_ENABLE=0 themselves (worker_base.py, then env_override.py)."""


def examine(case: Case) -> Assessment | None:
    """Assesses NCCL's out-of-memory errors, and GPU OOMs in a collective; None without, also for its other errors."""
    refused = case.first("nccl_register")
    if refused:
        why = reason("nccl_not_registered")
        return Assessment(Strength.NAMED, proof(case.first("nccl_system_error"), refused), why)
    error = case.first("nccl_oom", "deepep_buffer")
    if error:
        why = reason("nccl_without_memory")
        unhandled = case.first("nccl_unhandled_cuda")
        is_of_host = case.has("shm_small", "shm_no_space", "shm_insufficient")  # NCCL's segments there failed as well
        return Assessment(Strength.USUAL if is_of_host else Strength.NAMED, proof(unhandled, error), why)
    if (unhandled := case.first("nccl_unhandled_cuda")) and case.startup.args.num_gpu_blocks_override is not None:
        return Assessment(Strength.NAMED, proof(unhandled), reason("pool_beside_nccl"))
    if case.is_oom and (told := case.first("nccl_release_told")):
        why = f"By the text it works with NCCL {told.facts['what']}: what the other release takes more is missing."
        return Assessment(Strength.COMPARED, proof(told, case.first_failure), why)
    if case.is_oom and case.frames & {"frame_all_reduce"}:
        why = reason("set_up_of_collectives")
        return Assessment(
            Strength.POSSIBLE, proof(case.first("frame_all_reduce"), case.first("torch_oom", "cuda_oom")), why
        )
    return None


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes (None: not applicable): smaller or fewer buffers, a lower utilization, a free GPU."""
    if planner.case.has("nccl_register"):
        yield known_fix("default_nccl_buffers")
        return
    if told := planner.case.first("nccl_release_told"):
        steps = (f"pip install 'nvidia-nccl-cu12=={told.facts['what']}', or VLLM_NCCL_SO_PATH to its libnccl.so.2",)
        yield Fix("disable_custom_allreduce_or_nccl_env", "The text itself says that this worked.", steps=steps)
    room = planner.lower_utilization(GIB, "Communication buffers live beside the budget.")
    yield room if planner.known.args.num_gpu_blocks_override is not None else None
    if _has_no_cumem(planner) or planner.case.phase == "serving":
        if room is not None:
            yield replace(room, steps=known_fix("no_nccl_cumem").steps)
    else:
        yield known_fix("no_nccl_cumem")
        yield room
    yield known_fix("no_custom_all_reduce")
    yield known_fix("who_filled_the_card")


def _has_no_cumem(planner: FixPlanner) -> bool:
    """Whether NCCL's cuMem allocator is off already: by RCCL's default, the release, or if unknown the log's style."""
    if planner.known.gpu is not None and planner.known.gpu.vendor == "amd":
        return True
    if planner.known.release_known:
        return planner.release_is_within(*_SET_BY_VLLM)
    engine = planner.case.engine
    return engine.generation == "V0" or engine.is_styled_before_0_9_2


CAUSE = Cause(entry="LR304", phase="startup_load")
