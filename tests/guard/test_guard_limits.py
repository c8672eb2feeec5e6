"""What the engine holds, from whoever tells it; and what a request weighs against that."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.errors import LegroomError
from legroom.facts.releases import release
from legroom.guard.policy import PoolPolicy
from legroom.guard.request.body import demand_of
from legroom.guard.request.endpoints import Kind
from legroom.guard.weight.engine_limits import (
    EngineLimits,
    limits_of_metrics,
    limits_of_plan,
    limits_of_vllm,
    native_flags,
    read_limits,
)
from legroom.guard.weight.guarded_request import weight_of
from legroom.guard.weight.learnt_tokens import FEWEST, GENERATION, BoundedCache, ModelTokens, Quantiles, RecentMaximum
from legroom.planning.plan_document import plan_from_json
from legroom.units import cdiv

PLAIN = EngineLimits(num_blocks=101, block_size=16, full_request_blocks=64, max_model_len=1024, max_num_seqs=8)


def plan(**kv):
    return {
        "kv": {"num_blocks": 1000, "block_size": 16, "max_concurrency": 1000 / 64, "tokens": 16000} | kv,
        "args": {"max_model_len": 1024, "max_num_seqs": 256},
    }


def planned(**kv):
    return plan_from_json(plan(**kv), needs=())


def test_a_plan_gives_the_pool_and_the_flags():
    limits = limits_of_plan(planned())
    assert (limits.num_blocks, limits.full_request_blocks, limits.max_num_seqs) == (1000, 64, 256)


def test_a_plan_of_a_model_without_a_kv_cache_says_so():
    limits = limits_of_plan(planned(num_blocks=0, max_concurrency=0.0, bytes_per_token=0))
    assert limits.cacheless
    assert limits.share_sequences() == 256


def test_the_placeholder_alone_is_no_pool_on_any_of_the_engines():
    row = 'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="2",kv_cache_max_concurrency="None"} 1.0'
    limits = limits_of_metrics(row % 0 + "\n" + row % 1)
    assert limits.cacheless
    assert limits.share_blocks() is None


def test_the_null_block_is_nobodys():
    assert limits_of_plan(planned()).share_blocks() == 999


def test_a_file_that_is_no_plan_is_complained_about(tmp_path):
    for text in ("[]", "{}", "no", json.dumps(plan(num_blocks=0)), json.dumps({"kv": 3, "args": {}})):
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(LegroomError):
            read_limits(tmp_path / "plan.json")
    with pytest.raises(LegroomError, match="cannot be read"):
        read_limits(tmp_path / "none.json")


ROW = (
    'vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="%d",kv_cache_max_concurrency="2.03125",'
    'kv_cache_size_tokens="2080",num_gpu_blocks="65",effective_attention_block_size="32"} 1.0'
)


def test_the_metrics_page_gives_the_pool_and_the_length():
    limits = limits_of_metrics("# HELP x\n" + ROW % 0)
    assert (limits.num_blocks, limits.block_size, limits.full_request_blocks) == (65, 32, 32)
    assert limits.max_model_len == 1024


def test_every_engine_of_a_server_names_the_blocks_of_all_and_has_its_part():
    limits = limits_of_metrics((ROW % 0 + "\n" + ROW % 1).replace('"65"', '"130"'))
    assert (limits.num_blocks, limits.ranks, limits.full_request_blocks) == (65, 2, 32)
    assert limits.share_blocks() == 128


def test_servers_on_one_page_each_have_their_own_blocks():
    other = (ROW % 0).replace('num_gpu_blocks="65"', 'num_gpu_blocks="99",pod="b"')
    limits = limits_of_metrics(ROW % 0 + "\n" + other)
    assert (limits.num_blocks, limits.ranks) == (65, 2)


def test_a_server_without_a_kv_cache_does_not_open_the_pool_of_another_on_its_page():
    encoder = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1",pod="b"} 1.0'
    limits = limits_of_metrics(encoder + "\n" + ROW % 0)
    assert (limits.num_blocks, limits.ranks) == (65, 1)


def test_a_page_of_an_older_release_has_no_length():
    limits = limits_of_metrics('vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0')
    assert limits.known
    assert limits.max_model_len is None


@pytest.mark.parametrize("page", ["", "<html>", 'vllm:cache_config_info{num_gpu_blocks="None",block_size="16"} 1.0'])
def test_a_page_without_the_pool_leaves_it_unknown(page):
    assert not limits_of_metrics(page).known


@given(st.text())
def test_any_page_is_read(text):
    limits_of_metrics("vllm:cache_config_info{" + text)


def vllm_config(**cache):
    return SimpleNamespace(
        cache_config=SimpleNamespace(num_gpu_blocks=130, block_size=32, **cache),
        model_config=SimpleNamespace(max_model_len=1024, max_logprobs=20),
        scheduler_config=SimpleNamespace(max_num_seqs=16, max_num_queued_reqs=4),
        parallel_config=SimpleNamespace(data_parallel_size=2),
    )


def test_vllms_own_configuration_is_read():
    limits = limits_of_vllm(vllm_config(), SimpleNamespace(api_server_count=2))
    assert (limits.num_blocks, limits.max_model_len, limits.ranks, limits.api_servers) == (65, 1024, 2, 2)


def test_each_api_server_has_its_share():
    limits = limits_of_vllm(vllm_config(), SimpleNamespace(api_server_count=2))
    assert limits.share_blocks() == 64


@pytest.mark.parametrize(
    ("parallel", "blocks", "ranks"),
    [
        ({"data_parallel_size": 2}, 65, 2),
        ({"data_parallel_size": 4, "data_parallel_external_lb": True}, 130, 1),
        ({"data_parallel_size": 4, "data_parallel_hybrid_lb": True, "data_parallel_size_local": 2}, 65, 2),
    ],
)
def test_vllm_adds_up_the_blocks_of_the_engines_it_sends_requests_to(parallel, blocks, ranks):
    config = vllm_config(kv_cache_max_concurrency=blocks / 32, kv_cache_size_tokens=blocks * 32)
    config.parallel_config = SimpleNamespace(**parallel)
    limits = limits_of_vllm(config, None)
    assert (limits.num_blocks, limits.ranks, limits.full_request_blocks) == (blocks, ranks, 32)


def test_a_block_holds_a_part_of_the_tokens_on_each_rank_of_a_context_parallel_group():
    config = vllm_config()
    config.parallel_config = SimpleNamespace(decode_context_parallel_size=4)
    assert limits_of_vllm(config, None).block_size == 128
    config.cache_config.effective_attention_block_size = 64
    assert limits_of_vllm(config, None).block_size == 64


def test_a_plan_with_context_parallel_ranks_does_not_make_short_requests_long():
    document = plan(max_concurrency=1000 / 16)
    document["args"]["decode_context_parallel_size"] = 4
    limits = limits_of_plan(plan_from_json(document, needs=()))
    assert (limits.block_size, limits.blocks(64), limits.blocks(1024)) == (64, 1, 16)


def test_vllms_own_queue_bound_is_never_run_into():
    limits = limits_of_vllm(vllm_config(), SimpleNamespace(api_server_count=1))
    assert limits.share_sequences() == 4


def test_a_configuration_of_another_release_leaves_things_unknown():
    assert not limits_of_vllm(None, None).known
    assert not limits_of_vllm(SimpleNamespace(), object()).known


def test_the_engine_wins_over_the_plan_and_the_plan_fills_what_it_leaves_open():
    engine = EngineLimits(num_blocks=50, block_size=16, source="engine")
    both = engine.completed_by(limits_of_plan(planned()))
    assert (both.num_blocks, both.max_num_seqs, both.source) == (50, 256, "engine")
    assert EngineLimits(source="none").completed_by(limits_of_plan(planned())).num_blocks == 1000


def test_a_plan_tells_of_drafts_and_of_further_groups_what_a_metrics_page_does_not():
    page = EngineLimits(num_blocks=50, block_size=16, max_model_len=1024, source="page")
    document = plan(max_concurrency=1000 / 70)
    document["args"]["num_speculative_tokens"] = 3
    both = page.completed_by(limits_of_plan(plan_from_json(document, needs=())))
    assert (both.num_blocks, both.full_request_blocks, both.extra_tokens) == (50, 70, 6)


@pytest.mark.parametrize("other", [{"block_size": 32}, {"max_model_len": 2048}])
def test_the_blocks_of_a_full_request_are_not_taken_from_a_plan_of_another_length_or_block_size(other):
    page = EngineLimits(**{"num_blocks": 50, "block_size": 16, "max_model_len": 1024} | other)
    assert page.completed_by(limits_of_plan(planned())).full_request_blocks is None


def true_blocks(length, block, full_groups, window_groups, window, states):
    """What the groups of a hybrid model hold."""
    plain = cdiv(length, block)
    return full_groups * plain + window_groups * min(plain, cdiv(window, block) + 1) + states


@given(
    st.integers(1, 4096),
    st.sampled_from([16, 32, 128]),
    st.integers(1, 3),
    st.integers(0, 6),
    st.integers(1, 5000),
    st.integers(0, 4),
    st.integers(1, 4096),
)
def test_the_weight_is_never_below_what_a_hybrid_model_holds(longest, block, full, windows, window, states, length):
    length = min(length, longest)
    whole = true_blocks(longest, block, full, windows, window, states)
    limits = EngineLimits(10**6, block, whole, longest)
    assert limits.blocks(length) >= true_blocks(length, block, full, windows, window, states)


@given(st.integers(1, 4096))
def test_with_plain_attention_the_weight_is_exact(length):
    limits = EngineLimits(10**6, 16, 256, 4096)
    assert limits.blocks(length) == cdiv(length, 16)


def test_a_model_that_keeps_only_windows_never_weighs_more_than_a_full_length_request():
    limits = EngineLimits(1000, 16, 10, 4096)
    assert limits.blocks(4096) == 10


def weigh(body, kind=Kind.COMPLETION, limits=PLAIN, policy=None, learnt=None):
    return weight_of(demand_of(kind, body), limits, policy or PoolPolicy(), learnt or ModelTokens())


def test_a_request_weighs_its_prompt_and_its_answer_in_whole_blocks():
    weight = weigh({"prompt": [1] * 10, "max_tokens": 10})
    assert (weight.blocks, weight.tokens, weight.sequences) == (2, 20, 1)


def test_before_the_block_size_is_known_the_usual_one_is_taken():
    assert weigh({"prompt": [1] * 100, "max_tokens": 28}, limits=EngineLimits()).blocks == 8


def test_copies_and_batches_weigh_each():
    weight = weigh({"prompt": [[1] * 10, [1] * 20], "max_tokens": 6, "n": 3})
    assert (weight.blocks, weight.sequences) == (9, 6)


def test_nothing_grows_past_the_models_length():
    assert weigh({"prompt": [1] * 10, "max_tokens": 10**6}).blocks == 64


def test_an_answer_without_a_length_weighs_the_worst_until_answers_were_seen():
    body, learnt = {"prompt": [1] * 10, "max_tokens": None}, ModelTokens()
    assert weigh(body, learnt=learnt).tokens == 1024
    for _ in range(FEWEST):
        learnt.outputs.add(100)
    assert weigh(body, learnt=learnt).tokens == pytest.approx(120, abs=12)
    assert weigh(body, policy=PoolPolicy(open_ended="worst"), learnt=learnt).tokens == 1024
    assert weigh(body, policy=PoolPolicy(open_ended=30), learnt=learnt).tokens == 40


def test_an_estimate_is_never_counted_as_certain():
    weight = weigh({"prompt": "x" * 5000, "max_tokens": 16})
    assert weight.tokens == 1024
    assert weight.certain_blocks == 1


def test_embeddings_weigh_their_prompts_alone():
    assert weigh({"input": [[1] * 16, [1] * 17]}, Kind.POOLING).blocks == 3


def test_speculative_drafts_take_slots_too():
    limits = EngineLimits(101, 16, 64, 1024, extra_tokens=5)
    assert weigh({"prompt": [1] * 10, "max_tokens": 6}, limits=limits).blocks == 2


def test_text_is_a_token_a_byte_until_answers_were_seen():
    learnt = ModelTokens()
    assert learnt.bound(1000, True, 0) >= 1000
    for _ in range(FEWEST):
        learnt.observe(1000, True, 0, 250)
    assert 250 <= learnt.bound(1000, True, 0) <= 300
    assert learnt.bound(1000, False, 0) >= 1000, "English says nothing about other scripts"


@given(st.lists(st.tuples(st.integers(64, 5000), st.floats(0.05, 1.0)), min_size=FEWEST, max_size=200))
def test_the_bound_holds_for_everything_that_was_seen_lately(seen):
    learnt = ModelTokens()
    for text_bytes, ratio in seen:
        learnt.observe(text_bytes, True, 0, max(1, int(text_bytes * ratio)))
    assert all(learnt.bound(size, True, 0) >= int(size * ratio) for size, ratio in seen)


def test_one_odd_answer_does_not_weigh_on_all_other_chats():
    learnt = ModelTokens()
    learnt.observe(2, True, 1, 100_000)
    assert learnt.bound(2, True, 1) < 200
    for _ in range(3):
        learnt.observe(2, True, 1, 500)
    assert 500 <= learnt.bound(2, True, 1) < 600


@given(st.lists(st.integers(0, 1000), max_size=GENERATION - 1), st.integers(1, 5))
def test_the_highest_is_what_so_many_values_reached(values, times):
    highest = RecentMaximum(times)
    for value in values:
        highest.add(value)
    assert highest.value == (sorted(values)[-times] if len(values) >= times else 0)


def test_what_was_seen_long_ago_is_forgotten():
    highest = RecentMaximum()
    highest.add(1.0)
    for _ in range(2 * GENERATION):
        highest.add(0.2)
    assert highest.value == 0.2


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=500))
def test_a_quantile_reaches_its_share_of_the_values(values):
    quantile = Quantiles()
    for value in values:
        quantile.add(value)
    reached = sum(value <= quantile.at(0.99) for value in values)
    assert reached >= 0.99 * len(values)
    assert quantile.at(0.99) <= 1.2 * max(values) + 1


def test_the_book_of_models_stays_small_and_keeps_those_that_answer():
    models = BoundedCache(ModelTokens, 8)
    for number in range(20):
        models.get_or_add(f"adapter{number}")
        models.get_or_add("base").outputs.add(1)
    assert models.get("adapter0") is None
    assert models.get("base").outputs.count == 20


def test_releases_with_queue_bounds_get_them_set():
    flags = native_flags(release("0.29.0"), PLAIN)
    assert flags == {"--max-num-queued-reqs": "528", "--max-num-queued-tokens": "1600"}
    assert native_flags(release("0.28.0"), PLAIN) == {}


def test_vllms_queue_bound_stands_behind_a_guard_that_overcommits():
    assert native_flags(release("0.29.0"), PLAIN, overcommit=1.5)["--max-num-queued-tokens"] == "2400"
    assert native_flags(release("0.29.0"), PLAIN, overcommit=0.5)["--max-num-queued-tokens"] == "1600"
