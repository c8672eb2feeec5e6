"""Every flag of a planned server in a sentence, with its number from the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from legroom.drawing.text import wrap
from legroom.exports.export_request import MARK
from legroom.guard import MIDDLEWARE
from legroom.units import gib, human_bytes
from legroom.version import __version__

if TYPE_CHECKING:
    from legroom.exports.deploy.serve_command import Phrase
    from legroom.planning.plan_document import PlanDocument

_WIDTH = 100
WRITTEN = f"{MARK} {__version__}."
_Explanation = Callable[["Phrase", "PlanDocument"], str]


def comment(phrase: Phrase, plan: PlanDocument | None) -> str:
    """What a flag does here. Without a plan, what it does at all."""
    if phrase.flag == "--middleware" and MIDDLEWARE in phrase.values:
        return "The guard: it refuses requests that the KV cache has no room for."
    if plan is not None and phrase.flag in _WITH_PLAN:
        return _WITH_PLAN[phrase.flag](phrase, plan)
    return _PLAIN.get(phrase.flag.partition(".")[0], "As given; no figure of the plan depends on it alone.")


def headline(plan: PlanDocument) -> tuple[str, ...]:
    """What was planned and who wrote it down, in a few lines for the top of a file."""
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


def comment_lines(text: str) -> list[str]:
    """A sentence as the comment lines of a script or a unit."""
    return wrap(text, _WIDTH, "# ", "# ")


def _max_model_len(phrase: Phrase, plan: PlanDocument) -> str:
    if phrase.value in ("-1", "auto"):
        return f"The longest context that memory holds: {plan.args['max_model_len']:,} tokens here."
    needed = plan.kv.needed_bytes
    if not needed or plan.kv.num_blocks <= 0:
        return "The most tokens a request may have."
    return (
        f"The most tokens a request may have. One request of that length needs {gib(needed)} of KV cache; the pool "
        f"holds {plan.kv.max_concurrency:.2f} of them. A lower limit does not make the pool smaller."
    )


def _max_num_seqs(phrase: Phrase, plan: PlanDocument) -> str:
    if plan.kv.tokens <= 0:
        return _PLAIN[phrase.flag]
    average = int(plan.kv.tokens / max(int(plan.args["max_num_seqs"]), 1))
    return (
        f"Requests computed in one step. If all of them run, each has {average:,} tokens of the pool on average; any "
        "more wait, they do not fail."
    )


def _batched_tokens(phrase: Phrase, plan: PlanDocument) -> str:
    peak = human_bytes(plan.layout.activation_bytes)
    return f"Tokens computed in one step. They set the activation peak: {peak} of each card in the profile run."


def _utilization(phrase: Phrase, plan: PlanDocument) -> str:
    layout = plan.layout
    if plan.args.get("kv_cache_memory_bytes"):
        return "The share of the card that must be free at the start; the size of the pool is set separately."
    share = f"The share of each card that vLLM may use: {gib(layout.budget_bytes)} of {gib(layout.total_bytes)}."
    if not plan.kv.num_blocks:
        return f"{share} This model keeps no KV cache."
    return (
        f"{share} What weights and activations leave of it becomes KV cache, {gib(layout.kv_cache_bytes)}; another "
        f"{gib(layout.outside_bytes)} is used outside this share."
    )


def _tensor_parallel(phrase: Phrase, plan: PlanDocument) -> str:
    return (
        f"GPUs that split every layer between them. {gib(plan.layout.weights_bytes)} of weights and "
        f"{gib(plan.layout.kv_cache_bytes)} of KV cache lie on each."
    )


def _pipeline_parallel(phrase: Phrase, plan: PlanDocument) -> str:
    return f"Stages the layers are split into; the fullest card holds {gib(plan.layout.weights_bytes)} of weights."


def _kv_dtype(phrase: Phrase, plan: PlanDocument) -> str:
    per_token = plan.kv.bytes_per_token or 0
    return f"The data type of the KV cache: {per_token:,} bytes per token on each card, over all layers."


def _block_size(phrase: Phrase, plan: PlanDocument) -> str:
    size = plan.kv.block_size
    return f"Tokens in a block; the last block of a sequence may have up to {size - 1} unused. The pool uses {size}."


def _eager(phrase: Phrase, plan: PlanDocument) -> str:
    return "No CUDA graphs and no compilation: that saves their memory and slows decoding down."


def _kv_bytes(phrase: Phrase, plan: PlanDocument) -> str:
    return f"The size of the KV cache on each card, set rather than computed: {gib(plan.layout.kv_cache_bytes)}."


def _blocks(phrase: Phrase, plan: PlanDocument) -> str:
    return f"Blocks of the pool, set rather than computed: {plan.kv.num_blocks:,}."


def _offload(phrase: Phrase, plan: PlanDocument) -> str:
    left = gib(plan.layout.weights_bytes)
    return f"GiB of weights per card that stay in host memory; {left} remain on it. Every step reads the others again."


def _swap(phrase: Phrase, plan: PlanDocument) -> str:
    if plan.args.get("engine") == "V0":
        return "GiB of pinned host memory per GPU for preempted groups of several sequences."
    return "Accepted and not used: the V1 engine recomputes a preempted request."


def _graph_sizes(phrase: Phrase, plan: PlanDocument) -> str:
    return f"Batch sizes captured as CUDA graphs; this release sets {_graphs(plan)} aside for them."


def _graphs(plan: PlanDocument) -> str:
    return human_bytes(plan.layout.cuda_graph_bytes)


_WITH_PLAN: Mapping[str, _Explanation] = {
    "--max-model-len": _max_model_len,
    "--max-num-seqs": _max_num_seqs,
    "--max-num-batched-tokens": _batched_tokens,
    "--gpu-memory-utilization": _utilization,
    "--tensor-parallel-size": _tensor_parallel,
    "--pipeline-parallel-size": _pipeline_parallel,
    "--kv-cache-dtype": _kv_dtype,
    "--block-size": _block_size,
    "--enforce-eager": _eager,
    "--kv-cache-memory-bytes": _kv_bytes,
    "--num-gpu-blocks-override": _blocks,
    "--cpu-offload-gb": _offload,
    "--swap-space": _swap,
    "--cudagraph-capture-sizes": _graph_sizes,
    "--max-cudagraph-capture-size": _graph_sizes,
    "--cuda-graph-sizes": _graph_sizes,
}

_PLAIN: Mapping[str, str] = {
    "--max-model-len": "The most tokens a request may have; it does not set the size of the pool.",
    "--max-num-seqs": "Requests computed in one step; any more wait, they do not fail.",
    "--max-num-batched-tokens": "Tokens computed in one step: the activation peak grows with it.",
    "--gpu-memory-utilization": "The share of each card that vLLM may use; KV cache gets what is left of it.",
    "--tensor-parallel-size": "GPUs that split every layer between them.",
    "--pipeline-parallel-size": "Stages the layers are split into.",
    "--data-parallel-size": "Whole copies of the model, each with its own KV cache.",
    "--kv-cache-dtype": "The data type of the KV cache; weights have their own.",
    "--block-size": "Tokens in a block; the last block of a sequence is partly empty.",
    "--enforce-eager": "No CUDA graphs and no compilation: less memory, and slower decoding.",
    "--kv-cache-memory-bytes": "The size of the KV cache on each card, set rather than computed.",
    "--cpu-offload-gb": "GiB of weights per card that stay in host memory; every step reads them again.",
    "--dtype": "The data type that weights and activations are computed in.",
    "--quantization": "How the weights are quantized; the KV cache is not affected.",
    "--enable-prefix-caching": "Finished blocks stay cached until their room is needed; that costs no memory.",
    "--no-enable-prefix-caching": "Blocks are freed when a request ends.",
    "--enable-chunked-prefill": "Long prompts are computed in pieces, each within the tokens of one step.",
    "--no-enable-chunked-prefill": "A prompt is computed whole, so one step must hold the longest.",
    "--enable-expert-parallel": "Whole experts are spread over the GPUs instead of being split.",
    "--enable-lora": "LoRA adapters: their slots count as weights.",
    "--lora-modules": "Adapters that are loaded from the start, by name.",
    "--max-loras": "Adapters in one step, each in a slot for the largest rank.",
    "--max-lora-rank": "The largest rank that an adapter may have; every slot is sized for it.",
    "--speculative-config": "Tokens are guessed ahead; the draft model's weights and slots come on top.",
    "--compilation-config": "What is compiled and captured.",
    "--async-scheduling": "The next step is scheduled while the last one runs.",
    "--limit-mm-per-prompt": "Media items a request may have; the profile run uses that many.",
    "--hf-overrides": "Fields of the model's config to replace.",
    "--trust-remote-code": "Runs code that comes with the checkpoint: use it only with sources you trust.",
    "--served-model-name": "The name that requests use.",
    "--host": "The address it listens on.",
    "--port": "The port it listens on.",
    "--middleware": "A layer around every request, as given.",
    "--shutdown-timeout": "Seconds that running requests get to finish after SIGTERM.",
    "--disable-custom-all-reduce": "All-reduce by NCCL alone.",
    "--attention-backend": "Which attention kernels are used.",
    "--load-format": "How the checkpoint is read.",
    "--download-dir": "Where the checkpoint is kept.",
    "--ssl-certfile": "The certificate that clients see: the server answers https.",
    "--ssl-keyfile": "The private key of its certificate.",
    "--ssl-ca-certs": "The authorities that may sign client certificates.",
    "--allowed-local-media-path": "Requests may name files below this folder.",
    "--tool-parser-plugin": "Code that parses tool calls: use it only from sources you trust.",
    "--reasoning-parser-plugin": "Code that parses reasoning: use it only from sources you trust.",
    "--mm-processor-cache-gb": "GiB of host memory for processed media, in every API server and every engine.",
    "--data-parallel-size-local": "The copies that run on this machine.",
    "--nnodes": "Machines that share one copy.",
    "--tokenizer": "Where the tokenizer comes from.",
    "--revision": "Which revision of the checkpoint.",
    "--seed": "The seed of the random numbers.",
    "--kv-offloading-size": "GiB of host memory for KV blocks that leave the card, over all GPUs; it lies in /dev/shm.",
    "--kv-transfer-config": "Where KV blocks are sent to or come from.",
    "--api-server-count": "Processes that receive requests and send the answers.",
    "--enable-sleep-mode": "The server can give the card's memory back and take it again.",
    "--enable-auto-tool-choice": "The model may call tools.",
    "--tool-call-parser": "How tool calls are parsed from the model's text.",
    "--reasoning-parser": "How the model's reasoning is told apart from its answer.",
    "--chat-template": "How messages are turned into a prompt.",
    "--disable-log-requests": "Requests are not written to the log.",
    "--no-enable-log-requests": "Requests are not written to the log.",
    "--enable-log-requests": "Requests are written to the log.",
    "--swap-space": "GiB of pinned host memory per GPU (V0); the V1 engine does not use it.",
}
