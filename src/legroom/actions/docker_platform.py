"""A server in a Docker container, alone or as a Compose service. Docker cannot change the arguments of an existing
container. A Compose service is recreated with an override file; for a container alone, changes of flags are refused."""

import json
from pathlib import Path
from typing import Any

from legroom.actions import platform
from legroom.actions.programs import run_checked, run_program
from legroom.records import dataclass
from legroom.vllm.command_line import with_flags


@dataclass(frozen=True)
class DockerContainer:
    container: str
    stop_s: int = 60

    @property
    def name(self) -> str:
        """`Docker container NAME`, for messages."""
        return f"Docker container {self.container}"

    @property
    def settle_s(self) -> float:
        """Seconds until a restart shows in the state: `stop_s`, when Docker kills the container, and ten more."""
        return self.stop_s + 10.0

    async def state(self) -> platform.State:
        """The state by `docker inspect`: it runs unless paused; PID and start time are its identity."""
        return await _container_state(self.container)

    async def restart(self, request: platform.RestartRequest) -> None:
        """Restarts the container, which keeps its arguments."""
        words = ["docker", "restart", "--time", str(self.stop_s), self.container]
        await run_checked(words, f"restarting {self.name}", timeout_s=request.deadline_s, request=request)

    async def override_place(self) -> platform.Override:
        """Raises FlagsFixed: Docker cannot change a container's command."""
        hint = "run it by Compose (platform = 'compose'), or remove it and `docker run` it again with the new flags"
        raise platform.FlagsFixed(f"Docker cannot change the flags of {self.container} in place", hint)

    async def write_flags(self, change: platform.FlagChange) -> None:
        """Raises FlagsFixed, because the command of a container cannot be changed."""
        await self.override_place()

    async def restore_flags(self, override: platform.Override) -> None:
        """Does nothing, because no change is ever written."""


@dataclass(frozen=True)
class ComposeService:
    file: Path
    service: str
    stop_s: int = 60

    @property
    def name(self) -> str:
        """`Compose service NAME of FILE`, for messages."""
        return f"Compose service {self.service} of {self.file.name}"

    @property
    def settle_s(self) -> float:
        """Seconds until a restart shows in the state: `stop_s`, when Compose kills the container, and ten more."""
        return self.stop_s + 10.0

    async def state(self) -> platform.State:
        """The state of the service's first container; not running where it has none."""
        words = self._compose_command("ps", "--all", "--quiet", self.service)
        ids = (await run_checked(words, f"asking for {self.name}")).split()
        return await _container_state(ids[0]) if ids else platform.State(None, False)

    async def restart(self, request: platform.RestartRequest) -> None:
        """Recreates the container, which applies changed arguments."""
        options = ("--detach", "--no-deps", "--force-recreate", "--timeout", str(self.stop_s))
        words = self._compose_command("up", *options, self.service)
        await run_checked(words, f"restarting {self.name}", timeout_s=request.deadline_s, request=request)

    async def override_place(self) -> platform.Override:
        """legroom's override file beside the Compose file, with its present content to restore."""
        await self._command_words()
        return platform.Override(str(self._override_file()), platform.read_optional(self._override_file()))

    async def write_flags(self, change: platform.FlagChange) -> None:
        """Writes an override file with the service's whole command, changed."""
        # Compose replaces variables in the file again.
        flags = platform.with_doubled_signs(change.flags, "$")
        changed: dict[str, Any] = {"command": with_flags(await self._command_words(), flags)}
        env = {name: value for name, value in platform.with_doubled_signs(change.env, "$").items() if value is not None}
        if env:
            changed["environment"] = env
        # JSON is valid YAML.
        text = json.dumps({"services": {self.service: changed}}, indent=1)
        platform.write_atomically(self._override_file(), text + "\n", 0o600)

    async def restore_flags(self, override: platform.Override) -> None:
        """Writes the override file's earlier content back, or removes the file."""
        platform.restore_file(Path(override.place), override.before)

    async def _command_words(self) -> list[str]:
        """The words of the service's `command:`; FlagsFixed if it has none, or none with vLLM's flags."""
        words = self._compose_command("config", "--format", "json")
        text = await run_checked(words, f"reading {self.file.name}")
        service = _parse_json(text, self.file.name).get("services", {}).get(self.service)
        if service is None:
            raise platform.ActionFailed(f"{self.file} has no service {self.service}")
        command = service.get("command")
        if not isinstance(command, list) or not command:
            hint = "write its vLLM arguments under `command:`"
            raise platform.FlagsFixed(f"{self.name} has no command of its own to change", hint)
        words = [str(word) for word in command]
        platform.require_server([*(service.get("entrypoint") or ()), *words], self.name, in_image=True)
        return words

    async def replicas(self) -> int:
        """The number of running containers of the service."""
        words = self._compose_command("ps", "--quiet", self.service)
        return len((await run_checked(words, f"counting {self.name}")).split())

    async def scale(self, replicas: int) -> None:
        """Starts or stops containers until `replicas` run; the others keep running."""
        options = ("--detach", "--no-recreate", "--scale", f"{self.service}={replicas}")
        words = self._compose_command("up", *options, self.service)
        await run_checked(words, f"scaling {self.name}", timeout_s=600.0)

    def _override_file(self) -> Path:
        """The path of legroom's Compose override file, beside the Compose file."""
        return self.file.with_name(f"{self.file.stem}.legroom.yaml")

    def _compose_command(self, *words: str) -> list[str]:
        """`docker compose` with the Compose file, legroom's override if it exists, and then `words`."""
        files = ["--file", str(self.file)]
        if self._override_file().exists():
            files += ["--file", str(self._override_file())]
        return ["docker", "compose", *files, *words]


async def _container_state(container: str) -> platform.State:
    """The state by `docker inspect`, with PID and start time as identity; ActionFailed for an unknown container."""
    words = ["docker", "inspect", "--type", "container", "--format", "{{json .State}}", container]
    done = await run_program(words)
    if done.code:
        raise platform.ActionFailed(f"Docker does not know {container} or does not answer: {done.last_output}")
    state = _parse_json(done.output, "docker inspect")
    running = bool(state.get("Running")) and not state.get("Paused")
    started = state.get("StartedAt") or ""
    known = started and not started.startswith("0001-")
    return platform.State(f"{state.get('Pid')}@{started}" if known else None, running, bool(state.get("Restarting")))


def _parse_json(text: str, source: str) -> dict[str, Any]:
    """The JSON object in the text; ActionFailed, naming the source, where there is none."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise platform.ActionFailed(f"{source} gave an answer that is not JSON") from error
    if not isinstance(document, dict):
        raise platform.ActionFailed(f"{source} gave an answer of another shape")
    return document
