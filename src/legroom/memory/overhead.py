"""Device memory that torch does not allocate, and what vLLM uses beside its budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.facts.releases import release as known_release
from legroom.figures import Figure, Term, estimated
from legroom.memory.graphs import graph_bytes, graph_estimate
from legroom.units import MIB

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.facts.model import Model
    from legroom.vllm.args import EngineSettings


def cuda_context(gpu: Gpu) -> Figure:
    """What a process holds on the card before it allocates anything."""
    size = 527 * MIB if gpu.compute_capability >= (9, 0) else 420 * MIB
    return estimated(size, size - 120 * MIB, size + 120 * MIB, (Term("CUDA context", size, "before any allocation"),))


def non_torch(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> Figure:
    """Modules, cuBLAS handles and NCCL, as the release charges them."""
    release = known_release(settings.release)
    if settings.engine == "V1" and release.at_least("0.9.1"):
        base = 230 * MIB if release.at_least("0.14.0") else 100 * MIB
    else:
        base = 100 * MIB
    nccl = (1850 * MIB if release.at_least("0.14.0") else 400 * MIB) if settings.tensor_parallel_size > 1 else 0
    size = base + nccl
    return estimated(size, size // 2, size * 2, (Term("non-torch", size, "modules, handles, NCCL"),))


def outside(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> Figure:
    """What the card holds beside the budget once the server is up."""
    context = cuda_context(gpu)
    graphs = max(0, graph_bytes(model, settings, gpu).bytes - graph_estimate(model, settings, gpu).bytes)
    tables = settings.max_num_seqs * model.vocab_size * 4 if settings.runner == "V2" else 0
    size = context.bytes + graphs + tables
    terms = (
        Term("CUDA context", context.bytes, "outside every term of the budget"),
        Term("CUDA graphs beyond the estimate", graphs, ""),
        Term("sampler tables", tables, "sequences x vocabulary x 4"),
    )
    return estimated(size, int(size * 0.7), int(size * 1.5), terms)
