"""Clients share the pool: by weight, in turn, with a lane for small work, and nobody waits for ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.guard.policy import ClientPolicy, parse_policy
from legroom.guard.pool.admission_pool import FairQueue, Pool, PoolLimits
from legroom.guard.pool.projection import BlockNeed, Growth, Reservation, ReservationState
from legroom.guard.request.endpoints import client_of, weights_by_client

KEY = (b"authorization", b"Bearer sk-secret")


class Item:
    def __init__(self, client, cost=1.0):
        self.client, self.cost = client, cost


def drained(queue):
    order = []
    while (item := queue.next_in_turn()) is not None:
        queue.remove(item)
        order.append(item.client)
    return order


def test_one_clients_requests_stay_in_order_of_arrival():
    queue = FairQueue()
    items = [Item("a", cost) for cost in (9, 1, 5)]
    for item in items:
        queue.add(item)
    assert [queue.next_in_turn() is item and not queue.remove(item) for item in items] == [True] * 3


def test_a_client_behind_sixty_requests_of_another_is_next():
    queue = FairQueue()
    for _ in range(60):
        queue.add(Item("large", 100.0))
    queue.remove(queue.next_in_turn())
    queue.add(Item("small"))
    assert drained(queue)[:2].count("small") == 1


def test_a_client_of_twice_the_weight_has_twice_the_turns():
    queue = FairQueue()
    for _ in range(30):
        queue.add(Item("a"), weight=2.0)
        queue.add(Item("b"))
    assert drained(queue)[:30].count("a") == pytest.approx(20, abs=1)


@given(st.integers(1, 20), st.integers(1, 50))
def test_a_request_waits_for_at_most_one_turn_of_every_client_however_many_they_send(clients, each):
    queue = FairQueue()
    for number in range(clients):
        for _ in range(each):
            queue.add(Item(f"c{number}"))
    queue.add(Item("late"))
    assert drained(queue).index("late") <= clients


def test_a_client_that_leaves_the_middle_of_the_queue_is_not_met_again():
    queue = FairQueue()
    items = [Item("a"), Item("b"), Item("c")]
    for item in items:
        queue.add(item)
    queue.remove(items[1])
    assert (drained(queue), len(queue), queue.per_client) == (["a", "c"], 0, {})


def shared_pool(lane=0.1):
    return Pool(PoolLimits(20, None, 100, small_share=lane))


def test_small_work_of_another_client_does_not_wait_behind_large_work():
    pool = shared_pool()
    pool.acquire(BlockNeed(1), 0.0, "small")
    large = [pool.acquire(BlockNeed(6), 1.0, "large") for _ in range(10)]
    assert pool.acquire(BlockNeed(1), 2.0, "small").state is ReservationState.ADMITTED
    assert sum(reservation.state is ReservationState.ADMITTED for reservation in large) == 2


def test_the_lane_is_no_larger_than_the_policy_says_so_large_work_still_gets_its_turn():
    pool = shared_pool()
    pool.acquire(BlockNeed(1), 0.0, "small")
    first, _, third = (pool.acquire(BlockNeed(6), 0.0, "large") for _ in range(3))
    small = [pool.acquire(BlockNeed(1), 1.0, "small") for _ in range(50)]
    pool.release(first, 2.0)
    ended = 0
    while third.state is ReservationState.WAITING:
        pool.release(next(reservation for reservation in small if reservation.state is ReservationState.ADMITTED), 3.0)
        ended += 1
    assert ended <= 12, "what the two large ones before it had took as much as twelve small ones do"


def begun_beside(client):
    """Of twenty requests that grow tenfold, how many begin while the other client sends small ones."""
    pool = Pool(PoolLimits(100, None, 100, False, 0.05))
    pool.acquire(BlockNeed(1), 0.0, client)
    for _ in range(20):
        pool.acquire(BlockNeed(20, 1, Growth(2, 20, 100, 100)), 1.0, "large")
    return pool.running


def test_while_small_work_is_about_large_work_must_find_room_for_all_its_life():
    assert begun_beside("large") > 10
    assert begun_beside("small") == 1 + 4


def test_while_small_requests_are_served_large_prompts_are_not_computed_together(monkeypatch):
    monkeypatch.setattr("legroom.guard.pool.admission_pool.RECOMPUTE_STEPS", 0.01)
    pool = Pool(PoolLimits(100, None, 100, False, 0.05))
    pool.learn_pace(100, 1.0)
    pool.acquire(BlockNeed(1), 0.0, "small")
    large = BlockNeed(20, 1, Growth(10, 20, 1000, 1000), 500)
    first, second = (pool.acquire(large, 1.0, "large") for _ in range(2))
    assert (first.state, second.state) == (ReservationState.ADMITTED, ReservationState.WAITING)
    pool.admit_waiting(1.05)
    assert second.state is ReservationState.WAITING
    pool.admit_waiting(1.11)
    assert second.state is ReservationState.ADMITTED


def test_a_request_seen_by_the_clock_alone_may_stay_longer_than_it_seems():
    reservation = Reservation(BlockNeed(20, 1, Growth(2, 20, 100, 100)), 0.0)
    assert reservation.progress(40.0).steps_left == (60,)
    assert reservation.progress(40.0, doubt=0.25).steps_left == (70,)
    reservation.steps_seen = 40
    assert reservation.progress(40.0, doubt=0.25).steps_left == (60,)


def test_a_client_that_is_alone_has_the_whole_pool():
    pool = shared_pool()
    assert [pool.acquire(BlockNeed(10), 0.0, "a").state for _ in range(2)] == [ReservationState.ADMITTED] * 2


def test_a_client_is_its_key_and_the_key_does_not_show():
    name = client_of([KEY], "10.0.0.1", ClientPolicy())
    assert name == client_of([(b"x-api-key", b"sk-secret")], "10.0.0.2", ClientPolicy())
    assert "secret" not in name


def test_a_client_without_a_key_is_its_address():
    assert client_of([], "10.0.0.1", ClientPolicy()) == "address:10.0.0.1"


def test_a_header_of_the_gateway_goes_before_key_and_address():
    policy = ClientPolicy(header="X-Team")
    assert client_of([KEY, (b"x-team", b"search")], "10.0.0.1", policy) == "header:search"


def test_a_policy_may_have_one_queue_for_all():
    assert client_of([KEY], "10.0.0.1", ClientPolicy(by="none")) == ""


def test_weights_of_the_policy_name_a_key_a_header_or_an_address():
    policy = parse_policy('[weights]\n"sk-secret" = 3\nsearch = 0.5')
    weights = weights_by_client(policy.weights)
    assert weights[client_of([KEY], "", ClientPolicy())] == 3.0
    assert weights["header:search"] == 0.5
