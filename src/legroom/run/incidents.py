"""What the supervisor writes down: how a server ended, incidents and actions in the journal, whether a fix worked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from legroom.live.journal.journal import DONE, FAILED, Journal, JournalUnavailable
from legroom.records import dataclass

Detail = Mapping[str, Any]
LINES_SHOWN = 15


@dataclass(frozen=True)
class ServerExit:
    """How one start of the server ended."""

    code: int
    was_ready: bool
    timed_out: bool
    hung: bool
    lived_s: float

    @property
    def why(self) -> str:
        """Why a start counts as failed."""
        return "it did not become healthy" if self.timed_out else f"it ended with {self.code}"


def history_entry(what: str, ending: ServerExit, remedy: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the history; `changed` is what was done, so it is filled in once it is."""
    diagnosed = {name: remedy.get(name) or None for name in ("failed", "cause", "entry", "refused")}
    return {"what": what, "exit_code": ending.code, "lived_s": ending.lived_s, "changed": None, **diagnosed}


def incident_detail(
    ending: ServerExit, remedy: Mapping[str, Any], command: str, lines: Sequence[str]
) -> dict[str, Any]:
    diagnosed = {name: remedy[name] for name in ("cause", "entry", "evidence", "refused") if remedy.get(name)}
    return {"exit_code": ending.code, "lived_s": ending.lived_s, "command": command, "lines": list(lines), **diagnosed}


class IncidentRecorder:
    """One server's incidents. A journal that cannot be written is reported once, and never stops a server."""

    def __init__(self, server: str, say: Callable[[str], None]) -> None:
        self.server = server
        self._say = say
        self._incident: int | None = None
        self._action: int | None = None
        self._silent = False

    def open(self, kind: str, title: str, detail: Detail) -> str:
        """Something is wrong; what follows belongs to it until it is over. What to call it: `incident 7`.

        A start that fails while an incident is open is a note of that one.
        """
        if self._incident is not None and kind == "start_failed":
            self.note(title, detail)
            return f"incident {self._incident}"
        self.close_failed(f"then: {title}")
        self._incident = self._write(lambda journal: journal.open_incident(self.server, kind, title, detail))
        return "not journalled" if self._incident is None else f"incident {self._incident}"

    def note(self, text: str, detail: Detail | None = None) -> None:
        incident = self._incident
        if incident is not None:
            self._write(lambda journal: journal.note(incident, text, detail))

    def begin_action(self, name: str, detail: Detail) -> None:
        """Written before it is done."""
        self._action = self._write(lambda journal: journal.begin_action(self._incident, self.server, name, detail))

    def close_done(self, outcome: str) -> None:
        """The server is up again."""
        self._finish(DONE, outcome)

    def close_failed(self, outcome: str) -> None:
        """It is not, and nothing more is done about it."""
        self._finish(FAILED, outcome)

    def fail_action(self) -> None:
        """What was done did not help; the incident goes on."""
        action, self._action = self._action, None
        if action is not None:
            self._write(lambda journal: journal.finish_action(action, FAILED))

    def _finish(self, result: str, outcome: str) -> None:
        action, incident, self._action, self._incident = self._action, self._incident, None, None
        if action is not None:
            self._write(lambda journal: journal.finish_action(action, result))
        if incident is not None:
            self._write(lambda journal: journal.close_incident(incident, outcome))

    def _write(self, write: Callable[[Journal], int | None]) -> int | None:
        """Open, write, close: incidents are rare, and an open database is memory that a supervisor does not need."""
        try:
            with Journal.open() as journal:
                return write(journal)
        except JournalUnavailable as error:
            if not self._silent:
                self._say(f"{error.message}; going on without")
            self._silent = True
            return None
