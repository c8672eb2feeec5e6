"""The activation peak: what the profile run allocates above the weights, as the release charges it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.figures import Figure, Term, estimated
from legroom.memory import activation_layers as layers
from legroom.memory.sampler import sampling
from legroom.units import MIB

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.facts.model import Model
    from legroom.vllm.args import EngineSettings

# cuBLAS takes its workspace from torch: 32 MiB from Hopper on, 8 MiB and a bit before.
_HOPPER = (9, 0)


def activation(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> Figure:
    """Peak of the profile run above the weights, with a warm compile cache."""
    ranks = settings.tensor_parallel_size
    tokens = settings.max_num_batched_tokens
    width = 4 if settings.dtype == "float32" else 2
    hidden = model.hidden_size
    kinds = layers.distinct_layers(model)
    workspace = max((layers.expert_workspace(k, ranks, settings.enable_expert_parallel) for k in kinds), default=0)
    moments = [layers.mixer_live(kind, hidden, ranks) for kind in kinds]
    moments += [live for kind in kinds if (live := layers.feedforward_live(kind, hidden, ranks))]
    widest = max(moments, key=lambda live: live.elements)
    cublas = cublas_workspace(gpu)
    kept = workspace * tokens * width
    forward = widest.elements * tokens * width
    terms = [Term("cuBLAS workspace", cublas, "kept by torch")]
    if kept:
        terms.append(Term("experts' workspace", kept, f"{tokens} tokens x {workspace} x {width} bytes"))
    sample = sampling(model, settings, gpu)
    sequences = min(settings.max_num_seqs, tokens)
    last = pp_rank == settings.pipeline_parallel_size - 1
    at_sampling = (tokens + 2 * sequences) * hidden * width + sample.bytes if last and not model.is_pooling else 0
    if at_sampling > forward:
        terms.append(Term("sampler", at_sampling, sample.how))
    else:
        terms.append(Term(widest.where, forward, f"{tokens} tokens x ({widest.how}) x {width} bytes"))
    peak = cublas + kept + max(forward, at_sampling)
    return estimated(peak, int(peak * 0.97), int(peak * 1.06) + 8 * MIB, tuple(terms))


def activation_cold(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> Figure:
    """The same on the first start, while the compile cache is still empty: the profile run then compiles, too."""
    return activation(model, settings, gpu, pp_rank)


def cublas_workspace(gpu: Gpu) -> int:
    """The workspace torch gives cuBLAS on this GPU."""
    return 32 * MIB if gpu.compute_capability >= _HOPPER else 8 * MIB + 128 * 1024
