"""The admission itself, without a server on either side: waiting for room, and models that need none."""

import asyncio
import json

import pytest

from legroom.guard.policy import Policy, PoolPolicy, QueuePolicy
from legroom.guard.pool.admission import Admission
from legroom.guard.request.endpoints import Kind
from legroom.guard.weight.engine_limits import NULL_BLOCK, EngineLimits

PLAIN = EngineLimits(num_blocks=11, block_size=16, max_model_len=160, max_num_seqs=4, source="a test")
CACHELESS = EngineLimits(num_blocks=NULL_BLOCK, block_size=16, max_model_len=512, max_num_seqs=3, source="a test")


def door_of(limits, **policy):
    admission = Admission()
    admission.file.policy = Policy(**policy)
    admission.learn_engine(limits)
    return admission


def asked(admission, kind=Kind.COMPLETION, **body):
    """A request that asked for room, or why it was refused."""
    request = admission.read(kind, json.dumps(body).encode())
    admission.weigh(request)
    return admission.admit(request) or request


def whole_pool(admission):
    return asked(admission, prompt=[1] * 100, max_tokens=60)


async def test_room_that_comes_before_the_wait_begins_is_taken_at_once():
    admission = door_of(PLAIN, queue=QueuePolicy(wait_s=3600.0))
    first, second = whole_pool(admission), whole_pool(admission)
    waiting = asyncio.create_task(admission.wait(second))
    admission.release(first, finished=True)  # before the task took its first step
    assert await asyncio.wait_for(waiting, 60.0) is None
    assert admission.metrics.admitted == 2


def test_giving_up_leaves_the_queue_once():
    admission = door_of(PLAIN)
    _, second = whole_pool(admission), whole_pool(admission)
    for _ in range(2):
        admission.abandon(second)
    assert (admission.pool.waiting, admission.pool.running, admission.metrics.left_queue) == (0, 1, 1)


def test_a_model_without_a_kv_cache_is_admitted_to_by_sequences_alone():
    admission = door_of(CACHELESS)
    requests = [asked(admission, Kind.POOLING, input=[7] * 500) for _ in range(4)]
    assert [admission.is_waiting(request) for request in requests] == [False, False, False, True]


def test_a_model_without_a_kv_cache_is_no_pool_of_unknown_size():
    admission = door_of(CACHELESS, pool=PoolPolicy(when_unknown="closed"))
    assert not admission.is_waiting(asked(admission, Kind.POOLING, input="a"))
    assert "no KV cache" in admission.summary()
    assert b"legroom_guard_fail_open 0.0" in admission.page()
    assert "--max-num-queued-tokens" not in admission.native_flags_hint("0.32.0")


def test_who_is_turned_away_for_want_of_a_sequence_is_told_so():
    admission = door_of(CACHELESS, queue=QueuePolicy(requests=0))
    refusals = [asked(admission, Kind.POOLING, input="a") for _ in range(4)]
    assert refusals[3].message.startswith("The server already runs as many sequences as it may")


@pytest.mark.parametrize("tokens", [1, 15, 16])
def test_a_pool_that_the_policy_names_is_a_pool_however_small(tokens):
    admission = door_of(CACHELESS, pool=PoolPolicy(tokens=tokens))
    requests = [asked(admission, Kind.POOLING, input="a") for _ in range(2)]
    assert [admission.is_waiting(request) for request in requests] == [False, True]


@pytest.mark.parametrize("admit", ["goodput", "strict"])
@pytest.mark.parametrize("many", [{"prompt": [1], "n": 40}, {"prompt": [[1, 2]] * 50}])
def test_more_sequences_than_run_at_once_are_admitted_as_vllm_queues_them(many, admit):
    admission = door_of(PLAIN, pool=PoolPolicy(admit=admit))
    request = asked(admission, **many, max_tokens=3)
    assert not admission.is_waiting(request)


def test_a_single_sequence_that_cannot_fit_is_refused_with_the_numbers():
    limits = EngineLimits(num_blocks=11, block_size=16, max_model_len=1024, source="a test")
    refusal = asked(door_of(limits), prompt=[1] * 100, max_tokens=200)
    assert (refusal.status, refusal.reason) == (400, "never_fits")
    assert "304" in refusal.message


def test_requests_that_grow_into_each_other_share_the_pool_unless_the_policy_is_strict():
    growing = {"prompt": [1] * 16, "max_tokens": 100}
    waiting = {}
    for admit in ("goodput", "strict"):
        admission = door_of(PLAIN, pool=PoolPolicy(admit=admit))
        waiting[admit] = [admission.is_waiting(asked(admission, **growing)) for _ in range(2)]
    assert waiting == {"goodput": [False, False], "strict": [False, True]}
