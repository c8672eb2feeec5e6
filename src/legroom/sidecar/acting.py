"""Acts on open incidents: applies the policy, takes the lease, drains, restarts or scales, and reports the outcome."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from legroom.actions.kubernetes_platform import KubernetesLease
from legroom.actions.platform import ActionFailed, FlagsFixed, Override, kept_override, scale
from legroom.live.detectors import Watcher
from legroom.live.journal.journal import Journal
from legroom.live.journal.journal_records import DONE, FAILED, UNDONE, Action, JournalUnavailable
from legroom.live.metrics.sample import Sample, ScrapeResult
from legroom.live.run_record import run_under_way
from legroom.sidecar.action_policy import DAY_S, RESTARTS, Decision, GroupState, ServerProblem, decide, refuse
from legroom.sidecar.decisions import decision_about
from legroom.sidecar.notifier import ActionReport
from legroom.sidecar.open_incidents import BY, OpenIncident
from legroom.sidecar.server_restart import ActionContext, RestartOrder, RestartOutcome, ServerRestart
from legroom.sidecar.watch_config import ServerConfig, SidecarConfig

_COUNTED = (*RESTARTS, "scale", "undo")


class Actor:
    """Acts on incidents, one action per group at a time. Actions are journalled before they begin."""

    def __init__(self, config: SidecarConfig, context: ActionContext, report: Callable[[ActionReport], None]) -> None:
        self._config, self._context, self._report = config, context, report
        self._servers = {server.name: server for server in config.servers}
        self._drains = Drains(self._servers, context, report)
        self._busy: dict[str, str] = {}
        self._acting_on: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun: dict[int, tuple[str, float]] = {}
        """Action id -> group and monotonic start, so that a changed clock frees no budget."""
        self._acted_until_s: dict[str, float] = {}
        self._holder = f"{BY} on {socket.gethostname()}"
        kubernetes = config.lease == "kubernetes"
        self._cluster_lease = KubernetesLease(config.lease_namespace) if kubernetes else None

    def consider(self, incident: OpenIncident, watcher: Watcher, group_size: int, num_unhealthy: int) -> None:
        """Decides about an open incident in a group of `group_size` servers, and starts an allowed action."""
        if not incident.remedies_known or self.is_acting_on(incident.server) or time.monotonic() < incident.ask_again_s:
            return
        if incident.finding is None or not incident.finding.is_seen_now:
            return  # the last scrape no longer showed it
        busy = self._busy.get(incident.group) or run_under_way(incident.server)
        group = GroupState(incident.group, group_size, num_unhealthy, (), busy)
        decision = self._decide(incident, watcher, group)
        if decision.action is None:
            self._report_refusal(incident, decision)
            return
        self._busy[incident.group] = f"{decision.action} of {incident.server} is under way"
        self._acting_on[incident.group] = incident.server
        self._spawn(incident.group, self._act(incident, watcher, group), incident)

    def is_acting_on(self, server: str) -> bool:
        """Whether an action on this server is under way."""
        return server in self._acting_on.values()

    def with_start_reason(self, result: ScrapeResult) -> ScrapeResult:
        """The sample with `start_requested` = 1 if an action here started its process; other results unchanged."""
        until_s = time.time() if self.is_acting_on(result.server) else self._acted_until_s.get(result.server, 0.0)
        if not isinstance(result, Sample) or (result.process_start_s or result.time_s) > until_s:
            return result
        return replace(result, start_requested=1)

    def _decide(self, incident: OpenIncident, watcher: Watcher, group: GroupState) -> Decision:
        """The policy's decision about the incident now, within the limits of its group."""
        server, settings = self._servers.get(incident.server), self._config.group(incident.group)
        return decision_about(incident, watcher, server, settings, group)

    def _report_refusal(self, incident: OpenIncident, decision: Decision) -> None:
        """Sets when the incident is decided on again, and reports the refusal unless it repeats the last one."""
        wait_s = REFUSED_AGAIN_S if decision.again_in_s is None else min(decision.again_in_s, 3600.0)
        incident.ask_again_s = time.monotonic() + (0.0 if decision.refusal == "busy" else wait_s)
        if decision.dedupe_key != incident.last_refusal:
            incident.last_refusal = decision.dedupe_key
            self._report(ActionReport(incident, f"not acting: {decision.reason}", "refusal"))

    async def _act(self, incident: OpenIncident, watcher: Watcher, group: GroupState) -> None:
        """Decides again from the attempts in the journal, then acts under the lease; reports a refusal or failure."""
        try:
            ages_s = await self._attempt_ages(incident.group)
            replicas, busy = await self._scaled_replicas(incident), run_under_way(incident.server)
            group = GroupState(group.name, group.servers, group.unhealthy, ages_s, busy, replicas)
            decision = self._decide(incident, watcher, group)
            if decision.action is None:
                self._report_refusal(incident, decision)
                return
            if not await self._take_lease(incident.group):
                reason = f"one at a time: somebody else acts on group {incident.group}"
                self._report_refusal(incident, refuse("busy", reason, about="lease"))
                return
            try:
                await self._carry_out(incident, decision)
            finally:
                await self._release_lease(incident.group)
        except (ActionFailed, JournalUnavailable) as error:
            if isinstance(error, FlagsFixed):
                incident.change = None  # a restart without new flags may still help
            self._report_refusal(incident, refuse("failed", error.message, about=error.message))

    async def _carry_out(self, incident: OpenIncident, decision: Decision) -> None:
        """Drains, scales or restarts the server as decided; if a restart with new flags fails, restores the old."""
        server = self._servers[incident.server]
        if decision.action == "drain":
            await self._drains.begin(incident, server, decision.reason)
            return
        incident_id = await self._context.journal(lambda journal: journal.incident_id(incident.key))
        begins = ActionReport(incident, f"{decision.action}: {decision.reason}", str(decision.action))
        if decision.action == "scale":
            self._report(begins)
            await self._add_replica(incident, server, incident_id)
            return
        finding = incident.finding
        failing = finding is not None and finding.restart_helps and finding.severity == "critical"
        change = incident.change if decision.action == "restart-with-flags" else None
        limits = self._config.group(incident.group).limits
        order = RestartOrder(server, limits, str(decision.action), decision.reason, failing, incident_id, change)
        outcome = await self._run_restart(order, lambda: self._report(begins))
        self._report(ActionReport(incident, outcome.text, order.name, outcome.state))
        if outcome.state == FAILED and change is not None:
            await self._restore_flags(order, outcome, incident)

    async def _run_restart(self, order: RestartOrder, on_begun: Callable[[], None] = lambda: None) -> RestartOutcome:
        """Carries out the restart; calls `on_begun` once it counts towards the group's restart budget."""
        begun_s = time.monotonic()
        outcome = await ServerRestart(self._context, order).run(on_begun)
        self._begun[outcome.action_id] = (order.server.group, begun_s)
        return outcome

    async def _restore_flags(self, order: RestartOrder, failed: RestartOutcome, incident: OpenIncident | None) -> None:
        """Restarts once with the old flags after new ones failed, and reports it; nothing where none were kept."""
        override = kept_override(failed.action_id, self._context.home)
        if override is None:
            return
        reason, restore = "it did not come up with its new flags", (failed.action_id, override)
        back = RestartOrder(order.server, order.limits, "undo", reason, True, order.incident_id, restore=restore)
        try:
            outcome = await self._run_restart(back)
        except (ActionFailed, JournalUnavailable) as error:
            self._report(ActionReport(incident, f"old flags are not put back: {error.message}", "undo", FAILED))
            return
        self._report(ActionReport(incident, f"old flags put back: {outcome.text}", "undo", outcome.state))

    async def _add_replica(self, incident: OpenIncident, server: ServerConfig, incident_id: int | None) -> None:
        """Adds a replica to the server's group, journalled as an action of incident `incident_id`, and reports it."""
        assert server.platform is not None
        wanted = (await self._scaled_replicas(incident) or 1) + 1
        detail = {"by": BY, "server": server.name, "replicas": wanted}
        scaling = (incident_id, server.group, "scale", detail)
        action = await self._context.journal(lambda journal: journal.begin_action(*scaling))
        self._begun[action] = (server.group, time.monotonic())
        try:
            text, state = await scale(server.platform, wanted), DONE
        except ActionFailed as error:
            text, state = error.message, FAILED
        await self._context.finish(action, state, {"outcome": text})
        self._report(ActionReport(incident, text, "scale", state))

    def end_drain_of(self, incident: OpenIncident) -> None:
        """Ends the incident's drains in the background; nothing where its server has no drain method."""
        server = self._servers.get(incident.server)
        if server is not None and server.drain_method is not None:
            self._spawn(None, self._drains.end(lambda journal: _drains_of(journal, incident.key), incident))

    async def recover(self) -> None:
        """Starts to finish or undo unfinished actions, one per group at a time, and to end drains left over."""
        left = await self._context.journal(lambda journal: journal.unfinished_actions())
        # Drains whose incident was closed while no sidecar ran.
        drained = await self._context.journal(
            lambda journal: [each for each in _only_drains(journal.actions()) if not _incident_is_open(journal, each)]
        )
        mine = [action for action in left if action.detail.get("by") == BY]
        drains = tuple(action for action in mine if action.name == "drain")
        for drain in (*drains, *drained):
            self._spawn(None, self._drains.end(lambda _, drain=drain: (drain,)))  # type: ignore[misc]
        others = [action for action in mine if action not in drains]
        for group in dict.fromkeys(action.group for action in others):
            self._busy[group] = "what was left unfinished is being ended"
            self._spawn(group, self._resume_all([action for action in others if action.group == group]))

    async def _resume_all(self, actions: Sequence[Action]) -> None:
        """Finish or undo one group's actions that an earlier process left unfinished, in order."""
        for action in actions:
            name = self._acting_on[action.group] = str(action.detail.get("server"))
            server = self._servers.get(name)
            if server is None or server.platform is None:
                text = "left unfinished, and the server is no longer acted on here"
                outcome = RestartOutcome(FAILED, text, action.id)
                await self._context.finish(action.id, FAILED, {"outcome": text})
            elif action.name == "scale":
                outcome = RestartOutcome(UNDONE, "legroom was killed in the middle of it", action.id)
                await self._context.finish(action.id, UNDONE)
            else:
                detail, limits = action.detail, self._config.group(action.group).limits
                taken_back = detail.get("takes_back")
                override = kept_override(taken_back, self._context.home) if taken_back is not None else None
                restore = (taken_back, override) if taken_back is not None and override is not None else None
                reason, failing = str(detail.get("reason")), bool(detail.get("failing"))
                order = RestartOrder(server, limits, action.name, reason, failing, action.incident_id, restore=restore)
                outcome = await ServerRestart(self._context, order).resume(action)
                if outcome.state == FAILED:
                    await self._restore_flags(order, outcome, None)
            await self._release_lease(action.group)
            self._report(ActionReport(None, f"action {action.id}: {outcome.text}", action.name, outcome.state))

    async def act_on_request(
        self, action: str, server_name: str, undo_action_id: int | None, group_size: int, num_unhealthy: int
    ) -> Decision:
        """Starts a `restart` that a person asks for, or the `undo` of action `undo_action_id`, in the background if the
        limits allow it; returns the decision. Raises ActionFailed for a wrong request."""
        server = self._servers.get(server_name)
        if server is None or server.platform is None:
            raise ActionFailed(f"no server {server_name or 'without a name'} with a platform is watched here")
        if action not in ("restart", "undo"):
            raise ActionFailed(f"{action} cannot be asked for here", "restart, or undo with an action's number")
        if (action == "undo") != (undo_action_id is not None):
            raise ActionFailed("an undo needs the number of an action, and nothing else takes one")
        restore = await self._flag_change_of_action(undo_action_id, server_name) if undo_action_id is not None else None
        limits, name = self._config.group(server.group).limits, server.group
        ages_s = await self._attempt_ages(name)
        state = GroupState(name, group_size, num_unhealthy, ages_s, self._busy.get(name))
        problem = ServerProblem(server_name, "a person's request", True, False)
        decision = decide(problem, state, limits, frozenset({"restart"}))
        if decision.action is not None:
            self._busy[name] = f"{action} of {server_name} is under way"
            self._acting_on[name] = server_name
            order = RestartOrder(server, limits, action, "a person asked for it", False, None, None, restore)
            self._spawn(name, self._restart_under_lease(order))
        return decision

    async def _flag_change_of_action(self, action_id: int, server_name: str) -> tuple[int, Override]:
        """(Action id, old flags) of a flag change on the server; ActionFailed where the action changed no flags."""
        kept = kept_override(action_id, self._context.home)
        changed = await self._context.journal(lambda journal: journal.action(action_id)) if kept is not None else None
        if kept is None or changed is None:
            raise ActionFailed(f"there is nothing to undo of action {action_id}")
        if changed.detail.get("server") != server_name:
            raise ActionFailed(f"action {action_id} changed {changed.detail.get('server')}, not {server_name}")
        return action_id, kept

    async def _restart_under_lease(self, order: RestartOrder) -> None:
        """Restarts while holding the group's lease, and reports the outcome or why it could not be done."""
        try:
            if not await self._take_lease(order.server.group):
                raise ActionFailed(f"one at a time: somebody else acts on group {order.server.group}")
            try:
                outcome = await self._run_restart(order)
            finally:
                await self._release_lease(order.server.group)
        except (ActionFailed, JournalUnavailable) as error:
            self._report(ActionReport(None, f"{order.name} of {order.server.name}: {error.message}", order.name))
            return
        self._report(ActionReport(None, outcome.text, order.name, outcome.state))

    async def _attempt_ages(self, group: str) -> Sequence[float]:
        """Seconds since each restart, scaling or undo of the group in the last day; the smaller of the journal's age
        and of that by this process's clock."""
        now_s, mono_s = time.time(), time.monotonic()
        past = await self._context.journal(lambda journal: journal.actions(now_s - DAY_S, group))
        wall = {action.id: now_s - action.begun_s for action in past if action.name in _COUNTED}
        own = {number: mono_s - begun_s for number, (at, begun_s) in self._begun.items() if at == group}
        ages = wall | {number: min(age_s, wall.get(number, age_s)) for number, age_s in own.items()}
        return [age_s for age_s in ages.values() if age_s < DAY_S]

    async def _scaled_replicas(self, incident: OpenIncident) -> int | None:
        """The present number of replicas of the incident's group; None where it may not be scaled."""
        server = self._servers.get(incident.server)
        counted = getattr(server.platform, "replicas", None) if server is not None else None
        if counted is None or "scale" not in self._config.group(incident.group).act:
            return None
        return int(await counted())

    async def _take_lease(self, group: str) -> bool:
        """Takes the group's lease, from the cluster if so configured, else the journal; False while another has it."""
        limits = self._config.group(group).limits
        seconds = limits.drain_deadline_s + 2 * limits.restart_deadline_s + 60.0
        if self._cluster_lease is not None:
            return await self._cluster_lease.take(group, self._holder, seconds)
        return await self._context.journal(lambda journal: journal.take_lease(group, self._holder, seconds))

    async def _release_lease(self, group: str) -> None:
        """Gives the group's lease back; a failure is ignored, as leases expire."""
        with contextlib.suppress(ActionFailed, JournalUnavailable):
            if self._cluster_lease is not None:
                await self._cluster_lease.release(group, self._holder)
            else:
                await self._context.journal(lambda journal: journal.release_lease(group, self._holder))

    def _spawn(self, group: str | None, work: Coroutine[Any, Any, None], incident: OpenIncident | None = None) -> None:
        """Runs `work` as a task; when it ends the group is no longer busy, and an exception is reported."""

        async def run_and_report() -> None:
            """Awaits the work and frees the group; reports an exception, which must not stop the watching."""
            try:
                await work
            except Exception as error:
                if incident is not None:
                    incident.ask_again_s = time.monotonic() + REFUSED_AGAIN_S
                self._report(ActionReport(None, f"acting failed: {error!r}", "refusal"))
            finally:
                if group is not None:
                    self._busy.pop(group, None)
                    if server := self._acting_on.pop(group, None):
                        self._acted_until_s[server] = time.time()

        task = asyncio.get_running_loop().create_task(run_and_report())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Cancels running actions, which are undone before they reached the server, else left for the next process."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


REFUSED_AGAIN_S = 30.0
"""Delay before a refused or failed action is considered again."""


class Drains:
    """Begins and ends drains. The journal is their only state, so another process can end them."""

    def __init__(
        self, servers: Mapping[str, ServerConfig], context: ActionContext, report: Callable[[ActionReport], None]
    ) -> None:
        self._servers, self._context, self._report = servers, context, report

    async def begin(self, incident: OpenIncident, server: ServerConfig, reason: str) -> None:
        """Keeps new requests from the server, once per incident and journalled; ActionFailed without a drain method."""
        drain_method = server.drain_method
        if drain_method is None:
            raise ActionFailed(f"no way to stop new work at {server.name} is named")
        if await self._context.journal(lambda journal: _drains_of(journal, incident.key)):
            incident.ask_again_s = float("inf")
            return
        self._report(ActionReport(incident, f"drain: {reason}", "drain"))
        detail = {"by": BY, "server": server.name, "door": drain_method.name}
        number = await self._context.journal(lambda journal: journal.incident_id(incident.key))
        drain = (number, server.group, "drain", detail)
        action = await self._context.journal(lambda journal: journal.begin_action(*drain))
        try:
            await drain_method.begin()
            text, state = f"new work is kept from {server.name} by {drain_method.name}", DONE
        except ActionFailed as error:
            text, state = error.message, FAILED
        await self._context.finish(action, state, {"outcome": text})
        incident.ask_again_s = float("inf") if state == DONE else time.monotonic() + REFUSED_AGAIN_S
        self._report(ActionReport(incident, text, "drain", state))

    async def end(self, find: Callable[[Journal], Iterable[Action]], incident: OpenIncident | None = None) -> None:
        """Ends the drains that `find` returns, retrying for ever; problems are reported for the incident, if any."""
        pause_s, last_problem = self._context.poll_s, ""
        while True:
            try:
                for drain in await self._context.journal(find):
                    await self._end_one(drain)
            except (ActionFailed, JournalUnavailable) as error:
                if error.message != last_problem:
                    last_problem = error.message
                    self._report(ActionReport(incident, f"new work is still turned away: {last_problem}", "drain"))
            else:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 60.0)

    async def _end_one(self, drain: Action) -> None:
        """Admits requests again, unless another drain of the server is in force, and marks the drain as undone."""
        name = str(drain.detail.get("server"))
        method = self._servers[name].drain_method if name in self._servers else None
        if method is not None and not await self._context.journal(lambda journal: _other_drains(journal, drain)):
            await method.end()
            self._report(ActionReport(None, f"{name}: new work is let in again", "drain"))
        await self._context.finish(drain.id, UNDONE)


def _drains_of(journal: Journal, key: str) -> tuple[Action, ...]:
    """The sidecar's completed drains, not undone, for the incident with this journal key."""
    number = journal.incident_id(key)
    incident = journal.incident(number) if number is not None else None
    return _only_drains(incident.actions) if incident is not None else ()


def _other_drains(journal: Journal, drain: Action) -> tuple[Action, ...]:
    """The sidecar's other drains of the same server that are in force, for incidents that are open."""
    server, drains = drain.detail.get("server"), _only_drains(journal.actions(group=drain.group))
    others = (other for other in drains if other.id != drain.id and other.detail.get("server") == server)
    return tuple(other for other in others if _incident_is_open(journal, other))


def _only_drains(actions: Iterable[Action]) -> tuple[Action, ...]:
    """Of the actions, the drains by a sidecar that are completed (DONE): not under way, failed or undone."""
    done = (action for action in actions if action.name == "drain" and action.state == DONE)
    return tuple(action for action in done if action.detail.get("by") == BY)


def _incident_is_open(journal: Journal, drain: Action) -> bool:
    """Whether the drain was made for an incident that is still open."""
    incident = journal.incident(drain.incident_id) if drain.incident_id is not None else None
    return incident is not None and incident.closed_s is None
