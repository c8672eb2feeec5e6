"""A planned server with everything that the deployment formats write."""

import argparse
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError
from legroom.exports.deploy.environment import EnvVariable, server_environment
from legroom.exports.deploy.flag_comments import flag_comment
from legroom.exports.deploy.serve_command import (
    API_KEY_NAME,
    WITHOUT_API_KEY,
    Address,
    Phrase,
    ServeCommand,
    address_of,
    parse_command,
)
from legroom.exports.deploy.start_times import DISK_BYTES_S, DOWNLOAD_BYTES_S, DRAIN_S, ENDPOINT_S, StartTimes
from legroom.exports.deploy.yaml_text import Commented
from legroom.exports.export_request import ExportRequest
from legroom.facts.flags import flag_name, flags_of
from legroom.facts.metrics import name_of
from legroom.facts.releases import Release
from legroom.guard import MIDDLEWARE, TOKEN_NAME
from legroom.masking import HIDDEN, PLACEHOLDER, is_secret
from legroom.memory.host_needs import HostNeeds, HostSettings, host_needs
from legroom.planning.plan_document import PlanDocument
from legroom.records import dataclass
from legroom.units import parse_speed, parse_whole
from legroom.vllm.parse import parse_flags

_PINNED = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
"""Settings that determine memory: written out, so that other defaults of a release change nothing."""
_UNKNOWN_KEY = (
    f"No API key: the plan file names none, and it cannot know of {API_KEY_NAME} in the server's environment. If the "
    f"server has one, set it here too: {WITHOUT_API_KEY}."
)
_READ_LARGER = {"fp8": 2, "bitsandbytes": 4}
"""Quantized while loading: the checkpoint may be this many times the weights on the GPUs."""


@dataclass(frozen=True)
class ServerOptions:
    """Options of a deployment besides the plan."""

    name: str | None = None
    disk_bytes_s: float = DISK_BYTES_S
    download_bytes_s: float = DOWNLOAD_BYTES_S
    drain_s: int = DRAIN_S
    guard: bool = False
    sidecar: bool = False
    image: str | None = None


@dataclass(frozen=True)
class ExportedServer:
    """One server with its flags, environment, times and host needs."""

    name: str
    model: str
    release: Release
    words: ServeCommand
    phrases: tuple[Phrase, ...]
    """The flags to write, each with its comment."""
    env: tuple[EnvVariable, ...]
    remarks: tuple[str, ...]
    """Comments for the head of a file, such as variables that are left out."""
    secrets: tuple[str, ...]
    gpus: int
    plan: PlanDocument
    times: StartTimes
    host: HostNeeds
    options: ServerOptions

    @property
    def address(self) -> Address:
        """Host, port, TLS and socket that the server listens on."""
        return address_of(self.words)

    @property
    def port(self) -> int:
        return self.address.port

    @property
    def drains_itself(self) -> bool:
        """Whether vLLM lets running requests finish on SIGTERM."""
        return self.words.get("--shutdown-timeout") is not None

    @property
    def requires_key(self) -> bool:
        """Whether requests need an API key."""
        return API_KEY_NAME in self.secrets

    def stop_sentence(self) -> str:
        """A sentence on what a stop does to running requests, for comments."""
        if self.drains_itself:
            return f"A stop waits for the drain ({self.times.drain_s} s) and the teardown."
        return f"vLLM {self.release.version} ends running requests at SIGTERM: take it out of the load balancer first."

    @property
    def served_name(self) -> str:
        """The model's name that clients send in requests (--served-model-name, else the model)."""
        phrase = self.words.get("--served-model-name")
        return phrase.values[0] if phrase and phrase.values else self.model

    @property
    def image(self) -> str:
        """The image that the user named, else vLLM's own of the planned release."""
        return self.options.image or f"vllm/vllm-openai:v{self.release.version}"

    @property
    def local_model(self) -> bool:
        """Whether the model is a folder on this machine rather than a Hub id."""
        return is_model_folder(self.model)


def commented_words(phrases: Iterable[Phrase], convert: Callable[[str], str]) -> Iterator[Any]:
    """Each flag's words after `convert`; the first is a `Commented` with the reason for the flag."""
    for phrase in phrases:
        first, *values = map(convert, phrase.words)
        yield Commented(phrase.why, first)
        yield from values


def requested_server(request: ExportRequest) -> ExportedServer:
    """The planned server of an export; for a plan file without an API key it remarks that there may be one."""
    server = planned_server(request.required_plan, server_options(request.options), request.secret_names)
    if request.from_file and API_KEY_NAME not in server.secrets:
        return replace(server, remarks=(*server.remarks, _UNKNOWN_KEY))
    return server


def add_server_options(group: argparse._ArgumentGroup, *, image: bool = False) -> None:
    """Adds the options that all deployment formats share, --image only with `image`."""
    group.add_argument("--name", metavar="NAME", help="what the service is called (default: from the model)")
    group.add_argument("--disk-speed", metavar="SPEED", help="how fast weights are read (default: 200MB/s)")
    group.add_argument("--download-speed", metavar="SPEED", help="how fast they are downloaded once (default: 100MB/s)")
    group.add_argument("--drain", metavar="SECONDS", help=f"for running requests when it stops (default: {DRAIN_S})")
    group.add_argument("--with-guard", action="store_true", help="legroom's guard in front of the requests")
    group.add_argument("--with-sidecar", action="store_true", help="legroom watch beside the server")
    if image:
        group.add_argument("--image", metavar="IMAGE", help="another image than vllm/vllm-openai of the release")


def is_model_folder(model: str) -> bool:
    """Whether the model is a folder here rather than a Hub id; like vLLM, it prefers a folder of that name."""
    if model.startswith(("/", ".", "~")):
        return True
    try:
        return bool(model) and Path(model).is_dir()
    except (OSError, ValueError):  # a text too long for a name, or with a zero byte
        return False


def server_options(options: Mapping[str, Any]) -> ServerOptions:
    """Parses the options that all deployment formats share; LegroomError for a wrong value."""
    name = options.get("name")
    if name is not None and not re.fullmatch(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", name):
        hint = "start with a lowercase letter, then use lowercase letters, digits and dashes, like vllm-chat"
        raise LegroomError(f"--name {name!r} is not a name", hint)
    drain = options.get("drain")
    return ServerOptions(
        name=name,
        disk_bytes_s=parse_speed(options.get("disk_speed"), "--disk-speed", DISK_BYTES_S),
        download_bytes_s=parse_speed(options.get("download_speed"), "--download-speed", DOWNLOAD_BYTES_S),
        drain_s=DRAIN_S if drain is None else parse_whole(drain, "--drain", 0, 99_999),
        guard=bool(options.get("with_guard")),
        sidecar=bool(options.get("with_sidecar")),
        image=options.get("image"),
    )


def planned_server(
    plan: PlanDocument, options: ServerOptions | None = None, secret_names: Sequence[str] = ()
) -> ExportedServer:
    """The server of a plan, with its memory flags written out; `secret_names`: more variables from a Secret."""
    options = options or ServerOptions()
    release = plan.release
    words = _with_memory_flags(parse_command(plan.command, release), plan)
    if _has_guard(words):
        options = replace(options, guard=True)
    given = dict(plan.env)
    local = words.count("--data-parallel-size-local")  # 0: this node only receives requests
    engines = plan.engines if local is None else local
    gpus = engines * max(1, gpus_per_engine(plan.args) // (words.count("--nnodes") or 1))
    checkpoint = checkpoint_bytes(plan, words)
    is_local = is_model_folder(words.model)
    words, drain_s = _with_shutdown_timeout(words, release, options)
    times = StartTimes(checkpoint, options.disk_bytes_s, 0.0 if is_local else options.download_bytes_s, drain_s)
    if options.guard and not _has_guard(words):
        words = words.with_phrase(Phrase("--middleware", (MIDDLEWARE,)))
    env, env_remarks = server_environment(plan, words, given, times)
    own_secrets = (name for name, value in given.items() if is_secret(name, value))
    hub, guard = () if is_local else ("HF_TOKEN",), (TOKEN_NAME,) if options.guard else ()
    # systemd, Docker and Kubernetes accept such a name.
    last_part = words.model.rstrip("/").rpartition("/")[2].lower()
    slug = re.sub(r"[^a-z0-9]+", "-", last_part).strip("-")[:40].strip("-")
    return ExportedServer(
        name=options.name or (f"vllm-{slug}" if slug else "vllm"),
        model=words.model,
        release=release,
        words=words,
        phrases=tuple(replace(phrase, why=flag_comment(phrase, plan)) for phrase in words.phrases),
        env=env,
        remarks=(*_remarks(gpus, words), *env_remarks),
        secrets=tuple(dict.fromkeys((*words.secrets, *secret_names, *own_secrets, *hub, *guard))),
        gpus=gpus,
        plan=plan,
        times=times,
        host=host_needs_of(words, gpus, engines, checkpoint, plan, given),
        options=options,
    )


def gpus_per_engine(args: Mapping[str, Any]) -> int:
    """GPUs of one data-parallel engine: tensor x pipeline x prefill-context parallel size of these vLLM arguments."""
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
    return math.prod(int(args.get(size) or 1) for size in sizes)


def _remarks(gpus: int, words: ServeCommand) -> Iterator[str]:
    """Remarks where one machine needs more than 8 GPUs, and on secrets that a placeholder replaced in the flags."""
    if gpus > 8:
        yield (
            f"This needs {gpus} cards in one machine. If yours have fewer, start a server on each with its share of "
            "the ranks (--nnodes, --data-parallel-size-local) or use Ray: one file cannot do that."
        )
    flags = [phrase.flag for phrase in words.phrases if PLACEHOLDER in phrase.value or f"://{HIDDEN}@" in phrase.value]
    if flags:
        left_out = f"the secret in it is left out ({PLACEHOLDER}, {HIDDEN})"
        yield f"{', '.join(dict.fromkeys(flags))}: {left_out}. Put it back where only the server can read it."


def checkpoint_bytes(plan: PlanDocument, words: ServeCommand) -> int:
    """Bytes read from disk at a start: the checkpoint's, if the plan has them, else estimated from all weights."""
    if plan.checkpoint_bytes:
        return plan.checkpoint_bytes
    ranks = int(plan.args.get("tensor_parallel_size") or 1)
    stages = [stage.layout for stage in plan.ranks] or [plan.layout]
    # A document of an older legroom has no host.
    weights = plan.host.checkpoint_bytes if plan.host else sum(layout.weights_bytes for layout in stages) * ranks
    given = words.get("--quantization")
    return weights * _READ_LARGER.get(given.value if given else "", 1)


def host_needs_of(
    words: ServeCommand, gpus: int, engines: int, checkpoint_bytes: int, plan: PlanDocument, env: Mapping[str, str]
) -> HostNeeds:
    """CPU cores and bytes of host memory for a server of `engines` on `gpus` in total; `env`: variables of the user."""
    args = parse_flags(words.words(), plan.release).args
    shares = plan.host.shares if plan.host else ()
    offloaded = sum(int(share["bytes"]) for share in shares if share["what"].startswith("offloaded weights"))
    settings = HostSettings(
        args=replace(args, env={**args.env, **env}),
        release=plan.release,
        gpus=gpus,
        engines=engines,
        has_media=bool(plan.modalities),
        swaps=plan.args.get("engine") == "V0",
        checkpoint_bytes=checkpoint_bytes,
        weights_bytes=plan.layout.weights_bytes,
        offloaded_bytes=offloaded // max(gpus, 1),
    )
    return replace(host_needs(settings), given_limit_bytes=plan.host.given_bytes if plan.host else None)


def _with_memory_flags(words: ServeCommand, plan: PlanDocument) -> ServeCommand:
    """The command with the planned values of the flags that determine memory written out."""
    for dest in _PINNED:
        flag, value = flag_name(dest), plan.args.get(dest)
        if words.get(flag) is None and value is not None and flag in flags_of(plan.release):
            words = words.with_phrase(Phrase(flag, (f"{value:g}" if isinstance(value, float) else str(value),)))
    return words


def _with_shutdown_timeout(words: ServeCommand, release: Release, options: ServerOptions) -> tuple[ServeCommand, int]:
    """(Command, with --shutdown-timeout added where the release has it, 0.18.0 on; drain time in seconds)."""
    flag = "--shutdown-timeout"
    if (given_s := words.count(flag)) is not None:
        return words, given_s
    if words.get(flag) is None and flag in flags_of(release) and options.drain_s:
        words = words.with_phrase(Phrase(flag, (str(options.drain_s),)))
    return words, options.drain_s


def _has_guard(words: ServeCommand) -> bool:
    """Whether the command names the guard as --middleware."""
    return any(phrase.flag == "--middleware" and MIDDLEWARE in phrase.values for phrase in words.phrases)


def guard_drain(server: ExportedServer) -> str:
    """A shell line that drains the guard and waits until nothing runs, it is silent, or the drain time is over."""
    bearer = '-H "Authorization: Bearer $LEGROOM_GUARD_TOKEN"'
    on = """-H "Content-Type: application/json" -d '{"on": true}'"""
    drain, status = (server.address.curl(f"/-/legroom/{what}") for what in ("drain", "status"))
    return (
        f"""{drain} -X POST {bearer} {on} """
        f"""|| exit 0; for turn in $(seq {max(server.times.drain_s // 2, 1)}); do {status} {bearer} """
        f"""| grep -Eq '"running": *0[^0-9]' && exit 0; sleep 2; done"""
    )


def metrics_drain(server: ExportedServer) -> str:
    """A shell line that waits for routers to notice, then until metrics show no request or the drain time ends."""
    engine = "v0" if server.plan.args.get("engine") == "V0" else "v1"
    roles = ("running", "waiting")
    running, waiting = (name_of(role, server.release, engine) or f"vllm:num_requests_{role}" for role in roles)
    return (
        f"sleep {ENDPOINT_S}; for turn in $(seq {max(server.times.drain_s // 2, 1)}); do "
        f"{server.address.curl('/metrics')} | grep -E '^({running}|{waiting})[{{ ]' "
        f"| grep -Eqv ' 0(\\.0)?$' || exit 0; sleep 2; done"
    )
