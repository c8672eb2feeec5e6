"""Flags and allocator settings that cost more than they give, break the server, or differ from the plan."""

from __future__ import annotations

import re

from legroom.deployments.source_text import Place
from legroom.deployments.subjects import StartedServer
from legroom.exports.deploy.environment import ALLOCATOR_NAMES
from legroom.facts import read_data
from legroom.facts.flags import flag_name
from legroom.lint.rule import (
    Context,
    Findings,
    Rule,
    checks,
    finding,
    flag_place,
    flag_value,
    flag_word,
    has_open_words,
    runs_on_rocm,
)
from legroom.lint.rules.flag_rules import IGNORED
from legroom.units import human_bytes
from legroom.vllm.args import other_value

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


_WHY_SHARE = (
    "vLLM needs this share free at its start, and the CUDA context, NCCL and other processes are outside of it (LR202)."
)
SHARE = Rule("share-high", "warning", "A share of the GPU that leaves no room beside it", _WHY_SHARE)
_HIGHEST_SHARE = 0.97
"""Above it a 24 GiB card keeps less than the 0.7 GiB that a CUDA context and the driver hold."""


@checks(StartedServer, SHARE, IGNORED)
def share_of_gpu(server: StartedServer, context: Context) -> Findings:
    """A --gpu-memory-utilization that leaves nothing, or that another flag overrides."""
    args, word = context.parsed_args(server).args, flag_word(server, "--gpu-memory-utilization")
    share = args.gpu_memory_utilization
    if word is None or share is None:
        return
    if args.kv_cache_memory_bytes is not None:
        message = "--kv-cache-memory-bytes sets the KV cache; the share only decides what must be free at the start"
        yield finding(IGNORED, server.place_of(word), message, "leave one of them out")
    elif _HIGHEST_SHARE < share <= 1 and server.runs_on_gpus:
        message = f"{share:g} leaves {1 - share:.0%} of the GPU for its CUDA context, NCCL and other processes"
        yield finding(SHARE, server.place_of(word), message, f"write at most {_HIGHEST_SHARE:g}", len(word.text))


_LOADS_ADAPTERS = re.compile(r"VLLM_(ALLOW_RUNTIME_LORA_UPDATING|PLUGINS|LORA_RESOLVER\w*)")
_WHY_PARSER = "Calls in another format stay in the text of the answer: the client sees no tool call."
PARSER = Rule("tool-parser", "warning", "A parser of another model's tool calls", _WHY_PARSER)


@checks(StartedServer, IGNORED, PARSER)
def features_without_effect(server: StartedServer, context: Context) -> Findings:
    """LoRA that no adapter uses, and a tool parser that does not read the model's calls."""
    word, args = flag_word(server, "--enable-lora"), context.parsed_args(server).args
    is_complete = server.runs not in ("shell", "config", "python") and not has_open_words(server)
    loads = flag_word(server, "--lora-modules", "--config") or any(map(_LOADS_ADAPTERS.match, server.env))
    if word is not None and is_complete and not loads and not server.launcher:
        message = "--enable-lora reserves memory, and no adapter is given or can be loaded"
        suggestion = "leave it out, or set VLLM_ALLOW_RUNTIME_LORA_UPDATING"
        yield finding(IGNORED, server.place_of(word), message, suggestion)
    word = flag_word(server, "--tool-call-parser")
    chosen, right = flag_value(server, word) if word else "", _tool_parsers(args.model) if word else ()
    if (
        word is not None
        and not has_open_words(server)
        and not flag_word(server, "--enable-auto-tool-choice", "--config")
    ):
        message = "--tool-call-parser does nothing without --enable-auto-tool-choice"
        yield finding(IGNORED, server.place_of(word), message, "add --enable-auto-tool-choice", len(word.text))
    is_known = re.fullmatch(r"[a-z]\w+", chosen) and flag_word(server, "--tool-parser-plugin") is None
    if word is not None and is_known and right and chosen not in right:
        message = f"{args.model} does not write its tool calls as --tool-call-parser {chosen} reads them"
        yield finding(PARSER, server.place_of(word), message, f"write {' or '.join(right)}", len(word.text))


def _tool_parsers(model: str) -> tuple[str, ...]:
    """The parsers that read the tool calls of a model; none where it is not listed."""
    name = model.rstrip("/").rpartition("/")[2].lower()
    rows = read_data("tool_parsers.json")["models"]
    return next((tuple(row["parsers"]) for row in rows if re.match(row["name"], name)), ())


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
    is_taken = runs_on_rocm(server)  # AITER's kernels take blocks of 1
    if size is not None and word is not None and size % 16 and not is_taken:
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


_WHY_BREAKS = (
    "Memory of expandable segments cannot be shared by IPC handles, pinned by a KV connector, or (before 0.20.1) put "
    "to sleep (LR906)."
)
BREAKS = Rule("allocator-breaks", "error", "Expandable segments where they break the server", _WHY_BREAKS)
_WHY_CLASHES = (
    "Custom all-reduce shares buffers between ranks by IPC handles; with expandable segments starts were seen to fail "
    "with 'invalid argument' (LR906)."
)
CLASHES = Rule("allocator-clash", "warning", "Expandable segments beside custom all-reduce", _WHY_CLASHES)
_WHY_USELESS = (
    "It frees cached segments earlier and joins no pieces; with a full pool there is hardly anything to free (LR406)."
)
USELESS = Rule("allocator-useless", "note", "garbage_collection_threshold", _WHY_USELESS)


@checks(StartedServer, BREAKS, CLASHES, USELESS)
def allocator_settings(server: StartedServer, context: Context) -> Findings:
    """PYTORCH_*_ALLOC_CONF values that conflict with the server's flags or release."""
    for name in ALLOCATOR_NAMES:
        word = server.env.get(name)
        if word is None:
            continue
        place = server.place_of(word)
        if "expandable_segments:true" in word.text.replace(" ", "").lower():
            # vLLM asserts only on this spelling in this variable.
            is_asserted = name == "PYTORCH_CUDA_ALLOC_CONF" and "expandable_segments:True" in word.text
            yield from _expandable_segments_findings(server, context, place, is_asserted)
        if "garbage_collection_threshold" in word.text:
            yield finding(USELESS, place, "garbage_collection_threshold does not fix fragmentation", "leave it out")


def _expandable_segments_findings(server: StartedServer, context: Context, place: Place, is_asserted: bool) -> Findings:
    """Expandable segments beside sleep mode, a KV connector or custom all-reduce, which some releases refuse."""
    is_certain = is_asserted and context.is_release_certain(server)
    release = context.release_of(server)
    ranks = context.parsed_args(server).args.tensor_parallel_size or 1
    sleeps = flag_word(server, "--enable-sleep-mode")
    if sleeps and release.before("0.20.1"):
        message = f"sleep mode of vLLM {release} asserts against expandable segments (they go together from 0.20.1 on)"
        yield finding(BREAKS, place, message, "leave expandable_segments out", is_certain=is_certain)
    connector = flag_word(server, "--kv-transfer-config", "--kv-offloading-size")
    if connector and release.at_least("0.21.0") and not (sleeps or flag_word(server, "--enable-cumem-allocator")):
        message = f"vLLM {release} refuses expandable segments with a KV connector ({connector.text.partition('=')[0]})"
        yield finding(BREAKS, place, message, "leave expandable_segments out", is_certain=is_certain)
    # Ranks on several nodes do not use custom all-reduce, and Ray may have them there.
    is_spread = other_value(context.parsed_args(server).args, "--distributed-executor-backend") == "ray"
    is_spread = is_spread or not server.env.keys().isdisjoint(("RAY_ADDRESS", "VLLM_HOST_IP"))
    if ranks > 1 and not is_spread and flag_word(server, "--disable-custom-all-reduce", "--nnodes") is None:
        instead = "leave expandable_segments out, or add --disable-custom-all-reduce"
        if release.within("0.21.0", "0.28.0"):
            message = (
                f"expandable segments break custom all-reduce of {ranks} ranks in vLLM {release} ('invalid argument')"
            )
            # A warning: only GPUs with peer access use custom all-reduce, and no file says whether they have it.
            yield finding(BREAKS, place, message, instead, is_certain=False)
        else:
            message = (
                f"expandable segments beside custom all-reduce of {ranks} ranks: the start fails in vLLM 0.21.0 to "
                f"0.28.0, and IPC handles are shared in {release} too"
            )
            yield finding(CLASHES, place, message, instead)
