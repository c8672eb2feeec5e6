"""A log that shows where the program was but not what it said: a guess, marked as one."""

from __future__ import annotations

from legroom.diagnosis.case import Case
from legroom.diagnosis.finding import Finding, proof

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
