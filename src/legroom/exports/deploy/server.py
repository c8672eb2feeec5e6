"""A planned server, described once: what every deployment format is written from."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legroom.errors import LegroomError
from legroom.exports.deploy.address import Address, address_of
from legroom.exports.deploy.comments import comment
from legroom.exports.deploy.environment import EnvLine, env_remarks, environment
from legroom.exports.deploy.times import DISK_BYTES_S, DOWNLOAD_BYTES_S, DRAIN_S, StartTimes
from legroom.exports.deploy.words import API_KEY_NAME, WITHOUT_API_KEY, Phrase, ServerWords, take_apart
from legroom.facts.flags import flag_name, flags_of
from legroom.guard import MIDDLEWARE, TOKEN_NAME
from legroom.masking import HIDDEN, PLACEHOLDER, is_secret
from legroom.memory.host_needs import HostNeeds, HostSettings, host_needs
from legroom.records import dataclass
from legroom.units import GIB, parse_speed
from legroom.vllm.parse import parse_flags

if TYPE_CHECKING:
    from legroom.exports.request import ExportRequest
    from legroom.facts.releases import Release
    from legroom.planning.plan_document import PlanDocument

_PINNED = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
"""What the memory of a server follows from: written out, so that a release with other defaults changes nothing."""
_UNKNOWN_KEY = (
    f"No API key: the plan file names none, and it cannot know of {API_KEY_NAME} in the server's environment. If the "
    f"server has one, set it here too: {WITHOUT_API_KEY}."
)
_CARDS_OF_A_MACHINE = 8
_READ_LARGER = {"fp8": 2, "bitsandbytes": 4}
"""Quantized while loading: the checkpoint may be this many times what lies on the cards."""


@dataclass(frozen=True)
class ServerOptions:
    """What a user may say about the deployment beside the plan."""

    name: str | None = None
    disk_bytes_s: float = DISK_BYTES_S
    download_bytes_s: float = DOWNLOAD_BYTES_S
    drain_s: int = DRAIN_S
    guard: bool = False
    sidecar: bool = False
    image: str | None = None


@dataclass(frozen=True)
class FlagLine:
    """One flag and what it does here."""

    phrase: Phrase
    why: str


@dataclass(frozen=True)
class ExportedServer:
    """One server, ready to be written in any form."""

    name: str
    model: str
    release: Release
    words: ServerWords
    lines: tuple[FlagLine, ...]
    env: tuple[EnvLine, ...]
    remarks: tuple[str, ...]
    """What is not in the environment, and why."""
    secrets: tuple[str, ...]
    gpus: int
    plan: PlanDocument | None
    times: StartTimes | None
    host: HostNeeds | None
    options: ServerOptions

    @property
    def address(self) -> Address:
        return address_of(self.words)

    @property
    def port(self) -> int:
        return self.address.port

    @property
    def drains_itself(self) -> bool:
        """Whether vLLM lets running requests finish on SIGTERM."""
        return self.words.get("--shutdown-timeout") is not None

    def stop_sentence(self) -> str:
        """What a plain stop does to requests that run."""
        if self.drains_itself:
            return f"A stop waits for the drain ({self.times.drain_s if self.times else 0} s) and the teardown."
        return f"vLLM {self.release.version} ends running requests at SIGTERM: take it out of the load balancer first."

    @property
    def image(self) -> str:
        return self.options.image or f"vllm/vllm-openai:v{self.release.version}"

    @property
    def local_model(self) -> bool:
        return is_model_folder(self.model)


def server_of(request: ExportRequest) -> ExportedServer:
    """The server that was asked for; the command line makes sure there is a plan."""
    if request.plan is None:
        raise LegroomError("which server? it is made from a plan", "give --plan FILE, or MODEL --gpu NAME")
    server = planned_server(request.plan, options_of(request.options), request.secret_names)
    if request.from_file and API_KEY_NAME not in server.secrets:
        return replace(server, remarks=(*server.remarks, _UNKNOWN_KEY))
    return server


def add_server_options(group: argparse._ArgumentGroup, *, image: bool = False) -> None:
    """What is the same for a unit, a container and a manifest."""
    group.add_argument("--name", metavar="NAME", help="what the service is called (default: from the model)")
    group.add_argument("--disk-speed", metavar="SPEED", help="how fast weights are read (default: 200MB/s)")
    group.add_argument("--download-speed", metavar="SPEED", help="how fast they are downloaded once (default: 100MB/s)")
    group.add_argument("--drain", metavar="SECONDS", help=f"for running requests when it stops (default: {DRAIN_S})")
    group.add_argument("--with-guard", action="store_true", help="legroom's guard in front of the requests")
    group.add_argument("--with-sidecar", action="store_true", help="legroom watch beside the server")
    if image:
        group.add_argument("--image", metavar="IMAGE", help="another image than vllm/vllm-openai of the release")


def copies_here(words: ServerWords, engines: int) -> int:
    """Data-parallel copies that this machine runs; 0 where it only takes requests for others."""
    local = _count(words, "--data-parallel-size-local")
    return engines if local is None else local


def ranks_here(words: ServerWords, args: Mapping[str, Any]) -> int:
    """GPUs of one copy on this machine."""
    sizes = (int(args.get(f"{what}_parallel_size") or 1) for what in ("tensor", "pipeline", "prefill_context"))
    return max(1, math.prod(sizes) // (_count(words, "--nnodes") or 1))


def _count(words: ServerWords, flag: str) -> int | None:
    phrase = words.get(flag)
    return int(phrase.value) if phrase and phrase.value.isascii() and phrase.value.isdigit() else None


def is_model_folder(model: str) -> bool:
    """Whether the model is a folder rather than a Hub id. vLLM looks for a folder of that name first; so does this."""
    if model.startswith(("/", ".", "~")):
        return True
    try:
        return bool(model) and Path(model).is_dir()
    except (OSError, ValueError):  # a text too long for a name, or with a zero byte
        return False


def options_of(options: Mapping[str, Any]) -> ServerOptions:
    """The shared options as argparse read them, checked."""
    name = options.get("name")
    if name is not None and not re.fullmatch(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", name):
        raise LegroomError(
            f"--name {name!r} is not a name",
            "start with a lowercase letter, then use lowercase letters, digits and dashes, like vllm-chat",
        )
    return ServerOptions(
        name=name,
        disk_bytes_s=parse_speed(options.get("disk_speed"), "--disk-speed", DISK_BYTES_S),
        download_bytes_s=parse_speed(options.get("download_speed"), "--download-speed", DOWNLOAD_BYTES_S),
        drain_s=_seconds(options.get("drain"), DRAIN_S),
        guard=bool(options.get("with_guard")),
        sidecar=bool(options.get("with_sidecar")),
        image=options.get("image"),
    )


def _seconds(text: str | None, default: int) -> int:
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise LegroomError(f"--drain {text!r} is not a number of seconds", "write it like --drain 120")
    return int(text)


def planned_server(
    plan: PlanDocument, options: ServerOptions | None = None, secret_names: Sequence[str] = ()
) -> ExportedServer:
    """The server of a plan, with the settings that memory follows from written out."""
    options = options or ServerOptions()
    release = plan.release
    words = _with_pinned(take_apart(plan.command, release), plan, release)
    if _has_guard(words):
        options = replace(options, guard=True)
    given = dict(plan.env)
    copies = copies_here(words, plan.engines)
    gpus = copies * ranks_here(words, plan.args)
    checkpoint = checkpoint_bytes(plan, words)
    local = is_model_folder(words.model)
    words, drain_s = _with_drain(words, release, options)
    times = StartTimes(checkpoint, options.disk_bytes_s, 0.0 if local else options.download_bytes_s, drain_s)
    if options.guard:
        words = _with_guard(words)
    lines = tuple(FlagLine(phrase, comment(phrase, plan)) for phrase in words.phrases)
    env = environment(plan, words, release, given, times)
    host = host_needs_of(words, gpus, copies, checkpoint, plan, given)
    return ExportedServer(
        name=options.name or name_of_model(words.model),
        model=words.model,
        release=release,
        words=words,
        lines=lines,
        env=env,
        remarks=(*_many_cards(gpus), *_hidden(words), *env_remarks(plan, words, release, given)),
        secrets=secrets_of(words, options, local, (*secret_names, *_secret_names(given))),
        gpus=gpus,
        plan=plan,
        times=times,
        host=host,
        options=options,
    )


def unplanned_server(words: Sequence[str], release: Release, env: Mapping[str, str] | None = None) -> ExportedServer:
    """A server of which only the command line is known (on a CPU, say): nothing is added to it."""
    parts = take_apart(words, release)
    options = ServerOptions()
    local = is_model_folder(parts.model)
    return ExportedServer(
        name=name_of_model(parts.model),
        model=parts.model,
        release=release,
        words=parts,
        lines=tuple(FlagLine(phrase, comment(phrase, None)) for phrase in parts.phrases),
        env=environment(None, parts, release, dict(env or {}), None),
        remarks=env_remarks(None, parts, release, dict(env or {})),
        secrets=secrets_of(parts, options, local, _secret_names(env or {})),
        gpus=1,
        plan=None,
        times=None,
        host=None,
        options=options,
    )


def secrets_of(words: ServerWords, options: ServerOptions, local: bool, given: Sequence[str]) -> tuple[str, ...]:
    """The variables that must come from a secret store: those of flags, and what is given by name already."""
    names = [*words.secrets, *given]
    if not local:
        names.append("HF_TOKEN")
    if options.guard:
        names.append(TOKEN_NAME)
    return tuple(dict.fromkeys(names))


def _many_cards(gpus: int) -> tuple[str, ...]:
    if gpus <= _CARDS_OF_A_MACHINE:
        return ()
    return (
        f"This needs {gpus} cards in one machine. If yours have fewer, start a server on each with its share of the "
        "ranks (--nnodes, --data-parallel-size-local) or use Ray: one file cannot do that.",
    )


def _hidden(words: ServerWords) -> tuple[str, ...]:
    """What a flag holds and no file may: a plan has a placeholder there already."""
    flags = [phrase.flag for phrase in words.phrases if PLACEHOLDER in phrase.value or f"://{HIDDEN}@" in phrase.value]
    if not flags:
        return ()
    named = ", ".join(dict.fromkeys(flags))
    left_out = f"the secret in it is left out ({PLACEHOLDER}, {HIDDEN})"
    return (f"{named}: {left_out}. Put it back where only the server can read it.",)


def _secret_names(env: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name for name, value in env.items() if is_secret(name, value))


def checkpoint_bytes(plan: PlanDocument, words: ServerWords) -> int:
    """What is read from disk: the checkpoint itself where the plan knows it, else the weights that it expects there and
    those that stay on the host."""
    if plan.checkpoint_bytes:
        return plan.checkpoint_bytes
    ways = int(plan.args.get("tensor_parallel_size") or 1)
    stages = [stage.layout for stage in plan.ranks] or [plan.layout]
    on_cards = plan.host.checkpoint_bytes if plan.host else 0
    if not on_cards:  # a document of an older legroom
        on_cards = sum(layout.weights_bytes for layout in stages) * ways
    phrase = words.get("--cpu-offload-gb")
    try:
        on_host = int(float(phrase.value) * GIB) * ways * len(stages) if phrase else 0
    except ValueError:
        on_host = 0
    given = words.get("--quantization")
    return (on_cards + on_host) * _READ_LARGER.get(given.value if given else "", 1)


def host_needs_of(
    words: ServerWords, gpus: int, engines: int, checkpoint_bytes: int, plan: PlanDocument, given: Mapping[str, str]
) -> HostNeeds:
    """What the host of this many ranks and engines must give."""
    args = parse_flags(words.words(), plan.release).args
    return host_needs(
        HostSettings(
            args=replace(args, env={**args.env, **given}),
            release=plan.release,
            gpus=gpus,
            engines=engines,
            has_media=bool(plan.modalities),
            swaps=plan.args.get("engine") == "V0",
            checkpoint_bytes=checkpoint_bytes,
            weights_bytes=plan.layout.weights_bytes,
        )
    )


def name_of_model(model: str) -> str:
    """A name that systemd, Docker and Kubernetes take, from the model's own."""
    last = model.rstrip("/").rpartition("/")[2].lower()
    slug = re.sub(r"[^a-z0-9]+", "-", last).strip("-")[:40].strip("-")
    return f"vllm-{slug}" if slug else "vllm"


def _with_pinned(words: ServerWords, plan: PlanDocument, release: Release) -> ServerWords:
    table = flags_of(release)
    for dest in _PINNED:
        flag = flag_name(dest)
        value = plan.args.get(dest)
        if words.get(flag) is not None or value is None or flag not in table:
            continue
        words = words.with_phrase(Phrase(flag, (f"{value:g}" if isinstance(value, float) else str(value),)))
    return words


def _with_drain(words: ServerWords, release: Release, options: ServerOptions) -> tuple[ServerWords, int]:
    """vLLM drains by itself on SIGTERM where it has the flag (0.18.0 on)."""
    phrase = words.get("--shutdown-timeout")
    if phrase is not None and phrase.value.isdigit():
        return words, int(phrase.value)
    if phrase is None and "--shutdown-timeout" in flags_of(release) and options.drain_s:
        words = words.with_phrase(Phrase("--shutdown-timeout", (str(options.drain_s),)))
    return words, options.drain_s


def _has_guard(words: ServerWords) -> bool:
    return any(phrase.flag == "--middleware" and MIDDLEWARE in phrase.values for phrase in words.phrases)


def _with_guard(words: ServerWords) -> ServerWords:
    return words if _has_guard(words) else words.with_phrase(Phrase("--middleware", (MIDDLEWARE,)))
