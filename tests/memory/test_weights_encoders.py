"""When a multimodal server has its encoders on the card."""

from __future__ import annotations

from typing import Any

from legroom.facts.gpus import gpu
from legroom.facts.model_sources import load
from legroom.facts.releases import release
from legroom.memory.weights.loaded import weights
from legroom.vllm.args import ServeArgs
from legroom.vllm.resolve import resolve
from legroom.vllm.traits import built_encoders


def test_a_limit_of_no_images_leaves_the_vision_tower_out():
    model, card = load("qwen3-vl-2b"), gpu("tesla t4")

    def loaded(version: str, **flags: Any) -> int:
        settings = resolve(ServeArgs(dtype="float16", **flags), model, card, release(version))
        return weights(model, settings, card).bytes

    none_allowed = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    assert loaded("0.11.0", **none_allowed) == loaded("0.11.0", language_model_only=True)
    assert loaded("0.11.0", **none_allowed) < loaded("0.11.0", limit_mm_per_prompt={"image": 1, "video": 0})
    assert loaded("0.10.2", **none_allowed) == loaded("0.10.2")


def test_a_limit_of_none_may_state_the_size_of_an_item_too():
    model = load("qwen3-vl-2b")
    limits = {"image": 0, "video": {"count": 0, "num_frames": 32}}
    assert not built_encoders(ServeArgs(limit_mm_per_prompt=limits), model, release("0.32.0"))


def test_gemma_4_holds_its_audio_encoder_and_up_to_0_27_unread_keys_of_layers_that_share_a_cache():
    model, card = load("google/gemma-4-E4B-it"), gpu("l4")

    def loaded(version: str) -> float:
        settings = resolve(ServeArgs(), model, card, release(version))
        return weights(model, settings, card).bytes / 2**30

    assert 15.1 < loaded("0.26.0") < 15.2  # vLLM 0.22 and 0.26 printed 15.18
    assert 0.1 < loaded("0.26.0") - loaded("0.28.0") < 0.12
