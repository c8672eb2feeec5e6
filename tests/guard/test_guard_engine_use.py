"""What the engine says is in use corrects what admission expects: shared prefixes are held once."""

import sys
from types import SimpleNamespace

import pytest

from legroom.guard.pool.admission import Admission
from legroom.guard.pool.block_pool import Pool, PoolLimits
from legroom.guard.pool.engine_usage import LOOKS, EngineUsage, usage_of_page, usage_of_registry
from legroom.guard.pool.projection import Growth, hold_of
from legroom.guard.pool.reservation import Need, TicketState
from legroom.guard.pool.step_clock import StepClock
from legroom.guard.weight.engine_limits import EngineLimits

PAGE = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.2
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.4
"""
GROWING = Need(10, 1, Growth(5, 10, 100, 100), 50)


def test_a_metrics_page_tells_what_all_engines_use():
    use = usage_of_page(PAGE)
    assert (use.running, use.waiting) == (8, 1)
    assert use.kv_share == pytest.approx(0.3)


def test_a_page_with_the_engines_counters_tells_its_steps_and_prompt_tokens():
    counters = 'vllm:iteration_tokens_total_count{engine="0"} 70\nvllm:prompt_tokens_total{engine="0"} 900.0\n'
    use = usage_of_page(PAGE + counters)
    assert (use.running, use.steps, use.prompt_tokens) == (8, 70, 900)


def test_an_older_release_calls_it_by_another_name():
    assert usage_of_page(PAGE.replace("kv_cache", "gpu_cache")).kv_share == pytest.approx(0.3)


@pytest.mark.parametrize("page", ["", "not metrics", PAGE.replace("kv_cache_usage_perc", "other"), "vllm:x{ 1"])
def test_a_page_without_these_series_says_nothing(page):
    assert usage_of_page(page) is None


def test_inside_vllm_the_registry_says_the_same(monkeypatch):
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    for name, value in (("num_requests_running", 4), ("num_requests_waiting", 2), ("kv_cache_usage_perc", 0.5)):
        prometheus.Gauge(f"vllm:{name}", "", ["engine"], registry=registry).labels("0").set(value)
    monkeypatch.setitem(sys.modules, "prometheus_client", SimpleNamespace(REGISTRY=registry))
    assert usage_of_registry() == EngineUsage(0.5, 4, 2)
    steps = prometheus.Histogram("vllm:iteration_tokens_total", "", ["engine"], registry=registry).labels("0")
    for tokens in (120, 8, 8):
        steps.observe(tokens)
    prometheus.Counter("vllm:prompt_tokens", "", ["engine"], registry=registry).labels("0").inc(112)
    assert usage_of_registry() == EngineUsage(0.5, 4, 2, 3, 112)


def test_prompt_tokens_that_the_prefix_cache_had_are_not_taken_for_computed():
    counters = "vllm:prompt_tokens_total 400\nvllm:generation_tokens_total 60\n"
    steps = "vllm:iteration_tokens_total_count 50\nvllm:iteration_tokens_total_sum 160\n"
    use = usage_of_page(PAGE + counters + steps)
    assert (use.steps, use.prompt_tokens, use.engines) == (50, 100, 2)


def test_of_several_api_servers_no_registry_is_asked(monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/anywhere")
    assert usage_of_registry() is None


def full_pool(recompute=0.001):
    pool = Pool(PoolLimits(100, None, 100, 1.0, recompute))
    tickets = [pool.acquire(GROWING, 0.0) for _ in range(40)]
    return pool, [ticket for ticket in tickets if ticket.state is TicketState.WAITING]


def test_prefixes_that_requests_share_make_room_for_more():
    pool, waiting = full_pool()
    for look in range(LOOKS):
        pool.learn_usage(EngineUsage(0.3, pool.running, 0), 0.1 * look)
    before = pool.running
    pool.admit_waiting(1.0)
    assert pool.running > 1.5 * before
    assert waiting[0].state is TicketState.ADMITTED


def test_a_small_difference_is_not_followed():
    pool, _ = full_pool()
    for look in range(LOOKS):
        pool.learn_usage(EngineUsage(0.9, pool.running, 0), 0.1 * look)
    assert pool.use_ratio == 1.0


def test_one_look_that_finds_the_pool_full_ends_it():
    pool, _ = full_pool()
    for look in range(LOOKS):
        pool.learn_usage(EngineUsage(0.3, pool.running, 0), 0.1 * look)
    assert pool.use_ratio < 0.5
    pool.learn_usage(EngineUsage(1.0, pool.running, 0), 1.0)
    assert pool.use_ratio == 1.0


def test_what_was_in_use_a_while_ago_is_not_taken_for_what_is():
    pool, _ = full_pool()
    for look in range(LOOKS):
        pool.learn_usage(EngineUsage(0.3, pool.running, 0), 0.1 * look)
    pool.admit_waiting(10.0)
    assert pool.use_ratio == 1.0


def test_requests_that_wait_in_the_engine_are_not_taken_for_shared_prefixes():
    pool, _ = full_pool()
    for look in range(LOOKS):
        pool.learn_usage(EngineUsage(0.4, 3, pool.running - 3), 0.1 * look)
    assert pool.use_ratio == 1.0


def test_where_a_preemption_is_dear_fewer_are_begun():
    cheap, dear = full_pool()[0], full_pool(0.2)[0]
    assert dear.running < cheap.running


def busy_looks(step_s, token_s, prompt_tokens=(0, 0, 400, 0, 1200)):
    """Looks at an engine that makes ten steps between them, each time with other prompts."""
    pool, now_s, steps, tokens = Pool(PoolLimits(100, None, 100, 0.25, 0.001)), 0.0, 0.0, 0.0
    for look in range(30):
        more = prompt_tokens[look % len(prompt_tokens)]
        steps, tokens = steps + 10, tokens + more
        now_s += 10 * step_s + more * token_s
        pool.learn_usage(EngineUsage(0.9, 10, 5, steps, tokens), now_s)
    return pool


def test_what_a_preemption_costs_is_learnt_from_the_engines_steps_and_prompts():
    assert not busy_looks(step_s=0.01, token_s=0.00005).recompute_is_dear
    assert busy_looks(step_s=0.02, token_s=0.002).recompute_is_dear


def test_nothing_is_learnt_of_a_preemptions_cost_where_every_step_has_the_same_prompts():
    assert not busy_looks(0.02, 0.002, prompt_tokens=(100,)).recompute_is_dear


def test_until_the_engine_has_shown_it_a_preemption_is_taken_to_be_cheap():
    admission = Admission()
    admission.learn_engine(EngineLimits(101, 16))
    assert not admission.pool.recompute_is_dear


def test_an_engine_that_restarted_does_not_unlearn_what_a_preemption_costs():
    pool = busy_looks(step_s=0.02, token_s=0.002)
    pool.learn_usage(EngineUsage(0.9, 10, 5, 3, 100), 1000.0)
    pool.learn_usage(EngineUsage(0.9, 10, 5, 13, 100), 1000.5)
    assert pool.recompute_is_dear


def test_an_answer_of_uncertain_length_counts_by_how_likely_it_is_still_there():
    hold = hold_of(Growth(10, 10, 100, 100, lives=(10, 20, 30, 40)), 0, counted=True)
    assert [hold.after(steps) for steps in (5, 15, 35, 50)] == [10, 7.5, 2.5, 0]


def test_lengths_that_an_answer_has_outlived_count_no_more():
    hold = hold_of(Growth(10, 10, 100, 100, lives=(10, 20, 30, 40)), 25, counted=True)
    assert hold.steps_left == (5, 15)


def test_a_request_grows_a_block_at_a_time():
    growth = Growth(1, 2, 40, 40, first_block_steps=28, block_steps=128)
    assert [growth.blocks_at(steps) for steps in (0, 28, 29, 40)] == [1, 1, 2, 2]


SHORT = Need(10, 1, Growth(9, 10, 20, 20), 90)


def test_an_answer_that_has_ended_by_the_engines_steps_makes_room_before_it_is_seen_to_end():
    pool = Pool(PoolLimits(100, None, 100, 1.0))
    tickets = [pool.acquire(SHORT, 0.0) for _ in range(12)]
    for look in range(1, 4):
        pool.learn_usage(EngineUsage(0.9, 10, 0, 10 * look), 0.1 * look)
        pool.admit_waiting(0.1 * look)
    assert [ticket.state for ticket in tickets[10:]] == [TicketState.ADMITTED] * 2


def looked(*looks):
    clock = StepClock()
    for at_s, steps in looks:
        clock.learn(steps, at_s)
    return clock


def test_the_engines_steps_tell_how_far_an_answer_has_come():
    clock = looked((10.0, 500), (10.5, 550), (11.0, 650))
    assert clock.steps_since(10.25, 11.0) == pytest.approx(125)
    assert clock.steps_since(10.25, 11.1) == pytest.approx(125 + 20)
    assert StepClock().steps_since(0.0, 1.0) is None


def test_steps_count_only_once_a_look_has_confirmed_them():
    clock = looked((10.0, 500), (10.5, 550))
    assert clock.steps_since(10.6, 11.0) == 0
    assert clock.steps_since(9.0, 10.5) == pytest.approx(50)
    assert clock.steps_since(10.0, 60.0) <= 100


def test_after_a_while_without_a_look_the_count_begins_anew():
    clock = looked((10.0, 500), (10.5, 550), (30.0, 2000), (30.5, 2010))
    assert clock.steps_since(29.0, 30.5) == pytest.approx(10)


def test_an_engine_that_restarted_starts_the_count_afresh():
    clock = looked((10.0, 500), (10.5, 550), (11.0, 3), (11.5, 43))
    assert clock.steps_since(11.0, 11.5) == pytest.approx(40)
