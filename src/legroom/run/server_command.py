"""The command of `legroom run`: its release, flags and address."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from legroom.actions.platform import QUERY_TIMEOUT_S
from legroom.actions.programs import interpreter_of_script
from legroom.deployments.deployment import deployment_from_command
from legroom.deployments.server_words import CONTAINER_TOOLS, basename, server_start
from legroom.errors import UNREACHABLE, LegroomError
from legroom.facts.releases import Release, latest
from legroom.facts.releases import release as known_release
from legroom.records import dataclass
from legroom.vllm.args import ServeArgs, is_given, other_value
from legroom.vllm.command_line import without_secrets
from legroom.vllm.parse import split_assignments

_NO_VLLM = 44
_VERSION = f"""
import sys
from importlib.metadata import PackageNotFoundError, version
try:
    print(version("vllm"))
except PackageNotFoundError:
    sys.exit({_NO_VLLM})
"""
_SERVER_MODULE = ("api_server", "api_server.py")
_WILDCARD_HOSTS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1", "*": "127.0.0.1"}


@dataclass(frozen=True)
class ServerCommand:
    words: tuple[str, ...]
    env: Mapping[str, str]
    """NAME=value words before the command."""
    flags_at: int
    """The index of the first word after `vllm serve` or the module."""
    release: Release
    stated_release: str
    """The installed release; empty where it is unknown."""
    args: ServeArgs
    problems: tuple[str, ...] = ()
    """Flags that this release refuses."""

    @property
    def port(self) -> int:
        """The --port given; 8000, vLLM's default, without one."""
        given = other_value(self.args, "--port")
        return int(given) if given and given.isdecimal() else 8000

    @property
    def host(self) -> str:
        """The --host given; the loopback address without one, or if it means all interfaces."""
        given = other_value(self.args, "--host") or ""
        return _WILDCARD_HOSTS.get(given, given)

    @property
    def url(self) -> str:
        """The base URL of the server; https where --ssl-certfile is given."""
        scheme = "https" if is_given(self.args, "--ssl-certfile") else "http"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}"


def read_command(words: Sequence[str], vllm: str | None, environ: Mapping[str, str]) -> ServerCommand:
    """Parses the words after `legroom run --`; `vllm`: the release the user names, by default the installed one.
    LegroomError for a command that is no vLLM server, or one that cannot be watched."""
    # `env NAME=value` is the same without `env`.
    env, rest = split_assignments(words[1:] if words and basename(words[0]) == "env" else words)
    rest = rest if env else list(words)
    usage = "legroom run [options] -- vllm serve MODEL [flags]"
    if not rest:
        raise LegroomError("which server?", usage)
    at = server_start(rest)
    if at is None:
        raise LegroomError(f"this is not a vLLM server: {shlex.join(without_secrets(rest))[:120]}", usage)
    if basename(rest[at]) in CONTAINER_TOOLS:
        hint = "run starts vLLM itself; put `legroom run -- vllm serve ...` inside the container"
        raise LegroomError("a container is not a child of legroom, so run cannot hold it", hint)
    its_env = {**environ, **env}
    if shutil.which(rest[0], path=its_env.get("PATH")) is None:
        hint = "install vLLM (pip install vllm), activate its environment, or give the path of its `vllm`"
        raise LegroomError(f"{rest[0]} is not installed here, or not on the PATH", hint, UNREACHABLE)
    version = vllm or installed_release(rest[at:], its_env)
    release = known_release(version.partition("+")[0]) if version else latest()
    deployment = deployment_from_command(shlex.join(rest), release)
    hint = "run that one without legroom run"
    for flag in ("--headless", "--uds", "--grpc"):
        if is_given(deployment.args, flag):
            raise LegroomError(f"a server with {flag} has no HTTP port to watch", hint)
    if other_value(deployment.args, "--ssl-cert-reqs") == "2":
        raise LegroomError("a server that wants a certificate of its clients answers nobody else", hint)
    given = other_value(deployment.args, "--port")
    if given and re.fullmatch(r"-?[0-9]+", given) and not (len(given) <= 5 and 1 <= int(given) <= 65535):
        raise LegroomError(f"--port {given} is no port that can be watched", "give one from 1 to 65535")
    problems = tuple(problem.message for problem in deployment.problems if problem.stops_vllm)
    ends = (i + 1 for i in range(at, len(rest)) if rest[i] == "serve" or rest[i].endswith(_SERVER_MODULE))
    return ServerCommand(tuple(rest), env, next(ends, len(rest)), release, version or "", deployment.args, problems)


def installed_release(words: Sequence[str], env: Mapping[str, str]) -> str | None:
    """The vLLM release in the command's own Python; None where unreadable, LegroomError where it has no vLLM."""
    program = shutil.which(words[0], path=env.get("PATH"))
    if program is None:
        return None
    python = interpreter_of_script(Path(program)) if basename(program) == "vllm" else program
    if python is None:
        return None
    try:
        done = subprocess.run(
            [python, "-c", _VERSION],
            capture_output=True,
            text=True,
            timeout=QUERY_TIMEOUT_S,
            check=False,
            env=dict(env),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode == _NO_VLLM and basename(program) != "vllm":
        hint = "give the Python of the environment that vLLM is installed in"
        raise LegroomError(f"{program} has no vLLM", hint, UNREACHABLE)
    return done.stdout.strip() or None
