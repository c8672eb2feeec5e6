"""Flags that cost more than they give, or differ from the plan."""

from __future__ import annotations

from legroom.deployments.subjects import StartedServer
from legroom.facts.flags import flag_name
from legroom.lint.rule import Context, Findings, Rule, checks, finding, flag_place, flag_word
from legroom.units import human_bytes

_WHY_EAGER = (
    "Without CUDA graphs every decoding step is slower. It saves the graphs' memory alone, and before 0.20 not one KV "
    "block comes of it, because graphs were not counted in the budget (LR201)."
)
EAGER = Rule("eager", "note", "--enforce-eager", _WHY_EAGER)


@checks(StartedServer, EAGER)
def server_without_cuda_graphs(server: StartedServer, context: Context) -> Findings:
    """A server with --enforce-eager, which decodes slower without CUDA graphs."""
    if not context.parsed_args(server).args.enforce_eager:
        return
    plan = context.plan_of(server)
    graphs = plan.layout.cuda_graph_bytes if plan else 0
    saved = f" ({human_bytes(graphs)} in the plan)" if graphs else ""
    message = f"--enforce-eager saves the memory of CUDA graphs{saved} and slows every decoding step"
    if context.release_of(server).before("0.20.0"):
        message += "; before 0.20 it adds no KV block"
    suggestion = "leave it out unless graph capture is what runs out (LR302)"
    yield finding(EAGER, flag_place(server, "--enforce-eager"), message, suggestion)


_WHY_BLOCK_SIZE = (
    "At most block_size - 1 slots of a sequence stay empty, 15 tokens with 16. FlashAttention takes multiples of 16: a "
    "smaller block costs the fast kernels or the start (LR403)."
)
BLOCK_SIZE = Rule("block-size", "warning", "A block size that FlashAttention does not take", _WHY_BLOCK_SIZE)


@checks(StartedServer, BLOCK_SIZE)
def unsupported_block_size(server: StartedServer, context: Context) -> Findings:
    """A --block-size that is not a multiple of 16."""
    size = context.parsed_args(server).args.block_size
    word = flag_word(server, "--block-size")
    is_rocm = "rocm" in server.image or any(name.startswith("VLLM_ROCM_") for name in server.env)
    if size is not None and word is not None and size % 16 and not is_rocm:  # AITER's kernels take blocks of 1
        message = (
            f"--block-size {size}: FlashAttention takes multiples of 16, and 16 wastes at most 15 tokens a sequence"
        )
        yield finding(BLOCK_SIZE, server.place_of(word), message, "leave it out", len(word.text))


_WHY_DIFFERS = "The numbers of the plan hold for the planned flags only."
DIFFERS = Rule("plan-differs", "warning", "Flags that differ from the plan", _WHY_DIFFERS)
_COMPARED = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "kv_cache_memory_bytes",
)


@checks(StartedServer, DIFFERS)
def flags_differ_from_plan(server: StartedServer, context: Context) -> Findings:
    """Flags of a server that differ from those of the plan given with --plan."""
    if (plan := context.plan_of(server)) is None:
        return
    args = context.parsed_args(server).args
    for dest in _COMPARED:
        given, planned = getattr(args, dest), plan.args.get(dest)
        if given is None or planned is None or given in (planned, -1):
            continue
        flag = flag_name(dest)
        message, suggestion = (
            f"{flag} is {given:g} here and {planned:g} in the plan",
            f"write {flag} {planned:g}, or plan again",
        )
        yield finding(DIFFERS, flag_place(server, flag), message, suggestion, len(flag))
