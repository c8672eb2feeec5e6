"""The pool never lets in more than it holds, keeps the order of arrival, and loses nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from legroom.guard.pool.admission_pool import LONGEST_RETRY_S, Pool, PoolLimits
from legroom.guard.pool.projection import BlockNeed, ReservationState


def pool_of(blocks=10, sequences=None, queue=10):
    return Pool(PoolLimits(blocks, sequences, queue))


def test_what_fits_is_let_in_at_once():
    pool = pool_of()
    assert pool.acquire(BlockNeed(10), 0.0).state is ReservationState.ADMITTED
    assert pool.held_blocks == 10


def test_what_does_not_fit_now_waits_and_enters_when_room_is_given_back():
    pool = pool_of()
    first, second = pool.acquire(BlockNeed(6), 0.0), pool.acquire(BlockNeed(6), 0.0)
    assert second.state is ReservationState.WAITING
    pool.release(first, 1.0)
    assert second.state is ReservationState.ADMITTED
    assert pool.held_blocks == 6


def test_more_than_the_whole_pool_never_fits():
    assert pool_of().acquire(BlockNeed(11), 0.0).state is ReservationState.TOO_LARGE


def test_a_full_queue_turns_away():
    pool = pool_of(queue=1)
    pool.acquire(BlockNeed(10), 0.0)
    assert pool.acquire(BlockNeed(1), 0.0).state is ReservationState.WAITING
    assert pool.acquire(BlockNeed(1), 0.0).state is ReservationState.QUEUE_FULL


def test_a_small_request_does_not_overtake_a_large_one_that_waits():
    pool = pool_of()
    pool.acquire(BlockNeed(6), 0.0)
    large, small = pool.acquire(BlockNeed(6), 0.0), pool.acquire(BlockNeed(1), 0.0)
    assert (large.state, small.state) == (ReservationState.WAITING, ReservationState.WAITING)


def test_leaving_the_head_of_the_queue_lets_the_next_in():
    pool = pool_of()
    pool.acquire(BlockNeed(6), 0.0)
    large, small = pool.acquire(BlockNeed(6), 0.0), pool.acquire(BlockNeed(1), 0.0)
    pool.release(large, 0.0)
    assert small.state is ReservationState.ADMITTED


def test_seats_are_a_limit_of_their_own():
    pool = pool_of(sequences=2)
    assert pool.acquire(BlockNeed(1, 2), 0.0).state is ReservationState.ADMITTED
    assert pool.acquire(BlockNeed(1, 1), 0.0).state is ReservationState.WAITING


def test_leaving_twice_gives_back_once():
    pool = pool_of()
    first = pool.acquire(BlockNeed(4), 0.0)
    pool.acquire(BlockNeed(4), 0.0)
    pool.release(first, 0.0)
    pool.release(first, 0.0)
    assert pool.held_blocks == 4


def test_a_pool_of_unknown_size_lets_all_in():
    pool = Pool(PoolLimits())
    assert all(pool.acquire(BlockNeed(10**9), 0.0).state is ReservationState.ADMITTED for _ in range(5))


def test_a_pool_that_grew_lets_waiting_requests_in():
    pool = pool_of()
    pool.acquire(BlockNeed(10), 0.0)
    late = pool.acquire(BlockNeed(10), 0.0)
    pool.resize(PoolLimits(20, None, 10))
    assert late.state is ReservationState.ADMITTED


def test_a_request_larger_than_a_pool_that_shrank_gets_its_turn_alone():
    pool = pool_of()
    first, late = pool.acquire(BlockNeed(10), 0.0), pool.acquire(BlockNeed(9), 0.0)
    pool.resize(PoolLimits(5, None, 10))
    pool.release(first, 0.0)
    assert late.state is ReservationState.ADMITTED


def test_retry_after_follows_the_rate_of_releases():
    pool = pool_of(100, queue=0)
    for second in range(60):
        pool.release(pool.acquire(BlockNeed(10), second), second)
    pool.acquire(BlockNeed(100), 60.0)
    assert pool.retry_after_s(BlockNeed(50), 60.0) == pytest.approx(5, abs=1)


def test_retry_after_is_rounded_down_as_a_late_return_leaves_the_server_idle():
    pool = pool_of(100, queue=0)
    for second in range(200):
        pool.release(pool.acquire(BlockNeed(10), second), second)
    pool.acquire(BlockNeed(100), 200.0)
    assert pool.retry_after_s(BlockNeed(55), 200.0) == 5, "5.8 by the rate"


def test_nobody_is_sent_away_for_longer_than_the_rate_can_tell_and_yet_not_all_at_once():
    pool = pool_of(100, queue=0)
    for second in range(60):
        pool.release(pool.acquire(BlockNeed(1), second), second)
    pool.acquire(BlockNeed(100), 60.0)
    told = [pool.retry_after_s(BlockNeed(10), 60.0) for _ in range(40)]
    assert max(told) <= LONGEST_RETRY_S
    assert len(set(told[3:])) >= 10


def test_retry_after_follows_the_seats_where_they_are_what_is_missing():
    pool = pool_of(10_000, sequences=4, queue=20)
    for second in range(60):
        pool.release(pool.acquire(BlockNeed(1), second), second)
    for _ in range(14):
        pool.acquire(BlockNeed(1), 60.0)
    assert pool.retry_after_s(BlockNeed(1), 60.0) == pytest.approx(11, abs=2), "ten wait, and one leaves a second"


def test_a_burst_is_told_to_come_back_spread_out():
    pool = pool_of(100, queue=0)
    for second in range(60):
        pool.release(pool.acquire(BlockNeed(10), second), second)
    pool.acquire(BlockNeed(100), 60.0)
    told = [pool.retry_after_s(BlockNeed(50), 60.0) for _ in range(4)]
    assert told == sorted(told)
    assert told[-1] > 2 * told[0]


def test_those_whose_time_in_the_queue_is_up_together_are_told_to_come_back_spread_out():
    pool = pool_of(100, queue=50)
    for second in range(60):
        pool.release(pool.acquire(BlockNeed(10), second), second)
    pool.acquire(BlockNeed(100), 60.0)
    told = []
    for reservation in [pool.acquire(BlockNeed(20), 60.0) for _ in range(20)]:
        pool.release(reservation, 60.0)
        told.append(pool.retry_after_s(reservation.need, 60.0, has_waited=True))
    assert told == sorted(told)
    assert len(set(told)) >= 15


def test_retry_after_is_a_guess_before_anything_was_released():
    pool = pool_of()
    pool.acquire(BlockNeed(10), 0.0)
    assert pool.retry_after_s(BlockNeed(5), 1000.0) == 2


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 10**6)), max_size=20), st.integers(1, 10**9))
def test_retry_after_is_a_whole_number_of_seconds_within_bounds(releases, asked):
    pool, now_s = Pool(PoolLimits(10**6, None, 0)), 0.0
    for blocks, later_s in releases:
        now_s += later_s
        pool.release(pool.acquire(BlockNeed(blocks), now_s), now_s)
    told = pool.retry_after_s(BlockNeed(asked), now_s)
    assert isinstance(told, int)
    assert 1 <= told <= LONGEST_RETRY_S


class PoolMachine(RuleBasedStateMachine):
    """Any order of asking, leaving, cancelling and resizing."""

    reservations = Bundle("reservations")

    @initialize(blocks=st.integers(1, 40), sequences=st.none() | st.integers(1, 6), queue=st.integers(0, 8))
    def start(self, blocks, sequences, queue):
        self.pool = Pool(PoolLimits(blocks, sequences, queue))
        self.alive, self.order, self.now_s, self.most_blocks = [], [], 0.0, blocks

    @rule(target=reservations, blocks=st.integers(1, 50), sequences=st.integers(1, 4))
    def ask(self, blocks, sequences):
        self.now_s += 1
        sequences = min(sequences, self.pool.limits.sequences or sequences)
        reservation = self.pool.acquire(BlockNeed(blocks, sequences), self.now_s)
        if reservation.state in (ReservationState.ADMITTED, ReservationState.WAITING):
            self.alive.append(reservation)
        return reservation

    @rule(reservation=consumes(reservations))
    def leave(self, reservation):
        self.now_s += 1
        self.pool.release(reservation, self.now_s)
        if reservation in self.alive:
            self.alive.remove(reservation)

    @rule(blocks=st.integers(1, 40))
    def resize(self, blocks):
        limits = self.pool.limits
        self.most_blocks = max(self.most_blocks, blocks)
        self.pool.resize(PoolLimits(blocks, limits.sequences, limits.queue_requests))

    @invariant()
    def what_is_held_is_what_the_admitted_hold(self):
        if hasattr(self, "pool"):
            inside = [reservation for reservation in self.alive if reservation.state is ReservationState.ADMITTED]
            assert self.pool.held_blocks == sum(reservation.need.blocks for reservation in inside)
            assert self.pool.held_sequences == sum(reservation.need.sequences for reservation in inside)
            assert self.pool.running == len(inside)

    @invariant()
    def never_more_is_held_than_the_largest_pool_had(self):
        if hasattr(self, "pool"):
            assert self.pool.held_blocks <= self.most_blocks or self.pool.running == 1
            assert self.pool.limits.sequences is None or self.pool.held_sequences <= self.pool.limits.sequences

    @invariant()
    def nobody_overtakes(self):
        """Those inside came before those who wait."""
        if hasattr(self, "pool"):
            waiting = [
                reservation.requested_s for reservation in self.alive if reservation.state is ReservationState.WAITING
            ]
            inside = [
                reservation.requested_s for reservation in self.alive if reservation.state is ReservationState.ADMITTED
            ]
            assert not waiting or not inside or max(inside) < min(waiting)
            assert self.pool.waiting == len(waiting)
            assert self.pool.queued_blocks == sum(
                t.need.blocks for t in self.alive if t.state is ReservationState.WAITING
            )

    @invariant()
    def an_empty_pool_keeps_nobody_waiting(self):
        if hasattr(self, "pool"):
            assert self.pool.running or not self.pool.waiting

    def teardown(self):
        if hasattr(self, "pool"):
            for reservation in list(self.alive):
                self.pool.release(reservation, self.now_s)
            assert (self.pool.held_blocks, self.pool.held_sequences, self.pool.waiting) == (0, 0, 0)


TestPoolMachine = PoolMachine.TestCase
