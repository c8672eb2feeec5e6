"""Advice is computed: every change it names was tried on the memory model."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from legroom.planning import advice
from legroom.planning.advice import MOST_ADVICE, USEFUL_CONTEXT, with_longer_context_first, with_quick_advice
from legroom.planning.capacity_search import USUAL_UTILIZATION
from legroom.planning.levers import more_gpus
from legroom.planning.plan import cold_start, plan
from legroom.vllm.args import ServeArgs

FAILING = [
    ("llama-3.1-8b", "rtx 4090", "0.10.2", ServeArgs()),
    ("llama-3.1-8b", "rtx 4090", "0.26.0", ServeArgs()),
    ("llama-3.1-8b", "rtx 3060", "0.26.0", ServeArgs(max_model_len=4096)),
    ("qwen3-32b", "h100", "0.19.0", ServeArgs(gpu_memory_utilization=0.7)),
    ("llama-3.1-8b", "l4", "0.11.0", ServeArgs(gpu_memory_utilization=0.7, max_model_len=4096)),
]
ADVISED = {}
"""Several tests look at parts of the advice on one plan, which is made once."""


def with_advice(planned, **options):
    target = planned.target
    key = (target.model.name, target.gpu.name, target.gpus, target.gpus_given, str(target.release))
    key = (*key, repr(planned.args), repr(options))
    if key not in ADVISED:
        ADVISED[key] = advice.with_advice(planned, **options)
    return ADVISED[key]


@pytest.mark.parametrize(("model", "card", "vllm", "args"), FAILING)
def test_every_piece_of_advice_starts(target, model, card, vllm, args):
    advised = with_advice(plan(target(model, card, vllm), args))
    assert advised.verdict == "does_not_fit"
    assert advised.advice
    for piece in advised.advice:
        again = plan(piece.plan.target, replace(args, **piece.flags))
        assert again.verdict != "does_not_fit"
        assert again.memory == piece.plan.memory


def test_a_plan_that_fits_needs_no_advice(target):
    assert with_advice(plan(target(card="h100"), ServeArgs(max_model_len=8192))).advice == ()


def test_a_flag_the_user_pinned_is_never_changed(target):
    advised = with_advice(plan(target(), ServeArgs()), keep=("max_model_len",))
    assert advised.advice
    assert all("max_model_len" not in piece.flags for piece in advised.advice)


def test_a_shorter_context_is_the_longest_that_fits(target):
    start = plan(target(vllm="0.10.2"), ServeArgs())
    shorter = next(piece for piece in with_advice(start).advice if "max_model_len" in piece.flags)
    length = shorter.flags["max_model_len"]
    assert shorter.plan.verdict == "fits"
    beyond = plan(start.target, ServeArgs(max_model_len=length + 2048))
    assert beyond.verdict != "fits"


@pytest.mark.parametrize("model", ["Qwen/Qwen3-32B", "Qwen/Qwen3-32B-AWQ"])
def test_where_all_that_fits_halves_the_context_a_tight_advice_keeps_more(target, model):
    fitting = with_advice(plan(target(model, "rtx 3090", "0.32.0"), ServeArgs(model)))
    ways = with_longer_context_first(fitting).advice
    assert [way for way in ways if way in fitting.advice] == list(fitting.advice)
    [tight] = (way for way in ways if way not in fitting.advice)
    assert tight.plan.verdict == "tight"
    assert tight.plan.settings.max_model_len >= 2 * fitting.advice[0].plan.settings.max_model_len


def test_a_length_that_the_user_gave_is_cut_after_what_keeps_it(target):
    given = plan(target("qwen3-coder-30b-awq", "rtx 4090", "0.32.0"), ServeArgs(max_model_len=32768))
    ways = with_longer_context_first(with_advice(given)).advice
    cuts = ["max_model_len" in way.flags for way in ways]
    assert len(set(cuts)) == 2
    assert cuts == sorted(cuts)


def test_a_tight_way_with_a_useful_length_goes_before_a_sure_one_without(target):
    given = plan(target("Qwen/Qwen3-32B-AWQ", "rtx 4090", "0.32.0"), ServeArgs(max_model_len=32768))
    first, second = with_longer_context_first(with_advice(given)).advice[:2]
    assert first.plan.settings.max_model_len >= USEFUL_CONTEXT > second.plan.settings.max_model_len


def test_weights_too_big_for_the_card_are_not_answered_with_utilization(target):
    advised = with_advice(plan(target(card="rtx 3060"), ServeArgs(max_model_len=4096)))
    assert all(set(piece.flags) != {"gpu_memory_utilization"} for piece in advised.advice)


def test_a_card_that_runs_over_while_serving_is_answered_with_less(target):
    start = plan(target(card="h200"), ServeArgs(gpu_memory_utilization=0.985, max_model_len=8192))
    assert start.verdict != "fits"
    lower = [piece for piece in with_advice(start).advice if "gpu_memory_utilization" in piece.flags]
    assert lower
    assert lower[0].flags["gpu_memory_utilization"] < 0.985


def test_data_parallel_engines_are_offered_more_gpus_each(target):
    """The limit of twice the GPUs in use counts those of all engines, as does the number that it is divided by."""
    start = plan(target("llama-3.1-70b", "a100-40gb", gpus=8), ServeArgs(tensor_parallel_size=2, data_parallel_size=4))
    assert list(more_gpus(start)) == [{"tensor_parallel_size": 4}, {"pipeline_parallel_size": 2}]


def test_no_advice_asks_for_more_gpus_than_were_given(target):
    given = replace(target("llama-3.1-70b", "a100-40gb", gpus=2), gpus_given=True)
    start = plan(given, ServeArgs(model="llama-3.1-70b"))
    advised = with_advice(start)
    assert advised.advice
    assert all(piece.plan.args.gpus_needed <= 2 for piece in advised.advice)


def test_idle_gpus_that_are_tight_alone_come_with_what_makes_them_sure_before_another_checkpoint(target):
    given = replace(target("gemma-3-12b", "rtx 3090", "0.32.0", 2), gpus_given=True)
    first, *others = with_advice(plan(given, ServeArgs("gemma-3-12b"))).advice
    assert first.plan.verdict == "fits"
    assert first.flags.items() >= {"tensor_parallel_size": 2}.items()
    assert "model" not in first.flags
    assert any("model" in each.flags for each in others)


def test_a_checkpoint_is_advised_with_the_context_that_its_own_plan_advises(target):
    """The search for another checkpoint tries powers of two, its own plan the longest length that is sure."""
    first = with_advice(plan(target("qwen3-30b-a3b", "rtx 3090", "0.32.0"), ServeArgs("qwen3-30b-a3b"))).advice[0]
    own = with_advice(plan(target(first.flags["model"], "rtx 3090", "0.32.0"), ServeArgs(first.flags["model"])))
    assert first.flags["max_model_len"] == own.advice[0].flags["max_model_len"]


def test_levers_are_combined_where_none_is_enough_alone(target):
    given = replace(target("llama-3.1-70b", "a100-40gb", gpus=2), gpus_given=True)
    best = with_advice(plan(given, ServeArgs(model="llama-3.1-70b"))).advice[0]
    assert best.plan.verdict == "fits"
    assert best.flags["tensor_parallel_size"] == 2
    assert best.plan.target.model.quantization.weight_bits == 4


def test_a_shorter_context_is_named_before_another_checkpoint(target):
    pieces = with_advice(plan(target(vllm="0.32.0"), ServeArgs(model="llama-3.1-8b"))).advice
    assert set(pieces[0].flags) == {"max_model_len"}
    assert any("model" in piece.flags for piece in pieces[1:])


@pytest.mark.parametrize(("name", "says"), [("llama-3.1-70b", True), ("meta-llama/Llama-3.1-70B-Instruct", False)])
def test_an_instruction_tuned_checkpoint_in_place_of_a_base_model_is_said_to_be_one(target, name, says):
    advised = with_advice(plan(target(name, "h100", "0.32.0"), ServeArgs(name)))
    other = next(advice for advice in advised.advice if "model" in advice.flags)
    assert ("instruction-tuned" in other.trades) is says


def test_advice_holds_for_the_first_start_too(target):
    for piece in with_advice(plan(target(vllm="0.32.0"), ServeArgs())).advice:
        assert cold_start(piece.plan).memory.failure is None


def test_where_nothing_helps_on_the_gpus_given_the_number_that_would_is_a_note(target):
    start = plan(replace(target("deepseek-v3", "h100", "0.32.0", gpus=8), gpus_given=True), ServeArgs())
    advised = with_advice(start)
    assert advised.advice == ()
    assert any(note.startswith("16 of these GPUs would hold it") for note in advised.notes)


def test_a_base_model_that_no_checkpoint_stands_in_for_is_quantized_while_it_loads(target):
    base = "meta-llama/Llama-3.1-8B"
    start = plan(replace(target(base, "rtx 3060", "0.32.0"), gpus_given=True), ServeArgs(model=base))
    assert with_advice(start).advice[0].flags["quantization"] == "fp8"


def test_where_only_more_cards_help_nothing_tight_is_added(target):
    name = "qwen2.5-32b-w8a8"
    advised = with_advice(plan(target(name, "rtx 4090"), ServeArgs(model=name)))
    assert all(each.plan.args.gpus_needed > 1 for each in advised.advice)
    assert with_longer_context_first(advised) == advised


def test_a_smaller_model_of_the_series_is_the_last_resort(target):
    """Of 14B, 8B, 4B and less, the largest that the card holds."""
    start = plan(replace(target("qwen3-32b", "rtx 3060"), gpus_given=True), ServeArgs(model="qwen3-32b"))
    assert with_advice(start, enough=MOST_ADVICE).advice[0].flags["model"] == "Qwen/Qwen3-4B"


def test_videos_are_left_out_where_their_profile_run_takes_the_card(target):
    name = "Qwen/Qwen2.5-VL-7B-Instruct"
    start = plan(target(name, "l4", "0.32.0"), ServeArgs(model=name))
    first = with_advice(start).advice[0]
    assert first.flags["limit_mm_per_prompt"] == {"video": 0}
    assert first.plan.settings.max_model_len > 8192


def test_leaving_media_out_is_no_advice_where_it_gains_nothing(target):
    name = "Qwen/Qwen3-VL-8B-Instruct"
    start = plan(target(name, "rtx 4090", "0.32.0"), ServeArgs(model=name))
    assert not any("limit_mm_per_prompt" in each.flags for each in with_advice(start).advice)


def test_no_change_is_advised_twice(target):
    advised = with_advice(plan(target("meta-llama/Llama-3.1-70B", "h100"), ServeArgs())).advice
    assert all(piece.flags != other.flags for piece, other in itertools.combinations(advised, 2))


def test_what_holds_on_the_card_that_is_there_comes_before_more_cards(target):
    advised = with_advice(plan(target("mistral-small-3.2-24b", "rtx 5090"), ServeArgs())).advice
    gpus = [piece.plan.args.gpus_needed for piece in advised]
    assert gpus[0] == 1 < gpus[-1]


def test_a_card_filled_to_the_brim_is_no_first_advice_where_there_is_another(target):
    first = with_advice(plan(target("meta-llama/Llama-3.1-70B", "h100"), ServeArgs())).advice[0]
    assert first.flags.get("gpu_memory_utilization", 0) <= USUAL_UTILIZATION


def test_where_only_a_last_resort_helps_the_number_of_gpus_that_would_do_is_named(target):
    there = replace(target("deepseek-r1", "h100", gpus=8), gpus_given=True)
    advised = with_advice(plan(there, ServeArgs(tensor_parallel_size=8)))
    assert [set(piece.flags) for piece in advised.advice] == [{"cpu_offload_gb"}]
    assert any("of these GPUs would hold it" in note for note in advised.notes)


def test_what_the_release_refuses_is_left_out_and_the_rest_made_to_fit(target):
    refused = plan(target("llama-3.1-8b", "rtx 4090"), ServeArgs(quantization="awq"))
    (piece,) = with_advice(refused).advice
    assert piece.flags["quantization"] is None and piece.flags["max_model_len"]
    assert piece.plan.verdict == "fits"


@pytest.mark.parametrize(("model", "card", "vllm", "args"), FAILING)
def test_the_first_fixes_are_the_same_without_a_search_for_all(target, model, card, vllm, args):
    first = plan(target(model, card, vllm), args)
    known = [piece.flags for piece in with_advice(first).advice[:2]]
    assert [piece.flags for piece in with_advice(first, enough=2).advice[:2]] == known
    quick = with_quick_advice(first, 2)
    assert not quick.advised or [piece.flags for piece in quick.advice[:2]] == known


def test_what_takes_several_changes_is_left_to_the_search(target):
    assert with_quick_advice(plan(target("llama-3.1-8b", "l4", "0.11.0"), ServeArgs()), 2).advised
    assert not with_quick_advice(plan(target("llama-3.1-405b", "l4", "0.11.0"), ServeArgs()), 2).advised


def test_changes_are_tried_until_time_is_up(target):
    first = plan(target("llama-3.1-8b", "l4", "0.11.0"), ServeArgs())
    asked = iter(range(100))
    assert with_quick_advice(first, 2, lambda: True) == first
    some = with_quick_advice(first, 5, lambda: next(asked) >= 6)
    assert some.advice and not some.advised
