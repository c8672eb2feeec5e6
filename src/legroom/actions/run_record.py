"""What a `legroom run` writes down of itself for others on its machine: who it is, and what it is about to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from legroom.actions.programs import process_identity
from legroom.home import runs_folder
from legroom.live.metrics.address import is_loopback_host

RunState = Literal["starting", "serving", "restarting", "stopping"]
_UNDER_WAY: dict[str, str] = {
    "starting": "is starting the server",
    "restarting": "is restarting the server",
    "stopping": "is stopping the server, as it was asked to",
}


def run_under_way(server: str, home: Path | None = None) -> str | None:
    """What a `legroom run` on this machine is doing to a server, given its address; None where there is none, or its
    server should be serving.

    While it is under way the server's silence is no news, and nobody else needs to act.
    """
    place = urlsplit(server)
    if not is_loopback_host(place.hostname or ""):
        return None
    port = place.port or (443 if place.scheme == "https" else 80)
    try:
        record: dict[str, Any] = json.loads((runs_folder(home) / f"{port}.json").read_text("utf-8"))
        what = _UNDER_WAY.get(str(record.get("state"))) or _after_death(record)
        if what is None or process_identity(int(record["pid"])) is None:
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return f"`legroom run` (pid {record['pid']}) {what}"


def _after_death(record: dict[str, Any]) -> str | None:
    """A run whose server has died sees it at once, but may take seconds to clean up before it writes that down. An API
    server that has lost an engine core takes seconds, too, until it is gone: it no longer listens, and ends (0.32)."""
    parts = [record.get("child_pid"), *(record.get("engine_pids") or ())]
    is_gone = any(isinstance(pid, int) and process_identity(pid) is None for pid in parts)
    return "sees that the server has ended, and does what is to be done" if is_gone else None
