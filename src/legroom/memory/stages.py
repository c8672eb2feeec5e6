"""The layers of each pipeline stage (vLLM's get_pp_indices)."""

from legroom.errors import LegroomError
from legroom.vllm.args import EngineSettings


def _stage_sizes(num_layers: int, settings: EngineSettings) -> tuple[int, ...]:
    """Layers of each pipeline stage: as VLLM_PP_LAYER_PARTITION says, else split evenly; the last stages (up to 0.7.3
    the last one, from 0.8.0 on those before it) get the remainder."""
    stages = settings.pipeline_parallel_size
    written = settings.given.env.get("VLLM_PP_LAYER_PARTITION")
    if written:
        return _written_partition(written, num_layers, stages)
    sizes = [num_layers // stages] * stages
    left = num_layers % stages
    if settings.release.before("0.8.0"):
        sizes[-1] += left
    else:
        for index in range(2, left + 2):
            sizes[-index] += 1
    return tuple(sizes)


def stage_range(num_layers: int, settings: EngineSettings, stage: int) -> range:
    """The indices, out of 0 to `num_layers` - 1, of the layers on one pipeline stage."""
    sizes = _stage_sizes(num_layers, settings)
    start = sum(sizes[:stage])
    return range(start, start + sizes[stage])


def _written_partition(text: str, num_layers: int, stages: int) -> tuple[int, ...]:
    """The layers per stage that VLLM_PP_LAYER_PARTITION (`text`) lists; LegroomError if they are not the model's."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if len(sizes) != stages or sum(sizes) != num_layers or min(sizes, default=-1) < 0:
        why = f"VLLM_PP_LAYER_PARTITION={text} does not split {num_layers} layers over {stages} stages"
        raise LegroomError(why, "write one count a stage, adding up to the number of layers")
    return sizes
