"""Every flag of a planned server in a sentence, with its number from the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from legroom.exports.request import MARK
from legroom.guard import MIDDLEWARE
from legroom.units import gib, human_bytes
from legroom.version import __version__

if TYPE_CHECKING:
    from legroom.exports.deploy.words import Phrase
    from legroom.planning.plan_document import PlanDocument

WRITTEN = f"{MARK} {__version__}."
_Told = Callable[["Phrase", "PlanDocument"], str]


def comment(phrase: Phrase, plan: PlanDocument | None) -> str:
    """What a flag does here. Without a plan, what it does at all."""
    if phrase.flag == "--middleware" and MIDDLEWARE in phrase.values:
        return "The guard: requests that the pool cannot hold are turned away at the door."
    if plan is not None and phrase.flag in _WITH_PLAN:
        return _WITH_PLAN[phrase.flag](phrase, plan)
    return _PLAIN.get(phrase.flag.partition(".")[0], "As it was given; no figure of the plan depends on it alone.")


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


def _max_model_len(phrase: Phrase, plan: PlanDocument) -> str:
    if phrase.value in ("-1", "auto"):
        return f"The longest context that memory holds: {plan.args['max_model_len']:,} tokens here."
    needed = plan.kv.needed_bytes
    if not needed or plan.kv.num_blocks <= 0:
        return "Tokens a request may have."
    return (
        f"Tokens a request may have. One request of that length needs {gib(needed)} of KV cache; the pool holds "
        f"{plan.kv.max_concurrency:.2f} of them. A shorter length does not make the pool smaller."
    )


def _max_num_seqs(phrase: Phrase, plan: PlanDocument) -> str:
    if plan.kv.tokens <= 0:
        return "Requests in a step; more wait, they do not fail."
    average = int(plan.kv.tokens / max(int(plan.args["max_num_seqs"]), 1))
    return (
        f"Requests in a step. If all of them run, each has {average:,} tokens of the pool on average; more wait, they "
        "do not fail."
    )


def _batched_tokens(phrase: Phrase, plan: PlanDocument) -> str:
    peak = human_bytes(plan.layout.activation_bytes)
    return f"Tokens in a step. They set the activation peak: {peak} of each card in the profile run."


def _utilization(phrase: Phrase, plan: PlanDocument) -> str:
    layout = plan.layout
    if plan.args.get("kv_cache_memory_bytes"):
        return "The share of the card that must be free at start; the size of the pool is given apart."
    share = f"The share of a card that is vLLM's: {gib(layout.budget_bytes)} of {gib(layout.total_bytes)}."
    if not plan.kv.num_blocks:
        return f"{share} This model keeps no KV cache."
    return (
        f"{share} What the weights and the peak leave of it is KV cache, {gib(layout.kv_cache_bytes)}; beside it "
        f"{gib(layout.outside_bytes)} are used outside."
    )


def _tensor_parallel(phrase: Phrase, plan: PlanDocument) -> str:
    return (
        f"GPUs that share every layer. {gib(plan.layout.weights_bytes)} of weights and "
        f"{gib(plan.layout.kv_cache_bytes)} of KV cache lie on each."
    )


def _pipeline_parallel(phrase: Phrase, plan: PlanDocument) -> str:
    return f"Stages the layers are split into; the fullest card holds {gib(plan.layout.weights_bytes)} of weights."


def _kv_dtype(phrase: Phrase, plan: PlanDocument) -> str:
    per_token = plan.kv.bytes_per_token or 0
    return f"How KV entries are kept: {per_token:,} bytes a token on a card, all layers together."


def _block_size(phrase: Phrase, plan: PlanDocument) -> str:
    size = plan.kv.block_size
    return f"Tokens in a block; the last block of a sequence is up to {size - 1} tokens empty. The pool uses {size}."


def _eager(phrase: Phrase, plan: PlanDocument) -> str:
    return "No CUDA graphs and no compilation: their memory is saved and decoding is slower."


def _kv_bytes(phrase: Phrase, plan: PlanDocument) -> str:
    return f"The size of the KV cache on a card, given rather than computed: {gib(plan.layout.kv_cache_bytes)}."


def _blocks(phrase: Phrase, plan: PlanDocument) -> str:
    return f"Blocks of the pool, given rather than computed: {plan.kv.num_blocks:,}."


def _offload(phrase: Phrase, plan: PlanDocument) -> str:
    left = gib(plan.layout.weights_bytes)
    return f"GiB of weights a card that stay in host memory; {left} remain on the card. Every step reads them anew."


def _swap(phrase: Phrase, plan: PlanDocument) -> str:
    if plan.args.get("engine") == "V0":
        return "GiB of pinned host memory a GPU for preempted groups of several sequences."
    return "Read and not used: the V1 engine recomputes a preempted request."


def _graph_sizes(phrase: Phrase, plan: PlanDocument) -> str:
    return f"Batch sizes captured as CUDA graphs; this release sets {_graphs(plan)} aside for them."


def _graphs(plan: PlanDocument) -> str:
    return human_bytes(plan.layout.cuda_graph_bytes)


_WITH_PLAN: Mapping[str, _Told] = {
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
    "--max-model-len": "Tokens a request may have; it does not set the size of the pool.",
    "--max-num-seqs": "Requests in a step; more wait, they do not fail.",
    "--max-num-batched-tokens": "Tokens in a step: the activation peak grows with it.",
    "--gpu-memory-utilization": "The share of a card that is vLLM's; what weights and peak leave of it is KV cache.",
    "--tensor-parallel-size": "GPUs that share every layer.",
    "--pipeline-parallel-size": "Stages the layers are split into.",
    "--data-parallel-size": "Whole copies of the model, each with a pool of its own.",
    "--kv-cache-dtype": "How KV entries are kept; weights have their own.",
    "--block-size": "Tokens in a block; the last block of a sequence is partly empty.",
    "--enforce-eager": "No CUDA graphs and no compilation: less memory, slower decoding.",
    "--kv-cache-memory-bytes": "The size of the KV cache on a card, given rather than computed.",
    "--cpu-offload-gb": "GiB of weights a card that stay in host memory; every step reads them anew.",
    "--dtype": "What weights and activations are computed in.",
    "--quantization": "How the weights are quantized; KV entries are not touched by it.",
    "--enable-prefix-caching": "Finished blocks stay until somebody needs the room; it neither costs nor saves memory.",
    "--no-enable-prefix-caching": "Blocks are dropped when a request ends.",
    "--enable-chunked-prefill": "Long prompts are computed in pieces of at most the tokens of a step.",
    "--no-enable-chunked-prefill": "A prompt is computed whole, so a step must hold the longest.",
    "--enable-expert-parallel": "Experts are spread over the GPUs instead of being cut.",
    "--enable-lora": "Adapters: their slots are part of the weights.",
    "--lora-modules": "Adapters that are there from the start, by name.",
    "--max-loras": "Adapters in one step; a slot each, at the largest rank.",
    "--max-lora-rank": "The largest rank: every slot is as large.",
    "--speculative-config": "Tokens are guessed ahead; the draft's weights and slots come on top.",
    "--compilation-config": "What is compiled and captured.",
    "--async-scheduling": "The next step is scheduled while the last one runs.",
    "--limit-mm-per-prompt": "Media a request may have; the profile run is made with that many.",
    "--hf-overrides": "Fields of the model's config that are replaced.",
    "--trust-remote-code": "Code that comes with the checkpoint is run: only from those you trust.",
    "--served-model-name": "The name that requests use.",
    "--host": "The address it listens on.",
    "--port": "The port it listens on.",
    "--middleware": "A layer around every request, as it was given.",
    "--shutdown-timeout": "Seconds that running requests get to finish after SIGTERM.",
    "--disable-custom-all-reduce": "All-reduce by NCCL alone.",
    "--attention-backend": "Which attention kernels are used.",
    "--load-format": "How the checkpoint is read.",
    "--download-dir": "Where the checkpoint is kept.",
    "--ssl-certfile": "The certificate that clients are shown: it answers https.",
    "--ssl-keyfile": "The key of its certificate.",
    "--ssl-ca-certs": "Who may sign the certificates of clients.",
    "--allowed-local-media-path": "Requests may name files under it.",
    "--tool-parser-plugin": "Code that reads tool calls: only from those you trust.",
    "--reasoning-parser-plugin": "Code that reads thoughts: only from those you trust.",
    "--mm-processor-cache-gb": "GiB of host memory for processed media, in every API server and every engine.",
    "--data-parallel-size-local": "The copies that this machine runs.",
    "--nnodes": "Machines that share one copy.",
    "--tokenizer": "Where the tokenizer comes from.",
    "--revision": "Which revision of the checkpoint.",
    "--seed": "Where random numbers start.",
    "--kv-offloading-size": "GiB of host memory for KV blocks that leave the card, over all GPUs; it lies in /dev/shm.",
    "--kv-transfer-config": "Where KV blocks are sent to or come from.",
    "--api-server-count": "Processes that read and answer requests.",
    "--enable-sleep-mode": "The card's memory can be given back and taken again.",
    "--enable-auto-tool-choice": "The model may call tools.",
    "--tool-call-parser": "How tool calls are read from the model's text.",
    "--reasoning-parser": "How the model's thoughts are told from its answer.",
    "--chat-template": "How messages become a prompt.",
    "--disable-log-requests": "Requests are not written to the log.",
    "--no-enable-log-requests": "Requests are not written to the log.",
    "--enable-log-requests": "Requests are written to the log.",
    "--swap-space": "GiB of pinned host memory a GPU (V0); the V1 engine does not use it.",
}
