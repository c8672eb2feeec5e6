"""How the ranks of tensor parallelism add up their parts of a layer, and what that costs a captured graph.

Every layer does it twice, and every graph holds each as a node of its own. vLLM takes the first of three ways that the
cards and the size allow: FlashInfer's kernel with the norm in it, its own kernel over peer access, NCCL. A node of
NCCL's costs the driver far more than a kernel's, so the same server has larger graphs on cards without peer access.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from legroom.facts.fit import by_release, constants
from legroom.facts.releases import release as known_release
from legroom.memory.activation.peak import element_bytes, is_compiled
from legroom.units import MIB
from legroom.vllm.args import is_given

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.facts.model import Model
    from legroom.vllm.args import EngineSettings

_CUSTOM_RANKS = (2, 4, 6, 8)
"""World sizes that vLLM's own kernel is compiled for."""
_CUSTOM_BELOW_BYTES = 8 * MIB


def is_nvlink_server(gpu: Gpu) -> bool:
    """Hopper and Blackwell servers; Blackwell's workstation and desktop cards (12.x) are like the cards before them."""
    return gpu.vendor == "nvidia" and gpu.compute_capability[0] in (9, 10)


def is_fused(settings: EngineSettings, gpu: Gpu) -> bool:
    """0.17+ fuses it with the norm on capability 9.0 and the 10.x family; at first not beside other parallel ranks."""
    rows = constants()["graphs"]["all_reduce"]["fused_beside"]
    if settings.engine == "V0" or known_release(settings.release).before(rows[0]["since"]):
        return False
    beside = by_release(rows, settings.release)
    if settings.data_parallel_size > 1 and not beside["data_parallel"]:
        return False
    if settings.pipeline_parallel_size > 1 and not beside["pipeline_parallel"]:
        return False
    return settings.tensor_parallel_size > 1 and is_nvlink_server(gpu) and is_compiled(settings)


def captured_all_reduce(model: Model, settings: EngineSettings, gpu: Gpu, sizes: Iterable[int]) -> int:
    """Bytes that graphs of these many tokens hold for their all-reduces."""
    if settings.tensor_parallel_size == 1 or gpu.vendor != "nvidia":
        return 0
    fit = constants()["graphs"]["all_reduce"]
    fused_mib, nccl_mib = fit["fused_mib"], fit["nccl_mib"]
    custom_mib = by_release(fit["custom"][settings.engine], settings.release)["mib"]
    largest_fused = _largest_fused_bytes(settings, gpu) if is_fused(settings, gpu) else 0
    custom_below = _CUSTOM_BELOW_BYTES if _has_own_kernel(settings, gpu) else 0
    token = model.hidden_size * element_bytes(settings)
    layer_mib = 0.0
    for size in sizes:
        summed_bytes = size * token
        if summed_bytes <= largest_fused:
            layer_mib += fused_mib
        else:
            layer_mib += custom_mib if summed_bytes < custom_below else nccl_mib
    return int(len(model.layers) * layer_mib * MIB)


def _largest_fused_bytes(settings: EngineSettings, gpu: Gpu) -> int:
    by_ranks = constants()["graphs"]["all_reduce"]["fused_largest_mib"][f"{gpu.compute_capability[0]}.x"]
    return int(by_ranks.get(str(settings.tensor_parallel_size), 0) * MIB)


def _has_own_kernel(settings: EngineSettings, gpu: Gpu) -> bool:
    """Over NVLink, or between two cards on PCIe that may read each other's memory."""
    ranks = settings.tensor_parallel_size
    if ranks not in _CUSTOM_RANKS or is_given(settings.given, "--disable-custom-all-reduce"):
        return False
    if gpu.interconnect in ("nvlink", ""):
        return True
    without_peers = constants()["graphs"]["all_reduce"]["without_peer_access"]
    return ranks == 2 and gpu.interconnect == "pcie" and not any(line in gpu.name for line in without_peers)
