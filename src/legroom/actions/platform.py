"""The interface of all platforms: a server's state, its restart, and changes of its flags."""

import json
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, runtime_checkable

from legroom.deployments.server_words import SHELLS, basename, server_start
from legroom.errors import UNREACHABLE, LegroomError
from legroom.files import replace_file
from legroom.records import dataclass, field

QUERY_TIMEOUT_S = 30.0
"""Docker under load has taken 20 s to answer a query."""


class ActionFailed(LegroomError):
    """An action failed. The message says what was not done."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint, UNREACHABLE)


class FlagsFixed(ActionFailed):
    """The platform cannot change the flags of this server."""


@dataclass(frozen=True)
class State:
    """A server as its platform reports it. `identity` differs for every start of the server, which shows whether an
    interrupted restart has happened."""

    identity: str | None
    running: bool | None = None
    underway: bool = False


@dataclass(frozen=True)
class FlagChange:
    """Flags and environment variables for the next start. None removes one; "" is a switch without a value."""

    flags: Mapping[str, str | None]
    env: Mapping[str, str | None] = field(default_factory=dict)

    def __str__(self) -> str:
        set_flags = {name: f"{name} {value}".strip() for name, value in self.flags.items()}
        set_variables = {name: f"{name}={value}" for name, value in self.env.items()}
        removed = {name: f"without {name}" for name, value in (*self.flags.items(), *self.env.items()) if value is None}
        return ", ".join((set_flags | set_variables | removed).values()) or "no change"


@dataclass(frozen=True)
class Override:
    """Where a flag change was written (a file, a workload), and the content before it (None: it did not exist)."""

    place: str
    before: str | None


@dataclass(frozen=True)
class RestartRequest:
    """One restart. `launched` is called with the pid and identity of the restart program before it runs."""

    token: str
    deadline_s: float = 300.0
    launched: Callable[[int, str], Awaitable[None]] | None = None


@runtime_checkable
class Platform(Protocol):
    """What runs the server: systemd, Docker, Kubernetes ..."""

    @property
    def name(self) -> str:
        """Platform and server in words, such as `systemd unit vllm.service`."""

    @property
    def settle_s(self) -> float:
        """Seconds that a restart may take before the platform's state shows it."""

    async def state(self) -> State:
        """Identity of the server's process, and whether it runs; ActionFailed where the platform does not answer."""

    async def restart(self, request: RestartRequest) -> None:
        """Restarts the server and returns once the platform has accepted that; raises `ActionFailed`."""

    async def override_place(self) -> Override:
        """Where a flag change will be written, with its present content; raises `FlagsFixed` if nowhere."""

    async def write_flags(self, change: FlagChange) -> None:
        """Writes the change for the next restart."""

    async def restore_flags(self, override: Override) -> None:
        """Restores the content that `override` kept from before the change; may be called twice."""


@runtime_checkable
class Scalable(Protocol):
    """A platform that can run more or fewer servers of a group."""

    async def replicas(self) -> int:
        """The number of servers that the platform is set to run."""

    async def scale(self, replicas: int) -> None:
        """Set the number of servers that the platform runs."""


def restore_file(path: Path, old_content: str | None) -> None:
    """Writes the content from before a change back to a file; None: the file did not exist and is removed."""
    if old_content is None:
        path.unlink(missing_ok=True)
    else:
        write_atomically(path, old_content)


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Replaces a file in one step, with permissions `mode`; ActionFailed where it cannot be written."""
    try:
        replace_file(path, text, mode)
    except OSError as error:
        raise ActionFailed(f"{path} cannot be written: {error.strerror}") from error


def read_optional(path: Path) -> str | None:
    """The text of a file; None where there is no such file, ActionFailed where it cannot be read."""
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ActionFailed(f"{path} cannot be read: {error}") from error


def undo_file(action_id: int, home: Path) -> Path:
    """The file that keeps what an action's flag change replaced, for undoing it."""
    return home / "undo" / f"{action_id}.json"


def keep_override(action_id: int, override: Override, home: Path) -> None:
    """Stores, for undoing, the content that this action's flag change will replace; called before the change."""
    write_atomically(undo_file(action_id, home), json.dumps(asdict(override)) + "\n", 0o600)


def kept_override(action_id: int, home: Path) -> Override | None:
    """What `keep_override` stored for this action; None if it stored nothing or the change was undone."""
    path = undo_file(action_id, home)
    text = read_optional(path)
    if text is None:
        return None
    try:
        kept = json.loads(text)
        return Override(str(kept["place"]), kept["before"])
    except (ValueError, KeyError, TypeError) as error:
        raise ActionFailed(f"{path} cannot be read: {error}") from error


def forget_override(action_id: int, home: Path) -> None:
    """Deletes the file under `home` in which `keep_override` stored the settings before this action, if it is there."""
    undo_file(action_id, home).unlink(missing_ok=True)


async def scale(platform: Platform, replicas: int) -> str:
    """Scales the platform to this number of servers; returns what was done, in words. ActionFailed below 1."""
    if replicas < 1:
        raise ActionFailed("a group is never scaled below one server")
    if not isinstance(platform, Scalable):
        return f"start another server beside {platform.name}: legroom cannot scale it ({replicas} wanted)"
    before = await platform.replicas()
    if before == replicas:
        return f"{platform.name} has {replicas} already"
    await platform.scale(replicas)
    return f"{platform.name} scaled from {before} to {replicas}"


def with_doubled_signs(values: Mapping[str, str | None], signs: str) -> dict[str, str | None]:
    """The values with each character in `signs` doubled, as systemd, Compose and supervisord files escape it."""
    twice = str.maketrans({sign: sign * 2 for sign in signs})
    return {name: value.translate(twice) if value is not None else None for name, value in values.items()}


def shell_words(text: str, where: str) -> list[str]:
    """The words of a command line; ActionFailed, naming the place `where`, if a quote is not closed."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ActionFailed(f"{where} cannot be read: {error}") from error


def require_server(words: Sequence[str], where: str, *, in_image: bool = False) -> None:
    """Raises FlagsFixed unless the words (of the place `where`) start vLLM; `in_image`: they follow the image's entry
    point, taken for vLLM's unless they begin with a shell."""
    if server_start(list(words)) is None and not any("vllm" in word for word in words[:1]):
        if in_image and not any(basename(word) in SHELLS for word in words[:1]):
            return
        shown = " ".join(words[:2])
        hint = "start vLLM there directly, or change the flags in that script by hand"
        raise FlagsFixed(f"{where} runs `{shown} ...`, and legroom cannot see vLLM's flags in it", hint)
