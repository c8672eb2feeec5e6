"""What torch keeps of the warm-up pass before a full graph is captured."""

from __future__ import annotations

from recorded_runs import H200, models, settle

from legroom.facts.gpus import gpu
from legroom.facts.models import load
from legroom.memory.attention_scratch import split_buffers
from legroom.memory.warm_up import warm_up_cache
from legroom.units import MIB

LLAMA = models()["g-llama"]


def test_the_split_buffers_and_one_small_segment_stay_cached() -> None:
    settings = settle(LLAMA, "0.32.0")
    cached = warm_up_cache(LLAMA, settings, H200, 496)
    assert cached == 248 * MIB + 20 * MIB + 2 * MIB
    assert cached > split_buffers(LLAMA, settings, H200, 496)


def test_a_pass_that_carves_up_the_split_buffer_needs_a_second_one() -> None:
    model = load("google/gemma-3-12b-it")
    settings = settle(model, "0.32.0", max_model_len=8192)
    assert warm_up_cache(model, settings, H200, 496) > 2 * 240 * MIB


def test_off_hopper_a_pass_leaves_its_activations_alone() -> None:
    card = gpu("a100 80gb")
    assert warm_up_cache(LLAMA, settle(LLAMA, "0.32.0", card), card, 240) < 64 * MIB
