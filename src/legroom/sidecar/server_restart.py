"""One restart, from the drain until the server answers again. Each stage is journalled before it begins. After a kill,
`resume` undoes a restart that had not reached the server and finishes one that had. The platform's identity of the
server (a pid, a container id) shows whether the restart happened, so that it is never done twice."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from legroom.actions import platform
from legroom.actions.programs import process_identity
from legroom.actions.server_drain import DrainMethod, NoDrain, PlatformDrain, wait_until_empty
from legroom.live.journal.journal import Journal
from legroom.live.journal.journal_buffer import Write
from legroom.live.journal.journal_records import DONE, FAILED, UNDONE, Action, JournalUnavailable
from legroom.live.metrics.sample import Sample, ScrapeResult
from legroom.records import dataclass
from legroom.sidecar.action_policy import ActionLimits
from legroom.sidecar.open_incidents import BY
from legroom.sidecar.watch_config import ServerConfig

_Answer = TypeVar("_Answer")


class JournalCall(Protocol):
    """Calls a function with the journal, in the journal's own thread. Raises `JournalUnavailable`."""

    def __call__(self, call: Callable[[Journal], _Answer], /) -> Awaitable[_Answer]: ...


@dataclass(frozen=True)
class ActionContext:
    """What actions need: the journal, a scrape function and a poll interval."""

    journal: JournalCall
    write_later: Callable[[Write], None]
    """Queues a write without waiting."""
    scrape: Callable[[ServerConfig], Awaitable[ScrapeResult]]
    home: Path
    poll_s: float = 0.5

    async def finish(self, action_id: int, state: str, detail: Mapping[str, Any] | None = None) -> None:
        """Records the action's final `state` (done, failed, undone), as soon as the journal can be written."""

        def write_state(journal: Journal) -> None:
            """Writes the final state into the journal."""
            journal.finish_action(action_id, state, detail)

        try:
            await self.journal(write_state)
        except JournalUnavailable:
            self.write_later(write_state)


@dataclass(frozen=True)
class RestartOutcome:
    """The final state (done, failed or undone) and a sentence."""

    state: str
    text: str
    action_id: int


@dataclass(frozen=True)
class RestartOrder:
    server: ServerConfig
    limits: ActionLimits
    name: str
    reason: str
    failing: bool
    """Whether requests are lost already, so that no drain waits for them."""
    incident_id: int | None = None
    change: platform.FlagChange | None = None
    restore: tuple[int, platform.Override] | None = None
    """The earlier action whose flag change this one reverts."""


class _Abandoned(Exception):
    """The restart is abandoned before it reached the server."""


class ServerRestart:
    """Carries out one restart order, or resumes one that a killed legroom left unfinished."""

    def __init__(self, context: ActionContext, order: RestartOrder) -> None:
        if order.server.platform is None:
            raise platform.ActionFailed(f"no platform is named for {order.server.name}, so it cannot be restarted")
        self._context, self._order = context, order
        self._platform: platform.Platform = order.server.platform
        self._drain_method: DrainMethod = order.server.drain_method or NoDrain()
        self._id = 0
        self._launched = False

    async def run(self, on_begun: Callable[[], None] = lambda: None) -> RestartOutcome:
        """Drains and restarts the server until it answers again; calls `on_begun` once the journal has the restart,
        before which alone it raises `ActionFailed` or `JournalUnavailable`. Later failures are recorded: undone (by the
        old flags) until the server is reached, then failed. A cancellation is raised again, unrecorded after that."""
        order = self._order
        before = await self._platform.state()
        running = await self._context.scrape(order.server)
        started_s = running.process_start_s if isinstance(running, Sample) else None
        override = await self._platform.override_place() if order.change is not None else None
        detail = self._begun_detail(before, started_s)
        begin = (order.incident_id, order.server.group, order.name, detail)
        self._id = await self._context.journal(lambda journal: journal.begin_action(*begin))
        on_begun()
        try:
            if override is not None:
                platform.keep_override(self._id, override, self._context.home)
            await self._drain_server()
            await self._launch()
            await self._wait_until_back(before, started_s)
        except _Abandoned as given_up:
            return await self._record_undone(str(given_up))
        except (platform.ActionFailed, JournalUnavailable) as error:
            return await (self._record_failed(error.message) if self._launched else self._record_undone(error.message))
        except asyncio.CancelledError:
            # A restart that reached the server stays unfinished in the journal, for the next process.
            if not self._launched:
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(asyncio.shield(self._record_undone("legroom was stopped")), 20.0)
            raise
        return await self._record_done(f"{order.server.name} was restarted by {self._platform.name}")

    def _begun_detail(self, before: platform.State, started_s: float | None) -> dict[str, Any]:
        """The journal's detail of the restart, from which a later process can resume it."""
        order = self._order
        return {
            "by": BY,
            "server": order.server.name,
            "platform": self._platform.name,
            "door": self._drain_method.name,
            "identity_before": before.identity,
            "process_start_before_s": started_s,
            "failing": order.failing,
            "reason": order.reason,
            "change": str(order.change) if order.change is not None else None,
            "takes_back": order.restore[0] if order.restore is not None else None,
        }

    async def _drain_server(self) -> None:
        """Drains the server until it has no request, unless it is failing; raises _Abandoned if the drain fails."""
        order, drain_method = self._order, self._drain_method
        await self._record_stage("draining", {"door": drain_method.name})
        try:
            await drain_method.begin()
        except platform.ActionFailed as error:
            if not order.failing:
                raise _Abandoned(f"new work could not be stopped: {error.message}") from error
        if order.failing or isinstance(drain_method, PlatformDrain):
            why = "it is failing: its requests are lost already" if order.failing else drain_method.name
            await self._record_stage("drained", {"waited": False, "why": why})
            return
        deadline_s, poll_s = order.limits.drain_deadline_s, self._context.poll_s
        drained = await wait_until_empty(drain_method, self._unfinished_requests, deadline_s, poll_s)
        if not drained.empty:
            no_drain = isinstance(drain_method, NoDrain)
            more = ", and there is no guard or other way to stop new work" if no_drain else ""
            raise _Abandoned(f"{drained}{more}")
        await self._record_stage("drained", {"waited_s": round(drained.waited_s, 2)})

    async def _launch(self) -> None:
        """Writes or restores flags and restarts by the platform; raises _Abandoned where the change is refused."""
        order = self._order
        if order.change is not None or order.restore is not None:
            # Kubernetes rolls a change out by itself.
            await self._mark_launched(0, "")
        if order.change is not None:
            try:
                await self._platform.write_flags(order.change)
            except platform.ActionFailed as error:
                raise _Abandoned(f"the flags could not be changed: {error.message}") from error
        if order.restore is not None:
            await self._platform.restore_flags(order.restore[1])
        token, deadline_s = f"{self._id}-{time.time():.0f}", order.limits.restart_deadline_s
        await self._platform.restart(platform.RestartRequest(token, deadline_s, self._mark_launched))
        await self._record_stage("restarted", {})

    async def _mark_launched(self, pid: int, identity: str) -> None:
        """Records that the restart program was started, with its pid (0: none) and process identity."""
        await self._record_stage("launched", {"pid": pid, "identity": identity})
        self._launched = True

    async def _wait_until_back(self, before: platform.State, started_s: float | None) -> None:
        """Waits until another process than `before`, or than the one started at `started_s`, answers with metrics;
        ActionFailed after the restart deadline."""
        limit_s = self._order.limits.restart_deadline_s
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            result = await self._context.scrape(self._order.server)
            if isinstance(result, Sample) and await self._is_new_process(before, started_s, result):
                return
            await asyncio.sleep(self._context.poll_s)
        text = f"{self._order.server.name} did not answer within {limit_s:g} s of its restart"
        more = f": {self._platform.name} is still starting it" if await self._is_starting() else ""
        raise platform.ActionFailed(text + more)

    async def _is_starting(self) -> bool:
        """Whether the platform is starting the server now."""
        with contextlib.suppress(platform.ActionFailed):
            return (await self._platform.state()).underway
        return False

    async def _is_new_process(self, before: platform.State, started_s: float | None, sample: Sample) -> bool:
        """Whether `sample` is of another process than the one before the restart: by start time, else by the platform's
        identity. True where neither was known before, False where the platform cannot tell."""
        if started_s is not None and sample.process_start_s is not None:
            return sample.process_start_s != started_s
        if before.identity is None:
            return True
        with contextlib.suppress(platform.ActionFailed):
            return (await self._platform.state()).identity not in (None, before.identity)
        return False

    async def _unfinished_requests(self) -> float | None:
        """Running plus waiting requests by a scrape now; None where it fails or does not report them."""
        result = await self._context.scrape(self._order.server)
        if not isinstance(result, Sample) or result.running is None:
            return None
        return result.running + (result.waiting or 0.0)

    async def _record_stage(self, name: str, detail: Mapping[str, Any]) -> None:
        """Adds a stage of the restart, such as `drained`, to its action in the journal."""
        await self._context.journal(lambda journal: journal.reach_stage(self._id, name, detail))

    async def _record_done(self, text: str) -> RestartOutcome:
        """Ends the drain, marks restored flags as undone, and records the restart as done; `text`: the outcome."""
        text = await self._end_drain(text)
        if self._order.restore is not None:
            taken_back = self._order.restore[0]
            await self._context.finish(taken_back, UNDONE)
            platform.forget_override(taken_back, self._context.home)
        return await self._record_outcome(DONE, text)

    async def _record_failed(self, text: str) -> RestartOutcome:
        """Ends the drain, and records the restart as failed; `text`: the outcome."""
        return await self._record_outcome(FAILED, await self._end_drain(text, retries=False))

    async def _record_undone(self, text: str) -> RestartOutcome:
        """Restores changed flags whose old values were stored, ends the drain, and records the restart as undone."""
        override = platform.kept_override(self._id, self._context.home)
        if override is not None:
            with contextlib.suppress(platform.ActionFailed):
                await self._platform.restore_flags(override)
                platform.forget_override(self._id, self._context.home)
        return await self._record_outcome(UNDONE, await self._end_drain(text, retries=False))

    async def _record_outcome(self, state: str, text: str) -> RestartOutcome:
        """Records the final state (done, failed, undone) in the journal, and returns it."""
        await self._context.finish(self._id, state, {"outcome": text})
        return RestartOutcome(state, text, self._id)

    async def _end_drain(self, text: str, retries: bool = True) -> str:
        """Ends the drain, if it `retries` for up to 30 s; returns `text`, with the problem appended if that fails."""
        end_s = time.monotonic() + (30.0 if retries else 0.0)
        while True:
            try:
                await self._drain_method.end()
            except platform.ActionFailed as error:
                if time.monotonic() < end_s:
                    await asyncio.sleep(1.0)
                    continue
                is_inside = getattr(self._drain_method, "url", "") == self._order.server.name
                if is_inside and await self._is_starting():
                    return text  # a guard in a server that starts turns nobody away
                return f"{text}; {self._drain_method.name} may still turn requests away: {error.message}"
            return text

    async def resume(self, action: Action) -> RestartOutcome:
        """Finishes or undoes the restart of a journalled action that a killed legroom left unfinished."""
        self._id = action.id
        launched = action.stage("launched")
        if launched is None:
            return await self._record_undone("legroom was killed before the server was touched")
        self._launched = True
        pid, identity = int(launched.detail.get("pid") or 0), launched.detail.get("identity")
        end_s = time.monotonic() + self._order.limits.restart_deadline_s
        while pid and identity and process_identity(pid) == identity and time.monotonic() < end_s:
            await asyncio.sleep(min(self._context.poll_s, 0.2))
        before = platform.State(action.detail.get("identity_before"))
        started_s = action.detail.get("process_start_before_s")
        try:
            if await self._has_restarted(before, started_s, launched.time_s):
                await self._wait_until_back(before, started_s)
                return await self._record_done("legroom was killed during the restart, which had happened")
            state = await self._platform.state()
            if state.running is False and not state.underway:
                # It was stopped and never started.
                await self._launch()
                await self._wait_until_back(before, started_s)
                started = "the server was down and is started"
                return await self._record_done(f"legroom was killed during the restart; {started}")
        except (platform.ActionFailed, JournalUnavailable) as error:
            return await self._record_failed(error.message)
        return await self._record_undone("legroom was killed before the restart took effect")

    async def _has_restarted(self, before: platform.State, started_s: float | None, launched_s: float) -> bool:
        """Whether another process than `before` (or than that started at `started_s`) runs; checked until the platform
        has had its `settle_s` since `launched_s`."""
        end_s = time.monotonic() + max(0.0, self._platform.settle_s - max(0.0, time.time() - launched_s))
        while True:
            with contextlib.suppress(platform.ActionFailed):
                now = await self._platform.state()
                if before.identity is not None and now.identity not in (None, before.identity):
                    return True
                if now.underway:
                    end_s = max(end_s, time.monotonic() + self._context.poll_s)
            result = await self._context.scrape(self._order.server)
            if isinstance(result, Sample) and started_s is not None and result.process_start_s is not None:
                if result.process_start_s != started_s:
                    return True
            elif isinstance(result, Sample) and before.identity is None:
                return True  # without an identity an answer is all there is
            if time.monotonic() >= end_s:
                return False
            await asyncio.sleep(self._context.poll_s)
