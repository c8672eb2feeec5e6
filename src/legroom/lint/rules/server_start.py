"""Servers that do not start: no room on their GPU, too little time, or a Service that sets VLLM_PORT."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from legroom.deployments.subjects import StartedServer
from legroom.deployments.yaml_nodes import Node
from legroom.exports.deploy.exported_server import planned_server
from legroom.exports.deploy.start_times import IMPORT_S, SAFETY, SHORTEST_ENGINE_S, SHORTEST_LIMIT_S
from legroom.facts import pattern
from legroom.facts.flags import default
from legroom.lint.rule import (
    Context,
    Findings,
    Severity,
    checks,
    finding,
    flag_place,
    flag_word,
    has_open_words,
    runs_on_rocm,
)
from legroom.lint.server_plan import ServerPlan, file_plan_of, plan_of_server, refusal_of_server
from legroom.planning.plan_json import plan_document
from legroom.units import human_bytes
from legroom.vllm.config_rules import field_refusals

_NO_MEMORY = pattern("server_start.no_memory")
_USUAL_SHARE = 0.9  # What vLLM takes by default: hardly any other program runs in the rest of a card.
_SMALL_CARD_BYTES, _COMMON_CARD_BYTES, _LARGE_CARD_BYTES = 24 * 10**9, 80 * 10**9, 141 * 10**9
_MORE_RANKS = "raise --tensor-parallel-size, or name the card"
NO_CARD_HELPS = ("unsupported_quantization", "unsupported_architecture")


@checks(StartedServer, "does-not-fit")
def server_does_not_fit_gpu(server: StartedServer, context: Context) -> Findings:
    """A server that vLLM refuses to start, or that does not fit one of the GPUs its file names."""
    if not server.runs_on_gpus:
        return
    release = context.release_of(server)
    is_known, may_be_long = not context.has_unknown_release(server), "VLLM_ALLOW_LONG_MAX_MODEL_LEN" in server.env
    is_judged = not may_be_long and (is_known or bool(server.launcher))
    is_judged = is_judged and not (runs_on_rocm(server) and not server.gpu_names)  # without a name it is NVIDIA's
    refusal = refusal_of_server(server, release) if is_judged else None
    if refusal is not None and not is_known and not refusal.message.startswith("--max-model-len"):
        return  # what every release checks is the length
    refused = field_refusals(context.parsed_args(server).args, release) if not server.gpu_names else ()
    if refusal is not None and refusal.message in (message for message, _ in refused):
        return  # another rule says it at the flag
    if refusal is not None:
        certain = context.is_release_given or bool(server.named_release)
        message = f"vLLM{f' {release}' if is_known else ''} will not start: {refusal.message}"
        place = flag_place(server, refusal.message.partition(" ")[0])
        yield finding("does-not-fit", place, message, refusal.hint, is_certain=certain)
        return
    if not server.gpu_names:
        made = plan_of_server(server, release) if is_judged else None
        failure = made.plan.memory.failure if made is not None else None
        # What no card changes: the plan is of an H200.
        if failure is not None and failure.id in NO_CARD_HELPS and "capab" not in failure.message:
            certain = context.is_release_given or bool(server.named_release)
            message = f"vLLM {release} will not start: {failure.message}"
            yield finding("does-not-fit", flag_place(server, "--quantization"), message, is_certain=certain)
        elif context.named_cards:
            return  # another rule judges it by this card
        elif made is not None and made.held_bytes > _COMMON_CARD_BYTES and not server.launcher:
            message = f"one GPU holds {human_bytes(made.held_bytes)} of weights: no card of 80 GB does"
            found = finding("does-not-fit", server.place, message, _MORE_RANKS, is_certain=False)
            is_sure = bool(server.gpus) and made.held_bytes > _LARGE_CARD_BYTES
            yield found if is_sure else replace(found, severity="note")
        elif made is not None and not made.plan.memory.failure and made.least_gpu_bytes > _SMALL_CARD_BYTES:
            length, args = made.plan.settings.max_model_len, context.parsed_args(server).args
            is_open = args.max_model_len is None and not server.launcher and context.plan is None
            if is_open and flag_word(server, "--config") is None:
                message = f"without --max-model-len weights and one request of {length:,} tokens take "
                message += f"{human_bytes(made.least_gpu_bytes)} of a GPU: vLLM refuses to start on a smaller one"
                suggestion = "write the length that requests need, or name the card"
                yield replace(finding("does-not-fit", server.place, message, suggestion), severity="note")
        return
    # Another rule is about the host's memory.
    own = file_plan_of(replace(server, memory_limit_bytes=None), release)
    for gpu_name, plan in zip(server.gpu_names, own.plans if own is not None else (), strict=False):
        failure = plan.memory.failure
        if own is not None and (failure is not None or plan.verdict == "does_not_fit"):
            on_any = failure is not None and failure.id in NO_CARD_HELPS
            what = f"vLLM {release} will not start" if on_any else f"it does not fit {gpu_name}"
            message = f"{what}: {failure.message if failure else plan.reason}"
            suggestion = "legroom plan --file FILE shows the flags that do"
            yield finding("does-not-fit", server.place, message, suggestion, is_certain=own.verdict == "does_not_fit")
            return


@checks(StartedServer, "does-not-fit")
def shares_above_one_gpu(server: StartedServer, context: Context) -> Findings:
    """A service that asks for more of a GPU than services before it, or other programs, leave."""
    used, where = _shares(server, context), flag_place(server, "--gpu-memory-utilization")
    before = context.servers[: context.servers.index(server)] if server in context.servers else ()
    others = [(each.read_as, _shares(each, context)) for each in before if _can_meet(server.profiles, each.profiles)]
    for gpu, share in used.items():
        taken = {name: shares[gpu] for name, shares in others if gpu in shares}
        beside = [
            name for name, is_engine in _other_programs(server, context, gpu) if is_engine or share >= _USUAL_SHARE
        ]
        is_full = round(sum(taken.values()), 6) > 1  # said at the service before
        if beside or (taken and not is_full and round(share + sum(taken.values()), 6) > 1):
            parts = [f"{name} for {part:g}" for name, part in taken.items()] + [f"{name} uses it" for name in beside]
            message = f"it asks for {share:g} of GPU {gpu}, and {', '.join(parts)}"
            suggestion = "give each its own GPU (device_ids), or shares of 1 in sum"
            # A file may list alternatives, of which one is started at a time.
            yield replace(finding("does-not-fit", where, message, suggestion), severity="note")
            return


def _can_meet(profiles: Sequence[str], others: Sequence[str]) -> bool:
    """Whether Compose services with these profiles may run at the same time; one without profiles always runs."""
    return not profiles or not others or not {*profiles}.isdisjoint(others)


def _other_programs(server: StartedServer, context: Context, gpu: int) -> Iterator[tuple[str, bool]]:
    """(Compose service, whether it fills the GPU, as SGLang does) of each one without vLLM that reserves the GPU."""
    known = {each.read_as for each in context.servers}
    for name, service in (each for document in context.documents for each in document.items("services")):
        devices = service.list("deploy", "resources", "reservations", "devices")
        ids = [item.scalar for device in devices for item in device.list("device_ids")]
        profiles = [item.scalar or "" for item in service.list("profiles")]
        is_other = f"compose service {name}" not in known and not _NO_MEMORY.search(name)
        uses_gpu = bool(devices) and (str(gpu) in ids or (not ids and gpu == 0))
        if is_other and uses_gpu and _can_meet(server.profiles, profiles):
            yield f"compose service {name}", "sglang" in service.text("image") or "ollama" in service.text("image")


def _shares(server: StartedServer, context: Context) -> dict[int, float]:
    """{GPU index: gpu_memory_utilization that the server asks of it}; empty where the file does not tell."""
    args = context.parsed_args(server).args
    is_open = has_open_words(server) and flag_word(server, "--gpu-memory-utilization") is None
    if args.kv_cache_memory_bytes is not None or is_open or not server.runs_on_gpus:
        return {}
    share = args.gpu_memory_utilization or float(default("--gpu-memory-utilization", context.release_of(server)))
    return dict.fromkeys(server.gpu_ids[: args.gpus_needed], share)


_FASTEST_DISK_BYTES_S, _NVME_BYTES_S = 10e9, 2e9
"""An upper bound of what a server's disks read, and what one local NVMe drive reads."""
_SHORTEST_START_S = IMPORT_S + SHORTEST_ENGINE_S  # The fastest measured start, without the time to read weights.
_DAY_S = 86_400  # No start takes a day, however large its model is.


@checks(StartedServer, "start-too-short")
def start_limit_too_short(server: StartedServer, context: Context) -> Findings:
    """A startup probe or start timeout that is shorter than the server's expected start."""
    limit = server.start_limit
    if limit is None:
        return
    plan, own = context.plan_of(server), plan_of_server(server, context.release_of(server))
    if own is not None and own.plan.memory.failure and own.plan.memory.failure.id in NO_CARD_HELPS:
        return  # it does not start at all
    is_restarted = server.runs != "compose"  # Compose only marks the container unhealthy; it keeps serving.
    size = own.checkpoint_bytes if own is not None else 0
    least_s = _SHORTEST_START_S + size / _FASTEST_DISK_BYTES_S
    needed_s, why = least_s, f"imports alone take about {IMPORT_S} s, and no weights are loaded then"
    if plan is None and own is not None and is_restarted:
        plan = plan_document(own.plan)
    if plan is not None:
        times = planned_server(plan).times
        if "LLMInferenceService" in server.read_as:  # KServe downloads the model in an init container
            times = replace(times, download_bytes_s=0.0)
        if context.parsed_args(server).args.enforce_eager:  # nothing is compiled or captured
            times = replace(times, engine_s=SHORTEST_ENGINE_S)
        needed_s, why = times.expected_s, times.parts()
    elif size:
        needed_s = _SHORTEST_START_S + size / _NVME_BYTES_S
        why = f"imports take about {IMPORT_S} s, and {human_bytes(size)} are read from a local NVMe drive"
    if limit.seconds < needed_s:
        about = "about" if size or plan else "at least"
        message = f"a start is given {limit.seconds:.0f} s and takes {about} {needed_s:.0f} s: {why}"
        found = finding("start-too-short", limit.place, message, f"allow at least {SAFETY * needed_s:.0f} s")
        # Disks and networks are up to SAFETY times as fast as the assumed ones.
        is_close = bool(plan) and limit.seconds * SAFETY > needed_s
        severity: Severity = "error" if size and limit.seconds < least_s and is_restarted else found.severity
        yield replace(found, severity="note" if is_close else severity)
    elif why := _why_first_start_is_long(server, own, context.parsed_args(server).args.model):
        message = f"a start is given {limit.seconds:.0f} s: {why}"
        longer = "write a longer start_period" if server.runs == "compose" else "add a longer startup probe"
        is_killed = server.runs == "kubernetes" and limit.seconds < SHORTEST_LIMIT_S / SAFETY
        key = ("depends_on", server.read_as.removeprefix("compose service "), "condition")
        services = [pair for document in context.documents for pair in document.items("services")]
        waiting = [name for name, service in services if service.text(*key) == "service_healthy"]
        message += f", and {waiting[0]}, which waits until it is healthy, does not start" if waiting else ""
        found = finding("start-too-short", limit.place, message, longer)
        is_sure = (is_killed and server.mounts is not None) or (bool(waiting) and own is not None)
        yield found if is_sure else replace(found, severity="note")


def _why_first_start_is_long(server: StartedServer, own: ServerPlan | None, model: str) -> str:
    """Why a start limit may end the first start, though not later ones; empty where it does not. `own`: its plan."""
    limit, kinds = server.start_limit, {probe.kind for probe in server.probes}
    expected_s = planned_server(plan_document(own.plan)).times.expected_s if own is not None else math.inf
    if "liveness" in kinds and "startup" not in kinds:
        if limit is not None and limit.seconds >= min(SAFETY * expected_s, _DAY_S):
            return "there is no startup probe, and a liveness probe this patient restarts a server that hangs late"
        return "there is no startup probe, and a first start that downloads and compiles longer is killed"
    if limit is None or server.runs != "compose" or model.startswith(("/", ".")):
        return ""
    if own is None:
        is_short = limit.seconds < SHORTEST_LIMIT_S
        return "a first start that downloads and compiles longer counts as unhealthy" if is_short else ""
    if limit.seconds >= expected_s:
        return ""
    return f"with its download a first start takes about {expected_s:.0f} s, and counts as unhealthy"


@checks(Node, "key-repeated")
def repeated_keys(document: Node, context: Context) -> Findings:
    """Keys that a manifest or a Compose file has twice."""
    text = document.source.text
    for node in document.walk() if "vllm" in text.lower() else ():
        for offset in node.repeated_keys:
            name = text[offset : text.find(":", offset)].strip("\"'")
            yield finding(
                "key-repeated", document.source.place(offset), f"{name} is here twice", "leave one of them", len(name)
            )


@checks(Node, "service-named-vllm")
def service_sets_vllm_port(document: Node, context: Context) -> Findings:
    """A Service named `vllm`, whose service link sets VLLM_PORT, if no file of its folder turns such links off."""
    name = document.get("metadata", "name")
    is_called_vllm = document.text("kind") == "Service" and name is not None and name.scalar == "vllm"
    is_headless = document.text("spec", "clusterIP") == "None"  # without an address there are no variables
    if name is not None and is_called_vllm and not is_headless and "own-port-here" not in context.platform_signs:
        message = "a Service called vllm sets VLLM_PORT=tcp://... in later pods, and vLLM then does not start"
        suggestion = "call it otherwise, or set enableServiceLinks: false in the pods"
        found = finding("service-named-vllm", document.source.place(name.offset), message, suggestion, len("vllm"))
        told = [server for server in context.servers if context.is_release_told(server)]
        reads_it = any(not context.release_of(server).before("0.4.3") for server in told)
        is_elsewhere = "own-port" in context.platform_signs  # an overlay may switch them off, and its base does not
        yield found if (reads_it or not context.servers) and not is_elsewhere else replace(found, severity="note")
