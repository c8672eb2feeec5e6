"""Toolkit, driver and architecture do not go together."""

from __future__ import annotations

from collections.abc import Iterator

from legroom.diagnosis.case import Case
from legroom.diagnosis.cause import Cause
from legroom.diagnosis.finding import Assessment, DeadEnd, Fix, proof
from legroom.diagnosis.fix_planner import FixPlanner
from legroom.explain.entry import Localized

_MESSAGES = (
    "no_kernel_image",
    "ptx_toolchain",
    "driver_old",
    "arch_unsupported",
    "libs_missing",
    "driver_nccl_capture",
)


def examine(case: Case) -> Assessment | None:
    """Messages that name the driver, the toolkit or the architecture."""
    error = case.first(*_MESSAGES)
    if error is None:
        return None
    driver = case.first("driver_version")
    have = f" The log shows driver {driver.facts.get('driver')}." if driver else ""
    why = (
        "The kernels were built for another driver, toolkit or GPU "
        f"generation than the ones here. No memory setting matters.{have}"
    )
    return Assessment(0.94, proof(error, driver), why)


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    yield Fix(
        "driver",
        "The driver must be at least as new as the CUDA that vLLM and torch were built with.",
        steps=(
            "nvidia-smi shows the driver and the newest CUDA it serves",
            "upgrade the driver, or install the vLLM wheel or image of an older CUDA",
        ),
        confidence=0.7,
    )
    yield Fix(
        "engine_version_or_V0",
        "The build must carry kernels for this GPU generation.",
        steps=(
            "use a release whose wheels support the GPU's compute "
            "capability, or build from source with TORCH_CUDA_ARCH_LIST set",
        ),
        confidence=0.5,
    )


CAUSE = Cause(
    label="driver_or_cuda_mismatch",
    entry="LR902",
    title=Localized("driver, CUDA and build do not go together", "驱动、CUDA 与编译版本不匹配"),
    phase="startup_load",
    domain="other",
    examine=examine,
    remedies=remedies,
    dead_ends=(DeadEnd("any memory flag", "nothing was short"),),
)
