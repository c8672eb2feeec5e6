"""What people have - a command, a manifest, a unit file, Python source - read as one `Deployment`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from legroom.deployments.plain_containers import container_run, image_release, visible_gpus
from legroom.deployments.plain_manifests import Found, config_words, load_documents, servers_in_documents
from legroom.deployments.plain_python import call_in_source, parse_kwargs, usage_of
from legroom.deployments.plain_shell import CONTAINER_TOOLS, ShellCommand, basename, server_commands
from legroom.errors import LegroomError
from legroom.facts.releases import Release, latest, release
from legroom.records import dataclass, field
from legroom.vllm.args import ServeArgs, other_value
from legroom.vllm.parse import ParsedArgs, parse_flags
from legroom.vllm.problems import FlagProblem
from legroom.vllm.secret_words import is_secret

MAX_FILE_BYTES = 10 * 2**20
_KEPT_ENV = re.compile(r"(VLLM|PYTORCH|CUDA|NVIDIA|HIP|ROCR|NCCL|TORCH)_\w+")
"""What bears on memory; tokens and keys are never kept."""
_API_KEY = "VLLM_API_KEY"
_NO_SERVER_HINT = (
    "legroom looks for `vllm serve ...`, `python -m vllm.entrypoints.openai.api_server ...`, a `docker run` of a vLLM "
    "image, or LLM(...)"
)


@dataclass(frozen=True)
class Deployment:
    """One server as somebody wrote it down."""

    args: ServeArgs
    release: Release
    """The release it was read for: the caller's, else the one its image names, else the newest known."""
    release_hint: str | None = None
    """What the image tag says, None where nothing does."""
    gpu_count: int | None = None
    shm_size: str | None = None
    problems: tuple[FlagProblem, ...] = ()
    notes: tuple[str, ...] = ()
    read_as: str = "a command line"
    secret_names: tuple[str, ...] = ()
    """Variables with a key or a token that the server is given; their values are never kept."""
    given_env: Mapping[str, str] = field(default_factory=dict)
    """Every other variable that it is given, whether or not memory depends on it."""


def deployment_from_command(text: str, asked: Release | None = None) -> Deployment:
    """Read a shell line or script: `vllm serve ...` with whatever stands before it, or a container run."""
    if len(text) > MAX_FILE_BYTES:
        raise LegroomError("the command is too long to be one", f"legroom reads at most {MAX_FILE_BYTES:,} characters")
    found = list(_limited(server_commands(text)))
    if not found:
        shown = " ".join(text.split())
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise LegroomError(f"no vLLM server in the command {shown!r}", _NO_SERVER_HINT)
    deployment = _naming_key(_from_shell(found[0], asked), text)
    return _noting_more(deployment, len(found))


def _limited(commands: Iterable[ShellCommand]) -> list[ShellCommand]:
    found: list[ShellCommand] = []
    try:
        for command in commands:
            found.append(command)
            if len(found) > 50:
                break
    except RecursionError:
        raise LegroomError("the command is nested too deeply", _NO_SERVER_HINT) from None
    return found


def _from_shell(command: ShellCommand, asked: Release | None) -> Deployment:
    if basename(command.words[0]) in CONTAINER_TOOLS:
        run = container_run(command.words)
        if run is None:
            raise LegroomError("the container command names no image", "write it as docker run [options] image [flags]")
        inner = Found(run.words, f"a {basename(command.words[0])} run line", run.image, run.env, run.gpus)
        return replace(_from_found(_inside_shell(inner), asked), shm_size=run.shm_size)
    gpus = visible_gpus(command.env)
    return _from_found(Found(command.words, "a command line", "", command.env, gpus), asked)


def _inside_shell(found: Found) -> Found:
    """A container that runs `bash -c "vllm serve ..."`."""
    for word in found.words:
        if "vllm" in word and " " in word.strip():
            for command in _limited(server_commands(word, found.env)):
                return replace(found, words=command.words, env=command.env)
    return found


def _from_found(found: Found, asked: Release | None) -> Deployment:
    hint = image_release(found.image) if found.image else None
    used = asked or (release(hint) if hint else latest())
    parsed = _with_config_file(parse_flags(found.words, used), found.words, used)
    env = {
        name: value
        for name, value in {**found.env, **parsed.args.env}.items()
        if _KEPT_ENV.fullmatch(name) and not is_secret(name)
    }
    notes = () if asked or hint else (f"no release is named; read as vLLM {used}, the newest known",)
    gpus = found.gpus if found.gpus is not None else visible_gpus(env)
    args = replace(parsed.args, env=env)
    secrets = tuple(name for name, value in found.env.items() if is_secret(name, value))
    given = {name: value for name, value in found.env.items() if name not in secrets}
    return Deployment(args, used, hint, gpus, None, parsed.problems, notes, found.read_as, secrets, given)


def _naming_key(deployment: Deployment, text: str) -> Deployment:
    """A key by reference (`-e VLLM_API_KEY`, a secretKeyRef) has no value to read, and still protects the server."""
    if _API_KEY in deployment.secret_names or not re.search(rf"\b{_API_KEY}\b", text):
        return deployment
    return replace(deployment, secret_names=(*deployment.secret_names, _API_KEY))


def _with_config_file(parsed: ParsedArgs, words: tuple[str, ...], used: Release) -> ParsedArgs:
    """vLLM reads --config first and lets the command line override it; so does this, where the file can be read."""
    path = other_value(parsed.args, "--config")
    if path is None:
        return parsed
    try:
        text = read_text(Path(path))
    except LegroomError as error:
        problem = FlagProblem("--config", "ignored", f"--config {path} was not read: {error.message}")
        return replace(parsed, problems=(*parsed.problems, problem))
    documents = load_documents(text, path)
    if not documents or not isinstance(documents[0], dict):
        raise LegroomError(f"{path} holds no settings", "a vLLM config file is a mapping like max-model-len: 8192")
    inserted = config_words(documents[0], used)[2:]
    start = 1 + max(
        (i for i, word in enumerate(words[:6]) if word == "serve" or word.endswith("api_server")), default=-1
    )
    kept = [word for i, word in enumerate(words) if word != "--config" and words[i - 1] != "--config"]
    return parse_flags([*words[:start], *inserted, *kept[start:]], used)


def _noting_more(deployment: Deployment, count: int) -> Deployment:
    if count < 2:
        return deployment
    return replace(deployment, notes=(*deployment.notes, f"{count} servers were found; this is the first"))


def deployment_from_file(path: str | Path, asked: Release | None = None) -> Deployment:
    """Read a manifest, compose file, vLLM config, systemd unit, Python file or shell script."""
    where = Path(path)
    text = read_text(where)
    if where.suffix == ".py":
        return deployment_from_python(text, asked, name=where.name)
    if re.search(r"^ExecStart\s*=", text, re.MULTILINE):
        return _from_unit(text, asked)
    if where.suffix in (".yaml", ".yml", ".json") or re.search(r"^(apiVersion|services|kind)\s*:", text, re.MULTILINE):
        return _from_yaml(text, where.name, asked)
    if where.suffix not in (".sh", ".bash", ".txt", "") and re.search(r"\bLLM\(", text):
        return deployment_from_python(text, asked, name=where.name)
    try:
        return deployment_from_command(text, asked)
    except LegroomError as error:
        raise LegroomError(f"{where.name}: {error.message}", error.hint) from None


def read_text(path: Path) -> str:
    """A text file of reasonable size."""
    try:
        if path.is_dir():
            raise LegroomError(f"{path} is a folder", "pass one file")
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise LegroomError(
                f"{path} is {size / 2**20:,.0f} MiB, too large for a deployment file",
                f"legroom reads files up to {MAX_FILE_BYTES >> 20} MiB",
            )
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LegroomError(f"{path} cannot be read: {reason}", "check the path") from None
    if len(content) > MAX_FILE_BYTES:
        raise LegroomError(f"{path} is too large", f"legroom reads files up to {MAX_FILE_BYTES >> 20} MiB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise LegroomError(f"{path} is not a text file", "pass a YAML, unit, Python or shell file") from None


def _from_yaml(text: str, name: str, asked: Release | None) -> Deployment:
    documents = load_documents(text, name)
    found = list(servers_in_documents(documents, asked or latest()))
    if not found:
        raise LegroomError(f"no vLLM server in {name}", _NO_SERVER_HINT)
    return _noting_more(_naming_key(_from_found(found[0], asked), text), len(found))


_UNIT_LINE = re.compile(r"^(?P<key>ExecStart|Environment)\s*=\s*(?P<value>.*)$", re.MULTILINE)


def _from_unit(text: str, asked: Release | None) -> Deployment:
    """A systemd unit's ExecStart, with its Environment lines."""
    joined = re.sub(r"\\[ \t]*\r?\n", " ", text)
    lines: list[str] = []
    for found in _UNIT_LINE.finditer(joined):
        value = found["value"].strip()
        lines.append(value.lstrip("-@:+!") if found["key"] == "ExecStart" else f"export {value}")
    return replace(deployment_from_command("\n".join(lines), asked), read_as="a systemd unit")


def deployment_from_python(text: str, asked: Release | None = None, name: str = "the source") -> Deployment:
    """`LLM(...)` or engine arguments in Python source."""
    found = call_in_source(text)
    if found is None:
        raise LegroomError(f"no LLM(...), EngineArgs(...) or AsyncEngineArgs(...) in {name}", _NO_SERVER_HINT)
    call, values, unread = found
    used = asked or latest()
    parsed = parse_kwargs(values, used, usage=usage_of(call))
    notes = [] if asked else [f"no release is named; read as vLLM {used}, the newest known"]
    notes += [f"the argument {argument} of {call}(...) is not a literal and was left out" for argument in unread]
    return Deployment(parsed.args, used, None, None, None, parsed.problems, tuple(notes), f"Python {call}(...)")
