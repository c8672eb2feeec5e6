"""Advice is computed: every change it names was tried on the memory model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from legroom.planning.advice import with_advice
from legroom.planning.plan import plan
from legroom.vllm.args import ServeArgs

FAILING = [
    ("llama-3.1-8b", "rtx 4090", "0.10.2", ServeArgs()),
    ("llama-3.1-8b", "rtx 4090", "0.26.0", ServeArgs()),
    ("llama-3.1-8b", "rtx 3060", "0.26.0", ServeArgs(max_model_len=4096)),
    ("qwen3-32b", "h100", "0.19.0", ServeArgs(gpu_memory_utilization=0.7)),
    ("llama-3.1-8b", "l4", "0.11.0", ServeArgs(gpu_memory_utilization=0.72, max_model_len=4096)),
]


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


def test_weights_too_big_for_the_card_are_not_answered_with_utilization(target):
    advised = with_advice(plan(target(card="rtx 3060"), ServeArgs(max_model_len=4096)))
    assert all(set(piece.flags) != {"gpu_memory_utilization"} for piece in advised.advice)


def test_a_card_that_runs_over_while_serving_is_answered_with_less(target):
    start = plan(target(card="h200"), ServeArgs(gpu_memory_utilization=0.985, max_model_len=8192))
    assert start.verdict != "fits"
    lower = [piece for piece in with_advice(start).advice if "gpu_memory_utilization" in piece.flags]
    assert lower
    assert lower[0].flags["gpu_memory_utilization"] < 0.985
