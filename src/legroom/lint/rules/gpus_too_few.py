"""More ranks than the container or the environment has GPUs."""

from __future__ import annotations

from legroom.deployments.subjects import StartedServer
from legroom.lint.rule import Context, Findings, Rule, checks, finding, flag_place, flag_word

_WHY = (
    "From 0.11.1 on vLLM ends with 'World size is larger than the number of available GPUs' unless it is told of Ray "
    "or of other nodes; before, it looked for a Ray cluster."
)
RULE = Rule("gpus-too-few", "error", "More ranks than GPUs", _WHY)
_MULTI_NODE = ("--distributed-executor-backend", "--nnodes")
"""Flags that put ranks on other machines."""
_PARTS = ("size-local", "rank", "start-rank", "address", "backend", "external-lb", "hybrid-lb")
_DATA_PARALLEL_NODES = ("--headless", *(f"--data-parallel-{part}" for part in _PARTS))
"""Flags that put data-parallel engines on other machines."""
_SIZES = tuple(f"--{kind}-parallel-size" for kind in ("tensor", "pipeline", "prefill-context", "data"))


@checks(StartedServer, RULE)
def more_ranks_than_gpus(server: StartedServer, context: Context) -> Findings:
    """A server whose parallel sizes need more GPUs than its container or environment gives it."""
    if server.launcher or context.release_of(server).before("0.11.1"):
        return  # a launcher spreads ranks over nodes itself
    gpus = server.gpu_count
    args = context.parsed_args(server).args
    ranks = args.engine_ranks if flag_word(server, *_DATA_PARALLEL_NODES) else args.gpus_needed
    if not gpus or ranks <= gpus or flag_word(server, *_MULTI_NODE):
        return
    message = f"{ranks} ranks are asked for, and {gpus} GPU{'s are' if gpus > 1 else ' is'} given: vLLM does not start"
    suggestion = (
        "give it a GPU for each rank, or ask for fewer; on a Ray cluster, add --distributed-executor-backend ray"
    )
    # A GPU request (`count: all`) overrides NVIDIA_VISIBLE_DEVICES.
    is_counted = server.gpus is not None or "CUDA_VISIBLE_DEVICES" in server.env
    is_certain = context.is_release_certain(server) and is_counted
    yield finding(RULE, flag_place(server, *_SIZES), message, suggestion, is_certain=is_certain)
