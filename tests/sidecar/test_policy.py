"""The policy refuses for a reason in words, and whatever happens its budgets hold."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from legroom.sidecar.action_policy import (
    ACTION_NAMES,
    DAY_S,
    HOUR_S,
    RESTARTS,
    ActionLimits,
    GroupState,
    ServerProblem,
    decide,
)

ALL = frozenset(ACTION_NAMES)
STUCK = ServerProblem("http://a", "stuck_engine", restart_helps=True, failing=True)
CREEP = ServerProblem("http://a", "memory_creep", restart_helps=True, failing=False, expected_drain_s=20)
BACKLOG = ServerProblem("http://a", "queue_backlog", restart_helps=False, failing=False, scale_helps=True)
GROUP = GroupState("llama", servers=4, unhealthy=1)


def test_a_stuck_engine_is_restarted_when_that_is_allowed():
    assert decide(STUCK, GROUP, ActionLimits(), frozenset({"restart"})).action == "restart"


def test_by_default_nothing_is_done_but_telling():
    refused = decide(STUCK, GROUP, ActionLimits(), frozenset({"notify"}))
    assert (refused.action, refused.refusal) == (None, "not allowed")


def test_load_is_never_answered_by_a_restart():
    refused = decide(BACKLOG, GROUP, ActionLimits(), frozenset({"notify", "restart"}))
    assert (refused.action, refused.refusal) == (None, "no help")


def test_load_is_answered_by_more_servers_up_to_a_number():
    assert decide(BACKLOG, GROUP, ActionLimits(), frozenset({"scale"})).action == "scale"
    full = GroupState("llama", 4, 1, replicas=8)
    assert decide(BACKLOG, full, ActionLimits(), frozenset({"scale"})).refusal == "most replicas"


def test_computed_flags_are_preferred_to_a_plain_restart():
    last_problem = ServerProblem("a", "pool_pressure", restart_helps=False, failing=False, has_flags=True)
    assert decide(last_problem, GROUP, ActionLimits(), ALL).action == "restart-with-flags"
    assert decide(last_problem, GROUP, ActionLimits(), frozenset({"restart"})).action is None


def test_a_failing_server_is_taken_out_where_only_drain_is_allowed():
    assert decide(STUCK, GROUP, ActionLimits(), frozenset({"drain"})).action == "drain"
    assert decide(CREEP, GROUP, ActionLimits(), frozenset({"drain"})).action is None


def test_one_at_a_time():
    busy = GroupState("llama", 4, 1, busy_with="action 7 is under way")
    assert decide(STUCK, busy, ActionLimits(), ALL).dedupe_key == ("busy", "action 7 is under way")


@pytest.mark.parametrize(
    ("servers", "unhealthy", "acts"), [(1, 1, True), (2, 1, True), (2, 2, False), (3, 2, False), (4, 2, True)]
)
def test_a_majority_must_be_healthy_unless_the_server_is_alone(servers, unhealthy, acts):
    decision = decide(STUCK, GroupState("g", servers, unhealthy), ActionLimits(), ALL)
    assert (decision.action is not None) == acts
    assert acts or decision.refusal == "unhealthy majority"


def test_budgets_and_pauses_refuse_and_say_until_when():
    hour = decide(STUCK, GroupState("g", 1, 1, (3000.0, 2000.0)), ActionLimits(), ALL)
    assert (hour.action, hour.again_in_s) == (None, 600.0)
    assert hour.refusal == "hour spent"
    day = decide(STUCK, GroupState("g", 1, 1, [HOUR_S * n for n in range(3, 9)]), ActionLimits(), ALL)
    assert (day.refusal, day.again_in_s) == ("day spent", DAY_S - 8 * HOUR_S)
    pause = decide(STUCK, GroupState("g", 1, 1, (100.0,)), ActionLimits(), ALL)
    assert (pause.refusal, pause.again_in_s) == ("pause", 200.0)


def test_pauses_double_and_end():
    limits = ActionLimits(first_pause_s=10, longest_pause_s=100)
    assert [limits.backoff_s(n) for n in (0, 1, 2, 3, 4, 5, 500)] == [0, 10, 20, 40, 80, 100, 100]


def test_a_server_that_serves_is_not_restarted_when_draining_takes_too_long():
    slow = ServerProblem("a", "memory_creep", True, False, expected_drain_s=500)
    assert decide(slow, GROUP, ActionLimits(), ALL).refusal == "slow drain"
    failing = ServerProblem("a", "stuck_engine", True, True, expected_drain_s=500)
    assert decide(failing, GROUP, ActionLimits(), ALL).action == "restart"


def test_a_clock_that_was_set_back_spends_the_budget():
    assert decide(STUCK, GroupState("g", 1, 1, (-5000.0, -50.0)), ActionLimits(), ALL).action is None


@given(
    st.builds(
        ServerProblem,
        st.just("a"),
        st.just("x"),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.none() | st.floats(0, 1e4),
    ),
    st.builds(
        GroupState,
        st.just("g"),
        st.integers(1, 9),
        st.integers(0, 9),
        st.lists(st.floats(-1e6, 1e6)),
        st.none() | st.just("somebody"),
        st.none() | st.integers(0, 20),
    ),
    st.frozensets(st.sampled_from(ACTION_NAMES)),
)
def test_every_answer_has_a_reason_and_only_allowed_actions(last_problem, group, allowed):
    decision = decide(last_problem, group, ActionLimits(), allowed)
    assert decision.reason
    assert decision.action is None or decision.action in allowed
    if decision.action in RESTARTS:
        assert last_problem.restart_helps or last_problem.has_flags
        assert group.busy_with is None
        assert group.servers == 1 or group.unhealthy * 2 <= group.servers
    if decision.again_in_s is not None:
        assert decision.again_in_s > 0
        assert math.isfinite(decision.again_in_s)


class RunAway(RuleBasedStateMachine):
    """Troubles, kills, failures, clocks set back: never more restarts than the budgets, never two at once."""

    def __init__(self):
        super().__init__()
        self.limits = ActionLimits(per_hour=2, per_day=4, first_pause_s=60, longest_pause_s=HOUR_S)
        self.true_s, self.skew_s = 0.0, 0.0
        self.begun_true_s, self.begun_wall_s = [], []
        self.under_way = False
        self.unhealthy = 1

    @rule(seconds=st.floats(0, 3 * HOUR_S))
    def time_passes(self, seconds):
        self.true_s += seconds

    @rule(seconds=st.floats(0, DAY_S))
    def the_clock_is_set_back(self, seconds):
        self.skew_s -= seconds

    @rule(number=st.integers(0, 5))
    def health_changes(self, number):
        self.unhealthy = number

    @rule(last_problem=st.sampled_from([STUCK, CREEP, BACKLOG]), times=st.integers(1, 50))
    def trouble_is_seen_again_and_again(self, last_problem, times):
        for _ in range(times):
            wall_s = self.true_s + self.skew_s
            group = GroupState(
                "g",
                5,
                self.unhealthy,
                [wall_s - begun for begun in self.begun_wall_s],
                "another" if self.under_way else None,
            )
            decision = decide(last_problem, group, self.limits, frozenset({"restart"}))
            if decision.action is not None:
                assert not self.under_way
                assert self.unhealthy <= 2
                assert last_problem.restart_helps
                self.under_way = True
                self.begun_true_s.append(self.true_s)
                self.begun_wall_s.append(wall_s)

    @precondition(lambda self: self.under_way)
    @rule()
    def it_ends_or_is_killed(self):
        self.under_way = False

    @invariant()
    def budgets_hold(self):
        for window_s, most in ((HOUR_S, self.limits.per_hour), (DAY_S, self.limits.per_day)):
            for begun_s in self.begun_true_s:
                assert sum(begun_s <= other < begun_s + window_s for other in self.begun_true_s) <= most


TestRunAway = RunAway.TestCase
TestRunAway.settings = settings(stateful_step_count=40)
