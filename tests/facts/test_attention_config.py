from __future__ import annotations

from typing import Any

import pytest

from legroom.errors import LegroomError
from legroom.facts.config.layer_patterns import mixer_kinds
from legroom.facts.config.mixers import encoder_mixers, further_mixers, mixers, mtp_mixers
from legroom.facts.model import Attention, LatentAttention, Mixer, StateSpace

BASE: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "sliding_window": 512,
}


def kinds(model_type: str, architecture: str = "", **changes: Any) -> str:
    """One letter a layer: f(ull), s(liding), c(hunked), m(amba), g(ated delta), n(one) ..."""
    text = BASE | {"model_type": model_type} | changes
    return "".join(kind[0] for kind in mixer_kinds(text, architecture))


@pytest.mark.parametrize(
    ("model_type", "pattern"),
    [
        ("gemma2", "sf" * 6),
        ("gemma3_text", "sssssf" * 2),
        ("gpt_oss", "sf" * 6),
        ("cohere2", "sssf" * 3),
        ("olmo3", "sssf" * 3),
        ("mistral", "s" * 12),
        ("phi3", "s" * 12),
        ("qwen2", "f" * 12),
    ],
)
def test_a_family_without_layer_types_has_its_known_pattern(model_type: str, pattern: str) -> None:
    assert kinds(model_type) == pattern


def test_written_layer_types_win() -> None:
    written = ["full_attention", "sliding_attention"] * 6
    assert kinds("gemma3_text", layer_types=written) == "fs" * 6


def test_sliding_layers_without_a_window_are_full() -> None:
    assert kinds("gemma3_text", layer_types=["sliding_attention"] * 12, sliding_window=None) == "f" * 12


def test_qwen_slides_only_when_told_to() -> None:
    assert kinds("qwen2", use_sliding_window=True) == "s" * 12


def test_counts_of_layer_types_are_enough() -> None:
    counts = {"sliding_attention": 9, "full_attention": 3}
    assert kinds("gemma3_text", layer_type_counts=counts) == "sssf" * 3
    assert kinds("gemma3_text", layer_type_counts={"sliding_attention": 10, "full_attention": 2}) == "sssssf" * 2
    assert kinds("secret", layer_type_counts=counts) == "sssf" * 3


def test_a_pattern_may_be_told_in_words() -> None:
    assert kinds("secret", layer_pattern="2 sliding : 1 full") == "ssf" * 4
    assert kinds("secret", layer_pattern="alternating sliding/full") == "sf" * 6


def test_gemma_4_ends_on_a_full_layer() -> None:
    assert kinds("gemma4_text", num_hidden_layers=10) == "sssssfsssf"


def test_llama_4_is_chunked_except_where_it_has_no_rope() -> None:
    assert kinds("llama4_text", sliding_window=None, attention_chunk_size=8192) == "cccf" * 3


def test_nemotron_h_writes_its_layers_as_letters() -> None:
    assert kinds("nemotron_h", hybrid_override_pattern="M-M*-EM-M*-E") == "mnmfnnmnmfnn"


def test_jamba_has_one_attention_layer_a_period() -> None:
    assert kinds("jamba", attn_layer_period=8, attn_layer_offset=4) == "mmmmfmmmmmmm"


def test_too_few_layer_types_are_refused() -> None:
    with pytest.raises(LegroomError, match="3 layer types for 12 layers"):
        kinds("gemma3_text", layer_types=["full_attention"] * 3)


def test_an_unknown_layer_type_is_named() -> None:
    with pytest.raises(LegroomError, match="quantum"):
        mixers(BASE | {"model_type": "secret", "layer_types": ["quantum"] * 12}, "")


def test_gemma_4_full_layers_have_wider_and_fewer_heads() -> None:
    text = BASE | {"model_type": "gemma4_text", "global_head_dim": 512, "num_global_key_value_heads": 2}
    found = mixers(text | {"attention_k_eq_v": True}, "Gemma4ForCausalLM")
    shapes = [(mixer.kv_heads, mixer.head_dim) for mixer in found if isinstance(mixer, Attention)]
    assert shapes[0] == (4, 128)
    assert shapes[5] == (2, 512)


def test_the_last_layers_of_gemma_3n_share_the_cache_of_others() -> None:
    found = mixers(BASE | {"model_type": "gemma3n_text", "num_kv_shared_layers": 5}, "Gemma3nForCausalLM")
    assert [isinstance(mixer, Attention) and mixer.shares_kv for mixer in found] == [False] * 7 + [True] * 5


def test_decilm_layers_may_have_no_attention() -> None:
    blocks = [{"attention": {"n_heads_in_group": 8, "no_op": False}}, {"attention": {"no_op": True}}]
    found = mixers(BASE | {"model_type": "nemotron-nas", "num_hidden_layers": 2, "block_configs": blocks}, "DeciLM")
    assert isinstance(found[0], Attention)
    assert found[0].kv_heads == 2
    assert found[1] is None


LATENT = BASE | {
    "model_type": "deepseek_v32",
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "sliding_window": None,
}


def latent(found: tuple[Mixer | None, ...]) -> list[LatentAttention]:
    return [mixer for mixer in found if isinstance(mixer, LatentAttention)]


def test_sparse_latent_attention_has_an_indexer_in_every_layer() -> None:
    assert {mixer.index_head_dim for mixer in latent(mixers(LATENT, "DeepseekV32ForCausalLM"))} == {128}


def test_shared_indexers_keep_one_cache() -> None:
    types = ["full", "shared", "shared"] * 4
    found = latent(mixers(LATENT | {"indexer_types": types}, "GlmMoeDsaForCausalLM"))
    assert [mixer.index_head_dim for mixer in found] == [128, 0, 0] * 4


def test_compress_ratios_belong_to_their_layers_and_the_draft() -> None:
    text = LATENT | {"model_type": "deepseek_v4", "head_dim": 512, "sliding_window": 128, "kv_lora_rank": None}
    text |= {"compress_ratios": [0, 4, 128] * 4 + [0], "num_nextn_predict_layers": 1}
    found = mixers(text, "DeepseekV4ForCausalLM")
    assert [mixer.compress_ratio for mixer in latent(found)[:3]] == [0, 4, 128]
    assert [mixer.compress_ratio for mixer in latent(mtp_mixers(text, found))] == [0]


def test_whisper_has_an_encoder_and_cross_attention() -> None:
    text = {"model_type": "whisper", "hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 20}
    text |= {"encoder_layers": 32, "encoder_attention_heads": 20}
    architecture = "WhisperForConditionalGeneration"
    assert len(encoder_mixers(text, architecture)) == 32
    crossing = further_mixers(text, architecture)[0][0]
    assert isinstance(crossing, Attention)
    assert crossing.cross


def test_falcon_h1_layers_attend_beside_their_mamba() -> None:
    text = BASE | {"model_type": "falcon_h1", "mamba_d_ssm": 4096, "mamba_n_heads": 64, "mamba_d_head": 64}
    text |= {"mamba_d_state": 128, "mamba_d_conv": 4, "mamba_n_groups": 1, "sliding_window": None}
    assert isinstance(mixers(text, "FalconH1ForCausalLM")[0], StateSpace)
    assert isinstance(further_mixers(text, "FalconH1ForCausalLM")[0][0], Attention)


def test_embedding_models_attend_both_ways() -> None:
    found = mixers(BASE | {"model_type": "bert", "sliding_window": None}, "BertModel")
    assert not any(isinstance(mixer, Attention) and mixer.causal for mixer in found)


def test_embedding_gemma_attends_both_ways_and_keeps_no_cache() -> None:
    text = BASE | {"model_type": "gemma3_text", "use_bidirectional_attention": True}
    assert not any(mixer.causal for mixer in mixers(text, "Gemma3TextModel") if isinstance(mixer, Attention))
    assert all(mixer.causal for mixer in mixers(text, "Gemma3ForCausalLM") if isinstance(mixer, Attention))


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        ({"num_attention_heads_per_layer": [48, 64]}, [48, 64]),
        ({"attention_other_setting": {"num_attention_heads": 24, "num_attention_groups": 8, "head_dim": 64}}, [16, 24]),
    ],
)
def test_full_and_sliding_layers_may_differ_in_heads(fields: dict[str, Any], heads: list[int]) -> None:
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}
    found = mixers({**BASE, "model_type": "step3p5", **layers, **fields}, "Step3p5ForCausalLM")
    assert [mixer.heads for mixer in found if isinstance(mixer, Attention)] == heads
