"""What follows when a server has ended unasked: its incident, its diagnosis, and whether it is started again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from legroom.run.incidents import IncidentRecorder, ServerExit, history_entry, incident_detail
from legroom.run.options import RunOptions
from legroom.run.restarts import RestartBudget, Setup, Setups

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
        self._adopt(remedy)
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
        self._setups.go_back()
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
            self._tell_cure(remedy)
        if self._options.on_crash == "exit":
            self.give_up("--on-crash exit: not restarted")
            return None
        return self._restart("the same command", remedy if remedy["is_memory"] and remedy["words"] else None)

    def _tell_cure(self, remedy: Mapping[str, Any]) -> None:
        """What a restart cannot do, or is not to: a limit to raise, a flag to change by hand."""
        if not remedy["words"]:
            self._say(f"nothing is changed: {remedy['refused']}")
        elif self._options.on_crash == "exit":
            self._say(f"what would fix it: {remedy['changed']}")

    def _restart(self, unchanged: str, remedy: Mapping[str, Any] | None = None) -> float | None:
        """Within the budget, after a wait."""
        delay_s = self._budget.take(time.monotonic())
        if delay_s is None:
            self.give_up(f"{self._options.restarts} restarts in an hour are used up: not restarted")
            return None
        changed = ""
        if remedy is not None:
            self._adopt(remedy)
            changed = remedy["changed"]
        current = self._setups.current
        self._incidents.begin_action("restart", {"changed": changed, "command": current.line})
        self._say(
            f"restart in {delay_s:g} s ({self._budget.left(time.monotonic())} left this hour): "
            + (f"changed {changed}. Expected now: {current.expected['text']}" if changed else unchanged)
        )
        return delay_s

    def _adopt(self, remedy: Mapping[str, Any]) -> None:
        self._setups.current = Setup.of(remedy)
        self.history[-1]["changed"] = remedy["changed"]
