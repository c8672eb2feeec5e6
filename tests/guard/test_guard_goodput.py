"""Admission that looks ahead: it fills the pool, keeps from thrashing, and is not misled by a few short answers."""

import math
import random
import sys
from pathlib import Path

import pytest

from legroom.guard.pool import early_start
from legroom.guard.pool.block_pool import Pool, PoolLimits
from legroom.guard.pool.projection import Growth, Outlook, hold_of
from legroom.guard.pool.reservation import Need, TicketState
from legroom.guard.weight.guarded_request import Weight, need_of
from legroom.guard.weight.output_lengths import AnswerLengths, LikelyLengths, prior_lives

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import guard_goodput as goodput

STEP_MS = (10.0, 1.0, 0.15)


@pytest.fixture(autouse=True)
def real_server(monkeypatch):
    """The engine says how many steps it made, as vLLM does, and the way to it takes a moment."""
    monkeypatch.setattr(goodput.POOL, "learn", True)
    monkeypatch.setattr(goodput.POOL, "hop_s", 0.015)


def measured(load, look_ahead):
    asked = goodput.LOADS[load](random.Random(0))
    direct = goodput.run(asked, None, STEP_MS)
    ours = goodput.run(asked, PoolLimits(goodput.POOL.blocks, None, 10_000, look_ahead), STEP_MS)
    return ours.tokens_per_s / direct.tokens_per_s, ours.preemptions, direct.preemptions


@pytest.mark.parametrize("load", ["short", "long", "several", "open-ended", "half prompts"])
def test_goodput_on_vllms_scheduler_is_not_below_that_of_vllm_alone(load):
    ratio, _, _ = measured(load, 1.0)
    assert ratio >= 0.99


@pytest.mark.parametrize(
    ("load", "share"), [("short", 0.1), ("long", 0.1), ("mixed", 0.1), ("several long", 0.1), ("open-ended", 0.45)]
)
def test_where_computing_again_never_pays_preemptions_are_avoided(load, share, monkeypatch):
    monkeypatch.setattr(early_start, "SEQUENCE_GAIN", 1e-6)
    monkeypatch.setattr(early_start, "FEW_GAIN", 1e-6)
    _, preemptions, direct = measured(load, 1.0)
    assert preemptions <= share * direct


@pytest.mark.parametrize("load", ["short", "long", "mixed"])
def test_strict_admission_never_preempts_where_lengths_are_known(load):
    _, preemptions, direct = measured(load, None)
    assert (preemptions, direct > 0) == (0, True)


GROWING = Need(10, 1, Growth(1, 10, 100, 100))


def test_requests_near_their_end_make_room_by_time_alone():
    pool = Pool(PoolLimits(20, None, 10, look_ahead=0.5, recompute_steps=1.0))
    pool.learn_pace(100, 10.0)
    pool.acquire(GROWING, 0.0)
    pool.acquire(GROWING, 5.0)
    waiting = pool.acquire(GROWING, 5.0)
    assert waiting.state is TicketState.WAITING
    pool.admit_waiting(9.0)
    assert waiting.state is TicketState.ADMITTED


def test_room_is_looked_for_at_every_end_before_the_last_moment():
    short = hold_of(Growth(6, 10, 10, 10), 0, True)
    outlook = Outlook(0.0, 0.0, 50, [short])
    outlook.add(outlook.of(short))
    newcomer = hold_of(Growth(2, 12, 100, 100), 0, True)
    assert outlook.has_room(newcomer, 13, 50)
    assert not outlook.has_room(newcomer, 12, 50)


def outlook_of(*holds, steps=200):
    outlook = Outlook(0.0, 0.0, steps, holds)
    outlook.start([outlook.of(hold) for hold in holds])
    return outlook


def test_a_newcomer_that_will_be_preempted_is_told_when():
    outlook = outlook_of(hold_of(Growth(0, 100, 100, 100), 0, True))
    newcomer = hold_of(Growth(0, 100, 100, 100), 0, True)
    assert outlook.steps_to_overflow(newcomer, 100, 100) == pytest.approx(50, abs=2)
    assert outlook.steps_to_overflow(newcomer, 250, 100) == math.inf


def test_a_place_for_a_whole_life_is_looked_for_at_the_next_ends():
    outlook = outlook_of(hold_of(Growth(60, 80, 20, 20), 0, True))
    newcomer = hold_of(Growth(25, 90, 100, 100), 0, True)
    assert outlook.has_place_within(newcomer, 100, steps=30)
    assert not outlook.has_place_within(newcomer, 100, steps=20)


def begun(pool, count, need=GROWING, now_s=0.0):
    return sum(pool.acquire(need, now_s).state is TicketState.ADMITTED for _ in range(count))


def test_requests_that_begin_together_are_seen_to_fill_the_pool_together():
    pool = Pool(PoolLimits(100, None, 100, 1.0, recompute_steps=1.0))
    long = pool.acquire(Need(90, 1, Growth(80, 90, 1000, 1000)), 0.0)
    assert begun(pool, 20) == 1
    pool.release(long, 1.0)
    assert pool.running == 10


def test_where_computing_again_is_cheap_a_request_begins_before_there_is_a_place_for_all_its_life():
    cheap, dear = (Pool(PoolLimits(100, None, 100, 1.0, recompute_steps=steps)) for steps in (0.001, 1.0))
    assert begun(dear, 40) == 10
    assert begun(cheap, 40) > 15


def test_a_request_waits_where_a_place_for_all_its_life_comes_sooner_than_beginning_early_pays():
    pool = Pool(PoolLimits(20, None, 100, 1.0, recompute_steps=0.05))
    pool.acquire(Need(20, 1, Growth(19, 20, 5, 5)), 0.0)
    early = Need(12, 1, Growth(1, 12, 100, 100), 100)
    assert pool.acquire(early, 0.0).state is TicketState.WAITING


def test_the_last_that_wait_begin_early_as_nobody_comes_after_them():
    crowd, last = (Pool(PoolLimits(100, None, 100, 1.0, recompute_steps=0.4)) for _ in range(2))
    assert begun(crowd, 60) == begun(last, 12) == 10
    for pool in (crowd, last):
        pool.admit_waiting(0.01)
    assert (crowd.running, last.running) == (10, 12)


def test_an_answer_that_outlived_what_was_expected_is_expected_to_go_on():
    assert hold_of(Growth(1, 3, 20, 500), 40, True).steps_left == (20,)
    assert hold_of(Growth(1, 3, 20, 500), 40, True).blocks == 5


def test_copies_of_one_prompt_take_their_next_blocks_together():
    weight = Weight(16, 1000, 4, 50, 4, start_blocks=4, most_steps=200)
    growth = need_of(weight, LikelyLengths(200, ()), 32, None, 128).growth
    assert growth.blocks_at(78) == 4
    assert growth.blocks_at(79) > 4


def test_of_an_open_ended_answer_any_length_is_likely_until_some_were_seen():
    lives = prior_lives(1024)
    assert list(lives) == sorted(lives)
    assert lives[0] < 32 and 100 < lives[2] < 200 and 512 < lives[-1] < 1024


def test_the_first_answers_do_not_make_open_ended_ones_longer_than_they_were_taken_for():
    lengths = AnswerLengths()
    answers(lengths, 1, 15)
    assert lengths.lives("m", "a", None, 1024) <= prior_lives(1024)


def answers(lengths, count, tokens, max_tokens=None, client="a"):
    for _ in range(count):
        lengths.observe("m", client, max_tokens, tokens)


def test_forty_short_answers_do_not_mislead():
    lengths = AnswerLengths()
    answers(lengths, 40, 3)
    answers(lengths, 40, 3, max_tokens=1000)
    assert lengths.expected("m", "a", None, 1024) == 1024
    assert lengths.expected("m", "a", 1000, 1024) == 1000


def test_many_short_answers_are_believed_and_a_few_long_ones_widen_at_once():
    lengths = AnswerLengths()
    answers(lengths, 400, 10)
    assert lengths.expected("m", "a", None, 1024) < 20
    answers(lengths, 4, 700)
    assert lengths.expected("m", "a", None, 1024) >= 700


def test_a_new_client_is_expected_to_be_like_all_of_the_model():
    lengths = AnswerLengths()
    answers(lengths, 400, 10)
    assert lengths.expected("m", "new", None, 1024) < 20
    assert lengths.expected("other model", "new", None, 1024) == 1024


def test_requests_that_use_all_of_their_max_tokens_are_expected_to_do_so_again():
    lengths = AnswerLengths()
    answers(lengths, 400, 40, max_tokens=40)
    assert lengths.expected("m", "a", 700, 1024) == 700


def test_lengths_are_learnt_as_a_few_that_are_equally_likely():
    lengths = AnswerLengths()
    for number in range(2000):
        lengths.observe("m", "a", None, number % 500)
    lives = lengths.lives("m", "a", None, 1024)
    assert list(lives) == sorted(lives)
    assert lives[0] <= 70 and 200 <= lives[2] <= 310 and lives[-1] >= 420
    assert lengths.lives("other", "a", None, 1024) == ()


def test_an_answer_longer_than_all_known_ones_widens_them_at_once():
    lengths = AnswerLengths()
    answers(lengths, 400, 10)
    assert lengths.lives("m", "a", None, 1024)[-1] < 20
    answers(lengths, 4, 700)
    assert lengths.lives("m", "a", None, 1024)[-1] >= 700
