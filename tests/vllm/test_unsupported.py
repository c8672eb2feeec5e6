"""What a release cannot run, whatever the memory, in its own words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from small_vllm_models import A10, A100, B200, H100, HYBRID, LLAMA, MI300, MOE, T4, VISION

from legroom.facts.gpus import Gpu, gpu
from legroom.facts.model import Attention, Layer, Model, Quantization
from legroom.facts.releases import known_releases, release
from legroom.vllm.args import ServeArgs
from legroom.vllm.resolve import resolve
from legroom.vllm.unsupported import Unsupported, unsupported

V100, P40 = gpu("v100-32gb"), gpu("p40")
RTX5090 = gpu("rtx5090")
PLAIN = replace(LLAMA, source="bundled: a test")


def quantized(method: str, bits: int = 4, **more: Any) -> Model:
    """A checkpoint whose own config names the method."""
    return replace(PLAIN, quantization=Quantization(method, bits, **more))


AWQ, GPTQ = quantized("awq", group_size=128), quantized("gptq", group_size=128)
FP8 = quantized("fp8", 8, number="float", strategy="block", block=(128, 128))
MXFP4 = quantized("mxfp4", number="float", group_size=32)
NVFP4 = quantized("modelopt_fp4", number="float", group_size=16)
INT4 = quantized("compressed-tensors", group_size=128)
FLOAT8 = quantized("compressed-tensors", 8, number="float", strategy="channel", dynamic_activations=True)


def refused(version: str, model: Model = PLAIN, card: Gpu = H100, **given: Any) -> Unsupported | None:
    settings = resolve(ServeArgs(model="m", **given), model, card, release(version))
    return unsupported(settings, model, card)


def said(version: str, model: Model = PLAIN, card: Gpu = H100, **given: Any) -> str:
    found = refused(version, model, card, **given)
    assert found is not None
    return found.message


def test_a_quantization_that_no_release_has_is_unknown():
    assert said("0.19.0", quantization="bananas").startswith("Unknown quantization method: bananas. Must be one of [")


def test_a_method_for_quantized_checkpoints_finds_no_config_beside_a_plain_one():
    assert said("0.19.0", quantization="awq", dtype="half") == "Cannot find the config file for awq"


def test_a_method_that_quantizes_while_loading_takes_a_plain_checkpoint():
    assert refused("0.19.0", quantization="fp8") is None
    assert refused("0.19.0", quantization="bitsandbytes") is None


def test_a_flag_that_names_another_method_than_the_checkpoint_is_taken_for_a_mistake():
    assert said("0.19.0", AWQ, A100, quantization="gptq") == (
        "Quantization method specified in the model config (awq) does not match the quantization method specified in "
        "the `quantization` argument (gptq)."
    )


def test_a_config_that_nobody_signed_leaves_a_doubt_instead_of_a_refusal():
    by_name = replace(AWQ, assumed=True)
    typed = [replace(AWQ, source=source, config={}) for source in ("the given config.json", "folder awq")]
    for model in (by_name, *typed):
        found = refused("0.19.0", model, A100, quantization="compressed-tensors")
        assert found is not None
        assert not found.certain
        too_old = refused("0.19.0", model, T4)
        assert too_old is None or not too_old.certain
    saved = replace(typed[1], config={"transformers_version": "4.57.0"})
    found = refused("0.19.0", saved, A100, quantization="compressed-tensors")
    assert found is not None
    assert found.certain


@pytest.mark.parametrize(
    ("version", "model", "card", "needed"),
    [
        ("0.10.2", AWQ, V100, 75),
        ("0.10.2", GPTQ, P40, 0),
        ("0.5.0", FP8, A100, 89),
        ("0.10.2", FP8, T4, 80),
        ("0.14.0", FP8, T4, 0),
        ("0.11.0", MXFP4, T4, 80),
        ("0.11.0", NVFP4, T4, 80),
        ("0.19.0", NVFP4, T4, 0),
        ("0.11.0", NVFP4, A100, 0),
        ("0.14.0", FP8, V100, 75),
    ],
)
def test_a_method_asks_for_a_card_that_has_its_kernels(version: str, model: Model, card: Gpu, needed: int):
    found = refused(version, model, card, dtype="half" if model is not MXFP4 else None)
    message = found.message if found and found.id == "unsupported_quantization" else ""
    assert (f"Minimum capability: {needed}." in message) == bool(needed)


def test_marlin_is_no_name_for_a_checkpoint_on_a_card_that_does_not_run_it():
    assert "(awq) does not match" in said("0.10.2", AWQ, T4, quantization="awq_marlin")
    assert refused("0.10.2", AWQ, A10, quantization="awq_marlin") is None


@pytest.mark.parametrize(
    ("version", "model", "card", "message"),
    [
        ("0.11.0", INT4, T4, "Min capability: 80. Current capability: 75."),
        ("0.12.0", INT4, T4, ""),
        ("0.10.2", FLOAT8, T4, "Min capability: 80. Current capability: 75."),
        ("0.10.2", FLOAT8, A10, ""),
        ("0.5.3", FLOAT8, A10, "Min capability: 89. Current capability: 86."),
    ],
)
def test_compressed_tensors_asks_about_each_of_its_formats(version: str, model: Model, card: Gpu, message: str):
    found = refused(version, model, card, dtype="half")
    assert (found.message if found else "").endswith(message)
    assert bool(found) == bool(message)


def test_awq_without_marlin_wants_float16():
    assert said("0.19.0", AWQ, A100, quantization="awq", dtype="bfloat16") == (
        "torch.bfloat16 is not supported for quantization method awq. Supported dtypes: [torch.float16]"
    )
    assert refused("0.19.0", AWQ, A100, dtype="bfloat16") is None


def test_a_method_that_moved_to_a_plugin_is_refused_with_the_plugins_name():
    found = refused("0.32.0", quantization="bitsandbytes")
    assert found is not None
    assert (found.certain, "vllm-bnb-plugin" in found.hint) == (True, True)


def test_amd_cards_have_a_list_of_their_own():
    assert said("0.10.2", quantized("bitsandbytes"), MI300) == (
        "bitsandbytes quantization is currently not supported in rocm."
    )
    assert refused("0.10.2", FP8, MI300) is None


def test_bfloat16_needs_ampere():
    assert said("0.8.0", PLAIN, T4).startswith(
        "Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU has compute "
        "capability 7.5."
    )
    assert said("0.32.0", PLAIN, T4, dtype="bfloat16").startswith("Bfloat16 is only supported")
    assert refused("0.10.0", PLAIN, T4) is None


@pytest.mark.parametrize(
    ("version", "card", "runs"),
    [("0.10.0", P40, False), ("0.19.1", V100, True), ("0.20.0", V100, False), ("0.32.0", T4, True)],
)
def test_builds_hold_kernels_for_some_cards_only(version: str, card: Gpu, runs: bool):
    found = refused(version, PLAIN, card, dtype="half")
    assert (found is None) == runs
    if found:
        assert "no kernel image is available" in found.message


def test_a_card_newer_than_the_release_is_a_doubt():
    found = refused("0.8.5", PLAIN, RTX5090)
    assert found is not None
    assert not found.certain
    assert refused("0.9.0", PLAIN, B200) is None


def test_an_architecture_that_came_later_is_refused_or_a_doubt():
    text = replace(PLAIN, architecture="Qwen3ForCausalLM")
    experts = replace(MOE, architecture="Qwen3MoeForCausalLM", source="bundled: a test")
    assert said("0.6.0", text) == "Model architectures ['Qwen3ForCausalLM'] are not supported for now."
    later = refused("0.8.0", text)
    assert later is not None
    assert not later.certain  # the Transformers backend may run it
    certain = refused("0.8.0", experts)
    assert certain is not None
    assert certain.certain
    assert refused("0.8.4", text) is None


@pytest.mark.parametrize(
    ("version", "card", "runs"),
    [
        ("0.11.0", A100, False),
        ("0.12.0", A100, True),
        ("0.12.0", T4, True),
        ("0.26.0", T4, False),
        ("0.26.0", H100, True),
        ("0.9.0", A100, True),
    ],
)
def test_an_fp8_cache_needs_a_backend_that_reads_it_on_this_card(version: str, card: Gpu, runs: bool):
    assert (refused(version, PLAIN, card, kv_cache_dtype="fp8", dtype="half") is None) == runs


def test_a_plain_model_on_a_usual_card_is_never_refused():
    for version in known_releases():
        for model in (LLAMA, HYBRID, VISION, MOE):
            assert refused(version, replace(model, architecture="LlamaForCausalLM"), H100) is None, version


def test_experts_that_cannot_move_are_not_balanced():
    balanced = {"enable_expert_parallel": True, "tensor_parallel_size": 2, "others": ("--enable-eplb",)}
    gpt_oss = replace(MOE, source="bundled: a test", model_type="gpt_oss", quantization=MXFP4.quantization)
    fp8 = replace(gpt_oss, model_type="", quantization=FP8.quantization)
    assert said("0.32.0", gpt_oss, **balanced) == "EPLB is not supported GptOssMxfp4MoEMethod."
    assert refused("0.32.0", fp8, **balanced) is None
    assert refused("0.32.0", gpt_oss, **balanced | {"others": ()}) is None


def test_keys_and_values_of_unequal_widths_run_on_triton_below_hopper():
    unequal = replace(PLAIN, layers=tuple(Layer(Attention(32, 8, 192, 128), None) for _ in range(4)))
    assert said("0.32.0", unequal, T4, kv_cache_dtype="fp8").startswith("FP8 KV cache is not supported by the Triton")
    assert refused("0.32.0", unequal, H100, kv_cache_dtype="fp8") is None
    sinks = replace(unequal, config={"add_swa_attention_sink_bias": True})
    assert said("0.20.2", sinks, A100) == "Sinks are only supported in FlashAttention 3"
    assert refused("0.20.2", sinks, H100) is None


def test_block_sparse_attention_takes_blocks_of_128():
    mixers = (Attention(64, 4, 128, 128), Attention(64, 4, 128, 128, index_head_dim=128))
    sparse = replace(PLAIN, layers=tuple(Layer(mixer, None) for mixer in mixers))
    assert refused("0.32.0", sparse) is None
    assert refused("0.28.0", sparse, block_size=128) is None
    assert said("0.28.0", sparse).startswith("No common block size for 16")
    assert said("0.32.0", sparse, block_size=64).startswith("No common block size for 64")
    assert said("0.32.0", sparse, attention_backend="FLASHINFER").startswith("No common block size for 128")


@pytest.mark.parametrize("version", ["0.13.0", "0.15.0", "0.18.0", "0.25.1", "0.32.0"])
def test_an_auto_round_checkpoint_runs_under_the_name_that_the_release_has_for_it(version):
    checkpoint = quantized("auto-round", group_size=128)
    assert refused(version, checkpoint) is None
    assert refused(version, checkpoint, quantization="inc") is None


def test_a_quantized_checkpoint_was_not_quantized_again_at_first():
    gpt_oss = replace(MXFP4, config={"model_type": "gpt_oss"})
    assert said("0.20.2", gpt_oss, quantization="mxfp8").startswith("Setting `quantization_config` for online")
    assert refused("0.22.1", gpt_oss, quantization="mxfp8") is None


def test_decode_context_parallelism_was_asked_of_the_selected_backend_first():
    shared = {"tensor_parallel_size": 16, "decode_context_parallel_size": 2}
    assert refused("0.22.1", **shared) is None
    by_flag = said("0.22.1", attention_backend="TRITON_ATTN", **shared)
    assert "return the softmax LSE during decode, but TRITON_ATTN does not" in by_flag
