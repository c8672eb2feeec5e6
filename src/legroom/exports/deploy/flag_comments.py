"""Sentences about the flags of a planned server, with numbers of the plan."""

from collections.abc import Mapping

from legroom.drawing.text import wrap
from legroom.exports.deploy.serve_command import Phrase
from legroom.exports.export_request import MARK
from legroom.facts import read_data
from legroom.guard import MIDDLEWARE
from legroom.planning.plan_document import PlanDocument
from legroom.units import gib, human_bytes
from legroom.version import __version__

WRITTEN = f"{MARK} {__version__}."


def flag_comment(phrase: Phrase, plan: PlanDocument) -> str:
    """A sentence about the effect of a flag, with numbers of the plan."""
    if phrase.flag == "--middleware" and MIDDLEWARE in phrase.values:
        return "The guard: it refuses requests that the KV cache has no room for."
    planned = _planned_comments(phrase, plan).get(phrase.flag)
    return planned or _PLAIN.get(phrase.flag.partition(".")[0], "As given; no figure of the plan depends on it alone.")


def plan_headline(plan: PlanDocument) -> tuple[str, ...]:
    """The comment lines at the top of a file: the plan's main figures, and that legroom wrote the file."""
    gpu, layout, kv = plan.gpu, plan.layout, plan.kv
    each = "the card" if gpu.count == 1 else "each card"
    lines = [
        f"{plan.model} on {gpu.count} x {gpu.name} with vLLM {plan.vllm}.",
        f"Of {gib(layout.total_bytes)} on {each}: weights {gib(layout.weights_bytes)}, activations "
        f"{gib(layout.activation_bytes)}, KV cache {gib(layout.kv_cache_bytes)}, "
        f"{gib(max(layout.headroom_bytes, 0))} free at the peak.",
    ]
    if kv.num_blocks > 0:
        pool = "The pool" if plan.engines == 1 else f"The pool of each of the {plan.engines} data-parallel engines"
        lines.append(
            f"{pool} has {kv.num_blocks:,} blocks, {kv.tokens:,} tokens: {kv.max_concurrency:.2f} requests "
            f"of the full {plan.args['max_model_len']:,} tokens at once."
        )
    return (*lines, WRITTEN)


def comment_lines(*texts: str) -> list[str]:
    """Each text as wrapped comment lines of a script or a unit."""
    return [line for text in texts for line in wrap(text, 100, "# ", "# ")]


def _planned_comments(phrase: Phrase, plan: PlanDocument) -> dict[str, str]:
    """Flag -> its comment, for flags whose comments contain numbers of the plan; `phrase`: the flag to comment."""
    layout, kv = plan.layout, plan.kv
    graphs = human_bytes(layout.cuda_graph_bytes)
    captured = f"Batch sizes captured as CUDA graphs; this release sets {graphs} aside for them."
    peak = human_bytes(layout.activation_bytes)
    return {
        "--max-model-len": _max_model_len_comment(phrase, plan),
        "--max-num-seqs": _max_num_seqs_comment(plan),
        "--max-num-batched-tokens": "Tokens computed in one step. They set the activation peak: "
        f"{peak} of each card in the profile run.",
        "--gpu-memory-utilization": _gpu_memory_utilization_comment(plan),
        "--tensor-parallel-size": f"GPUs that split every layer between them. {gib(layout.weights_bytes)} of weights "
        f"and {gib(layout.kv_cache_bytes)} of KV cache lie on each.",
        "--pipeline-parallel-size": "Stages the layers are split into; the fullest card holds "
        f"{gib(layout.weights_bytes)} of weights.",
        "--kv-cache-dtype": f"The data type of the KV cache: {kv.bytes_per_token or 0:,} bytes per token on each card, "
        "over all layers.",
        "--block-size": f"Tokens in a block; the last block of a sequence may have up to {kv.block_size - 1} unused. "
        f"The pool uses {kv.block_size}.",
        "--enforce-eager": "No CUDA graphs and no compilation: that saves their memory and slows decoding down.",
        "--kv-cache-memory-bytes": "The size of the KV cache on each card, set rather than computed: "
        f"{gib(layout.kv_cache_bytes)}.",
        "--num-gpu-blocks-override": f"Blocks of the pool, set rather than computed: {kv.num_blocks:,}.",
        "--cpu-offload-gb": f"GiB of weights per card that stay in host memory; {gib(layout.weights_bytes)} remain on "
        "it. Every step reads the others again.",
        "--swap-space": "GiB of pinned host memory per GPU for preempted groups of several sequences."
        if plan.args.get("engine") == "V0"
        else "Accepted and not used: the V1 engine recomputes a preempted request.",
        "--cudagraph-capture-sizes": captured,
        "--max-cudagraph-capture-size": captured,
        "--cuda-graph-sizes": captured,
    }


def _max_model_len_comment(phrase: Phrase, plan: PlanDocument) -> str:
    """What --max-model-len limits (for `auto`, the length found), and how many such requests the KV pool holds."""
    if phrase.value in ("-1", "auto"):
        return f"The longest context that memory holds: {plan.args['max_model_len']:,} tokens here."
    needed = plan.kv.needed_bytes
    if not needed or plan.kv.num_blocks <= 0:
        return "The most tokens a request may have."
    return (
        f"The most tokens a request may have. One request of that length needs {gib(needed)} of KV cache; the pool "
        f"holds {plan.kv.max_concurrency:.2f} of them. A lower limit does not make the pool smaller."
    )


def _max_num_seqs_comment(plan: PlanDocument) -> str:
    """What --max-num-seqs limits, and the mean tokens of KV cache for each request if all run."""
    if plan.kv.tokens <= 0:
        return _PLAIN["--max-num-seqs"]
    average = int(plan.kv.tokens / max(int(plan.args["max_num_seqs"]), 1))
    return (
        f"Requests computed in one step. If all of them run, each has {average:,} tokens of the pool on average; any "
        "more wait, they do not fail."
    )


def _gpu_memory_utilization_comment(plan: PlanDocument) -> str:
    """The GiB that the utilization amounts to, how much of them is KV cache, and what is used outside of them."""
    layout = plan.layout
    if plan.args.get("kv_cache_memory_bytes"):
        return "The share of the card that must be free at the start; the size of the pool is set separately."
    share = f"The share of each card that vLLM may use: {gib(layout.budget_bytes)} of {gib(layout.total_bytes)}."
    if not plan.kv.num_blocks:
        return f"{share} This model keeps no KV cache."
    kept = f"What weights and activations leave of it becomes KV cache, {gib(layout.kv_cache_bytes)}"
    return f"{share} {kept}; another {gib(layout.outside_bytes)} is used outside this share."


_PLAIN: Mapping[str, str] = read_data("flag_comments.json")["comments"]
