"""What follows when a server has ended unasked: its incident, its diagnosis, and whether it is started again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from legroom.live.journal.journal import DONE, FAILED, Journal, JournalUnavailable
from legroom.records import dataclass
from legroom.run.run_options import RunOptions

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


BUDGET_WINDOW_S = 3600.0
MAX_RESTART_DELAY_S = 300.0
_MAX_DOUBLINGS = 64
"""By then the longest delay is reached from any first one; many more are no float."""


@dataclass(frozen=True)
class Setup:
    """One way to start the server."""

    words: tuple[str, ...]
    env: Mapping[str, str]
    """What stands before the command."""
    line: str
    """As it may be printed."""
    expected: Mapping[str, Any]

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Setup:
        return cls(tuple(answer["words"]), dict(answer["env"]), answer["line"], answer["expected"])

    def is_same_launch(self, other: Setup) -> bool:
        """Whether both launch the same, whatever was expected of it."""
        return (self.words, self.env) == (other.words, other.env)

    def is_among(self, others: Iterable[Setup]) -> bool:
        """Whether one of them launches the same."""
        return any(self.is_same_launch(other) for other in others)


class Setups:
    """The set-up in use, and what became of those before it."""

    def __init__(self, first: Setup) -> None:
        self.current = first
        self._tried: list[Setup] = []
        self._served: list[Setup] = []
        self._removed_env: dict[str, str] = {}
        """Variables that a change took from the environment, until it has served."""

    @property
    def tried(self) -> Sequence[Setup]:
        """Every set-up that was launched: none of them is the fix of a failure."""
        return self._tried

    @property
    def any_has_served(self) -> bool:
        return bool(self._served)

    @property
    def current_has_served(self) -> bool:
        return self.current.is_among(self._served)

    def mark_launched(self) -> None:
        if not self.current.is_among(self._tried):
            self._tried.append(self.current)

    def mark_served(self) -> None:
        """It came up: what to go back to, from now on."""
        self._served = [*(setup for setup in self._served if not setup.is_same_launch(self.current)), self.current]
        self._removed_env.clear()

    def change(self, answer: Mapping[str, Any]) -> None:
        """To what somebody left for this restart. The server inherits the environment, so what goes is taken away."""
        self.current = Setup.of(answer)
        self._removed_env |= {name: os.environ.pop(name) for name in answer["unset"] if name in os.environ}

    def revert(self) -> None:
        """To what has served last."""
        self.current = self._served[-1]
        os.environ.update(self._removed_env)


class RestartBudget:
    """Counts restarts after crashes. Never a loop: what crashes more often than the budget stays down."""

    def __init__(self, per_hour: int, first_delay_s: float) -> None:
        self.per_hour, self.first_delay_s = per_hour, first_delay_s
        self._taken: list[float] = []

    def remaining(self, now_s: float) -> int:
        """How many more the last hour allows."""
        self._taken = [taken for taken in self._taken if now_s - taken < BUDGET_WINDOW_S]
        return max(self.per_hour - len(self._taken), 0)

    def consume(self, now_s: float) -> float | None:
        """How long to wait before the restart that is begun now; None where the budget is spent."""
        if not self.remaining(now_s):
            return None
        doublings = min(len(self._taken), _MAX_DOUBLINGS)
        delay_s = min(self.first_delay_s * 2.0**doublings, MAX_RESTART_DELAY_S)
        self._taken.append(now_s)
        return delay_s


FindFix = Callable[[], dict[str, Any] | None]
"""Diagnoses the server that has just ended; None where a stop came first."""


class RestartPolicy:
    """Decides about every end. Nothing here waits: the supervisor is told how long to."""

    def __init__(
        self,
        options: RunOptions,
        setups: Setups,
        incidents: IncidentRecorder,
        find_fix: FindFix,
        last_lines: Callable[[], list[str]],
        say: Callable[[str], None],
    ) -> None:
        self.history: list[dict[str, Any]] = []
        """What failed and what was done about it, in order."""
        self._options, self._setups, self._incidents = options, setups, incidents
        self._find_fix, self._last_lines, self._say = find_fix, last_lines, say
        self._budget = RestartBudget(options.restarts, options.restart_delay_s)
        self._tries = 0

    def served(self) -> None:
        """The server is up: what was tried has worked."""
        self._incidents.close_done("it serves again")
        self._tries = 0
        self._setups.mark_served()

    def delay_after(self, ending: ServerExit) -> float | None:
        """How long to wait before the server is started again; None where it is not."""
        return self._after_crash(ending) if ending.was_ready else self._after_failed_start(ending)

    def give_up(self, reason: str) -> None:
        self._say(reason)
        self._incidents.close_failed(reason)

    def _after_failed_start(self, ending: ServerExit) -> float | None:
        self._incidents.fail_action()
        remedy = self._find_fix()
        if remedy is None:
            return None
        line = self._setups.current.line
        detail = incident_detail(ending, remedy, line, self._last_lines()) | {"how": ending.why}
        name = self._incidents.open("start_failed", f"start-up failed: {remedy['failed']}", detail)
        self.history.append(history_entry("start_failed", ending, remedy))
        head = f"start failed ({ending.why}, {name}): {remedy['failed']}"
        if remedy["words"] and self._tries < self._options.tries:
            self._try_fix(remedy, head)
            return 0.0
        return self._after_unfixed_start(remedy, head)

    def _try_fix(self, remedy: Mapping[str, Any], head: str) -> None:
        self._tries += 1
        expected = remedy["expected"]["text"]
        self._say(
            f"try {self._tries} of {self._options.tries}: {head} Changed: {remedy['changed']}. Expected now: {expected}"
        )
        self._use_remedy(remedy)
        change = {"changed": remedy["changed"], "command": self._setups.current.line}
        self._incidents.begin_action("relaunch", change)

    def _after_unfixed_start(self, remedy: Mapping[str, Any], head: str) -> float | None:
        """What has served before is started again; a command that never has is not."""
        refused = remedy["refused"]
        if remedy["words"]:
            refused = f"{self._options.tries} tries are used up; next would be {remedy['changed']}"
        if not self._setups.any_has_served or self._options.on_crash == "exit":
            self.give_up(f"{head} Not tried again: {refused}")
            return None
        if self._setups.current_has_served:
            self._say(f"{head} Nothing is changed: {refused}")
            return self._restart("it has served before")
        self._say(f"{head} Not tried again: {refused}")
        self._setups.revert()
        return self._restart(f"back to what has served: {self._setups.current.line}")

    def _after_crash(self, ending: ServerExit) -> float | None:
        """The incident is written before anything else is done."""
        if ending.code == 0:
            self._say("vLLM exited 0, but nobody had asked it to stop: its engine died")
        what = "hung and was killed" if ending.hung else "died"
        title = f"the server {what} after {ending.lived_s:.0f} s (exit {ending.code})"
        detail = incident_detail(ending, {}, self._setups.current.line, self._last_lines())
        name = self._incidents.open("died_serving", title, detail)
        self._say(f"{name}: {title}")
        remedy = self._find_fix()
        if remedy is None:
            return None
        self._incidents.note(remedy["failed"], {"cause": remedy.get("cause"), "evidence": remedy.get("evidence")})
        self._say(f"diagnosis: {remedy['failed']}")
        self.history.append(history_entry("died_serving", ending, remedy))
        if remedy["is_memory"]:
            self._report_manual_fix(remedy)
        if self._options.on_crash == "exit":
            self.give_up("--on-crash exit: not restarted")
            return None
        return self._restart("the same command", remedy if remedy["is_memory"] and remedy["words"] else None)

    def _report_manual_fix(self, remedy: Mapping[str, Any]) -> None:
        """What a restart cannot do, or is not to: a limit to raise, a flag to change by hand."""
        if not remedy["words"]:
            self._say(f"nothing is changed: {remedy['refused']}")
        elif self._options.on_crash == "exit":
            self._say(f"what would fix it: {remedy['changed']}")

    def _restart(self, unchanged: str, remedy: Mapping[str, Any] | None = None) -> float | None:
        """Within the budget, after a wait."""
        delay_s = self._budget.consume(time.monotonic())
        if delay_s is None:
            self.give_up(f"{self._options.restarts} restarts in an hour are used up: not restarted")
            return None
        changed = ""
        if remedy is not None:
            self._use_remedy(remedy)
            changed = remedy["changed"]
        current = self._setups.current
        self._incidents.begin_action("restart", {"changed": changed, "command": current.line})
        self._say(
            f"restart in {delay_s:g} s ({self._budget.remaining(time.monotonic())} left this hour): "
            + (f"changed {changed}. Expected now: {current.expected['text']}" if changed else unchanged)
        )
        return delay_s

    def _use_remedy(self, remedy: Mapping[str, Any]) -> None:
        self._setups.current = Setup.of(remedy)
        self.history[-1]["changed"] = remedy["changed"]
