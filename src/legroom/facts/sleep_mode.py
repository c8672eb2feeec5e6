"""What vLLM's sleep mode takes off the card, by release. Data in `data/sleep.json`."""

from __future__ import annotations

from typing import Any

from legroom.facts import read_data
from legroom.facts.fit import by_release
from legroom.facts.gpus import Gpu
from legroom.facts.releases import release as known_release
from legroom.records import dataclass

FLAG = "--enable-sleep-mode"
ENDPOINTS_SWITCH = "VLLM_SERVER_DEV_MODE"
"""Set to 1, `vllm serve` answers /sleep, /wake_up and /is_sleeping."""


@dataclass(frozen=True, slots=True)
class SleepRules:
    """What leaves the card during sleep in one release."""

    buffers_saved: bool
    """Level 2 copies the model's buffers to the host."""
    sampler_pooled: bool
    """The sampler tables of model runner V2 are allocated in the pool of the weights."""
    runtime_offloaded: bool
    """Block tables and input buffers leave the card."""
    scratch_discarded: bool
    """The experts' workspace leaves the card."""
    graphs_flag: str | None
    """The flag that frees CUDA graphs; None where the release has none."""
    communication_flag: str | None
    """The flag that frees NCCL buffers; None where the release has none."""


def sleep_rules(version: str) -> SleepRules | None:
    """The rules of a release; None where it has no sleep mode."""
    data, release = _sleep_data(), known_release(version)
    if release.before(first_release_with_sleep()):
        return None
    row = {name: value for name, value in by_release(data["releases"], version).items() if name in _SWITCHES}
    flags: dict[str, Any] = {
        name: data[name]["name"] if release.at_least(data[name]["since"]) else None for name in _FLAGS
    }
    return SleepRules(**row, **flags)


_SWITCHES = ("buffers_saved", "sampler_pooled", "runtime_offloaded", "scratch_discarded")
_FLAGS = ("graphs_flag", "communication_flag")


def first_release_with_sleep() -> str:
    return str(_sleep_data()["releases"][0]["since"])


def host_bandwidth_bytes_s(gpu: Gpu) -> float:
    """The usual copy speed from pinned host memory to this card."""
    speeds = _sleep_data()["host_bandwidth_gb_s"]
    return float(speeds["by_capability"].get(str(gpu.compute_capability[0]), speeds["unknown"]) * 10**9)


def _sleep_data() -> Any:
    return read_data("sleep.json")
