from __future__ import annotations

from typing import Any

from legroom.facts import family_rows
from legroom.facts.config.modalities import modalities

QWEN_VISION: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}


def test_a_text_model_has_no_encoder() -> None:
    assert modalities({"model_type": "llama", "hidden_size": 64}) == ()


def test_the_language_model_of_llama_4_alone_has_no_encoder() -> None:
    assert modalities({"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "hidden_size": 5120}) == ()
    assert modalities({"model_type": "llama4", "hidden_size": 5120}) != ()


def test_the_encoder_of_qwen_2_5_vl_is_counted_from_its_config() -> None:
    (found,) = modalities({"model_type": "qwen2_5_vl", "hidden_size": 3584, "vision_config": QWEN_VISION})
    assert (found.num_layers, found.hidden_size, found.exact) == (32, 1280, True)
    assert found.parameters == 676_550_144


def test_a_config_that_only_says_there_is_vision_gets_its_familys_usual_encoder() -> None:
    (found,) = modalities({"model_type": "qwen2_5_vl", "hidden_size": 3584, "has_vision": True})
    assert found.parameters == 676_550_144
    assert not found.exact


def test_qwen_3_vl_takes_a_larger_encoder_for_wider_models() -> None:
    small, large = (
        modalities({"model_type": "qwen3_vl_text", "hidden_size": width, "has_vision": True})[0]
        for width in (2048, 4096)
    )
    assert (small.num_layers, large.num_layers) == (24, 27)


def test_a_family_may_depend_on_its_language_model() -> None:
    granite, llama = (
        modalities({"model_type": f"llava_next ({text} text)", "hidden_size": 2048, "has_vision": True})[0]
        for text in ("granite", "llama")
    )
    assert granite.hidden_size == 1152
    assert llama.hidden_size == 1024


def test_an_unknown_encoder_is_read_as_a_plain_transformer() -> None:
    vision = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    (found,) = modalities({"model_type": "new_vl", "text_config": {"hidden_size": 32}, "vision_config": vision})
    assert found.num_layers == 2


def test_every_family_makes_an_encoder_from_its_default() -> None:
    for name, row in family_rows("towers.json").items():
        if "default" in row:
            model_type = name.partition("+")[0]
            (found,) = modalities({"model_type": model_type, "hidden_size": 2048, "has_vision": True})
            assert found.parameters > 10**8, name
            assert found.max_tokens_per_item > 0, name


def test_the_encoder_of_glm_4_1v_is_counted_from_its_config() -> None:
    vision = {
        "depth": 24,
        "hidden_size": 1536,
        "image_size": 336,
        "in_channels": 3,
        "intermediate_size": 13696,
        "num_heads": 12,
        "out_hidden_size": 4096,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    (found,) = modalities({"model_type": "glm4v", "text_config": {"hidden_size": 4096}, "vision_config": vision})
    assert found.parameters == 892_498_432
    assert [(item.kind, item.since, item.tokens) for item in found.items] == [
        ("image", "", 6144),
        ("video", "", 30000),
        ("video", "0.26.0", 31974),
    ]


def test_a_video_of_glm_is_given_the_frames_that_make_the_most_tokens() -> None:
    (found,) = modalities({"model_type": "glm4v", "text_config": {"hidden_size": 4096}, "vision_config": {"depth": 24}})
    lengths = found.items[-1].lengths
    assert (lengths[9], lengths[10]) == (29645, 31974)
    assert max(lengths) == lengths[10]
