import bz2
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from legroom import facts
from legroom.errors import LegroomError
from legroom.facts import read_texts
from legroom.facts.bundled import bundled_config, find
from legroom.facts.huggingface import folder_bytes
from legroom.facts.model import LatentAttention
from legroom.facts.model_sources import load


def llama_config() -> dict[str, Any]:
    found = find("llama-3.2-1b")
    assert found is not None
    return bundled_config(found)


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    header, offset = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def test_a_folder_with_a_config_is_a_model_of_that_name(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(llama_config()))
    model = load(str(folder))
    assert (model.name, model.hidden_size, model.checkpoint_bytes) == ("my-model", 2048, None)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("My-Llama-AWQ", 4), ("llama-3.2-1b-NVFP4", 4), ("Llama-1B-FP8-dynamic", 8), ("llama-qat-q4_0-unquantized", None)],
)
def test_a_config_without_its_quantization_is_stored_as_its_name_says(
    tmp_path: Path, name: str, bits: int | None
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(llama_config()))
    scheme = load(str(tmp_path / name)).quantization
    assert (scheme and scheme.weight_bits) == bits
    assert scheme is None or scheme.named


def test_a_config_file_alone_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "whatever.json"
    path.write_text(json.dumps(llama_config()))
    assert load(str(path)).name == "whatever"


def test_safetensors_beside_the_config_give_the_checkpoints_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_config()))
    write_safetensors(tmp_path / "model.safetensors", {"a": ("BF16", [4, 8], 64), "b": ("F32", [2], 8)})
    assert load(str(tmp_path)).checkpoint_bytes == 72


def test_the_index_says_which_files_count(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-1.safetensors", {"a": ("BF16", [4], 8)})
    write_safetensors(tmp_path / "model-2.safetensors", {"b": ("BF16", [4], 8)})
    write_safetensors(tmp_path / "consolidated.safetensors", {"a": ("BF16", [8], 16)})
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert folder_bytes(tmp_path) == 16


def test_an_incomplete_download_gives_no_total(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-1.safetensors", {"a": ("BF16", [4], 8)})
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert folder_bytes(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x10\0\0\0\0\0\0\0{", b"\x02\0\0\0\0\0\0\0[]" + b"1" * 9])
def test_a_broken_safetensors_file_is_a_clear_message(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_config()))
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(LegroomError) as error:
        load(str(tmp_path))
    assert error.value.exit_code == 2


def test_a_modelopt_quantization_file_is_read_with_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_config()))
    quantization = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantization))
    model = load(str(tmp_path))
    assert model.quantization is not None
    assert model.quantization.weight_bits == 8


def test_an_old_gptq_quantization_file_is_read_with_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_config()))
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 64, "desc_act": True}))
    model = load(str(tmp_path / "config.json"))
    assert model.quantization is not None
    assert (model.quantization.method, model.quantization.group_size) == ("gptq", 64)


def test_a_folder_with_mistrals_params_only_is_a_model(tmp_path: Path) -> None:
    params = {"dim": 4096, "n_layers": 32, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "n_kv_heads": 8}
    params |= {"vocab_size": 32768, "max_seq_len": 32768}
    (tmp_path / "params.json").write_text(json.dumps(params))
    model = load(str(tmp_path))
    assert (len(model.layers), model.hidden_size, model.max_position_embeddings) == (32, 4096, 32768)
    moe = {"num_experts": 128, "num_shared_experts": 1, "num_experts_per_tok": 4, "expert_hidden_dim": 2048}
    widths = {"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64}
    (tmp_path / "params.json").write_text(json.dumps({**params, **widths, "v_head_dim": 128, "moe": moe}))
    mixer = load(str(tmp_path)).layers[0].mixer
    assert isinstance(mixer, LatentAttention)
    assert (mixer.kv_lora_rank, mixer.qk_rope_head_dim) == (256, 64)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"[1, 2]", "JSON list"),
        (b'"text"', "JSON str"),
        (b"\x89PNG\xff\xfe", "not text"),
        (b"[" * 100_000, "not JSON"),
        (b"{}", "empty"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(LegroomError, match=words) as error:
        load(str(path))
    assert error.value.exit_code == 2


def test_a_huge_file_is_refused_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    with path.open("wb") as file:
        file.truncate(50 * 2**30)  # sparse: reading it would take all memory
    with pytest.raises(LegroomError, match="which no config"):
        load(str(path))


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LegroomError, match=r"no config\.json"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    "path", ["./nothing/here", "/nowhere/config.json", "missing.gguf", "~/no-such-model-folder", "~nosuchuser/x"]
)
def test_a_path_to_nothing_is_said_to_be_missing(path: str) -> None:
    with pytest.raises(LegroomError, match="no file or folder"):
        load(path)


def test_an_architecture_legroom_does_not_know_is_marked(tmp_path: Path) -> None:
    config = {**llama_config(), "architectures": ["BrandNewForCausalLM"], "model_type": "brand_new"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not load(str(tmp_path)).known


def test_packed_files_read_as_the_folder_they_were_packed_from(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "gemma.json").write_text('{\n"gemma": "1"\n}\n')
    (folder / "qwen.json").write_text("{}\n")
    texts = read_texts(folder)
    folder.with_suffix(".packed").write_bytes(
        bz2.compress("".join(f"\f{name}\n{text}" for name, text in texts.items()).encode())
    )
    shutil.rmtree(folder)
    read_texts.cache_clear()
    assert read_texts(folder) == texts == {"gemma": '{\n"gemma": "1"\n}\n', "qwen": "{}\n"}


def test_a_wheel_has_the_texts_of_its_data_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    folder.with_suffix(".packed").write_bytes(bz2.compress(b'\fgpus\n{"a":1}'))
    (folder / "texts.packed").write_bytes(bz2.compress(b'\fevidence\n{"b":2}'))
    monkeypatch.setattr(facts, "DATA_FOLDER", folder)
    read_data = facts.read_data.__wrapped__
    assert (read_data("gpus.json"), read_data("evidence.json")) == ({"a": 1}, {"b": 2})
