"""Remedies and decisions for incidents, for the sidecar and for its dry run."""

import asyncio
from collections.abc import Sequence

from legroom.actions.platform import FlagChange
from legroom.actions.server_drain import PlatformDrain
from legroom.errors import LegroomError
from legroom.facts.flags import flag_name
from legroom.facts.releases import Release, latest
from legroom.live.detectors import DetectorFinding, Watcher
from legroom.live.metrics.window import Window
from legroom.live.remedies import ProposedRemedy, remedies_for
from legroom.planning.plan_document import PlanDocument
from legroom.sidecar.action_policy import RESTARTS, Decision, GroupState, ServerProblem, decide, refuse
from legroom.sidecar.notifier import IncidentReporter
from legroom.sidecar.open_incidents import OpenIncident
from legroom.sidecar.watch_config import GroupConfig, ServerConfig
from legroom.vllm.command_line import setting_words

_RECENT_S = 300.0
_BY_PEOPLE = frozenset({"model", "tensor_parallel_size", "pipeline_parallel_size"})
"""Settings that legroom never changes by itself."""


def decision_about(
    incident: OpenIncident, watcher: Watcher, server: ServerConfig | None, settings: GroupConfig, group: GroupState
) -> Decision:
    """The policy's decision about an incident; refusal `impossible` where no platform or drain method is configured."""
    finding = incident.finding
    assert finding is not None
    problem = ServerProblem(
        incident.server,
        incident.kind,
        restart_helps=finding.restart_helps,
        failing=finding.restart_helps and finding.severity == "critical",
        has_flags=incident.change is not None,
        scale_helps=incident.kind in ("queue_backlog", "pool_pressure", "refused_load"),
        expected_drain_s=expected_drain_s(watcher),
    )
    drain_method = server.drain_method if server is not None else None
    possible = settings.act
    if server is None or server.platform is None:
        possible -= {*RESTARTS, "scale"}
    if drain_method is None or isinstance(drain_method, PlatformDrain):
        possible -= {"drain"}
    decision = decide(problem, group, settings.limits, possible)
    if decision.action is not None or possible == settings.act:
        return decision
    wanted = decide(problem, group, settings.limits, settings.act)
    if wanted.action is None:
        return wanted
    if wanted.action == "drain":
        lacking = f"no way to stop new work at {incident.server} is named, so legroom cannot drain it"
    else:
        verb = "restart" if wanted.action in RESTARTS else wanted.action
        lacking = f"no platform is named for {incident.server}, so legroom cannot {verb} it"
    return refuse("impossible", lacking)


def expected_drain_s(watcher: Watcher) -> float | None:
    """Seconds until no request is left: queue / present rate + p95 latency; None where unknown."""
    latest, window = watcher.window.latest, watcher.window
    if latest is None or latest.running is None:
        return None
    if not latest.running and not latest.waiting:
        return 0.0
    (longest_s,), rate = window.quantiles("e2e_latency", (0.95,), _RECENT_S), window.rate("finished", _RECENT_S)
    if longest_s is None:
        return None
    return longest_s + (latest.waiting / rate if latest.waiting and rate else 0.0)


def first_accepted_change(remedies: Sequence[ProposedRemedy], plan: PlanDocument | None) -> FlagChange | None:
    """The flags of the first remedy that the release accepts and legroom may set (not model, TP, PP); or None."""
    if plan is None:
        return None
    try:
        used = plan.release if plan.vllm else latest()
    except LegroomError:
        return None  # which flags it takes is not known
    allowed = (remedy for remedy in remedies if not remedy.flags.keys() & _BY_PEOPLE)
    changes = (_flags_of_remedy(remedy, used) for remedy in allowed if remedy.flags or remedy.env)
    return next((change for change in changes if change is not None), None)


def _flags_of_remedy(remedy: ProposedRemedy, release: Release) -> FlagChange | None:
    """The remedy as flags and variables to set; None if the release lacks a flag or one takes several words."""
    flags: dict[str, str | None] = {}
    for dest, value in remedy.flags.items():
        words = setting_words(dest, value, release)
        if words is None or len(words) > 2:
            return None
        name, _, joined = words[0].partition("=") if words else (flag_name(dest), "", None)
        flags[name] = words[1] if len(words) == 2 else joined
    return FlagChange(flags, dict(remedy.env))


class RemedySearch:
    """Computes the remedies of each incident in a thread: planning takes seconds."""

    def __init__(self, reporter: IncidentReporter) -> None:
        self._reporter = reporter
        self.tasks: set[asyncio.Task[None]] = set()

    def begin(self, incident: OpenIncident, server: ServerConfig | None, window: Window) -> None:
        """Starts to compute the incident's remedies, once; decisions wait for them only if there is a plan."""
        if incident.remedies_asked or incident.finding is None:
            return
        incident.remedies_asked = True
        plan = server.plan if server is not None else None
        incident.change = server.answers.get(incident.kind) if server is not None else None
        incident.remedies_known = plan is None or incident.change is not None
        work = self._find_remedies(incident, incident.finding, window.snapshot(), plan)
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _find_remedies(
        self, incident: OpenIncident, finding: DetectorFinding, window: Window, plan: PlanDocument | None
    ) -> None:
        """Computes remedies in a thread, adopts the first accepted change unless one is configured, notes both."""
        try:
            remedies = await asyncio.to_thread(remedies_for, finding, window, plan)
            incident.change = incident.change or first_accepted_change(remedies, plan)
        finally:
            incident.remedies_known = True
        texts = "; ".join(remedy.why for remedy in remedies)
        change = str(incident.change) if incident.change else None
        detail = {"answers": [remedy.to_json() for remedy in remedies], "change": change}
        self._reporter.note(incident, f"what helps: {texts}", detail)
