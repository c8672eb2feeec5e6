"""`<home>/runs/<port>.json`: how other programs find a `legroom run`, and what they left for its next restart."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from typing import Any

from legroom.planning.store_path import runs_folder


class RunFile:
    """One run's file, there while it runs. Without a folder to write to, a server is held all the same."""

    def __init__(self, port: int) -> None:
        self.path = runs_folder() / f"{port}.json"
        self.log = self.path.with_name(f"{port}.log")
        self._flags = self.path.with_name(f"{port}.flags.json")

    def write(self, content: Mapping[str, Any]) -> str:
        """Replace the file in one step; why not, where it cannot be."""
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.touch(0o600)  # the command may hold keys
            temporary.write_text(json.dumps(content), encoding="utf-8")
            temporary.replace(self.path)
        except OSError as error:
            return f"{self.path} cannot be written: {error.strerror}"
        return ""

    def remove(self) -> None:
        """Only our own: another run of the same port may have begun."""
        with contextlib.suppress(OSError, ValueError):
            if json.loads(self.path.read_text("utf-8")).get("pid") == os.getpid():
                self.path.unlink()

    def keep_previous_log(self) -> None:
        """The log of the run before stays, once."""
        with contextlib.suppress(OSError):
            self.log.replace(self.log.with_name(f"{self.log.stem}.previous.log"))

    def take_changes(self) -> tuple[Mapping[str, Any] | None, str]:
        """What was left for this restart, once; or why it cannot be read."""
        try:
            text = self._flags.read_text("utf-8")
            self._flags.unlink()
        except FileNotFoundError:
            return None, ""
        except OSError as error:
            return None, f"{self._flags} cannot be read: {error.strerror}"
        try:
            changes = json.loads(text)
            if not isinstance(changes, dict) or not all(
                isinstance(changes.get(part, {}), dict) for part in ("flags", "env")
            ):
                raise ValueError
        except ValueError:
            return None, f'{self._flags} is not {{"flags": {{...}}, "env": {{...}}}}, so nothing is changed'
        return changes, ""
