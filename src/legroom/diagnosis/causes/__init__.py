"""The causes, one file each, all with the same face: CAUSE, ENTRY, DEAD_ENDS, `examine(case)`, `remedies(bench)`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Protocol

from legroom.diagnosis.case import Case
from legroom.diagnosis.finding import DeadEnd, Finding, Fix
from legroom.diagnosis.workbench import Workbench
from legroom.errors import LegroomError

NAMES = (
    "weights_too_big",
    "quantization_kernel_workspace",
    "gpu_shared_or_not_free",
    "no_cache_blocks",
    "hybrid_state_cache_limit",
    "kv_too_small_for_max_len",
    "tp_kv_head_replication_or_pp_imbalance",
    "profiling_activation_peak",
    "cudagraph_capture_oom",
    "lora_or_spec_decode_extra",
    "nccl_or_custom_allreduce_buffers",
    "runtime_activation_burst",
    "multimodal_inputs",
    "kv_preemption_thrash",
    "prefix_cache_pressure",
    "leak_over_time",
    "allocator_fragmentation",
    "sleep_mode_or_rlhf_colocation",
    "request_too_long",
    "host_ram_oom",
    "unified_memory_or_wsl",
    "driver_or_cuda_mismatch",
    "wrong_flag",
    "not_memory",
)
"""Every cause, which is also the name of its file."""


class Cause(Protocol):
    """What a cause's file exposes."""

    CAUSE: str
    ENTRY: str

    DEAD_ENDS: tuple[DeadEnd, ...]

    def remedies(self, bench: Workbench) -> Iterator[Fix | None]:
        """What mends it, the best first; None for one that does not apply here."""

    def examine(self, case: Case) -> Finding | None:
        """Look at a case; a finding if this cause may be behind it."""


MOST_FIXES = 5


@cache
def causes() -> tuple[Cause, ...]:
    """Every cause, loaded."""
    return tuple(importlib.import_module(f"legroom.diagnosis.causes.{name}") for name in NAMES)


def examine_all(case: Case) -> tuple[Finding, ...]:
    """What may be behind a case, the likeliest first."""
    found = [_in_time(finding, case) for cause in causes() if (finding := cause.examine(case))]
    return tuple(sorted(found, key=lambda finding: -finding.confidence))


def with_remedies(finding: Finding, bench: Workbench) -> Finding:
    """The finding with its fixes and dead ends."""
    cause = next(cause for cause in causes() if finding.cause == cause.CAUSE)
    fixes = [fix for fix in cause.remedies(bench) if fix is not None][:MOST_FIXES]
    return replace(finding, entry=_story(finding), fixes=tuple(fixes), dead_ends=cause.DEAD_ENDS)


def _story(finding: Finding) -> str:
    """Several entries of the catalog may tell of one cause: the one whose messages these are, else the cause's own."""
    from legroom.explain.catalog import best_entry  # noqa: PLC0415 - reads the catalog

    said = frozenset(evidence.id for evidence in finding.evidence)
    try:
        return best_entry(finding.cause, said, finding.entry).id
    except LegroomError:
        return finding.entry  # a record that the user imported cannot be read; that is not this log's trouble


def _in_time(finding: Finding, case: Case) -> Finding:
    """The first failure over all ranks wins: one that is proven by later failures only is likely its echo."""
    first = case.first_failure
    failing = [evidence for evidence in finding.evidence if evidence.role in ("failure", "host")]
    if first is None or not failing or first.role not in ("failure", "host"):
        return finding
    if first in failing or min(evidence.line for evidence in failing) <= first.line:
        return finding
    return replace(finding, confidence=round(finding.confidence * 0.8, 3))
