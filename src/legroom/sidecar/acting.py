"""From an open incident to an action: asks the policy, takes the lease, restarts, and reports the outcome."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from legroom.actions.kubernetes_platform import KubernetesLease
from legroom.actions.platform import ActionFailed, FlagsFixed, Override, kept_override, scale
from legroom.actions.run_platform import run_under_way
from legroom.live.detectors import Watcher
from legroom.live.journal.journal import DONE, FAILED, UNDONE, Action, JournalUnavailable
from legroom.sidecar.action_policy import DAY_S, RESTARTS, Decision, GroupState, ServerProblem, decide, refuse
from legroom.sidecar.decisions import decision_about
from legroom.sidecar.drains import REFUSED_AGAIN_S, Drains, left_drained
from legroom.sidecar.notifier import ActionReport
from legroom.sidecar.open_incidents import BY, OpenIncident
from legroom.sidecar.server_restart import ActionContext, RestartOrder, RestartOutcome, ServerRestart
from legroom.sidecar.watch_config import ServerConfig, SidecarConfig

_COUNTED = (*RESTARTS, "scale", "undo")


class Actor:
    """Acts on incidents, one at a time in a group. Everything it does is in the journal first."""

    def __init__(self, config: SidecarConfig, context: ActionContext, report: Callable[[ActionReport], None]) -> None:
        self._config, self._context, self._report = config, context, report
        self._servers = {server.name: server for server in config.servers}
        self._drains = Drains(self._servers, context, report)
        self._busy: dict[str, str] = {}
        self._acting_on: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun: dict[int, tuple[str, float]] = {}
        """Group and monotonic time of this process's actions: a clock that is set forward frees no budget."""
        self._holder = f"{BY} on {socket.gethostname()}"
        kubernetes = config.lease == "kubernetes"
        self._cluster_lease = KubernetesLease(config.lease_namespace) if kubernetes else None

    def consider(self, incident: OpenIncident, watcher: Watcher, servers: int, unhealthy: int) -> None:
        """Decides about an incident, and begins to act where that is the decision. Never waits."""
        if not incident.remedies_known or incident.finding is None or self.is_acting_on(incident.server):
            return
        if not incident.finding.is_seen_now:
            return  # it may be over, by the last restart perhaps: nothing is done to a server that looks well
        if time.monotonic() < incident.ask_again_s:
            return
        busy = self._busy.get(incident.group) or run_under_way(incident.server)
        group = GroupState(incident.group, servers, unhealthy, (), busy)
        decision = self._decide(incident, watcher, group)
        if decision.action is None:
            self._refuse(incident, decision)
            return
        self._busy[incident.group] = f"{decision.action} of {incident.server} is under way"
        self._acting_on[incident.group] = incident.server
        self._spawn(incident.group, self._act(incident, watcher, group), incident)

    def is_acting_on(self, server: str) -> bool:
        """Whether this server is being restarted, so that its silence is no news."""
        return server in self._acting_on.values()

    def _decide(self, incident: OpenIncident, watcher: Watcher, group: GroupState) -> Decision:
        server, settings = self._servers.get(incident.server), self._config.group(incident.group)
        return decision_about(incident, watcher, server, settings, group)

    def _refuse(self, incident: OpenIncident, decision: Decision) -> None:
        wait_s = REFUSED_AGAIN_S if decision.again_in_s is None else min(decision.again_in_s, 3600.0)
        incident.ask_again_s = time.monotonic() + (0.0 if decision.refusal == "busy" else wait_s)
        if decision.dedupe_key != incident.last_refusal:
            incident.last_refusal = decision.dedupe_key
            self._report(ActionReport(incident, f"not acting: {decision.reason}", "refusal"))

    async def _act(self, incident: OpenIncident, watcher: Watcher, group: GroupState) -> None:
        """Asks again with what the journal knows, then does it."""
        try:
            ages_s = await self._attempt_ages(incident.group)
            replicas, busy = await self._replicas(incident), run_under_way(incident.server)
            group = GroupState(group.name, group.servers, group.unhealthy, ages_s, busy, replicas)
            decision = self._decide(incident, watcher, group)
            if decision.action is None:
                self._refuse(incident, decision)
                return
            if not await self._lease(incident.group):
                reason = f"one at a time: somebody else acts on group {incident.group}"
                self._refuse(incident, refuse("busy", reason, about="lease"))
                return
            try:
                await self._carry_out(incident, decision)
            finally:
                await self._release(incident.group)
        except FlagsFixed as error:
            incident.change = None  # what a restart alone cures, it may still cure
            self._refuse(incident, refuse("failed", error.message, about=error.message))
        except (ActionFailed, JournalUnavailable) as error:
            self._refuse(incident, refuse("failed", error.message, about=error.message))

    async def _carry_out(self, incident: OpenIncident, decision: Decision) -> None:
        server = self._servers[incident.server]
        if decision.action == "drain":
            await self._drains.begin(incident, server, decision.reason)
            return
        number = await self._context.journal(lambda journal: journal.incident_id(incident.key))
        begins = ActionReport(incident, f"{decision.action}: {decision.reason}", str(decision.action))
        if decision.action == "scale":
            self._report(begins)
            await self._scale(incident, server, number)
            return
        finding = incident.finding
        failing = finding is not None and finding.restart_helps and finding.severity == "critical"
        change = incident.change if decision.action == "restart-with-flags" else None
        limits = self._config.group(incident.group).limits
        order = RestartOrder(server, limits, str(decision.action), decision.reason, failing, number, change)
        outcome = await self._restart(order, lambda: self._report(begins))
        self._report(ActionReport(incident, outcome.text, order.name, outcome.state))
        if outcome.state == FAILED and change is not None:
            await self._take_back(order, outcome, incident)

    async def _restart(self, order: RestartOrder, begun: Callable[[], None] = lambda: None) -> RestartOutcome:
        begun_s = time.monotonic()
        outcome = await ServerRestart(self._context, order).run(begun)
        self._begun[outcome.action_id] = (order.server.group, begun_s)
        return outcome

    async def _take_back(self, order: RestartOrder, failed: RestartOutcome, incident: OpenIncident | None) -> None:
        """A server that does not come up with its new flags gets its old ones back, once."""
        override = kept_override(failed.action_id, self._context.home)
        if override is None:
            return
        back = RestartOrder(
            order.server,
            order.limits,
            "undo",
            "it did not come up with its new flags",
            True,
            order.incident_id,
            restore=(failed.action_id, override),
        )
        try:
            outcome = await self._restart(back)
        except (ActionFailed, JournalUnavailable) as error:
            self._report(ActionReport(incident, f"old flags are not put back: {error.message}", "undo", FAILED))
            return
        self._report(ActionReport(incident, f"old flags put back: {outcome.text}", "undo", outcome.state))

    async def _scale(self, incident: OpenIncident, server: ServerConfig, number: int | None) -> None:
        assert server.platform is not None  # `_decide` allows nothing otherwise
        wanted = (await self._replicas(incident) or 1) + 1
        detail = {"by": BY, "server": server.name, "replicas": wanted}
        action = await self._context.journal(
            lambda journal: journal.begin_action(number, server.group, "scale", detail)
        )
        self._begun[action] = (server.group, time.monotonic())
        try:
            text, state = await scale(server.platform, wanted, act=True), DONE
        except ActionFailed as error:
            text, state = error.message, FAILED
        await self._context.finish(action, state, {"outcome": text})
        self._report(ActionReport(incident, text, "scale", state))

    def end_drain_of(self, incident: OpenIncident) -> None:
        """Ends the drain that was begun for it, if one was."""
        server = self._servers.get(incident.server)
        if server is not None and server.drain_method is not None:
            self._spawn(None, self._drains.end_after(incident))

    # What a killed legroom left

    async def recover(self) -> None:
        """Ends every action that was left unfinished, each group by itself, and drains that were left on.

        Returns when all are taken up.
        """
        left = await self._context.journal(lambda journal: journal.unfinished_actions())
        drained = await self._context.journal(left_drained)
        mine = [action for action in left if action.detail.get("by") == BY]
        drains = tuple(action for action in mine if action.name == "drain")
        for drain in (*drains, *drained):
            self._spawn(None, self._drains.end(drain))
        others = [action for action in mine if action not in drains]
        for group in dict.fromkeys(action.group for action in others):
            self._busy[group] = "what was left unfinished is being ended"
            self._spawn(group, self._resume_all([action for action in others if action.group == group]))

    async def _resume_all(self, actions: Sequence[Action]) -> None:
        """Those of one group, one at a time."""
        for action in actions:
            self._acting_on[action.group] = str(action.detail.get("server"))
            await self._resume(action)

    async def _resume(self, action: Action) -> None:
        server = self._servers.get(str(action.detail.get("server")))
        if server is None or server.platform is None:
            outcome = RestartOutcome(FAILED, "left unfinished, and the server is no longer acted on here", action.id)
            await self._context.finish(action.id, FAILED, {"outcome": outcome.text})
        elif action.name == "scale":
            outcome = RestartOutcome(UNDONE, "legroom was killed in the middle of it", action.id)
            await self._context.finish(action.id, UNDONE)
        else:
            outcome = await self._resume_restart(action, server)
        await self._release(action.group)
        self._report(ActionReport(None, f"action {action.id}: {outcome.text}", action.name, outcome.state))

    async def _resume_restart(self, action: Action, server: ServerConfig) -> RestartOutcome:
        detail, limits = action.detail, self._config.group(action.group).limits
        taken_back = detail.get("takes_back")
        override = kept_override(taken_back, self._context.home) if taken_back is not None else None
        restore = (taken_back, override) if taken_back is not None and override is not None else None
        order = RestartOrder(
            server,
            limits,
            action.name,
            str(detail.get("reason")),
            bool(detail.get("failing")),
            action.incident_id,
            restore=restore,
        )
        outcome = await ServerRestart(self._context, order).resume(action)
        if outcome.state == FAILED:
            await self._take_back(order, outcome, None)
        return outcome

    # What a person asks for

    async def act_on_request(
        self, action: str, server_name: str, undo: int | None, servers: int, unhealthy: int
    ) -> Decision:
        """A restart or an undo that a person asks for: within the budgets, and one at a time."""
        server = self._servers.get(server_name)
        if server is None or server.platform is None:
            raise ActionFailed(f"no server {server_name or 'without a name'} with a platform is watched here")
        if action not in ("restart", "undo"):
            raise ActionFailed(f"{action} cannot be asked for here", "restart, or undo with an action's number")
        if (action == "undo") != (undo is not None):
            raise ActionFailed("an undo needs the number of an action, and nothing else takes one")
        restore = await self._restorable(undo, server_name) if undo is not None else None
        limits, name = self._config.group(server.group).limits, server.group
        ages_s = await self._attempt_ages(name)
        state = GroupState(name, servers, unhealthy, ages_s, self._busy.get(name))
        decision = decide(
            ServerProblem(server_name, "a person's request", True, False), state, limits, frozenset({"restart"})
        )
        if decision.action is not None:
            self._busy[name] = f"{action} of {server_name} is under way"
            self._acting_on[name] = server_name
            order = RestartOrder(server, limits, action, "a person asked for it", False, None, None, restore)
            self._spawn(name, self._do_order(order))
        return decision

    async def _restorable(self, number: int, server_name: str) -> tuple[int, Override]:
        """What an action changed and can be taken back, where it was this server's."""
        override = kept_override(number, self._context.home)
        changed = await self._context.journal(lambda journal: journal.action(number)) if override is not None else None
        if override is None or changed is None:
            raise ActionFailed(f"there is nothing to undo of action {number}")
        if changed.detail.get("server") != server_name:
            raise ActionFailed(f"action {number} changed {changed.detail.get('server')}, not {server_name}")
        return number, override

    async def _do_order(self, order: RestartOrder) -> None:
        try:
            if not await self._lease(order.server.group):
                raise ActionFailed(f"one at a time: somebody else acts on group {order.server.group}")
            try:
                outcome = await self._restart(order)
            finally:
                await self._release(order.server.group)
        except (ActionFailed, JournalUnavailable) as error:
            self._report(ActionReport(None, f"{order.name} of {order.server.name}: {error.message}", order.name))
            return
        self._report(ActionReport(None, outcome.text, order.name, outcome.state))

    # Bookkeeping

    async def _attempt_ages(self, group: str) -> Sequence[float]:
        now_s, mono_s = time.time(), time.monotonic()
        past = await self._context.journal(lambda journal: journal.actions(now_s - DAY_S, group))
        wall = {action.id: now_s - action.begun_s for action in past if action.name in _COUNTED}
        own = {number: mono_s - begun_s for number, (at, begun_s) in self._begun.items() if at == group}
        ages = wall | {number: min(age_s, wall.get(number, age_s)) for number, age_s in own.items()}
        return [age_s for age_s in ages.values() if age_s < DAY_S]

    async def _replicas(self, incident: OpenIncident) -> int | None:
        server = self._servers.get(incident.server)
        counted = getattr(server.platform, "replicas", None) if server is not None else None
        if counted is None or "scale" not in self._config.group(incident.group).act:
            return None
        return int(await counted())

    async def _lease(self, group: str) -> bool:
        limits = self._config.group(group).limits
        seconds = limits.drain_deadline_s + 2 * limits.restart_deadline_s + 60.0
        if self._cluster_lease is not None:
            return await self._cluster_lease.take(group, self._holder, seconds)
        return await self._context.journal(lambda journal: journal.take_lease(group, self._holder, seconds))

    async def _release(self, group: str) -> None:
        try:
            if self._cluster_lease is not None:
                await self._cluster_lease.release(group, self._holder)
            else:
                await self._context.journal(lambda journal: journal.release_lease(group, self._holder))
        except (ActionFailed, JournalUnavailable):
            pass  # it ends by itself

    def _spawn(self, group: str | None, work: Coroutine[Any, Any, None], incident: OpenIncident | None = None) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:  # a mistake of legroom's own must not go unseen, nor stop the watching
                if incident is not None:
                    incident.ask_again_s = time.monotonic() + REFUSED_AGAIN_S
                self._report(ActionReport(None, f"acting failed: {error!r}", "refusal"))
            finally:
                if group is not None:
                    self._busy.pop(group, None)
                    self._acting_on.pop(group, None)

        task = asyncio.get_running_loop().create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Ends what is under way: undone where nothing was touched yet, else left to the next start."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
