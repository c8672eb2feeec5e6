"""What vLLM's sleep mode takes off the card, by release. Data in `data/sleep.json`."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from legroom.facts.data_files import read_data
from legroom.facts.fit import by_release
from legroom.facts.releases import release as known_release
from legroom.records import dataclass

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu

FLAG = "--enable-sleep-mode"
ENDPOINTS_SWITCH = "VLLM_SERVER_DEV_MODE"
"""Set to 1, `vllm serve` answers /sleep, /wake_up and /is_sleeping."""


@dataclass(frozen=True, slots=True)
class SleepRules:
    """What one release does."""

    buffers_saved: bool
    """Level 2 keeps the model's buffers on the host."""
    sampler_pooled: bool
    """The tables of runner V2's sampler lie in the pool of the weights."""
    runtime_offloaded: bool
    """Block tables and the like leave the card, too."""
    scratch_discarded: bool
    """So does the experts' workspace."""
    graphs_flag: str | None
    """The flag that takes CUDA graphs off the card; None where the release has none."""
    communication_flag: str | None


def sleep_rules(version: str) -> SleepRules | None:
    """The rules of a release; None where it has no sleep mode."""
    release = known_release(version)
    if release.before(_data()["releases"][0]["since"]):
        return None
    row = by_release(_data()["releases"], version)
    flags = (_data()["graphs_flag"], _data()["communication_flag"])
    graphs, communication = (flag["name"] if release.at_least(flag["since"]) else None for flag in flags)
    return SleepRules(
        row["buffers_saved"],
        row["sampler_pooled"],
        row["runtime_offloaded"],
        row["scratch_discarded"],
        graphs,
        communication,
    )


def first_release_with_sleep() -> str:
    """Where sleep mode begins."""
    since: str = _data()["releases"][0]["since"]
    return since


def host_bandwidth_bytes_s(gpu: Gpu) -> float:
    """How fast pinned host memory is copied to the card, unless the user knows better."""
    speeds = _data()["host_bandwidth_gb_s"]
    return float(speeds["by_capability"].get(str(gpu.compute_capability[0]), speeds["unknown"]) * 10**9)


@cache
def _data() -> Any:
    return read_data("sleep.json")
