"""Looks like memory, is not: kernel faults, assertions, NCCL without shortage, limits of a kernel, plain bugs."""

from __future__ import annotations

from collections.abc import Iterator

from legroom.diagnosis.case import Case
from legroom.diagnosis.cause import Cause
from legroom.diagnosis.evidence import Evidence
from legroom.diagnosis.finding import Assessment, DeadEnd, Fix, proof
from legroom.diagnosis.fix_planner import FixPlanner
from legroom.explain.entry import Localized

_REASONS = {
    "illegal_access": "A kernel touched an address that is not its own. "
    "The words speak of memory, but nothing was short.",
    "device_assert": "An assertion inside a kernel failed, most often an index "
    "out of range: a token id, a position, a block number.",
    "kernel_assertion": "An assertion inside a kernel failed, most often an index "
    "out of range: a token id, a position, a block number.",
    "kernel_launch": "A kernel could not be launched or failed in itself; the amount of memory has no part in it.",
    "xid": "The driver reports a fault of the GPU itself.",
    "kernel_shared_memory": "A kernel wants more shared memory of a streaming multiprocessor than "
    "the chip has. That is a few KiB on the chip, not the card's memory.",
    "backend_workspace": "A fixed workspace of the attention backend is too "
    "small; its size is a constant, the card has room.",
    "workspace_locked": "A kernel asked for workspace after start-up had fixed "
    "its size: a bug or an unsupported shape, not a shortage.",
    "custom_allreduce_invalid": "Custom all-reduce cannot share this kind of allocation between processes "
    "(expandable segments or the sleep-mode pool). It is a clash of settings.",
    "expandable_vs_pool": "The sleep-mode pool refuses expandable segments: a clash of settings.",
    "nccl_unhandled_cuda": "NCCL met a CUDA error that is not `out of memory`: "
    "driver, topology or a rank that had died before.",
    "nccl_other_cuda": "NCCL met a CUDA error that is not `out of memory`: "
    "driver, topology or a rank that had died before.",
    "nccl_invalid_usage": "NCCL was used in a way it does not support; it says nothing of a shortage.",
    "nccl_system_error": "A system call of NCCL failed: network, permissions, or shared memory between processes.",
    "nccl_timeout": "A collective operation did not finish: one rank was late or had died.",
    "segfault": "The process crashed in native code; the amount of memory has no part in it.",
    "shm_broadcast_stall": "One process waits for another that computes or hangs; no memory is short.",
    "rpc_timeout": "One process did not answer another in time; it says nothing of a shortage.",
}


def examine(case: Case) -> Assessment | None:
    """The first failure is one of the known look-alikes, or an exception that no memory message goes with."""
    error = case.first("profiling_error")
    if (
        error
        and error.facts.get("initial_bytes") is not None
        and error.facts.get("initial_bytes") == error.facts.get("current_bytes")
    ):
        why = (
            "Free memory before and after is the same, so nobody took or "
            "released any: the check itself is wrong for this platform."
        )
        return Assessment(0.93, proof(error), why)
    lookalike = _known(case)
    if lookalike:
        return lookalike
    if case.has("failed_execution_dump") and not case.is_oom:
        why = "A model step crashed and its input was saved; no allocation failed."
        return Assessment(0.7, proof(case.first("failed_execution_dump"), case.last("exception")), why)
    return _any_exception(case)


def _known(case: Case) -> Assessment | None:
    items = [item for item in case.evidence if item.id in _REASONS]
    if not items:
        return None
    error = items[0]
    confidence = (
        0.6
        if error.id in ("rpc_timeout", "nccl_system_error", "segfault", "shm_broadcast_stall")
        else 0.93
        if error.id != "nccl_unhandled_cuda"
        else 0.85
    )
    if case.has("nccl_oom"):
        confidence = 0.2
    elif case.has("shm_small", "shm_no_space"):
        confidence = min(confidence, 0.4)
    elif _shortage_first(case, error):
        confidence = 0.3
    return Assessment(confidence, proof(error), _REASONS[error.id])


def _shortage_first(case: Case, error: Evidence) -> bool:
    """A real shortage before it explains the look-alike as its echo."""
    shortage = case.first(
        "torch_oom",
        "cuda_oom",
        "torch_oom_unsized",
        "no_cache_blocks",
        "kv_bytes_short",
        "sampler_warmup_oom",
        "cumem_oom",
        "free_below_desired",
        "oom_killer",
        "killed_process",
    )
    return shortage is not None and shortage.line <= error.line


def _any_exception(case: Case) -> Assessment | None:
    error = case.first("exception")
    if error is None or case.is_oom:
        return None
    # That an engine died is no reason of its own where an exception says why.
    says_why = "Engine core initialization" not in error.text
    reasons = (item for item in case.evidence if item.role in ("failure", "host"))
    if any(not says_why or item.id != "died_silently" for item in reasons):
        return None
    kind = _kind(error)
    confidence = 0.35 if case.has("preempted", "kv_usage_metric") else 0.6
    why = f"The log ends in {kind}, and nothing in it speaks of memory running out."
    return Assessment(confidence, proof(error), why)


def _is_missing_module(case: Case) -> bool:
    error = case.first("exception")
    is_import = error is not None and _kind(error) in ("ModuleNotFoundError", "ImportError")
    return is_import and not case.has(*_REASONS)


def _kind(error: Evidence) -> str:
    """The exception's own name, without its module."""
    return str(error.facts.get("type", "an exception")).rpartition(".")[2]


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """What to do instead of turning memory knobs."""
    case = planner.case
    if case.has("custom_allreduce_invalid", "expandable_vs_pool"):
        yield Fix(
            "allocator_conf",
            "Without expandable segments the clash is gone.",
            steps=("unset PYTORCH_CUDA_ALLOC_CONF / PYTORCH_ALLOC_CONF",),
            confidence=0.65,
        )
        yield Fix(
            "disable_custom_allreduce_or_nccl_env",
            "Without custom all-reduce nothing has to be shared.",
            flags={"disable_custom_all_reduce": True},
            command=(*planner.command({}), "--disable-custom-all-reduce"),
            trades="slower all-reduce",
            confidence=0.6,
        )
    elif case.has("nccl_unhandled_cuda", "nccl_other_cuda", "nccl_invalid_usage", "nccl_timeout", "nccl_system_error"):
        yield Fix(
            "disable_custom_allreduce_or_nccl_env",
            "NCCL's own log names the call that failed.",
            env={"NCCL_DEBUG": "INFO"},
            command=planner.command({}, {"NCCL_DEBUG": "INFO"}),
            confidence=0.5,
        )
        yield Fix(
            "driver",
            "Driver, topology or a container without peer access are the usual reasons.",
            steps=("try NCCL_P2P_DISABLE=1; check nvidia-smi topo -m and the driver",),
            confidence=0.4,
        )
    elif case.has("kernel_shared_memory", "backend_workspace"):
        yield Fix(
            "flag",
            "Another attention backend has other limits.",
            steps=("choose another --attention-backend (before 0.15: VLLM_ATTENTION_BACKEND)",),
            confidence=0.5,
        )
    elif _is_missing_module(case):
        yield Fix(
            "engine_version_or_V0",
            "Python does not find a module that this vLLM, or something it loads, needs.",
            steps=("install it into the environment that runs vLLM: its name is at the end of the line above",),
            confidence=0.7,
        )
        return
    is_kernel = case.has(*_REASONS) or case.has("failed_execution_dump")
    yield Fix(
        "engine_version_or_V0",
        "A kernel fault is a bug: another release may not have it."
        if is_kernel
        else "The exception names what it stumbled over; where it is no setting of yours, it is a bug of the release.",
        steps=("upgrade, or go back to the last release that worked",),
        confidence=0.4,
    )
    if not is_kernel:
        return
    yield Fix(
        "report",
        "Find the kernel that fails.",
        env={"CUDA_LAUNCH_BLOCKING": "1"},
        command=planner.command({"enforce_eager": True}, {"CUDA_LAUNCH_BLOCKING": "1"}),
        steps=("run once with CUDA_LAUNCH_BLOCKING=1 and --enforce-eager: the traceback then points at it",),
        confidence=0.4,
    )


CAUSE = Cause(
    label="not_memory",
    entry="LR901",
    title=Localized("this looks like memory but is not", "看似内存问题，其实不是"),
    domain="other",
    priority=1,  # gives way to what explains as much
    examine=examine,
    remedies=remedies,
    dead_ends=(DeadEnd("any memory flag", "nothing was short; none of them changes this"),),
)
