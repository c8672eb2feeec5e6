"""Which item the encoder is profiled with, how many of it, and what its tower keeps alive."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from legroom.facts.config.model_config import model_from_config
from legroom.facts.gpus import gpu
from legroom.facts.model import Model
from legroom.facts.model_sources import load
from legroom.facts.releases import release
from legroom.memory.activation.encoder_profile import (
    EncoderProfile,
    encoder_budget,
    encoder_profile,
    items_per_batch,
    profiled_items,
)
from legroom.memory.activation.profile_run import activation
from legroom.memory.weights.loaded import weights
from legroom.vllm.args import EngineSettings, ServeArgs
from legroom.vllm.resolve import resolve

H200 = gpu("h200")
QWEN_TEXT: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 128000,
    "torch_dtype": "bfloat16",
}
QWEN_2_5: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    **QWEN_TEXT,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 3584,
    },
}
QWEN_3: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": {
        "model_type": "qwen3_vl_text",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "dtype": "bfloat16",
    },
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
INTERN: dict[str, Any] = {
    "architectures": ["InternVLForConditionalGeneration"],
    "model_type": "internvl",
    "image_seq_length": 256,
    "text_config": {**QWEN_TEXT, "model_type": "qwen2"},
    "_processor": {"image": {"crop_to_patches": False}},
    "vision_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "image_size": [448, 448],
        "patch_size": [14, 14],
    },
}


def settled(model: Model, version: str = "0.32.0", **flags: Any) -> EngineSettings:
    asked = {"max_model_len": 32768, "max_num_seqs": 256, "max_num_batched_tokens": 8192, "enforce_eager": True}
    return resolve(ServeArgs(**{**asked, **flags}), model, H200, release(version))


def profiled(model: Model, version: str = "0.32.0", **flags: Any) -> tuple[str, int, int]:
    settings = settled(model, version, **flags)
    items = profiled_items(model.modalities, settings)
    largest = max(items, key=lambda item: (item.tokens, item.kind))
    return largest.kind, largest.tokens, items_per_batch(largest, encoder_budget(items, settings), settings)


def run(model: Model, version: str = "0.32.0", **flags: Any) -> EncoderProfile:
    profile = encoder_profile(model, settled(model, version, **flags), H200)
    assert profile is not None
    return profile


@pytest.mark.parametrize(("length", "tokens"), [(2048, 16384), (32768, 32768), (65536, 65536), (128000, 114688)])
def test_a_video_of_qwen_2_5_vl_grows_with_the_longest_request_up_to_14_frames(length: int, tokens: int) -> None:
    assert profiled(model_from_config(QWEN_2_5), max_model_len=length) == ("video", tokens, 1)


def test_a_video_of_intern_vl_leaves_room_for_an_image() -> None:
    model = model_from_config(INTERN)
    assert profiled(model) == ("video", 32512, 1)
    assert profiled(model, max_model_len=2048) == ("video", 1792, 4)
    assert profiled(model, limit_mm_per_prompt={"image": 0}) == ("video", 32768, 1)


def test_a_modality_that_is_barred_is_not_profiled() -> None:
    assert profiled(model_from_config(QWEN_2_5), limit_mm_per_prompt={"video": 0}) == ("image", 16384, 1)


def test_a_limit_of_one_image_a_prompt_leaves_the_batch_as_it_is() -> None:
    intern = model_from_config(INTERN)
    assert profiled(intern, limit_mm_per_prompt={"image": 1, "video": 0}) == ("image", 256, 32)


def test_until_0_9_one_more_item_than_the_budget_holds_was_profiled() -> None:
    flags = {"limit_mm_per_prompt": {"video": 0}, "max_num_batched_tokens": 8300}
    assert profiled(model_from_config(INTERN), "0.9.2", **flags)[2] == 33
    assert profiled(model_from_config(INTERN), "0.10.0", **flags)[2] == 32


def test_the_processor_files_beside_a_config_set_the_size_of_a_picture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_2_5))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"max_pixels": 1280 * 28 * 28}))
    assert profiled(load(str(tmp_path)), limit_mm_per_prompt={"video": 0})[1] == 1280


def test_max_pixels_on_the_command_line_set_it_too() -> None:
    flags = {"limit_mm_per_prompt": {"video": 0}, "mm_processor_kwargs": {"max_pixels": 1280 * 28 * 28}}
    assert profiled(model_from_config(QWEN_2_5), **flags)[1] == 1280


# Peaks that vLLM 0.32.0 had on an H200 at 8,192 tokens and 256 sequences, eager.
@pytest.mark.parametrize(
    ("config", "flags", "measured"),
    [
        (QWEN_2_5, {}, 3_929_547_776),
        (QWEN_2_5, {"limit_mm_per_prompt": {"image": 1, "video": 0}}, 1_983_124_480),
        (QWEN_3, {}, 2_409_628_160),
    ],
)
def test_the_peak_of_the_tower_is_what_an_h200_showed(config: dict[str, Any], flags: Any, measured: int) -> None:
    model = model_from_config(config)
    assert activation(model, settled(model, **flags), H200).bytes == pytest.approx(measured, abs=4 * 2**20)


def test_tensor_parallel_ranks_share_the_heads_but_not_the_hidden_states() -> None:
    model = model_from_config(QWEN_3)
    settings = settled(model)
    one, four = (
        encoder_profile(model, replace(settings, tensor_parallel_size=ranks), H200).peak_bytes  # type: ignore[union-attr]
        for ranks in (1, 4)
    )
    assert one / 4 < four < one


def test_data_parallel_encoders_are_whole_on_every_rank() -> None:
    model = model_from_config(QWEN_3)
    split = replace(settled(model), tensor_parallel_size=2)
    whole = replace(split, given=replace(split.given, others=("--mm-encoder-tp-mode", "data")))
    assert weights(model, whole, H200).bytes - weights(model, split, H200).bytes > 2**29


def test_0_11_and_0_12_kept_a_padded_output_for_every_placeholder_of_qwen_3_vl() -> None:
    model = model_from_config(QWEN_3)
    assert profiled(model, "0.12.0") == ("video", 153_600, 1)
    padded = 153_600 * 4 * 4096 * 2
    assert padded < run(model, "0.12.0").kept_bytes < padded + 2**30
    assert run(model, "0.13.0").kept_bytes < 2**30


def test_v0_keeps_pixels_and_outputs_of_every_kind_during_the_text_pass() -> None:
    model = model_from_config(QWEN_2_5)
    flags = {"env": {"VLLM_USE_V1": "0"}, "max_model_len": 16384, "max_num_batched_tokens": 16384}
    pixels, outputs = 65536 * 1176 * 2, 16384 * 3584 * 2
    assert run(model, "0.9.2", **flags).kept_bytes == 2 * (pixels + outputs)


def test_sizes_in_the_limits_shrink_what_is_made_up() -> None:
    model = model_from_config(QWEN_2_5)
    limits = {"image": {"count": 1, "width": 448, "height": 448}, "video": 0}
    small = run(model, limit_mm_per_prompt=limits)
    assert small.peak_bytes < run(model, limit_mm_per_prompt={"video": 0}).peak_bytes / 10


def test_nothing_is_profiled_without_items_or_when_told_to_skip() -> None:
    model = model_from_config(QWEN_2_5)
    for flags in (
        {"limit_mm_per_prompt": {"image": 0, "video": 0}},
        {"skip_mm_profiling": True},
        {"language_model_only": True},
    ):
        assert encoder_profile(model, settled(model, **flags), H200) is None


def test_an_unknown_encoder_gets_a_wide_band_and_no_exact_weights() -> None:
    vision = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    text = {**QWEN_TEXT, "model_type": "qwen2"}
    model = model_from_config({"model_type": "new_vl", "text_config": text, "vision_config": vision})
    profile = run(model)
    assert profile.spread_bytes >= profile.peak_bytes * 0.3 - 1
    assert weights(model, settled(model), H200).kind == "estimated"


def settled_on(name: str, card: str, version: str, **flags: Any) -> tuple[Model, EngineSettings]:
    model = load(name)
    return model, resolve(ServeArgs(model=name, **flags), model, gpu(card), release(version))


def test_every_sequence_of_a_cross_attention_model_has_an_image_in_the_profile_run() -> None:
    # 0.6.2 with 256 sequences asked for masks of 19.63 GiB each.
    model, many = settled_on("meta-llama/Llama-3.2-11B-Vision-Instruct", "h100", "0.6.2")
    _, few = settled_on("meta-llama/Llama-3.2-11B-Vision-Instruct", "h100", "0.6.2", max_num_seqs=16)
    profiles = [encoder_profile(model, settings, gpu("h100")) for settings in (many, few)]
    assert profiles[0] is not None
    assert profiles[1] is not None
    assert profiles[0].peak_bytes > 58 * 2**30 > 12 * profiles[1].peak_bytes


def test_a_radeon_card_keeps_every_score_of_the_tower_until_it_has_a_flash_kernel() -> None:
    # 256 GiB were asked for on an RX 7800 XT: 65,536 patches, 16 heads.
    card = gpu("rx 7800 xt")
    model, early = settled_on("Qwen/Qwen3-VL-2B-Instruct", card.name, "0.11.0")
    _, late = settled_on("Qwen/Qwen3-VL-2B-Instruct", card.name, "0.15.0")
    before, after = encoder_profile(model, early, card), encoder_profile(model, late, card)
    assert before is not None
    assert after is not None
    assert before.peak_bytes > 100 * 2**30 > 10 * after.peak_bytes
    # The kernel is in a package of its own: without it the later release asks for as much.
    assert (before.scores_bytes, after.scores_bytes) == (0, 256 * 2**30)
    assert activation(model, late, card).high >= card.total_bytes


def test_dots_ocr_rotates_in_float32_beside_its_projections_and_their_copies() -> None:
    model = load("dots.ocr")
    args = ServeArgs(model="dots.ocr", max_model_len=8192, max_num_batched_tokens=16384)
    for version, widths in (("0.16.0", 20), ("0.12.0", 26)):
        profile = encoder_profile(model, resolve(args, model, H200, release(version)), H200)
        assert profile is not None and "57600 patches in the rotary embedding" in profile.peak_how
        assert profile.peak_bytes == pytest.approx(57600 * widths * 1536 * 2, rel=0.03)
