"""Repacking, online quantization or a kernel's workspace needs a second copy that does not fit."""

import re
from collections.abc import Iterator

from legroom.diagnosis.causes import Assessment, Case, Cause, Fix, FixPlanner, known_fix, proof, reason
from legroom.diagnosis.finding import Strength
from legroom.diagnosis.fixes.hardware_fixes import is_quantized, other_hardware
from legroom.diagnosis.fixes.log_accounting import FULL_OF_WEIGHTS
from legroom.facts.releases import earlier_release
from legroom.units import GIB, gib

_MLA_MARKS = ("attention/backends/mla", "W_UV_O", "W_Q_UK")
"""The second copy of an MLA layer's projections, multiplied with each other after loading (0.7.1 to 0.7.3)."""


def examine(case: Case) -> Assessment | None:
    """Assesses an OOM while weights are repacked for their kernel, with a second copy of one in memory; else None."""
    if not case.is_oom and not case.has("backend_workspace"):
        return None
    shards = case.last("shards")
    percent = shards.number("percent_count") if shards else None
    strength = Strength.NONE
    if case.has("kernel_workspace") and case.is_oom:
        strength = Strength.NAMED
    elif case.site == "quant":
        strength = Strength.SHOWN
    elif case.site == "load" and percent is not None and percent < 100 and "frame_create_weights" not in case.frames:
        strength = Strength.LIKELY
    elif case.site == "load" and percent == 100 and not case.has("weights_loaded"):
        strength = Strength.SUGGESTED
    elif case.has("backend_workspace"):
        strength = Strength.POSSIBLE
    if not strength:
        return None
    frames = [evidence for evidence in case.evidence if evidence.id == "frame_quant"][-2:]
    return Assessment(strength, proof(frames, shards, case.first("torch_oom", "backend_workspace")), _explanation(case))


def _explanation(case: Case) -> str:
    """Why the failed allocation is a kernel's workspace or a second copy of weights, with its size if printed."""
    if case.has("kernel_workspace"):
        return reason("kernel_workspace")
    return reason("second_copy", {"wanted": f" of {gib(case.oom.wanted_bytes)}" if case.oom else ""})


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes (None: not applicable): another release, a quantized checkpoint, a lower utilization, more GPUs."""
    if planner.case.has("kernel_workspace"):
        yield known_fix("other_kernel")
    frames = " ".join(item.text for item in planner.case.all("frame_quant"))
    if any(mark in frames for mark in _MLA_MARKS):
        config = planner.model.quantization if planner.model is not None else None
        is_fp8 = "scaled_quantize" in frames or (config is not None and config.method == "fp8")
        weights, total = planner.accounting.weights_bytes or 0, planner.total_bytes
        if total and weights > FULL_OF_WEIGHTS * total:  # without MLA the KV cache, many times larger, has no room
            yield other_hardware(planner)
        yield known_fix("mla_weights_in_8_bits" if is_fp8 else "mla_weights_as_they_are")
    named = f"{frames} {planner.known.args.model} {planner.known.args.quantization}"
    if "arlin" in named and re.search(r"\b(?:AWQ|GPTQ)\b|\b(?:awq|gptq)_marlin ", named):
        yield known_fix("checkpoint_as_it_is")
    which = f" (this is {planner.known.release})" if planner.known.release_known else ""
    before = earlier_release(planner.known.release) if planner.known.release_known else None
    differs = f"What is copied while loading differs from release to release{which}"
    pin = f"pin the last release that worked: pip install 'vllm=={before or 'X'}'"
    steps = (pin, "or take the newest one, where the copy may be gone")
    yield Fix("engine_version_or_V0", f"{differs}: the one before the failure began starts.", steps=steps)
    yield planner.pull_lever("quantized weights", "A checkpoint that is already quantized needs no copy at all.") or (
        None if is_quantized(planner) else known_fix("kernel_s_own_format")
    )
    if planner.case.site in ("graph", "serving", "profile"):
        need = planner.case.oom.wanted_bytes if planner.case.oom else GIB
        yield planner.lower_utilization(need, "A workspace that is made late needs room beside the pool.")
    yield planner.pull_lever("more GPUs", "Split over more GPUs, the copy fits beside the weights.")


CAUSE = Cause(entry="LR102", phase="startup_load", usual_at=("quant",))
