"""Whether to act on a problem: a pure function from server and group state to a decision.

A restart must help this kind of problem, stay within the budgets and the back-off, be the only action in its group,
leave a majority of the group healthy, and lose no requests unless the server is failing already. Attempts count against
the budgets, not successes.
"""

from collections.abc import Sequence
from typing import Literal

from legroom.records import dataclass

ActionName = Literal["notify", "drain", "restart", "restart-with-flags", "scale"]
ACTION_NAMES: tuple[ActionName, ...] = ("notify", "drain", "restart", "restart-with-flags", "scale")
RESTARTS: tuple[ActionName, ...] = ("restart", "restart-with-flags")
HOUR_S, DAY_S = 3600.0, 86400.0


@dataclass(frozen=True)
class ActionLimits:
    """Budgets and deadlines of one group of servers."""

    per_hour: int = 2
    """A model loads for minutes; what two restarts did not cure, a third will not."""
    per_day: int = 6
    first_pause_s: float = 300.0
    """Back-off after the first attempt, doubled with each further one."""
    longest_pause_s: float = 4 * HOUR_S
    drain_deadline_s: float = 120.0
    """Rejecting requests for longer is an outage itself."""
    restart_deadline_s: float = 600.0
    """From the restart until the server answers; a large model loads from a slow disk in minutes."""
    most_replicas: int = 8

    def backoff_s(self, attempts: int) -> float:
        """Seconds to wait after this many attempts within a day; 0 after none."""
        if attempts <= 0:
            return 0.0
        return float(min(self.first_pause_s * 2 ** min(attempts - 1, 30), self.longest_pause_s))


@dataclass(frozen=True)
class ServerProblem:
    """A finding, reduced to what the decision depends on."""

    server: str
    kind: str
    restart_helps: bool
    """As the detector says: true for a stuck engine or a leak, false for load."""
    failing: bool
    """Whether requests are lost already."""
    has_flags: bool = False
    """Whether flags were computed for it."""
    scale_helps: bool = False
    expected_drain_s: float | None = None
    """Until its requests are finished; None: unknown."""


@dataclass(frozen=True)
class GroupState:
    """The server's group. Ages are seconds since each attempt, in any order."""

    name: str
    servers: int
    unhealthy: int
    attempt_ages_s: Sequence[float] = ()
    busy_with: str | None = None
    """The action in progress, or the lease holder."""
    replicas: int | None = None


@dataclass(frozen=True)
class Decision:
    """The action (None: only notify) and the reason."""

    action: ActionName | None
    reason: str
    again_in_s: float | None = None
    """When a refusal by time ends."""
    refusal: str | None = None
    """Its kind: `busy` ends by itself soon, `failed` is an action that could not be started."""
    about: str = ""
    """Distinguishes refusals of one kind."""

    @property
    def dedupe_key(self) -> tuple[str | None, str]:
        """(refusal, about): equal for refusals that differ only in their numbers, which are reported once."""
        return self.refusal, self.about


def decide(problem: ServerProblem, group: GroupState, limits: ActionLimits, allowed: frozenset[str]) -> Decision:
    """The action against a problem, if `allowed` and within the group's limits, else a refusal."""
    wanted = _wanted_action(problem, allowed)
    if wanted.action is None:
        return wanted
    if group.busy_with is not None:
        return refuse("busy", f"one at a time: {group.busy_with} in group {group.name}", about=group.busy_with)
    if wanted.action == "drain":
        return _refuse_unhealthy_majority(group) or wanted
    hour_spent = _refuse_spent_budget(group, HOUR_S, limits.per_hour, "hour spent", "an hour")
    if wanted.action == "scale":
        if group.replicas is not None and group.replicas >= limits.most_replicas:
            most = f"group {group.name} has {group.replicas} servers, the most that is allowed"
            return refuse("most replicas", most)
        return hour_spent or _refuse_in_backoff(group, limits) or wanted
    return (
        _refuse_unhealthy_majority(group)
        or hour_spent
        or _refuse_spent_budget(group, DAY_S, limits.per_day, "day spent", "a day")
        or _refuse_in_backoff(group, limits)
        or _refuse_long_drain(problem, limits)
        or wanted
    )


def _wanted_action(problem: ServerProblem, allowed: frozenset[str]) -> Decision:
    """The action that helps against this kind of problem, budgets apart; a refusal if none of them is allowed."""
    if problem.has_flags and "restart-with-flags" in allowed:
        return Decision("restart-with-flags", f"the flags computed for {problem.kind} take effect at a restart")
    if problem.restart_helps and "restart" in allowed:
        return Decision("restart", f"a restart cures {problem.kind}")
    if problem.restart_helps and problem.failing and "drain" in allowed:
        return Decision("drain", "it is failing: new requests are better off elsewhere")
    if problem.scale_helps and "scale" in allowed:
        return Decision("scale", f"more servers cure {problem.kind}")
    if not problem.restart_helps and allowed & set(RESTARTS):
        return refuse("no help", f"a restart does not help against {problem.kind}")
    if allowed <= {"notify"}:
        return refuse("not allowed", "legroom was not told to act (--act)")
    return refuse("no help", f"no allowed action helps {problem.kind}", about="allowed")


def _refuse_unhealthy_majority(group: GroupState) -> Decision | None:
    """A refusal to take a server away where most of its group of two or more is unhealthy; else None."""
    if group.servers > 1 and group.unhealthy * 2 > group.servers:
        unhealthy = f"{group.unhealthy} of {group.servers} servers of group {group.name} are unhealthy"
        return refuse("unhealthy majority", f"{unhealthy}: none is taken away")
    return None


def _refuse_spent_budget(group: GroupState, window_s: float, most: int, refusal: str, per: str) -> Decision | None:
    """A refusal if the group had `most` attempts within `window_s` (`per`, in words: "an hour"); else None."""
    # A negative age means that the clock was set back.
    recent = [max(age_s, 0.0) for age_s in group.attempt_ages_s if age_s < window_s]
    if len(recent) < most:
        return None
    again_s = window_s - sorted(recent)[most - 1] if most > 0 else None
    return refuse(refusal, f"the budget of {most} restarts {per} is spent in group {group.name}", again_s)


def _refuse_in_backoff(group: GroupState, limits: ActionLimits) -> Decision | None:
    """A refusal where the back-off after the last day's attempts is not over yet; None where it is."""
    recent = [max(age_s, 0.0) for age_s in group.attempt_ages_s if age_s < DAY_S]
    pause_s = limits.backoff_s(len(recent))
    if not recent or min(recent) >= pause_s:
        return None
    left_s = pause_s - min(recent)
    reason = f"backing off: {len(recent)} restarts in the last day, the next in {left_s:.0f} s at the earliest"
    return refuse("pause", reason, left_s)


def _refuse_long_drain(problem: ServerProblem, limits: ActionLimits) -> Decision | None:
    """A refusal where a server that still serves would drain beyond the deadline; None if not or unknown."""
    if problem.failing or problem.expected_drain_s is None or problem.expected_drain_s <= limits.drain_deadline_s:
        return None
    longer = f"about {problem.expected_drain_s:.0f} s, longer than {limits.drain_deadline_s:.0f} s"
    return refuse("slow drain", f"draining would take {longer}, and the server still serves")


def refuse(refusal_kind: str, reason: str, again_in_s: float | None = None, about: str = "") -> Decision:
    """The decision to do nothing, for `again_in_s` if it ends by time; `about` distinguishes refusals of a kind."""
    return Decision(None, reason, again_in_s, refusal_kind, about)
