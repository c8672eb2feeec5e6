"""What kind of vLLM and what kind of machine wrote a log, told by its style where it does not say so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from legroom.diagnosis.evidence import Evidence
from legroom.diagnosis.torch_oom import parse_oom
from legroom.facts.releases import logged_release
from legroom.planning.startup_log import Startup
from legroom.records import dataclass
from legroom.units import GIB

_V1_FILES = frozenset(
    {
        "core.py",
        "core_client.py",
        "gpu_worker.py",
        "gpu_model_runner.py",
        "async_llm.py",
        "loggers.py",
        "kv_cache_utils.py",
        "multiproc_executor.py",
        "v1_core.py",
    }
)
_V0_FILES = frozenset(
    {
        "engine.py",
        "llm_engine.py",
        "async_llm_engine.py",
        "worker.py",
        "model_runner.py",
        "scheduler.py",
        "multiproc_worker_utils.py",
        "distributed_gpu_executor.py",
        "worker_base.py",
        "metrics.py",
        "gpu_executor.py",
        "executor_base.py",
        "model_runner_base.py",
    }
)


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine generation, and the releases the log can come from."""

    generation: Literal["V0", "V1", ""] = ""
    version: str | None = None
    """As printed; None where the log does not say."""
    before_brackets: bool | None = None
    """The logger wrote `file.py:1]` without an opening bracket: releases before 0.8."""

    def within(self, first: str, last: str) -> bool | None:
        """Whether the release lies in a range; None where that is not known."""
        if self.version is None:
            return None
        return logged_release(self.version).within(first, last)


@dataclass(frozen=True, slots=True)
class HostTraits:
    """The machine, as far as memory cares."""

    unified: bool = False
    """CPU and GPU share one memory."""
    wsl: bool = False
    trainer: bool = False
    """A training framework runs the engine on its own GPUs."""


def engine_of(evidence: Iterable[Evidence], startup: Startup) -> Engine:
    """By the version where it is printed, else by the files that log and how they write it."""
    files = [item.at for item in evidence if item.at]
    names = {name.lstrip("[") for name in files}
    generation: Literal["V0", "V1", ""] = ""
    if any("EngineCore" in item.process for item in evidence) or names & _V1_FILES:
        generation = "V1"
    elif names & _V0_FILES:
        generation = "V0"
    return Engine(generation, startup.vllm, not files[0].startswith("[") if files else None)


def platform_of(evidence: Iterable[Evidence], startup: Startup) -> HostTraits:
    items = tuple(evidence)
    ids = {item.id for item in items}
    failed = [oom for item in items if item.id == "torch_oom" and (oom := parse_oom(item))]
    totals = [item.facts.get("total_bytes") for item in items] + [oom.total_bytes for oom in failed]
    # 128 GB of shared memory shows as 115 to 129 GiB; no discrete card has a total there.
    unified = bool(ids & {"unified", "nv_sysmem", "tegra_assert"}) or any(
        isinstance(total, int) and 115 * GIB < total < 129 * GIB for total in (*totals, startup.gpu_total_bytes)
    )
    return HostTraits(unified or bool(startup.gpu_name and "GB10" in startup.gpu_name), "wsl" in ids, "trainer" in ids)
