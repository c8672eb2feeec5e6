"""What a `legroom run` of this machine does with a server, from its run file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from legroom.files import runs_folder
from legroom.live.metrics.endpoint import is_loopback_host, port_of
from legroom.live.metrics.sample import Sample, ScrapeFailure, ScrapeResult
from legroom.process_table import process_start_ticks

RunState = Literal["starting", "serving", "restarting", "stopping"]
_UNDER_WAY: dict[str, str] = {
    "starting": "is starting the server",
    "restarting": "is restarting the server",
    "stopping": "is stopping the server, as it was asked to",
}


def run_under_way(server: str, home: Path | None = None) -> str | None:
    """In words, what a `legroom run` of this machine is doing to the server; None without one, or while it serves."""
    record = _living_run(server, home)
    what = _UNDER_WAY.get(str(record.get("state")))
    pids = [record.get("child_pid"), *(record.get("engine_pids") or ())]
    if what is None and any(isinstance(pid, int) and process_start_ticks(pid) is None for pid in pids):
        what = "sees that the server has ended, and does what is to be done"  # before its run file shows it
    return f"`legroom run` (pid {record['pid']}) {what}" if what else None


def failed_under_way(result: ScrapeResult) -> str | None:
    """In words, what a `legroom run` does with the server, or behind the guard, that did not answer; or None."""
    return (result.under_way or run_under_way(result.server)) if isinstance(result, ScrapeFailure) else None


def with_start_reason(result: ScrapeResult) -> ScrapeResult:
    """The sample with its local `legroom run`'s `start_requested` (0 or 1); other results unchanged."""
    requested = start_requested(result.server)
    if not isinstance(result, Sample) or requested is None:
        return result
    return replace(result, start_requested=requested)


def start_requested(server: str) -> int | None:
    """Why a `legroom run` here started this server: 1 on request, 0 after a crash; None without a run."""
    requested = _living_run(server).get("start_requested")
    return None if requested is None else int(bool(requested))


def _living_run(server: str, home: Path | None = None) -> dict[str, Any]:
    """The run file's JSON of the running `legroom run` at this loopback address; empty where there is none."""
    if not is_loopback_host(urlsplit(server).hostname or ""):
        return {}
    try:
        record: dict[str, Any] = json.loads((runs_folder(home) / f"{port_of(server)}.json").read_text("utf-8"))
        return record if process_start_ticks(int(record["pid"])) is not None else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
