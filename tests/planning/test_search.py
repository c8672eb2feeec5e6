"""A wish is answered with settings that grant it, or with what is missing."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from legroom.planning import capacity_search, search_space
from legroom.planning.capacity_search import search_flags
from legroom.planning.search_space import CapacityGoal
from legroom.units import GIB
from legroom.vllm.args import ServeArgs


def test_the_best_setting_grants_the_wish(target):
    found = search_flags([target(card="h100")], ServeArgs(), CapacityGoal(32768, 8))
    assert found.best is not None
    assert found.best.settings.max_model_len == 32768
    assert found.best.memory.kv.max_concurrency >= 8
    assert found.best.settings.max_num_seqs >= 8
    assert found.best.verdict != "does_not_fit"


def test_a_setting_that_needs_no_sacrifice_makes_none(target):
    found = search_flags([target(card="h100")], ServeArgs(), CapacityGoal(8192, 4))
    assert found.losses == ()
    assert found.best is not None
    assert found.best.args == ServeArgs(max_model_len=8192)


def test_searches_of_one_goal_compute_each_combination_once(target, monkeypatch):
    """A tight answer is searched on for a sure one, and a full card for one of the usual utilization."""
    tried = []

    def counted(room, args, flags):
        tried.append((room.model.name, *sorted(flags.items())))
        return search_space.flag_combination(room, args, flags)

    monkeypatch.setattr(capacity_search, "flag_combination", counted)
    args = ServeArgs(quantization="fp8")
    goal = CapacityGoal(32768, policy="safe")
    found = search_flags([target("meta-llama/Llama-3.1-70B", "h100")], args, goal, max_answers=1).best
    assert not capacity_search.is_sure(found, args)
    assert len(tried) == len(set(tried)) > 100


def test_flags_that_were_given_are_not_searched(target):
    given = ServeArgs(max_num_batched_tokens=2048, gpu_memory_utilization=0.8)
    found = search_flags([target(card="h100")], given, CapacityGoal(16384, 4))
    assert found.best is not None
    assert found.best.settings.max_num_batched_tokens == 2048
    assert found.best.settings.gpu_memory_utilization == 0.8


def test_more_gpus_are_used_when_one_is_not_enough(target):
    found = search_flags([target(card="rtx 4090")], ServeArgs(), CapacityGoal(32768, 16, gpus=(1, 2, 4)))
    assert found.best is not None
    assert found.best.settings.tensor_parallel_size * found.best.settings.pipeline_parallel_size > 1


def test_an_impossible_wish_says_what_is_missing(target):
    found = search_flags([target(card="rtx 3060")], ServeArgs(), CapacityGoal(131072, 64))
    assert found.best is None
    assert "weights" in found.short_by


@pytest.mark.parametrize("goal", [(8192, 16), (32768, 4)])
def test_a_safer_policy_keeps_at_least_as_much_headroom(target, goal):
    from legroom.planning.plan import headroom_after_band

    def headroom(policy):
        found = search_flags([target(card="a100-40gb", vllm="0.19.0")], ServeArgs(), CapacityGoal(*goal, policy=policy))
        assert found.best is not None
        return headroom_after_band(found.best.layout, 1.0)

    assert headroom("safe") >= 0
    assert headroom("safe") >= headroom("tight") or headroom("tight") >= 0


def test_a_quantized_variant_is_taken_only_when_the_original_does_not_do(target):
    original, quantized = target("qwen3-32b", "rtx 5090"), target("qwen3-32b-awq", "rtx 5090")
    found = search_flags([original, quantized], ServeArgs(), CapacityGoal(8192, 2))
    assert found.best is not None
    assert found.best.target.model.name == quantized.model.name
    assert found.losses[0] == "another checkpoint, its weights in 4 bits"


@pytest.mark.parametrize(("model", "is_run"), [("qwen3-14b-awq", True), ("gemma-3-12b", False)])
def test_an_eight_bit_kv_cache_is_searched_on_cards_without_fp8_units_where_their_kernels_read_it(
    target, model, is_run
):
    found = search_flags([target(model, "rtx 3090", "0.32.0")], ServeArgs(), CapacityGoal(32768, 4))
    assert (found.best is not None) == is_run
    if found.best:
        assert found.best.settings.kv_cache_dtype == "fp8"
        assert found.losses[0] == "keys and values in 8 bits, which this card turns into 16 bits to compute with"


def test_of_two_splits_of_a_checkpoint_the_tensor_parallel_one_comes_first(target):
    original, fp8 = (target(name, "rtx 3090", "0.32.0", 2) for name in ("qwen3-30b-a3b", "qwen3-30b-a3b-fp8"))
    found = search_flags([original, fp8], ServeArgs(), CapacityGoal(32768, 4, gpus=(2,)))
    assert found.best is not None
    assert (found.best.settings.tensor_parallel_size, found.best.settings.pipeline_parallel_size) == (2, 1)
    splits = [(plan.settings.pipeline_parallel_size, losses) for plan, losses in found.alternatives]
    assert all(("pipeline stages: slower for each user" in losses) == (stages > 1) for stages, losses in splits)


def test_a_smaller_cap_or_step_is_given_with_its_value(target):
    found = search_flags(
        [target("gemma-4-26b-a4b-redhat-nvfp4", "rtx 3090", "0.32.0")], ServeArgs(), CapacityGoal(32768, 4)
    )
    assert found.losses == ("smaller prefill steps (1,024 tokens)", "a lower cap on running requests (128)")


def test_a_sure_setting_comes_before_one_that_leaves_hardly_any_memory(target):
    fp8 = target("RedHatAI/Meta-Llama-3.1-70B-Instruct-FP8", "h100", "0.32.0")
    found = search_flags([fp8], ServeArgs(), CapacityGoal(8192, 30, gpus=(2,)))
    assert capacity_search.is_sure(found.best, ServeArgs())
    assert not all(capacity_search.is_sure(plan, ServeArgs()) for plan, _ in found.alternatives)


def test_tens_of_thousands_of_settings_are_weighed(target):
    found = search_flags([target(card="h100")], ServeArgs(), CapacityGoal(32768, 8, gpus=(1, 2, 4, 8)))
    assert found.considered > 20_000


def test_room_for_more_requests_than_the_default_is_no_sacrifice(target):
    found = search_flags([target(card="l40s")], ServeArgs(), CapacityGoal(128, 400))
    assert found.best is not None
    assert found.best.settings.max_num_seqs >= 400
    assert found.losses == ()


@pytest.mark.parametrize("card", ["h100", "l4", "rtx 4090"])
def test_looking_for_one_setting_alone_finds_the_best_of_many(target, card):
    goal = CapacityGoal(8192, 4, gpus=(1, 2))
    one, many = (search_flags([target(card=card)], ServeArgs(), goal, max_answers=most) for most in (1, 4))
    assert one.best == many.best
    assert one.losses == many.losses


@pytest.mark.parametrize(("context", "users"), [(32768, 4), (16384, 8), (8192, 16)])
def test_a_setting_that_fits_is_preferred_to_a_tight_one_that_grants_the_same_wish(target, context, users):
    found = search_flags([target("qwen3-14b-awq", "rtx 4090")], ServeArgs(), CapacityGoal(context, users)).best
    assert found is not None and found.verdict == "fits"
    assert found.memory.kv.max_concurrency >= users


@pytest.mark.parametrize(("context", "users"), [(32768, 4), (16384, 8), (40960, 4)])
@pytest.mark.parametrize("max_answers", [1, 4])
def test_a_wish_that_no_setting_grants_lacks_bytes_and_needs_more_than_the_card_has(
    target, context, users, max_answers
):
    card = target("qwen3-30b-a3b-gptq-int4", "rtx 4090")
    found = search_flags([card], ServeArgs(), CapacityGoal(context, users), max_answers=max_answers)
    assert found.best is None and found.short_bytes > 0
    needed, has = map(float, re.search(r"needs ([\d.]+) GiB of ([\d.]+) GiB", found.short_by).groups())
    assert needed > has
    assert found.short_bytes / GIB == pytest.approx(needed - has, abs=0.02)


def test_one_answer_is_found_where_the_cheapest_settings_fail_a_check_that_only_the_plan_makes(target):
    """A hybrid model with more sequences than state blocks is refused whatever its memory: a lower cap starts."""
    asked = [target("qwen3.5-9b", "rtx 4090", "0.32.0")], ServeArgs(), CapacityGoal(32768, 4)
    one, several = search_flags(*asked, max_answers=1), search_flags(*asked)
    assert one.best is not None and several.best is not None
    assert one.best.args == several.best.args


def test_a_card_without_a_desktop_gets_no_fuller_setting_than_one_with_a_desktop(target):
    desktop = target("qwen3.5-9b", "rtx 4090", "0.32.0")
    bare = replace(desktop, gpu=replace(desktop.gpu, screen=False))
    shared, own = (search_flags([each], ServeArgs(), CapacityGoal(32768, 4)).best for each in (desktop, bare))
    assert shared is not None and own is not None
    assert own.layout.headroom_bytes >= shared.layout.headroom_bytes


def test_a_utilization_that_is_the_default_is_not_written(target):
    found = search_flags([target("qwen3-14b-awq", "rtx 4090", "0.32.0")], ServeArgs(), CapacityGoal(32768, 4))
    assert found.best is not None
    assert found.best.args.gpu_memory_utilization is None


def test_one_answer_is_as_sure_as_the_first_of_several(target):
    asked = [target("qwen3-32b-awq", vllm="0.32.0")], ServeArgs(), CapacityGoal(8192, 1)
    one, several = search_flags(*asked, max_answers=1), search_flags(*asked)
    assert one.best is not None and several.best is not None
    assert (one.best.verdict, one.best.args) == ("fits", several.best.args)


@pytest.mark.parametrize("answers", [1, 4])
def test_sequences_above_the_wish_go_before_anything_that_slows_a_user(target, answers):
    """The model needs a state block a sequence and has fewer than the default's; with 128 sequences it is tight."""
    card = target("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4", "rtx4090", vllm="0.32.0")
    best = search_flags([card], ServeArgs(), CapacityGoal(32768, 4), max_answers=answers).best
    assert best.verdict == "fits"
    assert 4 <= best.settings.max_num_seqs < 128
    assert (best.args.enforce_eager, best.args.kv_cache_dtype) == (None, None)


def test_a_hybrid_model_with_fewer_state_blocks_than_sequences_does_not_meet_a_goal(target):
    card = target("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4", "rtx4090", vllm="0.32.0")
    for flags, meets in (({}, False), ({"max_num_seqs": 64}, True), ({"enforce_eager": True}, True)):
        tried = search_space.flag_combination(card, ServeArgs(max_model_len=32768), flags)
        assert (tried.concurrency(0.92, 0.5) > 0) is meets
