"""Admission by projection: it fills the pool, avoids preemptions, and is not misled by a few short answers."""

import math

import pytest

from legroom.guard.pool import admission_pool
from legroom.guard.pool.admission_pool import Pool, PoolLimits
from legroom.guard.pool.engine_usage import StepClock, steps_of_page, steps_of_registry
from legroom.guard.pool.projection import BlockNeed, Growth, Projection, ReservationState, progress_of
from legroom.guard.weight.guarded_request import Weight, need_of
from legroom.guard.weight.learnt_tokens import AnswerLengths, LikelyLengths, prior_quantiles

GROWING = BlockNeed(10, 1, Growth(1, 10, 100, 100))


def pool_of(blocks):
    return Pool(PoolLimits(blocks, None, 100, is_strict=False))


@pytest.fixture
def recompute(monkeypatch):
    """Sets the steps that a prompt token takes."""
    return lambda steps: monkeypatch.setattr(admission_pool, "RECOMPUTE_STEPS", steps)


def test_requests_near_their_end_make_room_by_time_alone(recompute):
    recompute(1.0)
    pool = pool_of(20)
    pool.learn_pace(100, 10.0)
    pool.acquire(GROWING, 0.0)
    pool.acquire(GROWING, 5.0)
    waiting = pool.acquire(GROWING, 5.0)
    assert waiting.state is ReservationState.WAITING
    pool.admit_waiting(9.9)
    assert waiting.state is ReservationState.ADMITTED


def projection_of(*running, steps=200):
    projection = Projection(0.0, 0.0, steps, running)
    for progress in running:
        projection.add(progress.expected_blocks_at(projection.moments_from_now))
    return projection


def test_the_pool_is_checked_at_every_end_before_the_last_moment():
    projection = projection_of(progress_of(Growth(6, 10, 10, 10), 0), steps=50)
    candidate = progress_of(Growth(2, 12, 100, 100), 0)
    assert projection.steps_to_overflow(candidate, 13, 50) == math.inf
    assert projection.steps_to_overflow(candidate, 12, 50) < 50


def test_the_steps_to_a_preemption_are_projected():
    projection = projection_of(progress_of(Growth(0, 100, 100, 100), 0))
    candidate = progress_of(Growth(0, 100, 100, 100), 0)
    assert projection.steps_to_overflow(candidate, 100, 100) == pytest.approx(50, abs=2)
    assert projection.steps_to_overflow(candidate, 250, 100) == math.inf


def admitted(pool, count, need=GROWING, now_s=0.0):
    return sum(pool.acquire(need, now_s).state is ReservationState.ADMITTED for _ in range(count))


def test_requests_that_start_together_are_projected_to_fill_the_pool_together(recompute):
    recompute(1.0)
    pool = pool_of(100)
    long = pool.acquire(BlockNeed(90, 1, Growth(80, 90, 1000, 1000)), 0.0)
    assert admitted(pool, 20) == 1
    pool.release(long, 1.0)
    assert pool.running == 10


def test_where_recomputing_is_cheap_a_request_starts_before_the_pool_holds_it_to_its_end(recompute):
    recompute(1.0)
    assert admitted(pool_of(100), 40) == 10
    recompute(0.001)
    assert admitted(pool_of(100), 40) > 15


def test_the_last_waiting_requests_start_early(recompute):
    recompute(0.06)
    crowd, last = pool_of(100), pool_of(100)
    assert admitted(crowd, 60) == admitted(last, 12) == 10
    for pool in (crowd, last):
        pool.admit_waiting(0.01)
    assert (crowd.running, last.running) == (10, 12)


def test_an_answer_that_outlived_all_expected_lengths_ends_with_the_next_step():
    progress = progress_of(Growth(1, 3, 20, 500), 40)
    assert (progress.steps_left, progress.growth.blocks_at(progress.done_steps)) == ((1.0,), 5)


def test_an_answer_of_uncertain_length_counts_by_the_probability_that_it_still_runs():
    progress = progress_of(Growth(10, 10, 100, 100, (10, 20, 30, 40)), 0)
    assert [progress.expected_blocks(steps) for steps in (5, 15, 35, 50)] == [10, 7.5, 2.5, 0]
    assert progress.expected_blocks_at((5, 15, 35, 50)) == [10, 7.5, 2.5, 0]
    assert progress_of(Growth(10, 10, 100, 100, (10, 20, 30, 40)), 25).steps_left == (5, 15)


def test_a_request_grows_a_block_at_a_time():
    growth = Growth(1, 2, 40, 40, first_block_steps=28, block_steps=128)
    assert [growth.blocks_at(steps) for steps in (0, 28, 29, 40)] == [1, 1, 2, 2]


def test_an_answer_that_ended_by_the_engines_steps_makes_room_before_its_end_is_seen():
    pool = pool_of(100)
    short = BlockNeed(10, 1, Growth(9, 10, 20, 20), 90)
    reservations = [pool.acquire(short, 0.0) for _ in range(12)]
    for scrape in range(1, 4):
        pool.learn_steps(10 * scrape, 0.1 * scrape)
        pool.admit_waiting(0.1 * scrape)
    assert [reservation.state for reservation in reservations[10:]] == [ReservationState.ADMITTED] * 2


STEPS = 'vllm:iteration_tokens_total_count{engine="0"} 70\nvllm:iteration_tokens_total_count{engine="1"} 30\n'


@pytest.mark.parametrize(("page", "steps"), [(STEPS, 50), ("", None), ("not metrics", None), ("vllm:x{ 1", None)])
def test_a_metrics_page_says_the_steps_per_engine(page, steps):
    assert steps_of_page(page) == steps


def test_inside_vllm_the_registry_says_the_same(monkeypatch):
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    monkeypatch.setattr(prometheus, "REGISTRY", registry)
    assert steps_of_registry() is None
    steps = prometheus.Histogram("vllm:iteration_tokens_total", "", ["engine"], registry=registry).labels("0")
    for tokens in (120, 8, 8):
        steps.observe(tokens)
    assert steps_of_registry() == 3
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/anywhere")
    assert steps_of_registry() is None


@pytest.mark.parametrize(
    ("scrapes", "since_s", "now_s", "steps"),
    [
        (((10.0, 500), (10.5, 550), (11.0, 650)), 10.25, 11.0, 125),
        (((10.0, 500), (10.5, 550), (11.0, 650)), 10.25, 11.1, 125 + 20),
        (((10.0, 500), (10.5, 550)), 10.6, 11.0, 0),
        (((10.0, 500), (10.5, 550)), 9.0, 10.5, 50),
        (((10.0, 500), (10.5, 550), (30.0, 2000), (30.5, 2010)), 29.0, 30.5, 10),
        (((10.0, 500), (10.5, 550), (11.0, 3), (11.5, 43)), 11.0, 11.5, 40),
    ],
    ids=["between scrapes", "extrapolated", "after the last", "before the first", "after a gap", "after a restart"],
)
def test_the_engines_steps_are_interpolated(scrapes, since_s, now_s, steps):
    clock = StepClock()
    assert clock.steps_since(0.0, 1.0) is None
    for at_s, count in scrapes:
        clock.add(count, at_s)
    assert clock.steps_since(since_s, now_s) == pytest.approx(steps)


def test_copies_of_one_prompt_take_their_next_blocks_together():
    weight = Weight(16, 1000, 4, 50, 4, start_blocks=4, most_steps=200)
    growth = need_of(weight, LikelyLengths(200, ()), 32, None, 128).growth
    assert growth.blocks_at(78) == 4
    assert growth.blocks_at(79) > 4


def test_of_an_open_ended_answer_any_length_is_likely_until_some_were_seen():
    quantiles = prior_quantiles(1024)
    assert list(quantiles) == sorted(quantiles)
    assert quantiles[0] < 32 and 100 < quantiles[2] < 200 and 512 < quantiles[-1] < 1024


def test_the_first_answers_do_not_make_open_ended_ones_longer_than_they_were_taken_for():
    lengths = AnswerLengths()
    answers(lengths, 1, 15)
    assert lengths.likely("m", "a", None, 1024).quantiles <= prior_quantiles(1024)


def answers(lengths, count, tokens, max_tokens=None, client="a"):
    for _ in range(count):
        lengths.observe("m", client, max_tokens, tokens)


def test_forty_short_answers_do_not_mislead():
    lengths = AnswerLengths()
    answers(lengths, 40, 3)
    answers(lengths, 40, 3, max_tokens=1000)
    assert lengths.likely("m", "a", None, 1024).expected == 1024
    assert lengths.likely("m", "a", 1000, 1024).expected == 1000


def test_many_short_answers_are_believed_and_a_few_long_ones_widen_at_once():
    lengths = AnswerLengths()
    answers(lengths, 400, 10)
    assert lengths.likely("m", "a", None, 1024).expected < 20
    answers(lengths, 4, 700)
    assert lengths.likely("m", "a", None, 1024).expected >= 700


def test_a_new_client_is_expected_to_be_like_all_of_the_model():
    lengths = AnswerLengths()
    answers(lengths, 400, 10)
    assert lengths.likely("m", "new", None, 1024).expected < 20
    assert lengths.likely("other model", "new", None, 1024).expected == 1024


def test_requests_that_use_all_of_their_max_tokens_are_expected_to_do_so_again():
    lengths = AnswerLengths()
    answers(lengths, 400, 40, max_tokens=40)
    assert lengths.likely("m", "a", 700, 1024).expected == 700


def test_lengths_are_learnt_as_a_few_that_are_equally_likely():
    lengths = AnswerLengths()
    for number in range(2000):
        lengths.observe("m", "a", None, number % 500)
    quantiles = lengths.likely("m", "a", None, 1024).quantiles
    assert list(quantiles) == sorted(quantiles)
    assert quantiles[0] <= 70 and 200 <= quantiles[2] <= 310 and quantiles[-1] >= 420
    assert lengths.likely("other", "a", None, 1024).quantiles == ()


def test_an_answer_longer_than_all_known_ones_widens_them_at_once():
    lengths = AnswerLengths()
    answers(lengths, 400, 10)
    assert lengths.likely("m", "a", None, 1024).quantiles[-1] < 20
    answers(lengths, 4, 700)
    assert lengths.likely("m", "a", None, 1024).quantiles[-1] >= 700
