"""A model's config from a folder or a file on this machine, with what lies beside it.

Mistral's own params.json is written as the config.json it stands for. A checkpoint's safetensors headers say names,
shapes, precisions and bytes without a weight being read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.config.media_items import PROCESSOR_KEY, processor_files
from legroom.records import dataclass

LARGEST_CONFIG_BYTES = 20 * 2**20
"""No config.json comes near; a larger file is a mistake and is not read."""

PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
"""Where checkpoints say how large a picture or a video may be."""

QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Where checkpoints keep their quantization when config.json does not (ModelOpt, AutoGPTQ, AutoAWQ)."""


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of plausible size, or a clear refusal."""
    try:
        size = path.stat().st_size
        if size > LARGEST_CONFIG_BYTES:
            raise LegroomError(
                f"{path.name} has {size / 1e6:,.0f} MB, which no config.json has", "pass the model's config.json"
            )
        text = path.read_bytes()
    except OSError as error:
        raise LegroomError(f"{path} could not be read: {error.strerror or error}") from error
    return parse_json_object(text, path.name)


def parse_json_object(text: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `text`."""
    try:
        parsed = json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise LegroomError(f"{what} is not text", "pass the model's config.json or its folder") from error
    except (ValueError, RecursionError) as error:
        raise LegroomError(f"{what} is not JSON: {error}", "pass the model's config.json or its folder") from error
    if not isinstance(parsed, dict):
        kind = type(parsed).__name__
        raise LegroomError(f"{what} holds a JSON {kind}, not an object", "a config.json is an object: {...}")
    return parsed


def config_of_folder(folder: Path) -> dict[str, Any]:
    """The config.json of a folder (or Mistral's params.json), with its quantization file merged in."""
    path = folder / "config.json"
    if path.is_file():
        config = read_json_object(path)
    elif (folder / "params.json").is_file():
        config = config_from_params(read_json_object(folder / "params.json"))
    else:
        raise LegroomError(f"there is no config.json in {folder}", "pass the folder that holds the model's config.json")
    for name in QUANTIZATION_FILES:
        if (folder / name).is_file():
            config = with_quantization_file(config, name, read_json_object(folder / name))
    if config.get("vision_config"):
        files = {name: read_json_object(folder / name) for name in PROCESSOR_FILES if (folder / name).is_file()}
        config = {**config, PROCESSOR_KEY: processor_files(files)}
    return config


def with_quantization_file(config: dict[str, Any], name: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """The config with a quantization file's content where it has no quantization_config of its own."""
    if config.get("quantization_config") or config.get("compression_config"):
        return config
    method = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}[name]
    inner = content.get("quantization") if isinstance(content.get("quantization"), Mapping) else content
    return {**config, "quantization_config": {"quant_method": method, **(inner or {})}}


_NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "sliding_window": "sliding_window",
    "tied_embeddings": "tie_word_embeddings",
}
_DEFAULT_LEN = 128_000
"""vLLM takes this for a params.json that names no length."""


def config_from_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The HF-like config of a Mistral checkpoint that ships params.json only."""
    config: dict[str, Any] = {new: params[old] for old, new in _NAMES.items() if params.get(old) is not None}
    lengths = (params.get("max_position_embeddings"), params.get("max_seq_len"))
    config["max_position_embeddings"] = next((n for n in lengths if n), _DEFAULT_LEN)
    config["torch_dtype"] = params.get("dtype") or "bfloat16"
    config.update({"model_type": "mistral", "architectures": ["MistralForCausalLM"]})
    moe = params.get("moe")
    if isinstance(moe, Mapping):
        config.update({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]})
        config["num_local_experts"] = moe.get("num_experts")
        config["num_experts_per_tok"] = moe.get("num_experts_per_tok")
    quantization = params.get("quantization")
    if isinstance(quantization, Mapping) and quantization.get("qformat_weight") == "fp8_e4m3":
        scheme = "static" if quantization.get("qscheme_act") == "TENSOR" else "dynamic"
        config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": scheme}
    vision = params.get("vision_encoder") or (params.get("multimodal") or {}).get("vision_encoder_args")
    if isinstance(vision, Mapping):
        text = {**config}
        return {
            "model_type": "pixtral",
            "architectures": ["PixtralForConditionalGeneration"],
            "torch_dtype": config["torch_dtype"],
            "text_config": text,
            "vision_config": {**vision, "model_type": "pixtral"},
        }
    return config


LARGEST_HEADER_BYTES = 100 * 2**20
"""The format's own limit."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One stored tensor."""

    name: str
    dtype: str
    """As safetensors writes it: BF16, F8_E4M3, I32 ..."""
    shape: tuple[int, ...]
    bytes: int


def local_tensors(folder: Path) -> tuple[Tensor, ...]:
    """Every tensor of the safetensors files that vLLM would load from a folder; empty where there are none."""
    files = _checkpoint_files(folder)
    return tuple(tensor for path in files for tensor in read_header(path))


def read_header(path: Path) -> tuple[Tensor, ...]:
    """The tensors of one file."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 0 < size <= LARGEST_HEADER_BYTES:
                raise LegroomError(f"{path.name} is not a safetensors file", "its header length is not plausible")
            header = file.read(size)
    except OSError as error:
        raise LegroomError(f"{path} could not be read: {error.strerror or error}") from error
    if len(header) < size:
        raise LegroomError(f"{path.name} is cut short: its header is not whole", "download the checkpoint again")
    try:
        return parse_header(json.loads(header))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise LegroomError(f"{path.name} is not a safetensors file", "its header is not readable") from error


def parse_header(header: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """The tensors that a parsed header lists."""
    tensors = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        tensors.append(Tensor(name, str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), int(end) - int(begin)))
    return tuple(tensors)


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """What all of them take."""
    return sum(tensor.bytes for tensor in tensors)


def _checkpoint_files(folder: Path) -> list[Path]:
    """The index decides where there is one, so that a second copy (consolidated.safetensors) is not counted twice."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise LegroomError(f"{index.name} is not a safetensors index", "download the checkpoint again") from error
        return [folder / name for name in names if (folder / name).is_file()] if _all_there(folder, names) else []
    files = sorted(folder.glob("*.safetensors"))
    return [path for path in files if not path.name.startswith(("consolidated", "adapter_"))] or []


def _all_there(folder: Path, names: list[str]) -> bool:
    return all((folder / str(name)).is_file() for name in names)
