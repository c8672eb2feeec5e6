"""Prompts that begin alike: the beginning is counted once among those that run, as vLLM holds it."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.guard.pool.admission import Admission
from legroom.guard.pool.admission_pool import Pool, PoolLimits
from legroom.guard.pool.prefix_ledger import PrefixLedger
from legroom.guard.pool.projection import BlockNeed, Reservation, ReservationState
from legroom.guard.request.body import demand_of
from legroom.guard.request.endpoints import Kind
from legroom.guard.request.prefixes import MOST_KEYS, PrefixUnit, chain_of_ids
from legroom.guard.weight.engine_limits import EngineLimits, limits_of_metrics

UNIT = PrefixUnit(16)
LIMITS = EngineLimits(101, 16, max_model_len=1024, max_num_seqs=256, prefix_caching=True)
SYSTEM = "You are an assistant that answers briefly and in plain words. " * 12


def chain(ids, unit=UNIT, seed=0):
    return chain_of_ids(list(ids), unit, seed)


def reservation(ids, blocks=10):
    return Reservation(BlockNeed(blocks, chains=(chain(ids),)), 0.0)


def held_by(*prompts):
    ledger = PrefixLedger()
    reservations = [reservation(ids) for ids in prompts]
    for one_more in reservations:
        ledger.add(one_more)
    return ledger, reservations


def test_full_blocks_of_equal_beginnings_are_found():
    ledger, _ = held_by(range(100))
    assert ledger.units_of([chain([*range(50), *range(900, 950)])]) == 3


def test_the_last_token_is_computed_for_each_request_so_a_prompt_that_ends_a_block_shares_one_less():
    ledger, _ = held_by(range(100))
    assert ledger.units_of([chain(range(48))]) == 2
    assert ledger.units_of([chain(range(49))]) == 3


def test_equal_tokens_behind_another_beginning_are_not_shared():
    ledger, _ = held_by(range(100))
    assert ledger.units_of([chain([7777, *range(1, 100)])]) == 0


def test_what_several_hold_is_counted_once_until_the_last_of_them_ends():
    ledger, (first, second, third) = held_by(range(100), range(100), range(100))
    assert (ledger.shared_blocks, ledger.saved_blocks) == (6, 12)
    ledger.remove(first)
    assert (ledger.shared_blocks, ledger.saved_blocks) == (6, 6)
    ledger.remove(second)
    assert (ledger.shared_blocks, ledger.saved_blocks, third.shared_units) == (0, 0, 0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90)), max_size=12), st.randoms(use_true_random=False))
def test_all_that_run_hold_as_many_blocks_as_there_are_different_ones(prompts, rnd):
    tokens = [[group * 1000 + number for number in range(length)] for group, length in prompts]
    ledger, reservations = PrefixLedger(), []
    for ids in tokens:
        one_more = Reservation(BlockNeed(100, chains=(made,) if (made := chain(ids)) else ()), 0.0)
        reservations.append((one_more, ids))
        ledger.add(one_more)
    rnd.shuffle(reservations)
    while reservations:
        blocks = [tuple(ids[: 16 * (at + 1)]) for _, ids in reservations for at in range((len(ids) - 1) // 16)]
        assert len(blocks) - ledger.saved_blocks == pytest.approx(len(set(blocks)))
        ledger.remove(reservations.pop()[0])
    assert (ledger.shared_blocks, ledger.saved_blocks) == (0, 0)


def test_a_long_prompt_has_a_bounded_number_of_keys_and_still_shares_most_of_it():
    ledger, _ = held_by(range(150_000))
    both = chain(range(150_000))
    assert len(both.keys) <= MOST_KEYS
    assert ledger.units_of([both]) >= 0.99 * 150_000 / 16


def test_one_prompt_of_a_request_has_no_more_keys_than_are_compared():
    prompt = demand_of(Kind.COMPLETION, {"model": "m", "prompt": [*range(400_000)]}, UNIT).prompts[0]
    assert len(prompt.chain.keys) == MOST_KEYS


def test_what_is_no_token_id_has_no_chain():
    assert chain(["a"] * 100) is None
    assert chain([1 << 70] * 100) is None


def admission():
    made = Admission()
    made.learn_engine(LIMITS)
    return made


def asked(made, body, kind=Kind.COMPLETION):
    request = made.read(kind, json.dumps(body).encode())
    made.weigh(request)
    made.admit(request)
    return request


def admitted(made, bodies, kind=Kind.COMPLETION):
    return sum(asked(made, body, kind).reservation.state is ReservationState.ADMITTED for body in bodies)


def completions(prefix, count=60):
    rnd = random.Random(1)
    for _ in range(count):
        yield {"model": "m", "prompt": [*range(prefix), *rnd.choices(range(5000, 9000), k=40)], "max_tokens": 40}


def test_more_requests_with_one_beginning_are_let_in_than_without():
    shared = admitted(admission(), completions(400))
    apart = admitted(admission(), ({**body, "cache_salt": str(at)} for at, body in enumerate(completions(400))))
    assert (apart <= 4, shared >= 15) == (True, True)


def test_strict_admission_shares_what_is_counted_and_holds_no_more_than_the_pool(tmp_path):
    (tmp_path / "policy.toml").write_text('[pool]\nadmit = "strict"\n')
    made = Admission(tmp_path / "policy.toml")
    made.learn_engine(LIMITS)
    assert admitted(made, completions(400)) == (100 - 25) // 5
    assert made.pool.held_blocks <= 100


def test_chats_with_one_system_prompt_share_it():
    def chats():
        for at in range(60):
            turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{at} is asked about"}]
            yield {"model": "m", "messages": turns, "max_tokens": 20}

    shared = admitted(admission(), chats(), Kind.CHAT)
    apart = admitted(admission(), ({**body, "cache_salt": str(at)} for at, body in enumerate(chats())), Kind.CHAT)
    assert shared > 2 * apart


@pytest.mark.parametrize(
    "other",
    [
        {"model": "adapter"},
        {"cache_salt": "mine"},
        {"prompt_logprobs": 1},
        {"truncate_prompt_tokens": 50},
        {"echo": True, "logprobs": 1},
    ],
)
def test_requests_that_vllm_keeps_apart_share_nothing(other):
    made = admission()
    body = {"model": "m", "prompt": list(range(400)), "max_tokens": 1}
    asked(made, body)
    before = made.pool.held_blocks
    asked(made, body | other)
    assert made.pool.held_blocks == 2 * before


def test_copies_of_one_prompt_share_its_full_blocks():
    made = admission()
    asked(made, {"model": "m", "prompt": list(range(321)), "max_tokens": 15, "n": 4})
    assert made.pool.held_blocks == 20 + 4


@pytest.mark.parametrize(
    "limits",
    [
        EngineLimits(101, 16, max_model_len=1024, prefix_caching=False),
        EngineLimits(101, 16, max_model_len=1024),
        EngineLimits(101, 16, max_model_len=1024, prefix_caching=True, ranks=2),
        EngineLimits(101, 16, 80, 1024, prefix_caching=True),
    ],
    ids=["off", "not known", "data parallel", "hybrid"],
)
def test_without_certainty_that_the_server_shares_every_prompt_counts_in_full(limits):
    assert limits.prefix_unit is None


def test_the_metrics_page_says_whether_prefixes_are_cached():
    page = 'vllm:cache_config_info{{block_size="16",num_gpu_blocks="100",enable_prefix_caching="{}"}} 1.0\n'
    assert limits_of_metrics(page.format("True")).prefix_unit == PrefixUnit(16)
    assert limits_of_metrics(page.format("False")).prefix_unit is None


def test_a_chat_shares_up_to_its_first_image():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    turns = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": [image, {"type": "text", "text": SYSTEM}]},
    ]
    with_image = demand_of(Kind.CHAT, {"model": "m", "messages": turns}, UNIT).prompts[0].chain
    alone = demand_of(Kind.CHAT, {"model": "m", "messages": turns[:1]}, UNIT).prompts[0].chain
    assert with_image.keys == alone.keys


def test_keys_held_for_all_requests_are_given_back():
    pool = Pool(PoolLimits(1000, None, 10))
    reservations = [pool.acquire(BlockNeed(30, chains=(chain(range(400)),)), 0.0) for _ in range(5)]
    assert pool.held_blocks == 30 + 4 * (30 - 24)
    for done in reservations:
        pool.release(done, 1.0)
    assert pool.held_blocks == 0
