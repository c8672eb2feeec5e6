"""`legroom run`: start a server, see it through, and start it again with what mends it.

One process that waits: on its child, on signals, on a question to counsel. It polls only while a server starts.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from legroom.actions.child import Child
from legroom.actions.descendants import reap
from legroom.actions.server_log import KeptLog, last_lines
from legroom.errors import ANSWER_IS_NO, OK, LegroomError
from legroom.guard import TOKEN_NAME as GUARD_TOKEN
from legroom.run.health import HangWatch, health_status, is_healthy, port_problem, ticks_in_front
from legroom.run.incidents import Diary
from legroom.run.options import RunOptions, Setup
from legroom.run.outcomes import TriedFix
from legroom.run.restarts import LINES_SHOWN, Ending, RestartBudget, journalled, remembered
from legroom.run.run_file import RunFile
from legroom.run.stopping import Signals, Stopping
from legroom.run.task_process import Asking

LOOK_S = 1.0
"""How often a starting server is asked whether it is healthy."""
_PORT_PATIENCE_S = 10.0
"""How long the kernel may take to free the port of a server that is gone."""
Pool = Literal["unsaid", "said", "compared"]
"""Whether the server has printed the size of its KV pool, and whether that was held against the plan."""


class Supervisor:
    """Holds one server for as long as it should run."""

    def __init__(
        self,
        options: RunOptions,
        prepared: Mapping[str, Any],
        say: Callable[[str], None],
        outputs: tuple[int, int] = (1, 2),
    ) -> None:
        self.options = options
        self.say = say
        self.setup = Setup.of(prepared)
        self.prepared = prepared
        self.history: list[dict[str, Any]] = []
        """What failed and what was done about it, in order."""
        self.verified: bool | None = None
        self._outputs = outputs
        self._door: tuple[str, int, bool] = (prepared["host"], prepared["port"], prepared["url"].startswith("https"))
        self.file = RunFile(prepared["port"])
        self.diary = Diary(prepared["url"], say)
        self._tried_fix = TriedFix(prepared["vllm"], say)
        self._guard_token = _guard_token(self.setup.env) if prepared["has_guard"] else None
        self._emptying: Asking | None = None
        self.stopping = Stopping(
            max(options.drain_s, prepared["own_drain_s"]), say,
            close_door=self._close_guard if self._guard_token else None,
        )  # fmt: skip
        self._budget = RestartBudget(options.restarts, options.restart_delay_s)
        self._mark: bytes = prepared["capacity_mark"].encode()
        self._pool: Pool = "unsaid"
        self._tried: list[Setup] = []
        """Every set-up that was launched: none of them is the fix of a failure."""
        self._served: list[Setup] = []
        """Those that came up, the last one last."""
        self._taken_away: dict[str, str] = {}
        """Variables that a change took from the environment, until it has served."""
        self._tries = 0

    def run(self) -> int:
        """The exit code: vLLM's, except that an end which nobody asked for is never 0."""
        with self.file.alone(self.say), Signals() as self._signals:
            try:
                return self._lives()
            finally:
                self.diary.failed("asked to stop" if self.stopping.for_good else "the run ended")
                self.file.remove()

    def _lives(self) -> int:
        code = OK
        while not self.stopping.for_good:
            if not self._is_port_free():
                return code if self.stopping.for_good else code or ANSWER_IS_NO
            while self.stopping.restart:
                self.stopping.restarting()
                self._take_changes()
            if self.stopping.for_good:
                break
            ending = self._live()
            code = ending.code
            if not self.stopping.begun:
                code = code or ANSWER_IS_NO
                if not (self._after_crash(ending) if ending.was_ready else self._after_failed_start(ending)):
                    break
        return code

    def _live(self) -> Ending:
        self.file.keep_previous_log()
        log = KeptLog(self.file.log)
        self._pool, self.stopping.is_up = "unsaid", False
        began = time.monotonic()
        if not self.setup.is_among(self._tried):
            self._tried.append(self.setup)
        # Into a pipe Python would keep lines back until there are many.
        env = {"PYTHONUNBUFFERED": "1", **os.environ, **self.setup.env}
        if self._guard_token:
            env[GUARD_TOKEN] = self._guard_token
        child = Child(self.setup.words, env, log=log, see=self._see, outputs=self._outputs)
        asking: Asking | None = None
        watch: HangWatch | None = None
        timed_out = hung = False
        self._record(child)
        try:
            while not child.gone:
                if watch is None and not self.stopping.begun and self._is_up():
                    self.stopping.is_up = True
                    asking = self._came_up(child, log, asking)
                    watch = HangWatch(self.options.hang_timeout_s, ticks_in_front(child), self._answers)
                timed_out = timed_out or self._is_late(child, watch is not None, began)
                hung = self._hangs(child, watch) or hung
                asking = self._go_on(child, asking, self._look_s(watch))
        finally:
            for open_question in (asking, self._emptying):
                if open_question is not None:
                    open_question.stop()
            self._emptying = None
            child.close()
            log.close()
        return Ending(child.exit_code or 0, watch is not None, timed_out, hung, time.monotonic() - began)

    def _is_up(self) -> bool:
        return is_healthy(*self._door)

    def _answers(self, patience_s: float) -> bool:
        return health_status(*self._door, patience_s) is not None

    def _look_s(self, watch: HangWatch | None) -> float | None:
        """How long until the server is looked at again; one that is on its way out has a deadline instead."""
        if watch is None:
            return LOOK_S
        return None if self.stopping.begun else watch.left_s()

    def _hangs(self, child: Child, watch: HangWatch | None) -> bool:
        if watch is None or self.stopping.begun or not watch.hangs():
            return False
        self.say(f"it hangs: no answer and no work for {self.options.hang_timeout_s:g} s. Killing it")
        child.kill()
        child.wait_gone(_PORT_PATIENCE_S)
        return True

    def _see(self, line: bytes) -> None:
        """Called by the threads that pass output on."""
        if self._pool == "unsaid" and self._mark in line:
            self._pool = "said"

    def _go_on(self, child: Child | None, asking: Asking | None, patience_s: float | None) -> Asking | None:
        """Wait for something to happen, take it in, and give back the question that is still open."""
        waits = [wait for wait in (self._signals, child, asking, self._emptying) if wait is not None]
        left_s = self.stopping.left_s()
        patience_s = left_s if patience_s is None else patience_s if left_s is None else min(patience_s, left_s)
        readable, _, _ = select.select(waits, [], [], patience_s)
        if os.getpid() == 1:
            reap()  # the first process of a container: every orphan in it comes here
        if self._signals in readable:
            # One that came up since the last look has requests to finish already.
            self.stopping.is_up = self.stopping.is_up or (child is not None and self._is_up())
            for number in self._signals.taken():
                self._take(number, child)
        if child is not None and child in readable:
            child.read()
        if child is not None and self._emptying is not None and self._emptying in readable:
            self._see_emptied(self._emptying, child)
        self.stopping.check(child)
        if asking is not None and asking in readable:
            asking.read()
            if asking.done:
                self._answered(asking)
                asking = None
        if asking is None and child is not None and self._pool == "said":
            self._pool = "compared"
            asking = Asking("compare", {"log": str(self.file.log), "expected": dict(self.setup.expected)})
        return asking

    def _take(self, number: int, child: Child | None) -> None:
        if number == signal.SIGHUP and child is not None and (problem := self.file.moving()):
            self.say(f"SIGHUP: {problem}; the server goes on as it is")
        else:
            self.stopping.take(number, child)

    def _close_guard(self, deadline_s: float) -> None:
        question = {"url": self.prepared["url"], "token": self._guard_token, "deadline_s": deadline_s}
        self._emptying = Asking("empty", question)

    def _see_emptied(self, emptying: Asking, child: Child) -> None:
        emptying.read()
        if emptying.done:
            self._emptying = None
            self._answered(emptying)
            self.stopping.emptied(child)

    def _is_late(self, child: Child, ready: bool, began: float) -> bool:
        patience_s = self.options.ready_timeout_s
        if ready or self.stopping.begun or time.monotonic() - began < patience_s:
            return False
        self.say(f"not healthy after {patience_s:.0f} s: stopping it. Its last lines:")
        for line in last_lines(self.file.log, LINES_SHOWN):
            self.say(f"  {line}")
        child.kill()
        child.wait_gone(_PORT_PATIENCE_S)
        return True

    def _came_up(self, child: Child, log: KeptLog, asking: Asking | None) -> Asking:
        if asking is not None:
            self._answered(asking)
        log.started()
        child.settle()
        self.diary.worked("it serves again")
        self._tried_fix.end(worked=True)
        self._tries = 0
        self._served = [*(one for one in self._served if not one.is_like(self.setup)), self.setup]
        self._taken_away.clear()
        question = self._question() | {"url": self.prepared["url"], "verify": self.options.verify}
        return Asking("settle", question)

    def _answered(self, asking: Asking) -> None:
        try:
            answer = asking.answer()
        except LegroomError as error:
            self.say(error.message)
            return
        for line in answer["lines"]:
            self.say(line)
        if "ok" in answer:
            self._settled(answer)

    def _settled(self, answer: Mapping[str, Any]) -> None:
        self.verified = answer["ok"] if self.options.verify else None
        if answer["ok"] is False:
            name = self.diary.happened("not_verified", answer["proof"], {"command": self.setup.line})
            self.say(f"NOT verified ({name}): {answer['proof']}")
            return
        if answer["proof"]:
            self.say(f"{'verified' if answer['ok'] else 'not verified'}: {answer['proof']}")
        self.say(f"serving at {self.prepared['url']} with: {self.setup.line}")
        if self.options.save:
            from legroom.run.start_script import save  # noqa: PLC0415

            self.say(save(self.options.save, self.setup.words, self.setup.env))

    def _question(self) -> dict[str, Any]:
        return {
            "words": self.setup.words, "env": self.setup.env, "vllm": self.prepared["vllm"], "log": str(self.file.log),
            "gpus": self.prepared["gpus"],
        }  # fmt: skip

    def _asked(self, task: str, question: Mapping[str, Any]) -> dict[str, Any] | None:
        """An answer, while signals still count; None where a stop came first."""
        asking = Asking(task, question)
        while not asking.done:
            waits: list[Signals | Asking] = [self._signals, asking]
            if asking in select.select(waits, [], [])[0]:
                asking.read()
            for number in self._signals.taken():
                self._take(number, None)
            if self.stopping.for_good:
                asking.stop()
                return None
        return asking.answer()

    def _mended(self) -> dict[str, Any] | None:
        options = self.options
        bounds = {
            "keep": self.prepared["keep"], "min_context": options.min_context,
            "min_concurrency": options.min_concurrency,
            "tried": [(tried.words, tried.env) for tried in self._tried],
        }  # fmt: skip
        try:
            return self._asked("mend", self._question() | bounds)
        except LegroomError as why:
            return {
                "failed": f"{why.message}.",
                "refused": "the log could not be read",
                "words": (),
                "is_memory": False,
            }

    def _after_failed_start(self, ending: Ending) -> bool:
        """Whether to launch again."""
        self.diary.action_failed()
        self._tried_fix.end(worked=False)
        remedy = self._mended()
        if remedy is None:
            return False
        detail = journalled(ending, remedy, self.setup.line, self.file.log) | {"how": ending.why}
        name = self.diary.happened("start_failed", f"start-up failed: {remedy['failed']}", detail)
        self.history.append(remembered("start_failed", ending, remedy))
        of = self.options.tries
        head = f"start failed ({ending.why}, {name}): {remedy['failed']}"
        if remedy["words"] and self._tries < of:
            self._tries += 1
            expected = remedy["expected"]["text"]
            self.say(f"try {self._tries} of {of}: {head} Changed: {remedy['changed']}. Expected now: {expected}")
            self._adopt(remedy)
            self._tried_fix.begin(remedy)
            self.diary.about_to("relaunch", {"changed": remedy["changed"], "command": self.setup.line})
            return True
        refused = f"{of} tries are used up; next would be {remedy['changed']}" if remedy["words"] else remedy["refused"]
        if not self._served or self.options.on_crash == "exit":
            return self._give_up(f"{head} Not tried again: {refused}")
        if self.setup.is_among(self._served):
            self.say(f"{head} Nothing is changed: {refused}")
            return self._restart("it has served before")
        self.say(f"{head} Not tried again: {refused}")
        self.setup = self._served[-1]
        os.environ.update(self._taken_away)
        return self._restart(f"back to what has served: {self.setup.line}")

    def _adopt(self, remedy: Mapping[str, Any]) -> None:
        self.setup = Setup.of(remedy)
        self.history[-1]["changed"] = remedy["changed"]

    def _after_crash(self, ending: Ending) -> bool:
        """Whether to restart; the incident is written before anything else is done."""
        if ending.code == 0:
            self.say("vLLM exited 0, but nobody had asked it to stop: its engine died")
        what = "hung and was killed" if ending.hung else "died"
        title = f"the server {what} after {ending.lived_s:.0f} s (exit {ending.code})"
        name = self.diary.happened("died_serving", title, journalled(ending, {}, self.setup.line, self.file.log))
        self.say(f"{name}: {title}")
        remedy = self._mended()
        if remedy is None:
            return False
        self.diary.found(remedy["failed"], {"cause": remedy.get("cause"), "evidence": remedy.get("evidence")})
        self.say(f"diagnosis: {remedy['failed']}")
        self.history.append(remembered("died_serving", ending, remedy))
        if self.options.on_crash == "exit":
            return self._give_up("--on-crash exit: not restarted")
        return self._restart("the same command", remedy if remedy["is_memory"] and remedy["words"] else None)

    def _restart(self, unchanged: str, remedy: Mapping[str, Any] | None = None) -> bool:
        """Whether to launch again: within the budget, after a wait."""
        delay_s = self._budget.take(time.monotonic())
        if delay_s is None:
            return self._give_up(f"{self.options.restarts} restarts in an hour are used up: not restarted")
        changed = ""
        if remedy is not None:
            self._adopt(remedy)
            changed = remedy["changed"]
        self.diary.about_to("restart", {"changed": changed, "command": self.setup.line})
        self.say(
            f"restart in {delay_s:g} s ({self._budget.left(time.monotonic())} left this hour): "
            + (f"changed {changed}. Expected now: {self.setup.expected['text']}" if changed else unchanged)
        )
        self._pause(delay_s)
        return not self.stopping.for_good

    def _give_up(self, reason: str) -> bool:
        self.say(reason)
        self.diary.failed(reason)
        return False

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self.stopping.for_good and (left := until - time.monotonic()) > 0:
            self._go_on(None, None, left)

    def _take_changes(self) -> None:
        """What somebody left for this restart."""
        changes, problem = self.file.take_changes()
        if problem:
            self.say(problem)
        if changes is None:
            return
        try:
            answer = self._asked("change", self._question() | {"changes": dict(changes)})
        except LegroomError as error:
            self.say(f"the changes for this restart are left out: {error.message}")
            return
        if answer is not None:
            self.setup = Setup.of(answer)
            # What the server inherits.
            self._taken_away |= {name: os.environ.pop(name) for name in answer["unset"] if name in os.environ}
            self.say(f"restart with: {self.setup.line}. Expected now: {self.setup.expected['text']}")

    def _is_port_free(self) -> bool:
        """Whether to launch. What is left of our own server gets a moment to go."""
        until = time.monotonic() + _PORT_PATIENCE_S
        while problem := port_problem(self.prepared["host"], self.prepared["port"]):
            if not self._tried:
                raise LegroomError(problem, "stop what listens there, or give vLLM another --port")
            if time.monotonic() >= until:
                return self._give_up(f"{problem}: not started again")
            self._go_on(None, None, 0.1)
            if self.stopping.for_good:
                return False
        return True

    def _record(self, child: Child) -> None:
        problem = self.file.write(
            {
                "pid": os.getpid(), "child_pid": child.pid, "keeper_pid": child.keeper_pid, "url": self.prepared["url"],
                "command": self.setup.words, "env": self.setup.env, "log": str(self.file.log), "started_s": time.time(),
            }
        )  # fmt: skip
        if problem:
            self.say(problem)


def _guard_token(env: Mapping[str, str]) -> str:
    """The user's, else one that only this run and its server know."""
    return env.get(GUARD_TOKEN) or os.environ.get(GUARD_TOKEN) or os.urandom(16).hex()
