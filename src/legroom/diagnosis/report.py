"""A diagnosis: the verdict over one run, and over everything that was read."""

from __future__ import annotations

from typing import Literal

from legroom.diagnosis.case import Case
from legroom.diagnosis.causes import examine_all, with_remedies
from legroom.diagnosis.finding import Finding, proof
from legroom.diagnosis.starting_plan import Hints
from legroom.diagnosis.workbench import Workbench
from legroom.records import dataclass

_CONFIDENCE = 0.3
_BY_SITE = {
    "build": ("weights_too_big", "LR101"),
    "load": ("weights_too_big", "LR101"),
    "quant": ("quantization_kernel_workspace", "LR102"),
    "profile": ("profiling_activation_peak", "LR301"),
    "sampler": ("profiling_activation_peak", "LR301"),
    "warmup": ("profiling_activation_peak", "LR301"),
    "kv": ("no_cache_blocks", "LR201"),
    "graph": ("cudagraph_capture_oom", "LR302"),
    "serving": ("runtime_activation_burst", "LR401"),
    "spec": ("lora_or_spec_decode_extra", "LR303"),
    "lora": ("lora_or_spec_decode_extra", "LR303"),
    "wake": ("sleep_mode_or_rlhf_colocation", "LR407"),
}


def guess(case: Case) -> Finding | None:
    """What usually fails at the place that a traceback without its error goes through."""
    frames = [item for item in case.evidence if item.role == "frame" and _of_traceback(item.text)]
    known = _BY_SITE.get(case.site)
    if not frames or known is None:
        return None
    why = (
        "The log breaks off before the error itself. If memory "
        "ran out at this place it was this; the line that ends in "
        "`Error:` would tell."
    )
    return Finding(*known, _CONFIDENCE, proof(frames[-3:]), why)


def _of_traceback(text: str) -> bool:
    return 'File "' in text or "ERROR" in text or "[rank" in text or ".py" in text


Verdict = Literal["cause found", "not a memory problem", "no problem found", "not understood"]

NOT_MEMORY = frozenset({"not_memory", "driver_or_cuda_mismatch", "wrong_flag", "request_too_long"})
"""Causes that no amount of memory changes."""
_CAUSE_PHASE = {
    "weights_too_big": "startup_load", "quantization_kernel_workspace": "startup_load",
    "no_cache_blocks": "startup_kv", "kv_too_small_for_max_len": "startup_kv", "hybrid_state_cache_limit": "startup_kv",
    "cudagraph_capture_oom": "startup_graph", "runtime_activation_burst": "serving",
    "kv_preemption_thrash": "serving", "prefix_cache_pressure": "serving", "leak_over_time": "serving",
    "request_too_long": "serving", "wrong_flag": "startup_load", "driver_or_cuda_mismatch": "startup_load",
    "nccl_or_custom_allreduce_buffers": "startup_load", "gpu_shared_or_not_free": "startup_load",
}  # fmt: skip
_WORTH_SHOWING = 0.15
MOST_FINDINGS = 4


@dataclass(frozen=True)
class Diagnosis:
    """One run, explained."""

    case: Case
    verdict: Verdict
    findings: tuple[Finding, ...]

    @property
    def phase(self) -> str | None:
        """Where the first failure happened; none where nothing failed."""
        if not self.findings:
            return None
        failure = self.case.first_failure
        if self.case.is_traced or (failure is not None and failure.phase):
            return self.case.phase
        # Neither a traceback nor the message itself tells: the cause does, where it has a phase of its own.
        return _CAUSE_PHASE.get(self.findings[0].cause) or self.case.phase


def examine(case: Case, hints: Hints | None = None) -> Diagnosis:
    """Weigh the causes of one run and work out what mends the likely ones."""
    bench = Workbench(case, hints)
    weighed = [finding for finding in examine_all(case) if finding.confidence >= _WORTH_SHOWING][:MOST_FINDINGS]
    if not weighed and not _is_up(case):
        guessed = guess(case)
        weighed = [guessed] if guessed else []
    findings = tuple(with_remedies(finding, bench) for finding in weighed)
    return Diagnosis(case, _verdict(case, findings), findings)


def _verdict(case: Case, findings: tuple[Finding, ...]) -> Verdict:
    if findings:
        first = findings[0]
        if first.cause in ("not_memory", "driver_or_cuda_mismatch"):
            return "not a memory problem"
        return "cause found"
    return "no problem found" if _is_up(case) else "not understood"


def _is_up(case: Case) -> bool:
    started = case.startup.outcome == "started"
    return started or case.has("server_ready", "engine_ready", "request_served", "engine_stats")
