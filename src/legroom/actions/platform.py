"""What every platform can do to a server: say which start of it is running, restart it, change its flags and back."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from legroom.deployments.server_words import SHELLS, basename, server_start
from legroom.errors import UNREACHABLE, LegroomError
from legroom.home import store_path
from legroom.records import dataclass, field

QUERY_TIMEOUT_S = 30.0
"""A platform that does not answer a query by then counts as unavailable; Docker under load has taken 20 s."""


class ActionFailed(LegroomError):
    """Something could not be done to the world. The message says what, and what stands now."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint, UNREACHABLE)


class FlagsFixed(ActionFailed):
    """The flags of this server cannot be changed here, now or later."""


@dataclass(frozen=True)
class State:
    """A server as its platform sees it.

    `identity` is one text for one start of the server and another for the next: equal before and after means that it
    was not restarted, which is how an interrupted restart is never done twice.
    """

    identity: str | None
    running: bool | None = None
    underway: bool = False


@dataclass(frozen=True)
class FlagChange:
    """Flags and environment for the next start. None takes a flag away; "" is a switch without a value."""

    flags: Mapping[str, str | None]
    env: Mapping[str, str | None] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [
            f"without {name}" if value is None else f"{name} {value}".strip() for name, value in self.flags.items()
        ]
        words += [f"without {name}" if value is None else f"{name}={value}" for name, value in self.env.items()]
        return ", ".join(words) or "no change"


@dataclass(frozen=True)
class Override:
    """Where a change of flags was written, and what stood there before (None: nothing)."""

    place: str
    before: str | None


@dataclass(frozen=True)
class RestartRequest:
    """One restart that was asked for. `launched` is called with the process that does it, before it does anything."""

    token: str
    deadline_s: float = 300.0
    launched: Callable[[int, str], Awaitable[None]] | None = None


@runtime_checkable
class Platform(Protocol):
    """What runs the server. One file a platform; none of them detects or decides anything."""

    @property
    def name(self) -> str:
        """In a few words, such as `systemd unit vllm.service`."""
        ...

    @property
    def settle_s(self) -> float:
        """How long a restart may be under way here without a trace of it: stopping takes that long."""
        ...

    async def state(self) -> State:
        """As it is now. Raises `ActionFailed` where the platform does not answer."""
        ...

    async def restart(self, request: RestartRequest) -> None:
        """Stops and starts it. Returns when the platform has taken it on; raises `ActionFailed`."""
        ...

    async def override_place(self) -> Override:
        """Where flags would be overridden, with what stands there now. Raises `FlagsFixed` where they cannot be."""
        ...

    async def write_flags(self, change: FlagChange) -> None:
        """Writes the change for the next restart."""
        ...

    async def restore_flags(self, override: Override) -> None:
        """Puts back what stood there before. Harmless twice."""
        ...


@runtime_checkable
class Scalable(Protocol):
    """A platform that can run more or fewer servers of a group."""

    async def replicas(self) -> int:
        """How many are wanted now."""
        ...

    async def scale(self, replicas: int) -> None:
        """Wants so many."""
        ...

    def scale_words(self, replicas: int) -> str:
        """The command that does the same by hand."""
        ...


def restore_file(path: Path, before: str | None) -> None:
    """Puts a file back as it was, or away."""
    if before is None:
        path.unlink(missing_ok=True)
    else:
        write_atomically(path, before)


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Writes a file so that it is there whole or not at all, whenever the machine stops.

    One that is there keeps its mode and its owner, because it may hold what not everybody is to read.
    """
    path = path.resolve()  # what a link points to is the file
    beside = path.with_name(f".{path.name}.legroom")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        present = path.stat() if path.exists() else None
        beside.unlink(missing_ok=True)
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600 if present else mode)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            if present is not None:
                with contextlib.suppress(PermissionError):  # another's file may be written where its folder may be
                    os.fchown(handle, present.st_uid, present.st_gid)
                os.fchmod(handle, stat.S_IMODE(present.st_mode))
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise ActionFailed(f"{path} cannot be written: {error.strerror}") from error


def read_optional(path: Path) -> str | None:
    """A file's text; None where there is none."""
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ActionFailed(f"{path} cannot be read: {error}") from error


def undo_file(action_id: int, home: Path | None = None) -> Path:
    """Where the override of an action is kept."""
    return (home or store_path().parent) / "undo" / f"{action_id}.json"


def keep_override(action_id: int, override: Override, home: Path | None = None) -> None:
    """Keeps it, safely in the file before anything is changed."""
    kept = {"place": override.place, "before": override.before}
    write_atomically(undo_file(action_id, home), json.dumps(kept) + "\n", 0o600)


def kept_override(action_id: int, home: Path | None = None) -> Override | None:
    """What was kept; None where nothing was, or it has been undone."""
    path = undo_file(action_id, home)
    text = read_optional(path)
    if text is None:
        return None
    try:
        kept = json.loads(text)
        return Override(str(kept["place"]), kept["before"])
    except (ValueError, KeyError, TypeError) as error:
        raise ActionFailed(f"{path} cannot be read: {error}") from error


def forget_override(action_id: int, home: Path | None = None) -> None:
    """It has been undone."""
    undo_file(action_id, home).unlink(missing_ok=True)


async def scale(platform: Platform, replicas: int, act: bool) -> str:
    """Wants so many servers, or without `act` says how to. The answer is a sentence either way."""
    if replicas < 1:
        raise ActionFailed("a group is never scaled below one server")
    if not isinstance(platform, Scalable):
        return f"start another server beside {platform.name}: legroom cannot scale it ({replicas} wanted)"
    if not act:
        return f"to have {replicas}: {platform.scale_words(replicas)}"
    before = await platform.replicas()
    if before == replicas:
        return f"{platform.name} has {replicas} already"
    await platform.scale(replicas)
    return f"{platform.name} scaled from {before} to {replicas}"


def with_doubled_signs(values: Mapping[str, str | None], signs: str) -> dict[str, str | None]:
    """The values with every such sign twice: to whoever reads them, one alone begins a name that is replaced."""
    twice = str.maketrans({sign: sign * 2 for sign in signs})
    return {name: value.translate(twice) if value is not None else None for name, value in values.items()}


def require_server(words: Sequence[str], where: str, *, in_image: bool = False) -> None:
    """Raises where the words do not start vLLM themselves, so that a changed flag would not reach it.

    What an image starts is not known here (`in_image`): it is taken for vLLM, unless it is a shell with a script.
    """
    if server_start(list(words)) is None and not any("vllm" in word for word in words[:1]):
        if in_image and not any(basename(word) in SHELLS for word in words[:1]):
            return
        shown = " ".join(words[:2])
        raise FlagsFixed(
            f"{where} runs `{shown} ...`, and legroom cannot see vLLM's flags in it",
            "start vLLM there directly, or change the flags in that script by hand",
        )
