from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from legroom.errors import LegroomError
from legroom.facts.bundled import bundled_config, find
from legroom.facts.config.model_config import model_from_config
from legroom.facts.config.quantization import quantization
from legroom.facts.model import Attention, LatentAttention, StateSpace

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def attention(config: dict[str, Any], layer: int = 0) -> Attention:
    mixer = model_from_config(config).layers[layer].mixer
    assert isinstance(mixer, Attention)
    return mixer


def without(*names: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in LLAMA.items() if key not in names} | changes


def test_a_plain_config_becomes_a_model() -> None:
    model = model_from_config(LLAMA, "llama")
    assert (model.name, model.architecture, model.dtype) == ("llama", "LlamaForCausalLM", "bfloat16")
    assert (len(model.layers), model.hidden_size, model.vocab_size) == (32, 4096, 128256)
    assert attention(LLAMA) == Attention(32, 8, 128, 128)
    assert model.known


def test_kv_heads_left_out_are_as_many_as_the_heads() -> None:
    assert attention(without("num_key_value_heads")).kv_heads == 32


@pytest.mark.parametrize(
    ("width", "alias"),
    [
        ("num_hidden_layers", "n_layer"),
        ("num_hidden_layers", "num_layers"),
        ("hidden_size", "n_embd"),
        ("hidden_size", "d_model"),
        ("num_attention_heads", "n_head"),
        ("num_attention_heads", "num_heads"),
        ("num_key_value_heads", "num_kv_heads"),
        ("num_key_value_heads", "n_head_kv"),
        ("intermediate_size", "ffn_dim"),
    ],
)
def test_a_width_goes_by_many_names(width: str, alias: str) -> None:
    renamed = without(width, **{alias: LLAMA[width]})
    assert model_from_config(renamed).layers == model_from_config(LLAMA).layers


def test_falcon_7b_has_one_kv_head_whatever_else_it_writes() -> None:
    falcon = {
        "model_type": "falcon",
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "vocab_size": 65024,
        "multi_query": True,
        "new_decoder_architecture": False,
        "num_kv_heads": 71,
    }
    assert (attention(falcon).kv_heads, attention(falcon).head_dim) == (1, 64)


def test_the_architecture_follows_from_the_model_type() -> None:
    assert model_from_config(without("architectures")).architecture == "LlamaForCausalLM"


def test_an_architecture_that_vllm_does_not_serve_is_said_to_be_unknown() -> None:
    assert not model_from_config(without(architectures=["SecretForCausalLM"], model_type="secret")).known


def test_a_nested_text_config_is_read_with_its_class_defaults() -> None:
    gemma = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "vision_config": {"model_type": "siglip_vision_model"},
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
    }
    model = model_from_config(gemma)
    assert (model.vocab_size, model.max_position_embeddings) == (262208, 131072)
    assert attention(gemma).kv_heads == 4
    assert attention(gemma).window == 1024
    assert attention(gemma, 5).window is None


def test_a_model_type_may_name_its_language_model_in_words() -> None:
    model = model_from_config(without("architectures", model_type="llava (llama text)"))
    assert model.model_type == "llama"
    assert model.architecture == "LlavaForConditionalGeneration"


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"type": "linear", "factor": 4.0}, 8192),
        ({"rope_type": "llama3", "factor": 8.0}, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 2048),
        ({"rope_type": "default"}, 2048),
        ({"type": "dynamic", "factor": None}, 2048),
    ],
)
def test_rope_scaling_lengthens_only_what_is_not_yet_scaled(rope: dict[str, Any], length: int) -> None:
    scaled = without(max_position_embeddings=2048, rope_scaling=rope)
    assert model_from_config(scaled).max_position_embeddings == length


def test_a_config_without_any_length_means_2048_as_in_vllm() -> None:
    assert model_from_config(without("max_position_embeddings", model_type="secret")).max_position_embeddings == 2048


def test_a_length_under_another_name_is_not_overruled_by_a_class_default() -> None:
    starcoder = {"model_type": "gpt_bigcode", "n_embd": 6144, "n_layer": 40, "n_head": 48, "vocab_size": 49152}
    starcoder |= {"multi_query": True, "n_positions": 8192}
    assert model_from_config(starcoder).max_position_embeddings == 8192
    assert attention(starcoder).kv_heads == 1


def test_the_smallest_of_several_lengths_counts() -> None:
    assert model_from_config(without(seq_length=4096)).max_position_embeddings == 4096


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"])
def test_a_missing_width_is_named(name: str) -> None:
    with pytest.raises(LegroomError, match=name) as refused:
        model_from_config(without(name))
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("value", [0, -1, 10**9, "32", 3.5, True, [], {}])
def test_an_absurd_number_of_layers_is_refused(value: object) -> None:
    with pytest.raises(LegroomError, match="num_hidden_layers"):
        model_from_config(without(num_hidden_layers=value))


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(LegroomError, match="32 attention heads for 5"):
        model_from_config(without(num_key_value_heads=5))
    with pytest.raises(LegroomError, match="does not divide"):
        model_from_config(without("num_key_value_heads", hidden_size=4097))


@pytest.mark.parametrize("config", [{}, [], None, "llama", 7])
def test_what_is_no_object_is_refused(config: Any) -> None:
    with pytest.raises(LegroomError):
        model_from_config(config)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 10**7) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                *LLAMA,
                "layer_types",
                "sliding_window",
                "rope_scaling",
                "head_dim",
                "kv_lora_rank",
                "text_config",
                "quantization_config",
            ]
        ),
        _JSON,
    )
)
@example({"architectures": 1.0})
def test_no_config_ends_in_a_traceback(changes: dict[str, Any]) -> None:
    try:
        model_from_config(LLAMA | changes)
    except LegroomError as refused:
        assert refused.message


def test_multi_token_prediction_layers_are_kept_apart() -> None:
    model = model_from_config(without(num_nextn_predict_layers=1))
    assert len(model.draft_layers) == 1
    assert len(model.layers) == 32


def test_kinds_of_mixers_are_told_apart() -> None:
    latent = without(
        model_type="deepseek_v3", kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    assert isinstance(model_from_config(latent).layers[0].mixer, LatentAttention)
    gdn = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
    gdn |= {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4}
    kinds = [type(layer.mixer) for layer in model_from_config(without(model_type="qwen3_next", **gdn)).layers[:4]]
    assert kinds == [StateSpace, StateSpace, StateSpace, Attention]


@pytest.mark.parametrize("field", ["intermediate_size", "max_position_embeddings"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_field_that_is_no_finite_number_is_no_crash(field, value):
    try:
        model_from_config({**LLAMA, field: value})
    except LegroomError as error:
        assert field in f"{error} {error.hint}"


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("qwen2.5-vl-7b", ("vision_config", "patch_size"), 0),
        ("gemma-3-12b", ("vision_config", "num_hidden_layers"), 10**15),
        ("qwen2.5-vl-7b", ("vision_config", "mlp_ratio"), [0]),
        ("gemma-2-9b-fp8", ("quantization_config", "config_groups"), "x"),
        ("nemotron-h-8b", ("intermediate_size",), []),
    ],
)
def test_a_value_of_the_wrong_kind_is_an_error_for_people(name: str, field: tuple[str, ...], value: Any) -> None:
    config = copy.deepcopy(bundled_config(find(name)))
    section = config
    for key in field[:-1]:
        section = section[key]
    section[field[-1]] = value
    with pytest.raises(LegroomError, match="config"):
        model_from_config(config)


def test_blocks_of_no_rows_are_no_blocks() -> None:
    assert quantization({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 0]}}).block is None
