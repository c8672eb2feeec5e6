"""The supervisor of `legroom run`: starts a server, watches it, and restarts it with computed fixes. One process that
waits for its child, for signals and for tasks. It polls only while a server starts."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from legroom.actions.child import Child
from legroom.actions.keeper import reap
from legroom.errors import ANSWER_IS_NO, OK, LegroomError
from legroom.guard import START_REQUESTED
from legroom.guard import TOKEN_NAME as GUARD_TOKEN
from legroom.process_table import descendants, engine_name, exit_signal, has_role, process_start_ticks
from legroom.records import dataclass
from legroom.run import restart_policy
from legroom.run.health import HangWatch, ServerAddress, api_server_cpu_ticks, has_clients, port_problem
from legroom.run.run_file import ProcessRecord, RunFile, save_script
from legroom.run.stopping import STOPPED_REPLY_S, Signals, Stopping
from legroom.run.task_process import StartTask, TaskProcess, start_task_process

if TYPE_CHECKING:
    from legroom.live.run_record import RunState

PoolReport = Literal["awaited", "printed", "compared"]
"""Whether the server has printed the size of its KV pool, and whether it was compared with the plan."""

PREFIX = "legroom: "


@dataclass(frozen=True)
class Timing:
    """Poll interval and timeouts of the supervisor."""

    poll_interval_s: float = 1.0
    """Between health checks of a starting server."""
    port_timeout_s: float = 10.0
    """How long the kernel may take to free the port of an ended server."""
    leftover_grace_s: float = 3.0
    """How long engine cores and resource trackers may outlive their server."""


DEFAULT_TIMING = Timing()


class Announcer:
    """Writes legroom's lines to stderr in a thread: a stalled reader (a pager, Ctrl-S) does not delay signals."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, daemon=True)

    def __enter__(self) -> Announcer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.put(None)
        self._thread.join(0.5)

    def say(self, line: str) -> None:
        """Queues a line for stderr, prefixed to differ from the server's; beyond 10,000 queued lines it is dropped."""
        if self._lines.qsize() < 10_000:
            self._lines.put(f"{PREFIX}{line}\n")

    def _write_all(self) -> None:
        """Writes queued lines to stderr until None is queued, past Python's buffer, whose lock could block the exit."""
        while (line := self._lines.get()) is not None:
            try:
                target = sys.stderr.fileno()
            except (OSError, ValueError):  # replaced by an object without a file descriptor
                sys.stderr.write(line)
                continue
            rest = line.encode("utf-8", "replace")
            with contextlib.suppress(OSError):  # nobody reads it any more
                while rest:
                    rest = rest[os.write(target, rest) :]


class Supervisor:
    """Runs one server until it is asked to stop, or restarts no longer help."""

    def __init__(
        self,
        options: restart_policy.RunOptions,
        prepared: Mapping[str, Any],
        say: Callable[[str], None],
        outputs: tuple[int, int] = (1, 2),
        timing: Timing = DEFAULT_TIMING,
        start_task: StartTask = start_task_process,
    ) -> None:
        self.options = options
        self.say = say
        self._setups = restart_policy.Setups(restart_policy.Setup.of(prepared))
        self.prepared = prepared
        self.verified: bool | None = None
        self._outputs, self._timing, self._start_task = outputs, timing, start_task
        self._address = ServerAddress(prepared["host"], prepared["port"], prepared["url"].startswith("https"))
        self.file = RunFile(prepared["port"])
        self.incidents = restart_policy.IncidentRecorder(prepared["url"], say)
        calls = (self._find_fix, self._last_lines, say)
        self._restarts = restart_policy.RestartPolicy(options, self._setups, self.incidents, *calls)
        given_token = self.setup.env.get(GUARD_TOKEN) or os.environ.get(GUARD_TOKEN)
        self._guard_token = (given_token or os.urandom(16).hex()) if prepared["has_guard"] else None
        self._guard_drain: TaskProcess | None = None
        self.stopping = Stopping(
            max(options.drain_s, prepared["own_drain_s"]),
            say,
            start_drain=self._start_guard_drain if self._guard_token else None,
            has_clients=lambda: has_clients(self._address.port),
        )
        self._pool_line_mark: bytes = prepared["capacity_mark"].encode()
        self._pool: PoolReport = "awaited"
        self._engines: list[int] = []
        """Pids of the engine cores of a running server."""
        self._is_start_requested = not self.file.path.exists()  # a run that was not killed removes its file
        """Whether a person or the sidecar asked for this start, so that it follows no crash."""
        self._handles: dict[int, tuple[str, int]] = {}
        """A pidfd of each engine process -> its name and pid."""
        self._first_death: restart_policy.ProcessDeath | None = None
        self._process_record: ProcessRecord | None = None
        """The log and memory account of the present or last server process."""

    @property
    def setup(self) -> restart_policy.Setup:
        return self._setups.current

    @property
    def history(self) -> list[dict[str, Any]]:
        """An entry (`history_entry`) for each end of the server, for the run file and --json."""
        return self._restarts.history

    def run(self) -> int:
        """Run the server, restarting it as the policy says; returns vLLM's exit code, never 0 after a crash."""
        with self.file.lock(self.say), Signals() as self._signals:
            try:
                return self._serve_until_stopped()
            finally:
                self.incidents.close("asked to stop" if self.stopping.stop_requested else "the run ended")
                self.file.remove()

    def _serve_until_stopped(self) -> int:
        """Starts the server again and again until stopped or given up; returns the exit code."""
        code = OK
        while not self.stopping.stop_requested:
            if not self._is_port_free():
                return code if self.stopping.stop_requested else code or ANSWER_IS_NO
            self._is_start_requested = not self._setups.tried and self._is_start_requested
            while self.stopping.restart_requested:
                self._is_start_requested = True
                self.stopping.reset()
                self._apply_pending_changes()
            if self.stopping.stop_requested:
                break
            if not self._setups.tried:
                self.say(f"starting: {self.setup.line}")
            ending = self._serve_once()
            code = self.stopping.exit_code(ending.code)
            if not self.stopping.is_stopping:
                code = code or ANSWER_IS_NO
                delay_s = self._restarts.delay_after(ending)
                if delay_s is None:
                    break
                until_s = time.monotonic() + delay_s
                while not self.stopping.stop_requested and (left_s := until_s - time.monotonic()) > 0:
                    self._wait_for_event(None, None, left_s)
        return code

    def _serve_once(self) -> restart_policy.ServerExit:
        """Starts the server once and waits until its process is gone; returns how it ended."""
        if self._process_record is not None:
            self._process_record.log.forget()
        self.file.keep_previous_log()
        record = self._process_record = ProcessRecord(self.file.log)
        self._pool, self.stopping.is_up, self._engines, self._first_death = "awaited", False, [], None
        began = time.monotonic()
        self._setups.mark_launched()
        # Python would buffer lines that it writes to a pipe.
        env = {"PYTHONUNBUFFERED": "1", **os.environ, **self.setup.env, START_REQUESTED: str(+self._is_start_requested)}
        if self._guard_token:
            env[GUARD_TOKEN] = self._guard_token
        child = Child(
            self.setup.words,
            env,
            log=record.log,
            on_line=self._on_output_line,
            outputs=self._outputs,
            leftover_grace_s=self._timing.leftover_grace_s,
        )
        task: TaskProcess | None = None
        watch: HangWatch | None = None
        timed_out = hung = False
        self._write_run_file("starting", child)
        try:
            while not child.gone:
                if watch is None:
                    self._track_processes(child, record)
                if watch is None and not self.stopping.is_stopping and self._address.is_healthy():
                    self.stopping.is_up = True
                    task = self._on_ready(child, record, task)
                    used, is_stopped = api_server_cpu_ticks(child), child.has_stopped_engine
                    watch = HangWatch(self.options.hang_timeout_s, used, self._address.answers, is_stopped=is_stopped)
                is_late = watch is None and time.monotonic() - began >= self.options.ready_timeout_s
                if is_late and not (timed_out or self.stopping.is_stopping):
                    timed_out = True
                    self.say(f"not healthy after {self.options.ready_timeout_s:.0f} s: stopping it. Its last lines:")
                    for line in self._last_lines():
                        self.say(f"  {line}")
                    self._kill(child)
                if watch is not None and not self.stopping.is_stopping and watch.is_hung():
                    hung = True
                    self.say(f"it hangs: it could not serve for {self.options.hang_timeout_s:g} s. Killing it")
                    self._kill(child)
                check_s = watch.seconds_to_next_check() if watch is not None else self._timing.poll_interval_s
                is_ending = watch is not None and self.stopping.is_stopping  # a stop has its own deadline
                task = self._wait_for_event(child, task, None if is_ending else check_s)
        finally:
            for open_task in (task, self._guard_drain):
                if open_task is not None:
                    open_task.stop()
            self._guard_drain = None
            while self._handles:
                os.close(self._handles.popitem()[0])
            child.close()
            record.log.close()
            record.report_write_error(self.say)
            self._write_run_file("stopping" if self.stopping.stop_requested else "restarting")
        self._first_death = None if self.stopping.is_stopping or timed_out or hung else self._first_death
        return restart_policy.ServerExit(
            child.exit_code or 0, watch is not None, timed_out, hung, time.monotonic() - began
        )

    def _on_output_line(self, line: bytes) -> None:
        """Called by the output threads for each line: notes when vLLM prints its KV pool."""
        if self._pool == "awaited" and self._pool_line_mark in line:
            self._pool = "printed"

    def _wait_for_event(
        self, child: Child | None, task: TaskProcess | None, timeout_s: float | None
    ) -> TaskProcess | None:
        """Waits for one event or the timeout and handles it; returns the task still running, or None."""
        waits = [wait for wait in (self._signals, child, task, self._guard_drain) if wait is not None]
        left_s = self.stopping.next_check_s()
        timeout_s = min((each for each in (timeout_s, left_s) if each is not None), default=None)
        readable, _, _ = select.select([*waits, *self._handles], [], [], timeout_s)
        for handle in self._handles.keys() & set(readable):
            name, pid = self._handles.pop(handle)
            number = exit_signal(pid, handle)
            # vLLM itself sends SIGTERM to the others when one fails to start, and its helpers end without a signal.
            is_sent_by_vllm = number == signal.SIGTERM and not self.stopping.is_up
            if name and not is_sent_by_vllm and (number or "::" in name):
                self._first_death = self._first_death or restart_policy.ProcessDeath(name, pid, number)
            os.close(handle)
        reap()  # orphans of a killed keeper, or of the container whose init process this is
        if self._signals in readable:
            # A server that came up since the last check may have requests already, and be too busy to answer /health.
            serves = child is not None and (has_clients(self._address.port) or self._address.is_healthy())
            self.stopping.is_up = self.stopping.is_up or serves
            for number in self._signals.received():
                self._handle_signal(number, child)
        if child is not None and child in readable:
            child.read()
            if child.status is not None and child.pid is not None and self._first_death is None:
                who, pid = ("its keeper", child.keeper_pid) if child.has_lost_keeper else ("the API server", child.pid)
                self._first_death = restart_policy.ProcessDeath(who, pid, child.status & 0x7F)
        drain = self._guard_drain
        if child is not None and drain is not None and drain in readable:
            drain.read()
            if drain.done:
                self._guard_drain = None
                self._report_output(drain)
                self.stopping.on_drained(child)
        self.stopping.check(child)
        self.file.retry_write()
        if self._process_record is not None:
            self._process_record.report_write_error(self.say)
        if task is not None and task in readable:
            task.read()
            if task.done:
                self._report_output(task)
                task = None
        if task is None and child is not None and self._pool == "printed":
            self._pool = "compared"
            task_input = self._log_input() | {"expected": dict(self.setup.expected)}
            task = TaskProcess("compare_pool", task_input, self._start_task)
        return task

    def _handle_signal(self, number: int, child: Child | None) -> None:
        """Forwards the signal to `stopping`; refuses a SIGHUP (restart) that would be wrong or useless now."""
        if number == signal.SIGHUP and child is not None:
            stopping = self.stopping
            if problem := self.file.reject_address_flags():
                self.say(f"SIGHUP: {problem}; the server goes on as it is")
                return
            # Two watchers may both request a restart after a crash.
            if not (stopping.is_up or stopping.is_stopping or self.file.has_changes()):
                self.say("SIGHUP: it is starting already, and nothing was left to change")
                return
            if not stopping.is_stopping and any(process_start_ticks(pid) is None for pid in self._engines):
                self.say("SIGHUP: its engine has died, so it is about to end and to be started again anyway")
                return
        self.stopping.on_signal(number, child)
        if child is not None and self.stopping.is_stopping:
            self._write_run_file("stopping" if self.stopping.stop_requested else "restarting", child)

    def _start_guard_drain(self, deadline_s: float) -> None:
        """Starts the task that makes the guard refuse new requests and waits up to `deadline_s` for the open ones."""
        task_input = {"url": self.prepared["url"], "token": self._guard_token, "deadline_s": deadline_s}
        self._guard_drain = TaskProcess("drain_guard", task_input, self._start_task)

    def _kill(self, child: Child) -> None:
        """Kills the server; if an engine is stopped, first its engines, so that the API server answers its clients."""
        if child.has_stopped_engine() and child.kill_engines():
            child.wait_gone(STOPPED_REPLY_S)
        child.kill()
        child.wait_gone(self._timing.port_timeout_s)

    def _on_ready(self, child: Child, record: ProcessRecord, task: TaskProcess | None) -> TaskProcess:
        """Records that the server serves, and reports `task`'s output; returns the task that verifies the server."""
        if task is not None:
            self._report_output(task)
        record.log.started()
        child.mark_ready()
        self._track_processes(child, record)
        self._engines = [pid for _, pid in self._handles.values() if has_role(pid, "EngineCore")]
        self._write_run_file("serving", child)
        self._restarts.served()
        task_input = self._task_input() | {"url": self.prepared["url"], "verify": self.options.verify}
        return TaskProcess("verify_and_calibrate", task_input, self._start_task)

    def _track_processes(self, child: Child, record: ProcessRecord) -> None:
        """Finds the cgroup and opens a pidfd of each engine process; repeated, because vLLM sets titles late."""
        record.track_cgroup(child.pid)
        handles = {pid: handle for handle, (_, pid) in self._handles.items()}
        for pid in descendants(child.pid) if child.pid is not None else ():
            name = engine_name(pid, child.pid or 0)
            with contextlib.suppress(OSError):
                if name or pid in handles:
                    self._handles[handles.get(pid) or os.pidfd_open(pid)] = name, pid

    def _report_output(self, task: TaskProcess) -> None:
        """Prints a finished task's output; a failed verification opens an incident, a passed one saves the script."""
        try:
            output = task.output()
        except LegroomError as error:
            self.say(error.message)
            return
        if output["line"]:
            self.say(output["line"])
        if "ok" not in output:
            return
        self.verified = output["ok"] if self.options.verify else None
        if output["ok"] is False:
            name = self.incidents.open("not_verified", output["proof"], {"command": self.setup.line})
            self.say(f"NOT verified ({name}): {output['proof']}")
            return
        if output["proof"]:
            self.say(f"{'verified' if output['ok'] else 'not verified'}: {output['proof']}")
        self.say(f"serving at {self.prepared['url']} with: {self.setup.line}")
        if self.options.save:
            self.say(save_script(self.options.save, self.setup.words, self.setup.env))

    def _task_input(self) -> dict[str, Any]:
        """The JSON input that every task gets: command, environment, vLLM version, GPUs and log."""
        machine = {name: self.prepared[name] for name in ("vllm", "gpus")}
        return {"words": self.setup.words, "env": self.setup.env, **machine, **self._log_input()}

    def _log_input(self) -> dict[str, Any]:
        """JSON input for a task that reads the log: its path and the OOM counters of the current process."""
        return self._process_record.task_input() if self._process_record is not None else {"log": str(self.file.log)}

    def _last_lines(self) -> list[str]:
        """The last 15 lines that the present or last server printed."""
        return self._process_record.last_lines(15) if self._process_record is not None else []

    def _run_task(self, name: str, task_input: Mapping[str, Any]) -> dict[str, Any] | None:
        """Runs a task, handling signals until it ends; its output, or None where a stop was requested first."""
        task = TaskProcess(name, task_input, self._start_task)
        while not task.done:
            waits: list[Signals | TaskProcess] = [self._signals, task]
            if task in select.select(waits, [], [])[0]:
                task.read()
            for number in self._signals.received():
                self._handle_signal(number, None)
            if self.stopping.stop_requested:
                task.stop()
                return None
        return task.output()

    def _find_fix(self) -> dict[str, Any] | None:
        """The remedy (JSON) that a task computes from the log, or why it could not read it; None if stopped first."""
        bounds = {
            "keep": self.prepared["keep"],
            "min_context": self.options.min_context,
            "min_concurrency": self.options.min_concurrency,
            "tried": [(tried.words, tried.env) for tried in self._setups.tried],
            "death": asdict(self._first_death) if self._first_death is not None else None,
        }
        try:
            return self._run_task("find_fix", self._task_input() | bounds)
        except LegroomError as why:
            refused = "the log could not be read"
            return {"failed": f"{why.message}.", "refused": refused, "words": (), "is_memory": False}

    def _apply_pending_changes(self) -> None:
        """Applies and reports the flags and variables left for this restart; invalid ones are left out."""
        changes, problem = self.file.pop_changes()
        if problem:
            self.say(problem)
        if changes is None:
            return
        try:
            output = self._run_task("apply_changes", self._task_input() | {"changes": dict(changes)})
        except LegroomError as error:
            self.say(f"the changes for this restart are left out: {error.message}")
            return
        if output is not None:
            self._setups.change(output)
            self.say(f"restart with: {self.setup.line}. Expected now: {self.setup.expected['text']}")

    def _is_port_free(self) -> bool:
        """Waits until the port is free; False if it stays in use, or on a stop; LegroomError at the first start."""
        until = time.monotonic() + self._timing.port_timeout_s
        while problem := port_problem(self._address.host, self._address.port):
            if not self._setups.tried:
                raise LegroomError(problem, "stop what listens there, or give vLLM another --port")
            if time.monotonic() >= until:
                self._restarts.give_up(f"{problem}: not started again")
                return False
            self._wait_for_event(None, None, 0.1)
            if self.stopping.stop_requested:
                return False
        return True

    def _write_run_file(self, state: RunState, child: Child | None = None) -> None:
        """Writes the run file with this state; the pids are those of `child`, null without one."""
        pids = {
            "child_pid": child.pid if child else None,
            "keeper_pid": child.keeper_pid if child else None,
            "engine_pids": self._engines if child else [],
        }
        shown, count = shlex.split(self.setup.line), len(self.setup.env)  # keys and tokens stay in memory
        env = dict(word.partition("=")[::2] for word in shown[:count])
        command = {"command": shown[count:], "env": env, "start_requested": self._is_start_requested}
        self.file.record({"pid": os.getpid(), **pids, "url": self.prepared["url"], "state": state, **command}, self.say)
