"""The deployment of a command, a file or Python source: its parsed flags for one release, GPUs and environment."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from legroom.deployments.server_words import basename
from legroom.deployments.shell.shell_script import read_shell
from legroom.deployments.source_text import MAX_FILE_BYTES, Place, Text, Unread, read_text
from legroom.deployments.subjects import InvokedCommand, StartedServer, Subject
from legroom.errors import LegroomError
from legroom.facts import pattern
from legroom.facts.gpus import other_platform, unmodelled_platform
from legroom.facts.releases import Release, latest, release
from legroom.masking import is_secret
from legroom.records import dataclass, field
from legroom.vllm.args import ServeArgs, other_value
from legroom.vllm.command_line import flags_in
from legroom.vllm.flag_problems import FlagProblem
from legroom.vllm.parse import ParsedArgs, parse_flags

KEPT_ENV = pattern("deployment.kept_env")
_API_KEY = "VLLM_API_KEY"
_RAY_SERVE = ("run", "deploy", "build")  # The subcommands of Ray Serve's `serve` that start an application.
_RAY_SERVE_HINT = (
    "this is Ray Serve, which starts vLLM from an application of its own: write its engine_kwargs as the flags of "
    "`vllm serve`; with --distributed-executor-backend ray they are exported as a RayCluster"
)
_NO_SERVER_HINT = (
    "legroom looks for `vllm serve ...`, `python -m vllm.entrypoints.openai.api_server ...`, a `docker run` of a vLLM "
    "image, or LLM(...)"
)
_ROOT_PROMPT = re.compile(r"\s*# (?=.*\bvllm\b)")
_OPEN_QUOTE = "a quote that is never closed", "check the quotes around JSON values and paths"


@dataclass(frozen=True)
class Deployment:
    """One vLLM server as a command or a file describes it."""

    args: ServeArgs
    release: Release
    """The requested release, else the one its image names, else the newest known."""
    release_hint: str | None = None
    """The release that the image tag or the file names."""
    gpu_count: int | None = None
    gpu_names: tuple[str, ...] = ()
    """The GPU models that it may be scheduled on."""
    memory_limit_bytes: int | None = None
    """The memory limit of its container."""
    shm_size: str | None = None
    is_vllms_own: bool = True
    """Whether it runs vLLM's own build, whose flags are known."""
    problems: tuple[FlagProblem, ...] = ()
    notes: tuple[str, ...] = ()
    read_as: str = "a command line"
    secret_names: tuple[str, ...] = ()
    """Variables with a key or a token, without their values."""
    given_env: Mapping[str, str] = field(default_factory=dict)
    """All other variables."""
    place: Place | None = None
    """The place of its command."""
    other_platform: str = ""
    """The accelerators other than GPUs that it runs on, which legroom does not model."""

    def require_gpus(self) -> None:
        """Raises LegroomError where the server runs on accelerators that legroom does not model."""
        if self.other_platform:
            raise unmodelled_platform(self.other_platform)


def deployment_from_command(text: str, requested: Release | None = None) -> Deployment:
    """The first vLLM server of a shell line or script; LegroomError where it starts none."""
    if len(text) > MAX_FILE_BYTES:
        raise LegroomError("the command is too long to be one", f"legroom reads at most {MAX_FILE_BYTES:,} characters")
    subjects = read_shell(Text("the command", _ROOT_PROMPT.sub("  ", text, count=1))).subjects
    servers = _servers_with_words(subjects)
    if _has_open_quote(subjects, servers):
        raise LegroomError(f"the command line has {_OPEN_QUOTE[0]}", _OPEN_QUOTE[1])
    if not servers:
        shown = " ".join(text.split())
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        commands = [each.texts() for each in subjects if isinstance(each, InvokedCommand)]
        is_ray = any(basename(words[0]) == "serve" and words[1] in _RAY_SERVE for words in commands if len(words) > 1)
        raise LegroomError(f"no vLLM server in the command {shown!r}", _RAY_SERVE_HINT if is_ray else _NO_SERVER_HINT)
    return _first_deployment(servers, text, requested)


def deployment_from_file(path: str | Path, requested: Release | None = None, number: int | None = None) -> Deployment:
    """The first server of a file of any kind, or that at index `number`, which must exist; LegroomError without any."""
    return _deployment_in(Path(path), read_text(Path(path)), requested, number)


def deployment_from_text(text: str, requested: Release | None = None) -> Deployment:
    """The first server of a shell line, or of a pasted manifest or other file; LegroomError without any."""
    from legroom.deployments.file_kinds import kind_by_first_line

    if "\n" not in text.strip() or kind_by_first_line(text) in (None, "shell"):
        return deployment_from_command(text, requested)
    return _deployment_in(Path("the text"), text, requested, None)


def _deployment_in(where: Path, text: str, requested: Release | None, number: int | None) -> Deployment:
    """The first server of the text of a file at `where`, or that at index `number`; LegroomError without any."""
    from legroom.deployments.file_reader import read_file  # only files need YAML and the like

    parts = list(read_file(str(where), text, requested or latest()))
    servers = [server for part in parts for server in part.servers]
    subjects = [subject for part in parts for subject in part.subjects]
    if _has_open_quote(subjects, servers):
        raise LegroomError(f"{where.name} has a command with {_OPEN_QUOTE[0]}", _OPEN_QUOTE[1])
    if not servers:
        raise _no_server_error(where, text, [part.unread for part in parts if part.is_whole and part.unread][:1])
    texts = [word.text for word in servers[0].words]
    if any(part.is_template for part in parts) or any("{{" in text or "{%" in text for text in texts):
        raise _template_error(where)
    if number is not None:
        return _with_api_key(deployment_of(servers[number], requested), text)
    return _first_deployment(servers, text, requested)


def deployment_from_python(text: str, requested: Release | None = None, name: str = "the source") -> Deployment:
    """The server of an engine call in Python source (called `name`) or of keyword arguments; LegroomError for none."""
    from legroom.deployments.python_reader import parse_python, python_subjects  # only source needs it

    source = text
    try:
        parse_python(source)
    except LegroomError as error:
        source = f"LLM({text.strip().strip(',')})"
        try:
            parse_python(source)
        except LegroomError:
            raise error from None
    servers = _servers_with_words(python_subjects(Text(name, source)))
    if not servers:
        raise _no_engine_call_error(name)
    return _first_deployment(servers, text, requested)


def _servers_with_words(subjects: Sequence[Subject]) -> list[StartedServer]:
    """The servers among `subjects` whose command line is known and runs vLLM itself, not Ray or another launcher."""
    servers = [subject for subject in subjects if isinstance(subject, StartedServer) and subject.words]
    # The command of another launcher cannot be written with changed vLLM flags.
    return [server for server in servers if not server.launcher]


def _has_open_quote(subjects: Sequence[Subject], servers: Sequence[StartedServer]) -> bool:
    """Whether the first server, or without one any command, has a quote that is never closed."""
    if servers:
        return any(word.is_open for word in servers[0].words)
    return any(word.is_open for subject in subjects if isinstance(subject, InvokedCommand) for word in subject.words)


def _no_server_error(where: Path, text: str, unread: Sequence[Unread]) -> LegroomError:
    """The error for a file in which no server was found, by why: unreadable, a template, no engine call."""
    from legroom.deployments.file_kinds import kind_of
    from legroom.deployments.python_reader import parse_python
    from legroom.deployments.yaml_nodes import is_template

    if unread:
        return LegroomError(f"{where.name} {unread[0].reason}", unread[0].hint)
    kind = kind_of(str(where), text)
    if kind == "yaml" and is_template(text):
        return _template_error(where)
    if kind != "python":
        return LegroomError(f"no vLLM server in {where.name}", _NO_SERVER_HINT)
    try:
        parse_python(text)
    except LegroomError as error:
        return error
    return _no_engine_call_error(where.name)


def _template_error(where: Path) -> LegroomError:
    """The error for a file that is a template, with the way to render it."""
    from legroom.deployments.yaml_nodes import TEMPLATE_HINT

    return LegroomError(f"{where.name} is a template (it holds {{{{ ... }}}}), not a manifest", TEMPLATE_HINT)


def _no_engine_call_error(name: str) -> LegroomError:
    """The error for Python source, called `name`, without a call that starts an engine."""
    return LegroomError(f"no LLM(...), EngineArgs(...) or AsyncEngineArgs(...) in {name}", _NO_SERVER_HINT)


def _first_deployment(servers: Sequence[StartedServer], text: str, requested: Release | None) -> Deployment:
    """The deployment of the first server, with a note where there are more."""
    deployment = _with_api_key(deployment_of(servers[0], requested), text)
    if len(servers) < 2:
        return deployment
    more = f"{len(servers)} servers were found; this is the first, at line {servers[0].place.line}"
    return replace(deployment, notes=(*deployment.notes, more))


def thousands_notes(words: Sequence[str]) -> Iterator[str]:
    """A note for each flag value like `8k`, which vLLM reads as 8,000 and a user may mean as 8,192."""
    for flag, value in flags_in(words).items():
        if value[-1:] == "k" and value[:-1].isdecimal():
            more = int(value[:-1]) * 1024
            yield f"vLLM reads {flag} {value} as {more // 1024 * 1000:,}; {value.upper()} is {more:,}"


def deployment_of(server: StartedServer, requested: Release | None = None) -> Deployment:
    """The server's parsed flags and environment; without a requested release, the named one or the newest."""
    hint = server.named_release
    used = requested or (release(hint) if hint else latest())
    words = [word.text for word in server.words]
    notes = [] if requested or hint else [f"no release is named; read as vLLM {used}, the newest known"]
    if server.call is not None:
        from legroom.deployments.python_reader import parse_call  # only Python source needs it

        call = server.call
        parsed = parse_call(call, used)
        notes += [f"the argument {name} of {call.name}(...) is not a literal and was left out" for name in call.unread]
    else:
        parsed = _with_config_file(parse_flags(words, used), words, used)
    given = {name: word.text for name, word in server.env.items()}
    secrets = tuple(name for name, value in given.items() if is_secret(name, value))
    kept = ((name, value) for name, value in {**given, **parsed.args.env}.items() if KEPT_ENV.fullmatch(name))
    env = {name: value for name, value in kept if not is_secret(name)}
    return Deployment(
        args=replace(parsed.args, env=env),
        release=used,
        release_hint=hint,
        gpu_count=server.gpu_count,
        gpu_names=server.gpu_names,
        memory_limit_bytes=server.memory_limit_bytes,
        shm_size=server.shm if server.shm and server.shm[0].isdigit() else None,
        is_vllms_own=_is_published_build(server),
        problems=parsed.problems,
        notes=(*notes, *(remark.rstrip(".") for remark in server.remarks), *thousands_notes(words)),
        read_as=server.read_as,
        secret_names=secrets,
        given_env={name: value for name, value in given.items() if name not in secrets},
        place=server.place,
        other_platform="" if server.runs_on_gpus else other_platform(server.device_words),
    )


def _is_published_build(server: StartedServer) -> bool:
    """Whether a server runs a vLLM as its project publishes it; forks and launchers add and remove flags."""
    image = server.image
    if server.launcher or not image:
        return not server.launcher
    from legroom.deployments import container_images  # not for a plain command line

    is_own = "vllm" not in image.lower() or container_images.is_published_by_vllm(image)
    return is_own and not container_images.is_other_build(image)


def _with_api_key(deployment: Deployment, text: str) -> Deployment:
    """The deployment; with VLLM_API_KEY among its secret names where the text of its file mentions that variable."""
    if _API_KEY in deployment.secret_names or not re.search(rf"\b{_API_KEY}\b", text):
        return deployment
    return replace(deployment, secret_names=(*deployment.secret_names, _API_KEY))


def _with_config_file(parsed: ParsedArgs, words: Sequence[str], used: Release) -> ParsedArgs:
    """`parsed` with the --config file's flags below its own; an unread file is a FlagProblem, an empty one an error."""
    path = other_value(parsed.args, "--config")
    if path is None:
        return parsed
    from legroom.deployments.vllm_config import config_words  # only where a file is named
    from legroom.deployments.yaml_nodes import load_nodes

    try:
        text = read_text(Path(path))
    except LegroomError as error:
        problem = FlagProblem("--config", "ignored", f"--config {path} was not read: {error.message}")
        return replace(parsed, problems=(*parsed.problems, problem))
    try:
        documents = load_nodes(Text(path, text))
    except LegroomError as error:
        raise LegroomError(f"{path} {error.message}", error.hint) from None
    if not documents or not isinstance(documents[0].values, dict):
        raise LegroomError(f"{path} holds no settings", "a vLLM config file is a mapping like max-model-len: 8192")
    inserted = [word.text for word in config_words(documents[0], used)]
    starts = (i + 1 for i, word in enumerate(words[:6]) if word == "serve" or word.endswith("api_server"))
    start = max(starts, default=0)
    kept = [word for i, word in enumerate(words) if word != "--config" and words[i - 1] != "--config"]
    return parse_flags([*words[:start], *inserted, *kept[start:]], used)
