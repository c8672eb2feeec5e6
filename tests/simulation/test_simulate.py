from __future__ import annotations

from itertools import accumulate
from statistics import fmean

import pytest

from legroom.errors import LegroomError
from legroom.simulation.fast.accounting import step_seconds
from legroom.simulation.fast.rows import StepCost
from legroom.simulation.flag_search import Candidate, choose, flag_combinations
from legroom.simulation.replay_outcome import Goal, load_verdict
from legroom.simulation.scheduler_settings import SchedulerSettings
from legroom.simulation.step_time import Hardware, calibrated, fixed_cost, roofline
from legroom.simulation.timeline import Timeline
from legroom.simulation.trace import Trace, Users
from legroom.simulation.trace_replay import simulate
from legroom.simulation.traces import synthetic
from legroom.sweeps import ProcessExecutor


def _trace(*rows: tuple[int, int, int]) -> Trace:
    trace = Trace()
    for arrival, prompt_len, output_len in rows:
        trace.add(prompt_len, output_len, arrival)
    return trace


def test_one_request_takes_a_step_a_token() -> None:
    timeline = simulate(_trace((3, 10, 5)), SchedulerSettings(100))
    assert list(timeline.finish_steps) == [7]
    assert timeline.tally.steps == 5


def test_a_request_that_is_too_long_is_rejected_and_counted() -> None:
    timeline = simulate(_trace((0, 10, 5), (0, 400, 5), (0, 90, 5)), SchedulerSettings(6, max_model_len=100))
    assert [rejection.id for rejection in timeline.rejections] == ["r1", "r2"]
    assert timeline.tally.finished == 1
    assert timeline.as_json()["rejected"] == 2


def test_recomputed_tokens_are_those_that_were_computed_before() -> None:
    settings = SchedulerSettings(5, block_size=16, max_num_seqs=2, max_model_len=64, enable_prefix_caching=False)
    timeline = simulate(_trace((0, 30, 30), (0, 20, 30)), settings)
    needed = 30 + 30 - 1 + 20 + 30 - 1
    assert timeline.tally.preemptions > 0
    assert timeline.tally.recomputed_tokens == timeline.tally.scheduled_tokens - needed


def test_speculation_saves_steps_and_finishes_the_same_tokens() -> None:
    plain = simulate(_trace((0, 30, 60)), SchedulerSettings(50))
    drafted = simulate(_trace((0, 30, 60)), SchedulerSettings(50, num_speculative_tokens=3, speculative_acceptance=0.5))
    assert drafted.tally.finished == 1
    assert drafted.tally.steps < plain.tally.steps / 2


def test_seconds_need_a_cost() -> None:
    trace = Trace(in_seconds=True)
    trace.add(10, 5, 0.5)
    with pytest.raises(LegroomError, match="steps need a duration"):
        simulate(trace, SchedulerSettings(100))


def test_seconds_add_up() -> None:
    trace = Trace(in_seconds=True)
    trace.add(10, 5, 0.5)
    timeline = simulate(trace, SchedulerSettings(100), cost=StepCost(0.1, 0.0, 0.0, 0.0))
    assert timeline.seconds["latency_s"] == pytest.approx([0.5])
    assert timeline.as_json()["seconds"]["kind"] == "estimated"


def test_the_roofline_can_be_scaled_to_a_measurement() -> None:
    cost = roofline(Hardware(16e9, 131072, 16e9, 3.35e12, 990e12))
    scaled = calibrated(cost, 0.02, 10, 50_000)
    assert step_seconds(scaled, 10, 50_000, 10) == pytest.approx(0.02)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_blocks": 1},
        {"block_size": 0},
        {"max_num_seqs": 300, "max_num_batched_tokens": 200},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 512, "max_model_len": 4096},
        {"watermark": 1.5},
    ],
)
def test_settings_that_vllm_refuses_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(LegroomError):
        SchedulerSettings(**{"num_blocks": 100, **wrong})  # type: ignore[arg-type]


def test_the_search_takes_the_fastest_setting_without_preemption_where_none_is_allowed() -> None:
    trace = _trace(*[(0, 40, 30)] * 20)
    candidates = [
        Candidate({"max_num_seqs": seats}, SchedulerSettings(20, max_num_seqs=seats, max_model_len=100))
        for seats in (1, 2, 3, 16)
    ]
    choice = choose(trace, candidates, Goal(most_preemptions=0), executor=ProcessExecutor(1))
    assert choice.holds
    assert choice.best.flags == {"max_num_seqs": 3}
    assert choice.outcomes[-1].preemptions > 0


def test_two_processes_find_what_one_finds() -> None:
    trace = _trace(*[(i, 40, 30) for i in range(20)])
    candidates = [
        Candidate({"max_num_seqs": seats}, SchedulerSettings(20, max_num_seqs=seats, max_model_len=100))
        for seats in (1, 2, 3)
    ]
    assert choose(trace, candidates, Goal(), executor=ProcessExecutor(2)) == choose(
        trace, candidates, Goal(), executor=ProcessExecutor(1)
    )


def test_flags_that_are_given_are_not_searched() -> None:
    tried = list(flag_combinations(["max_num_seqs", "block_size"]))
    assert all("max_num_seqs" not in flags for flags in tried)
    assert len(list(flag_combinations([]))) >= 200


def test_an_interrupted_search_keeps_what_it_has() -> None:
    tried = [Candidate({"max_num_seqs": n}, SchedulerSettings(60, max_num_seqs=n)) for n in (2, 8, 16)]
    calls: list[float] = []

    def interrupt(share: float) -> None:
        calls.append(share)
        if len(calls) == 2:
            raise KeyboardInterrupt

    choice = choose(_trace(*[(0, 40, 30)] * 5), tried, Goal(), executor=ProcessExecutor(1), progress=interrupt)
    assert choice.interrupted
    assert [outcome.flags["max_num_seqs"] for outcome in choice.outcomes] == [2, 8]


@pytest.mark.parametrize(("users", "think_s"), [(4, 1.0), (40, 10.0), (400, 5.0)])
def test_users_ask_as_often_as_they_are_answered(users: int, think_s: float) -> None:
    trace = synthetic.read(f"users={users} think={think_s} prompt=100 output=50 requests={max(400, 8 * users)}")
    settings = SchedulerSettings(num_blocks=2000, max_model_len=512, max_num_seqs=32)
    timeline = simulate(trace, settings, cost=fixed_cost(0.02))
    answer_s = fmean(timeline.seconds["latency_s"])
    assert timeline.requests_per_s == users / (think_s + answer_s)
    assert timeline.trace.requests_per_s == pytest.approx(timeline.requests_per_s, rel=0.3)
    assert timeline.trace.users == Users(users, think_s)


def _most_in_flight(timeline: Timeline) -> int:
    assert timeline.clocks
    asked = [(at, 1) for at, step in zip(timeline.trace.arrivals, timeline.finish_steps, strict=True) if step >= 0]
    answered = [(at, -1) for at, step in zip(timeline.clocks.finish_s, timeline.finish_steps, strict=True) if step >= 0]
    return max(accumulate(change for _, change in sorted(asked + answered)))


@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("settings", [{}, {"async_scheduling": True}, {"scheduling_policy": "priority"}])
@pytest.mark.parametrize(("users", "think_s", "step_s"), [(1, 0.1, 0.3), (20, 0.1, 0.3), (20, 5, 0.02), (60, 30, 0.02)])
def test_users_who_wait_for_an_answer_never_have_more_requests_than_they_are(engine, settings, users, think_s, step_s):
    mix = f"users={users} think={think_s} prompt=lognormal(200,0.9) output=lognormal(50,0.9) requests=150"
    scheduler = SchedulerSettings(num_blocks=120, max_model_len=1024, max_num_seqs=32, **settings)
    timeline = simulate(synthetic.read(mix), scheduler, cost=fixed_cost(step_s), engine=engine)
    assert timeline.rejections and timeline.tally.finished == 150 - len(timeline.rejections)
    assert max(timeline.tally.peak_running, timeline.tally.peak_waiting, _most_in_flight(timeline)) <= users
    assert list(timeline.trace.arrivals) == sorted(timeline.trace.arrivals)


def test_both_engines_let_users_ask_at_the_same_times():
    trace = synthetic.read("users=20 think=2 prompt=lognormal(200,0.9) output=lognormal(50,0.9) requests=150")
    settings = SchedulerSettings(num_blocks=120, max_model_len=1024, max_num_seqs=8, async_scheduling=True)
    fast, slow = (simulate(trace, settings, cost=fixed_cost(0.05), engine=engine) for engine in ("fast", "reference"))
    assert list(fast.trace.arrivals) == pytest.approx(list(slow.trace.arrivals))
    assert fast.as_json()["latency"] == slow.as_json()["latency"]


def test_servers_share_all_users():
    trace = synthetic.read("users=11 prompt=10 output=10 requests=40").checked()
    assert [part.users.count for part in trace.shares(4, 4)] == [3, 3, 3, 2]


def test_users_overload_no_server():
    timeline = simulate(
        synthetic.read("users=300 think=1 prompt=100 output=50"), SchedulerSettings(200), cost=fixed_cost(0.2)
    )
    assert load_verdict(timeline).verdict == "serves_late"
