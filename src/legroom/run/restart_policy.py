"""The options of `legroom run`, and what follows an unrequested end of the server: an incident, a diagnosis, and the
decision to restart."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from legroom.live.journal.journal import Journal
from legroom.live.journal.journal_records import DONE, FAILED, JournalUnavailable
from legroom.records import dataclass, field

OnCrash = Literal["restart", "exit"]
Detail = Mapping[str, Any]


@dataclass(frozen=True)
class RunOptions:
    words: tuple[str, ...]
    tries: int = 3
    keep: tuple[str, ...] = ()
    """Flags that must not change, as the user wrote them."""
    min_context: int | None = None
    min_concurrency: float | None = None
    on_crash: OnCrash = "restart"
    restarts: int = 5
    """Restarts after crashes per hour."""
    restart_delay_s: float = 2.0
    """Before the first restart; doubles with each further one within an hour."""
    ready_timeout_s: float = 1800.0
    hang_timeout_s: float = 120.0
    """How long a server may neither use CPU time nor answer; 0: for ever."""
    drain_s: float = 60.0
    verify: bool = True
    save: str | None = None
    vllm: str | None = None
    gpu: str | None = None


@dataclass(frozen=True)
class ProcessDeath:
    """The first process of a server that ended."""

    who: str
    pid: int
    signal: int | None
    """0: it exited. None: not known."""

    @property
    def process(self) -> str:
        """The process in words: `the API server (pid 42)`."""
        return f"{self.who} (pid {self.pid})"


@dataclass(frozen=True)
class ServerExit:
    """How one run of the server ended."""

    code: int
    was_ready: bool
    timed_out: bool
    hung: bool
    lived_s: float

    @property
    def why(self) -> str:
        """Why the start counts as failed, as a clause: it was not healthy in time, or its exit code."""
        return "it did not become healthy" if self.timed_out else f"it ended with {self.code}"


def history_entry(kind: str, ending: ServerExit, remedy: Mapping[str, Any]) -> dict[str, Any]:
    """The run history's entry for an end; `kind`: start_failed or died_serving; `remedy`: a `Remedy` as JSON."""
    diagnosed = {name: remedy.get(name) or None for name in ("failed", "cause", "entry", "refused")}
    return {"what": kind, "exit_code": ending.code, "lived_s": ending.lived_s, "changed": None, **diagnosed}


def incident_detail(ending: ServerExit, remedy: Mapping[str, Any], command: str, lines: list[str]) -> dict[str, Any]:
    """The journal's detail of a server's end: exit code, seconds lived, command, last `lines`, diagnosis."""
    diagnosed = {name: remedy[name] for name in ("cause", "entry", "evidence", "refused") if remedy.get(name)}
    return {"exit_code": ending.code, "lived_s": ending.lived_s, "command": command, "lines": lines, **diagnosed}


class IncidentRecorder:
    """One server's incidents. A journal that cannot be written is reported once, and never stops a server."""

    def __init__(self, server: str, say: Callable[[str], None]) -> None:
        self.server = server
        self._say = say
        self._incident: int | None = None
        self._action: int | None = None
        self._silent = False

    def open(self, kind: str, title: str, detail: Detail) -> str:
        """Opens an incident, or adds to the open one; returns `incident 7`, or `not journalled`."""
        if self._incident is not None and kind == "start_failed":
            self.note(title, detail)
            return f"incident {self._incident}"
        self.close(f"then: {title}")
        self._incident = self._write(lambda journal: journal.open_incident(self.server, kind, title, detail))
        return "not journalled" if self._incident is None else f"incident {self._incident}"

    def note(self, text: str, detail: Detail | None = None) -> None:
        """Adds a note to the open incident, if there is one."""
        incident = self._incident
        if incident is not None:
            self._write(lambda journal: journal.note(incident, text, detail))

    def begin_action(self, name: str, detail: Detail) -> None:
        """Records that an action (`name`: `restart`, `relaunch`) of the open incident begins."""
        self._action = self._write(lambda journal: journal.begin_action(self._incident, self.server, name, detail))

    def finish_action(self, result: str = FAILED) -> None:
        """Records the result of the last action; the incident stays open."""
        action, self._action = self._action, None
        if action is not None:
            self._write(lambda journal: journal.finish_action(action, result))

    def close(self, outcome: str, result: str = FAILED) -> None:
        """Finishes the open action with `result` and closes the open incident with `outcome`, if any."""
        self.finish_action(result)
        incident, self._incident = self._incident, None
        if incident is not None:
            self._write(lambda journal: journal.close_incident(incident, outcome))

    def _write(self, write: Callable[[Journal], int | None]) -> int | None:
        """The result of `write(journal)`, for which alone the journal is opened; None if it cannot be written."""
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


@dataclass(frozen=True)
class Setup:
    """A command to start the server. Two are equal where their words and variables are."""

    words: tuple[str, ...]
    env: Mapping[str, str]
    """Variables before the command."""
    line: str = field(compare=False)
    """The command line without secrets."""
    expected: Mapping[str, Any] = field(compare=False)

    @classmethod
    def of(cls, task_output: Mapping[str, Any]) -> Setup:
        """The setup in the output of a task that prepares a command: words, environment, shown line, expected pool."""
        return cls(tuple(task_output["words"]), dict(task_output["env"]), task_output["line"], task_output["expected"])


class Setups:
    """The present set-up, and those that were launched or have served before."""

    def __init__(self, first: Setup) -> None:
        self.current = first
        self.tried: list[Setup] = []
        """All launched set-ups, which are not tried again as fixes."""
        self.served: list[Setup] = []
        """Set-ups that came up, the last one at the end."""
        self._removed_env: dict[str, str] = {}
        """Variables that a change removed from the environment, kept until it has served."""

    def mark_launched(self) -> None:
        """Adds the current setup to those that were tried, unless it is there."""
        if self.current not in self.tried:
            self.tried.append(self.current)

    def mark_served(self) -> None:
        """Makes the current setup the one to revert to."""
        self.served = [*(setup for setup in self.served if setup != self.current), self.current]
        self._removed_env.clear()

    def change(self, task_output: Mapping[str, Any]) -> None:
        """Switches to the setup that `apply_changes` computed; removes its `unset` variables from the environment."""
        self.current = Setup.of(task_output)
        self._removed_env |= {name: os.environ.pop(name) for name in task_output["unset"] if name in os.environ}

    def revert(self) -> None:
        """Switch back to the command and environment that served last."""
        self.current = self.served[-1]
        os.environ.update(self._removed_env)


class RestartBudget:
    """Limits restarts after crashes per hour, with exponential back-off."""

    def __init__(self, per_hour: int, first_delay_s: float) -> None:
        self.per_hour, self.first_delay_s = per_hour, first_delay_s
        self._taken: list[float] = []

    def remaining(self, now_s: float) -> int:
        """Restarts left at `now_s`, after those of the hour before it."""
        self._taken = [taken for taken in self._taken if now_s - taken < BUDGET_WINDOW_S]
        return max(self.per_hour - len(self._taken), 0)

    def consume(self, now_s: float) -> float | None:
        """Counts a restart and returns the delay before it; None where the budget is spent."""
        if not self.remaining(now_s):
            return None
        doublings = min(len(self._taken), 64)  # larger powers of two overflow a float
        delay_s = min(self.first_delay_s * 2.0**doublings, MAX_RESTART_DELAY_S)
        self._taken.append(now_s)
        return delay_s


FindFix = Callable[[], dict[str, Any] | None]
"""Diagnoses the server that has just ended; returns None where a stop was requested first."""


class RestartPolicy:
    """Decides after every end of the server whether and how to restart it."""

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
        """Failures and fixes in order."""
        self._options, self._setups, self._incidents = options, setups, incidents
        self._find_fix, self._last_lines, self._say = find_fix, last_lines, say
        self._budget = RestartBudget(options.restarts, options.restart_delay_s)
        self._tries = 0

    def served(self) -> None:
        """Called when the server is up: closes the incident and marks the setup as one that has served."""
        self._incidents.close("it serves again", DONE)
        self._tries = 0
        self._setups.mark_served()

    def delay_after(self, ending: ServerExit) -> float | None:
        """Journals and diagnoses the server's end, and adopts a fix; returns seconds until the restart, or None."""
        return self._after_crash(ending) if ending.was_ready else self._after_failed_start(ending)

    def give_up(self, reason: str) -> None:
        """Says why the server is not restarted, and closes the incident with that."""
        self._say(reason)
        self._incidents.close(reason)

    def _after_failed_start(self, ending: ServerExit) -> float | None:
        """After a start that never served: seconds until the next (0 with a fix); None if it gives up or is stopped."""
        self._incidents.finish_action()
        remedy = self._find_fix()
        if remedy is None:
            return None
        line = self._setups.current.line
        detail = incident_detail(ending, remedy, line, self._last_lines()) | {"how": ending.why}
        name = self._incidents.open("start_failed", f"start-up failed: {remedy['failed']}", detail)
        self.history.append(history_entry("start_failed", ending, remedy))
        head = f"start failed ({ending.why}, {name}): {remedy['failed']}"
        if remedy.get("by_signal") and self._options.on_crash == "restart":
            self._say(head)
            return self._restart("the same command")
        if not remedy["words"] or self._tries >= self._options.tries:
            return self._after_unfixed_start(remedy, head)
        self._tries += 1
        changed, expected = remedy["changed"], remedy["expected"]["text"]
        self._say(f"try {self._tries} of {self._options.tries}: {head} Changed: {changed}. Expected now: {expected}")
        self._use_remedy(remedy)
        self._incidents.begin_action("relaunch", {"changed": changed, "command": self._setups.current.line})
        return 0.0

    def _after_unfixed_start(self, remedy: Mapping[str, Any], failure_text: str) -> float | None:
        """After a failed start without a fix: seconds until a setup that has served is started again; None where there
        is none, with --on-crash exit, or with the budget spent."""
        refused = remedy["refused"]
        if remedy["words"]:
            refused = f"{self._options.tries} tries are used up; next would be {remedy['changed']}"
        if not self._setups.served or self._options.on_crash == "exit":
            self.give_up(f"{failure_text} Not tried again: {refused}")
            return None
        if self._setups.current in self._setups.served:
            self._say(f"{failure_text} Nothing is changed: {refused}")
            return self._restart("it has served before")
        self._say(f"{failure_text} Not tried again: {refused}")
        self._setups.revert()
        return self._restart(f"back to what has served: {self._setups.current.line}")

    def _after_crash(self, ending: ServerExit) -> float | None:
        """After a crash of a serving server: opens an incident and diagnoses; seconds until the restart, or None."""
        if ending.code == 0 and not ending.hung:
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
        if remedy["is_memory"] and not remedy["words"]:
            self._say(f"nothing is changed: {remedy['refused']}")
        elif remedy["is_memory"] and self._options.on_crash == "exit":
            self._say(f"what would fix it: {remedy['changed']}")
        if self._options.on_crash == "exit":
            self.give_up("--on-crash exit: not restarted")
            return None
        return self._restart("the same command", remedy if remedy["is_memory"] and remedy["words"] else None)

    def _restart(self, unchanged_text: str, remedy: Mapping[str, Any] | None = None) -> float | None:
        """Counts a restart against the budget and adopts the remedy, if any; the delay in seconds, None where the
        budget is spent. `unchanged_text`: said where there is no remedy."""
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
            + (f"changed {changed}. Expected now: {current.expected['text']}" if changed else unchanged_text)
        )
        return delay_s

    def _use_remedy(self, remedy: Mapping[str, Any]) -> None:
        """Makes the remedy's command the current setup, and notes the change in the run's history."""
        self._setups.current = Setup.of(remedy)
        self.history[-1]["changed"] = remedy["changed"]
