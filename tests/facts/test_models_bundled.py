import re
import subprocess
import sys

import pytest

import legroom
from legroom.errors import LegroomError
from legroom.facts import bundled
from legroom.facts.bundled import bundled_names, derived, nearest, smaller_siblings, variants
from legroom.facts.config_classes import interfaces
from legroom.facts.model_sources import load
from legroom.facts.releases import first_release, known_releases, release
from legroom.vllm_logs.printed_flags import load_logged_model


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("META-LLAMA/llama-3.1-8b-instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("llama-3.1-8b", "llama-3.1-8b"),
        ("Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("qwen2.5-7b-instruct", "qwen2.5-7b"),
        ("Qwen2.5-7B-Instruct-AWQ", "qwen2.5-7b-awq"),
        ("gemma-3-27b-it", "gemma-3-27b"),
        ("gpt-oss-20b", "gpt-oss-20b"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-r1"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b-2507"),
    ],
)
def test_a_bundled_model_is_found_by_hub_id_or_short_name(spelling: str, name: str) -> None:
    found = bundled.find(spelling)
    assert found is not None
    assert found.name == name


def test_at_least_a_hundred_architectures_are_bundled() -> None:
    assert sum(1 for name in bundled_names() if bundled._bundled_of(name).base is None) >= 100


def test_every_bundled_model_has_a_source_and_reads_as_a_model() -> None:
    for name in bundled_names():
        found = bundled._bundled_of(name)
        assert found.source, name
        model = load(name)
        assert model.layers, name
        assert model.source.startswith("bundled: ")


def test_no_two_models_claim_the_same_hub_id() -> None:
    owners: dict[str, str] = {}
    for name in bundled_names():
        for hub_id in bundled._bundled_of(name).ids:
            assert owners.setdefault(hub_id.lower(), name) == name, hub_id


def test_a_bundled_name_needs_no_hub_library() -> None:
    script = (
        "import sys; from legroom.facts.model_sources import load; load('llama-3.1-8b');"
        "assert 'huggingface_hub' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_model_keeps_the_hub_id_it_was_asked_by() -> None:
    assert load("meta-llama/Llama-3.1-8B-Instruct").name == "meta-llama/Llama-3.1-8B-Instruct"
    assert load("llama-3.1-8b").name == "meta-llama/Llama-3.1-8B"
    assert load("qwen2.5-7b-instruct").name == "Qwen/Qwen2.5-7B-Instruct"


def test_a_known_re_uploader_of_an_unchanged_model_is_read_as_that_model() -> None:
    assert load("unsloth/Llama-3.2-3B-Instruct").hidden_size == 3072
    assert not load("unsloth/Llama-3.2-3B-Instruct").assumed


def test_a_quantization_of_the_same_name_by_somebody_else_is_not_taken_for_the_known_one() -> None:
    known, other = (load(f"{maker}/Qwen3.6-35B-A3B-NVFP4") for maker in ("nvidia", "RedHatAI"))
    assert known.quantization is not None
    assert other.quantization is not None
    assert not known.assumed
    assert not known.quantization.list_assumed
    assert other.assumed
    assert other.quantization.list_assumed


def test_a_quantized_variant_has_its_bases_layers_and_its_own_quantization() -> None:
    base, awq = load("Qwen/Qwen2.5-7B-Instruct"), load("Qwen/Qwen2.5-7B-Instruct-AWQ")
    assert base.layers == awq.layers
    assert base.quantization is None
    assert awq.quantization is not None
    assert (awq.quantization.method, awq.quantization.weight_bits) == ("awq", 4)


def test_the_variants_of_a_model_are_listed_by_its_name_or_its_hub_id() -> None:
    names = {found.name for found in variants("Qwen/Qwen2.5-7B-Instruct")}
    assert names == {found.name for found in variants("qwen2.5-7b")}
    assert any("awq" in name for name in names)
    assert all(found.base == "qwen2.5-7b" for found in variants("qwen2.5-7b"))


def test_a_variant_is_made_from_the_model_that_was_named() -> None:
    newer = [one for found in variants("meta-llama/Llama-3.3-70B-Instruct") for one in found.ids]
    assert newer
    assert all("3.3-70b-instruct" in one.lower() for one in newer)
    coder = [one for found in variants("Qwen/Qwen2.5-Coder-7B-Instruct") for one in found.ids]
    assert coder
    assert all("Coder" in one for one in coder)
    assert [found.name for found in variants("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16")]


def test_a_near_miss_names_what_was_meant() -> None:
    assert "llama-3.1-8b" in nearest("llama-3.1-8bb")
    with pytest.raises(LegroomError) as error:
        load("lama-3.1-8b")
    assert error.value.exit_code == 2
    assert "llama-3.1-8b" in error.value.hint


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(LegroomError, match="no model"):
        load("  ")


def test_lists_are_written_short_and_read_long() -> None:
    assert bundled._expand({"cycle": ["a", "b"], "times": 2, "then": ["a"]}) == ["a", "b", "a", "b", "a"]
    assert bundled._expand({"runs": [["a", 2], ["b", 1]]}) == ["a", "a", "b"]
    assert bundled._expand({"names": ["lm_head", ["layers.{}.mlp", "0-1,3"]]}) == [
        "lm_head",
        "layers.0.mlp",
        "layers.1.mlp",
        "layers.3.mlp",
    ]


def test_a_base_and_its_instruct_model_may_differ_in_length() -> None:
    assert load("Qwen/Qwen2.5-7B").max_position_embeddings == 131072
    assert load("Qwen/Qwen2.5-7B-Instruct").max_position_embeddings == 32768


def test_a_revision_of_a_bundled_model_is_looked_up_and_the_way_out_is_named() -> None:
    with pytest.raises(LegroomError) as error:
        load("Qwen/Qwen2.5-7B-Instruct", revision="no-such-revision-in-any-cache", offline=True)
    assert error.value.exit_code == 3
    assert "leave the revision out" in error.value.hint


def test_experts_stored_narrower_than_the_rest_are_known_as_such() -> None:
    flash, requantized = load("deepseek-ai/DeepSeek-V4-Flash"), load("sgl-project/DeepSeek-V4-Flash-FP8")
    assert flash.quantization is not None
    assert requantized.quantization is not None
    assert (flash.quantization.weight_bits, flash.quantization.experts_bits) == (8, 4)
    assert requantized.quantization.experts_bits is None


@pytest.mark.parametrize(
    ("alias", "means"),
    [
        ("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct"),
        ("llama3.3-70b", "meta-llama/Llama-3.3-70B-Instruct"),
        ("llama-3.1-70b", "meta-llama/Llama-3.1-70B"),
        ("qwen3-coder-30b", "Qwen/Qwen3-Coder-30B-A3B-Instruct"),
        ("phi-3.5-mini", "microsoft/Phi-3.5-mini-instruct"),
    ],
)
def test_an_alias_is_what_it_says(alias: str, means: str) -> None:
    assert load(alias).name == means


def test_a_smaller_sibling_is_of_the_same_series_and_role() -> None:
    assert [each.ids[0] for each in smaller_siblings("Qwen/Qwen3-8B-Base")][:2] == [
        "Qwen/Qwen3-4B-Base",
        "Qwen/Qwen3-1.7B-Base",
    ]


@pytest.mark.parametrize(
    ("name", "base", "method"),
    [
        ("cyankiwi/Qwen3.8-27B-AWQ-INT4", "Qwen/Qwen3.8-27B", "compressed-tensors"),
        ("QuantTrio/Qwen3.5-35B-A3B-AWQ", "Qwen/Qwen3.5-35B-A3B", "awq"),
        ("unsloth/Qwen3-8B-GGUF:Q4_K_M", "Qwen/Qwen3-8B", "gguf"),
        ("someone/finance-Llama3-8B", "meta-llama/Meta-Llama-3-8B", None),
        ("someone/Qwen3-VL-Embedding-8B-FP8", "Qwen/Qwen3-VL-8B-Instruct", "fp8"),
        ("/models/Qwen3-8B-AWQ", "Qwen/Qwen3-8B-AWQ", "awq"),
        ("./out/qwen25-05b-tutor-merged/checkpoint-500", "Qwen/Qwen2.5-0.5B", None),
        ("~/hub/models--deepseek-ai--DeepSeek-V3-0324/snapshots/e9b33add76883f29", "deepseek-ai/DeepSeek-V3", "fp8"),
        ("llama3.1:70b", "meta-llama/Llama-3.1-70B", None),
        ("allenai/Llama-3.1-Tulu-3-8B-DPO", "meta-llama/Llama-3.1-8B", None),
        ("someone/GLM-4.5-Air-106B-A12B-AWQ", "zai-org/GLM-4.5-Air", "awq"),
        ("someone/Qwen3.5-9B-OCR", "Qwen/Qwen3.5-9B", None),
        ("bytedance/UI-TARS-1.5-7B", "Qwen/Qwen2.5-VL-7B-Instruct", None),
        ("Equall/Saul-7B-Instruct-v1", "mistralai/Mistral-7B-v0.1", None),
        ("mlx-community/gpt-oss-20b-MXFP4-Q4", "openai/gpt-oss-20b", "mxfp4"),
        ("someone/gpt-oss-20b-BF16-tuned", "openai/gpt-oss-20b", None),
        ("someone/Mistral-7B-Instruct-v0.3:Q4_K_M", "mistralai/Mistral-7B-v0.3", "gguf"),  # vLLM's REPO:QUANT
        ("stepfun-ai/Step-3.5-Flash-FP8", "stepfun-ai/Step-3.5-Flash", "fp8"),  # no folder of a training step
        ("Tongyi-Zhiwen/QwenLong-L1.5-30B-A3B", "Qwen/Qwen3-30B-A3B", None),  # not QwenLong-L1
        ("someone/Qwopus3.5-27B-v3-NVFP4", "Qwen/Qwen3.5-27B", "modelopt_fp4"),
        ("deepseek-ai/DeepSeek-V4-Flash-DSpark", "deepseek-ai/DeepSeek-V4-Flash", "fp8"),  # no draft alone
        ("selfrag_llama2_7b", "meta-llama/Llama-2-7b-hf", None),
        ("someone/qwen2_5_7b_instruct", "Qwen/Qwen2.5-7B", None),
        ("someone/internlm2_5-1_8b-tuned", "internlm/internlm2_5-1_8b-chat", None),
        ("someone/L3.3-70B-Euryale-AWQ", "meta-llama/Llama-3.1-70B", "awq"),
        ("dicta-il/DictaLM-3.0-Nemotron-12B-W4A16", "nvidia/NVIDIA-Nemotron-Nano-12B-v2", "compressed-tensors"),
    ],
)
def test_a_name_says_how_a_checkpoint_is_built_and_stored(name: str, base: str, method: str | None) -> None:
    named = bundled.derived(name)
    assert named is not None
    assert base in named.source
    scheme = load(name, offline=True).quantization
    assert (scheme.method if scheme else None) == method


@pytest.mark.parametrize(
    "name",
    [
        "someone/a-model-of-their-own-7b",
        "someone/Qwen3-52B",  # the letters of Qwen3.5-2B
        "someone/Phi-9-mini",  # not Phi-4-mini
        "someone/Yi-9-6B",  # not Yi-6B
        "someone/gemma-3n-2b",
        "someone/Qwen3-8B-A1B",
        "someone/GLM-5-Air",
        "someone/GLM-5.2-4layer",
        "someone/Qwen3-Coder-REAP-25B-A3B",
        "someone/GLM-4.5-Air-REAP-82B-A12B",
        "someone/EAGLE3-Llama-3.1-8B",
        "someone/Qwen3-8B-Audio",
        "someone/Qwen3-8B-exl3",
        "someone/Qwen3-ForcedAligner-0.6B",
        "someone/VideoLLaMA3-7B-Qwen2.5",
        "someone/llava-med-mistral-7b",
        "someone/openvla-llama-2-7b",
        "someone/blip2-opt-2.7b",
        "someone/qwen2_5_1_5b",  # 1.5B or 5B
        "someone/granite-4.2-3b-vision",
        "someone/Laguna-S-2.1-DFlash-NVFP4",
        "someone/dspark_qwen3_8b_block7",
        "/models/merged/checkpoint-10",
    ],
)
def test_a_name_that_holds_no_known_model_or_tells_of_another_says_nothing(name: str) -> None:
    assert bundled.derived(name) is None


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("rdtand/Qwen3.6-35B-A3B-PrismaQuant-4.75bit-vllm", 4.75),
        ("someone/Qwen3-8B-mixed-5.5bit", 5.5),
        ("someone/Qwen3-8B-6.25-bit", 6.25),
        ("someone/Qwen3-8B-4bit", None),
        ("someone/Qwen2.5-7B-Instruct", None),
    ],
)
def test_bits_on_average_in_a_name_size_the_weights_and_are_told(
    name: str, bits: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    scheme = load(name, offline=True).quantization
    assert ((scheme and scheme.mean_bits) or None) == bits
    if bits is None:
        return
    report = legroom.plan(name, gpu="b200", vllm="0.32.0", max_model_len=4096, advice=False)
    plain = re.sub("(-mixed|-PrismaQuant)?-[0-9.]+-?bit(-vllm)?", "", name)
    whole = legroom.plan(plain, gpu="b200", vllm="0.32.0", max_model_len=4096, advice=False).layout.weights.bytes
    weights = report.layout.weights
    assert weights.low <= whole * bits / 16 * 1.02 < weights.bytes < whole * (bits + 2.5) / 16
    assert weights.high > weights.bytes * 1.05
    assert f"{bits:g} bits on average" in str(load(name, offline=True).source)


def test_weights_whose_scheme_is_guessed_may_have_quantized_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    guessed = legroom.plan("cyankiwi/Qwen3-8B-AWQ-4bit", gpu="h100", vllm="0.32.0", advice=False).layout.weights
    tables = 2 * 151936 * 4096 * 2
    assert guessed.bytes - guessed.low >= tables * 3 // 4
    assert guessed.high > guessed.bytes


def test_a_guess_holds_both_ways_of_storing_linear_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    named = ("cyankiwi/Qwen3.8-27B-AWQ-INT4", "cyankiwi/Qwen3.8-27B-AWQ-BF16-INT4")
    all_, linear_kept = (legroom.plan(n, gpu="h100", vllm="0.32.0", advice=False).layout.weights for n in named)
    assert linear_kept.bytes - all_.bytes > 6 * 2**30
    assert all_.high > linear_kept.bytes * 0.99
    assert linear_kept.low < all_.bytes


def test_every_bundled_architecture_is_in_some_releases_registry() -> None:
    for name in bundled_names():
        architecture = load(name).architecture
        asked = any(interfaces(architecture, release(version)) is not None for version in known_releases())
        assert asked or first_release(architecture), f"{name}: no release of vLLM has {architecture}"


def test_millions_of_parameters_in_a_name_are_told_from_billions() -> None:
    assert derived("somebody/gpt2-124m").base == "gpt2"
    assert derived("somebody/gpt2-774m") is None


@pytest.mark.parametrize("name", ["qwen3-14b-foo", "qwen3-14b-awk"])
def test_a_known_name_with_a_word_that_no_checkpoint_has_is_refused(name: str) -> None:
    with pytest.raises(LegroomError, match="neither a bundled model") as refused:
        load(name)
    assert "qwen3-14b" in refused.value.hint
    assert f"./{name}" in refused.value.hint
    assert load(f"./{name}").config["num_hidden_layers"] == 40
    assert load_logged_model(name).name == name
