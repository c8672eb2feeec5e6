"""Flags and allocator settings that cost more than they give, break the server, or differ from the plan."""

import re
from dataclasses import replace

from legroom.deployments.source_text import Place
from legroom.deployments.subjects import StartedServer
from legroom.exports.deploy.environment import ALLOCATOR_NAMES
from legroom.facts import read_data
from legroom.facts.flags import flag_name
from legroom.facts.gpus import gpu, is_known_gpu
from legroom.lint.rule import Context, Findings, checks, finding, flag_place, flag_value, flag_word, has_open_words
from legroom.units import human_bytes
from legroom.vllm.args import other_value


@checks(StartedServer, "eager")
def server_without_cuda_graphs(server: StartedServer, context: Context) -> Findings:
    """A server with --enforce-eager, which decodes slower without CUDA graphs."""
    is_of_cpu = not server.runs_on_gpus or "cpu-build" in context.platform_signs
    if not context.parsed_args(server).args.enforce_eager or is_of_cpu:
        return
    plan = context.plan_of(server)
    graphs = plan.layout.cuda_graph_bytes if plan else 0
    saved = f" ({human_bytes(graphs)} in the plan)" if graphs else ""
    message = f"--enforce-eager saves the memory of CUDA graphs{saved} and slows every decoding step"
    if context.release_of(server).before("0.20.0"):
        message += "; before 0.20 it adds no KV block"
    suggestion = "leave it out unless graph capture is what runs out (LR302)"
    yield finding("eager", flag_place(server, "--enforce-eager"), message, suggestion)


@checks(StartedServer, "flag-ignored")
def overridden_utilization(server: StartedServer, context: Context) -> Findings:
    """A --gpu-memory-utilization that another flag overrides."""
    args, word = context.parsed_args(server).args, flag_word(server, "--gpu-memory-utilization")
    share = args.gpu_memory_utilization
    if word is None or share is None:
        return
    if args.kv_cache_memory_bytes is not None:
        message = "--kv-cache-memory-bytes sets the KV cache; the share only decides what must be free at the start"
        yield finding("flag-ignored", server.place_of(word), message, "leave one of them out")


_NO_RELEASE = "99.0"
_LOADS_ADAPTERS = re.compile(r"VLLM_(ALLOW_RUNTIME_LORA_UPDATING|PLUGINS|LORA_RESOLVER\w*)")


@checks(StartedServer, "flag-ignored", "flag-value", "flag-costly", "code-trusted")
def flags_without_companions(server: StartedServer, context: Context) -> Findings:
    """Flags that vLLM refuses or ignores unless another flag, which is missing, is given too."""
    if has_open_words(server) or flag_word(server, "--config"):
        return
    cards = " ".join((*server.gpu_names, *(card.name for card in context.named_cards)))
    for row in read_data("flag_companions.json")["rows"]:
        word = flag_word(server, row["flag"])
        is_met = flag_word(server, *row["needs"]) is not None or context.release_of(server).at_least(
            row.get("before", _NO_RELEASE)
        )
        is_met = is_met or (row["rule"] == "code-trusted" and context.parsed_args(server).args.model[:1] in ("/", "."))
        is_met = is_met or ("not_on" in row and re.search(row["not_on"], cards) is not None)
        if word is not None and not is_met and re.fullmatch(row.get("value", ".*"), flag_value(server, word)):
            is_certain = row["rule"] != "flag-value" or (server.runs != "python" and not server.launcher)
            found = finding(row["rule"], server.place_of(word), row["message"], row["suggestion"], len(row["flag"]))
            found = found if is_certain else replace(found, severity="warning")
            yield replace(found, severity="note") if server.runs == "config" else found  # a command may give the other


@checks(StartedServer, "flag-ignored", "tool-parser")
def features_without_effect(server: StartedServer, context: Context) -> Findings:
    """LoRA without an adapter, and a tool-call parser that does not read this model's calls."""
    word, args = flag_word(server, "--enable-lora"), context.parsed_args(server).args
    is_complete = server.runs not in ("shell", "config", "python") and not has_open_words(server)
    loads = flag_word(server, "--lora-modules", "--config") or any(
        _LOADS_ADAPTERS.match(name) and word.text.lower() not in ("0", "false") for name, word in server.env.items()
    )
    if word is not None and is_complete and not loads and not server.launcher:
        message = "--enable-lora reserves memory, and no adapter is given or can be loaded"
        suggestion = "leave it out, or set VLLM_ALLOW_RUNTIME_LORA_UPDATING"
        yield finding("flag-ignored", server.place_of(word), message, suggestion)
    word = flag_word(server, "--tool-call-parser")
    rows, name = read_data("tool_parsers.json")["models"], args.model.rstrip("/").rpartition("/")[2].lower()
    chosen = flag_value(server, word) if word else ""
    right = next((row["parsers"] for row in rows if re.match(row["name"], name)), ())
    is_known = re.fullmatch(r"[a-z]\w+", chosen) and flag_word(server, "--tool-parser-plugin") is None
    if word is not None and is_known and right and chosen not in right:
        message = f"{args.model} does not write its tool calls as --tool-call-parser {chosen} reads them"
        yield finding("tool-parser", server.place_of(word), message, f"write {' or '.join(right)}", len(word.text))


_COMPARED = ["max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization"]
_COMPARED += ["tensor_parallel_size", "pipeline_parallel_size", "kv_cache_memory_bytes"]


@checks(StartedServer, "plan-differs")
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
        message = f"{flag} is {given:g} here and {planned:g} in the plan"
        suggestion = f"write {flag} {planned:g}, or plan again"
        yield finding("plan-differs", flag_place(server, flag), message, suggestion, len(flag))


@checks(StartedServer, "allocator-breaks", "allocator-clash", "allocator-useless")
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
            yield finding(
                "allocator-useless", place, "garbage_collection_threshold does not fix fragmentation", "leave it out"
            )


def _expandable_segments_findings(server: StartedServer, context: Context, place: Place, is_asserted: bool) -> Findings:
    """Expandable segments beside sleep mode, a KV connector or custom all-reduce; `is_asserted`: vLLM would stop."""
    is_certain = is_asserted and context.is_release_certain(server)
    release = context.release_of(server)
    args = context.parsed_args(server).args
    ranks = args.tensor_parallel_size or 1
    sleeps = flag_word(server, "--enable-sleep-mode")
    if sleeps and release.before("0.20.1"):
        message = f"sleep mode of vLLM {release} asserts against expandable segments (they go together from 0.20.1 on)"
        yield finding("allocator-breaks", place, message, "leave expandable_segments out", is_certain=is_certain)
    connector = flag_word(server, "--kv-transfer-config", "--kv-offloading-size")
    if connector and release.at_least("0.21.0") and not (sleeps or flag_word(server, "--enable-cumem-allocator")):
        message = f"vLLM {release} refuses expandable segments with a KV connector ({connector.text.partition('=')[0]})"
        found = finding("allocator-breaks", place, message, "leave expandable_segments out", is_certain=is_certain)
        yield found if context.is_release_told(server) else replace(found, severity="note")
    # Ranks on several nodes do not use custom all-reduce, and Ray may have them there. More than two cards without
    # NVLink do not either, and without graphs only its own buffers are shared.
    is_spread = other_value(args, "--distributed-executor-backend") == "ray"
    is_spread = is_spread or not server.env.keys().isdisjoint(("RAY_ADDRESS", "VLLM_HOST_IP"))
    is_spread = is_spread or flag_word(server, "--disable-custom-all-reduce", "--nnodes") is not None
    named = [gpu(name).interconnect for name in server.gpu_names if is_known_gpu(name)]
    if ranks > 1 and (ranks == 2 or "pcie" not in named) and not is_spread and not args.enforce_eager:
        instead = "leave expandable_segments out, or add --disable-custom-all-reduce"
        beside = f"expandable segments beside custom all-reduce of {ranks} ranks"
        if release.within("0.21.0", "0.28.0"):
            message = f"{beside} break the start of vLLM {release} ('invalid argument')"
            # A warning: only GPUs with peer access use custom all-reduce, and no file says whether they have it.
            yield finding("allocator-breaks", place, message, instead, is_certain=False)
        else:
            message = f"{beside}: vLLM 0.21.0 to 0.28.0 does not start, and {release} shares IPC handles too"
            yield replace(finding("allocator-clash", place, message, instead), severity="note")
