"""A `Model` from a bundled name, a Hub id, a folder, a config.json or a GGUF file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.bundled import (
    Bundled,
    bundled_names,
    expanded,
    find,
    mirrored,
    nearest,
    smaller_siblings,
    title,
    variants,
)
from legroom.facts.config.media_items import PROCESSOR_KEY, processor_files
from legroom.facts.config.model_config import model_from_config
from legroom.facts.config.quantization import LINEAR_ATTENTION, quantization
from legroom.facts.model import Model, Quantization
from legroom.isolation import Isolation, isolation
from legroom.records import dataclass

LARGEST_CONFIG_BYTES = 20 * 2**20
"""Above every published config.json; a larger file is not read."""

PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
"""Files with the size limits of images and videos."""

QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files with the quantization of checkpoints whose config.json lacks it (ModelOpt, AutoGPTQ, AutoAWQ)."""


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; LegroomError where it is too large or not JSON."""
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
"""vLLM's default for a params.json without a length."""


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
"""The limit of the safetensors format."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One stored tensor."""

    name: str
    dtype: str
    """As safetensors writes it: BF16, F8_E4M3, I32 ..."""
    shape: tuple[int, ...]
    bytes: int


def local_tensors(folder: Path) -> tuple[Tensor, ...]:
    """Every tensor of the safetensors files that vLLM loads from a folder."""
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
    return sum(tensor.bytes for tensor in tensors)


def _checkpoint_files(folder: Path) -> list[Path]:
    """The files of the index, or all safetensors files without consolidated copies and adapters."""
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


__all__ = ["bundled_names", "load", "nearest", "smaller_siblings", "variants"]


def load(
    name_or_path: str,
    revision: str | None = None,
    offline: bool | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Model:
    """The model of a name or path, with `overrides` applied to its config.

    `offline` None follows HF_HUB_OFFLINE. A name with a revision is read from the Hub, even if it is bundled.
    """
    text = name_or_path.strip()
    if not text:
        raise LegroomError("no model was named", "pass a Hub id, a folder with a config.json, or a config.json")
    if "\0" in text or len(text) > 4096:
        raise LegroomError("the model name is not a name or a path", "pass a Hub id or a path")
    if limits := isolation():
        return _without_files(text, limits, overrides)
    path = Path(os.path.expanduser(text))  # noqa: PTH111 - pathlib's raises where a user is not known
    if _exists(path):
        return _from_path(path, overrides)
    if revision is None and (bundled := find(text)):
        return from_bundled(bundled, text, overrides)
    if _looks_like_a_path(text):
        raise LegroomError(f"there is no file or folder {text}", "check the path")
    if revision is None and (bundled := mirrored(text)):
        return _from_mirror(bundled, text, overrides)
    try:
        return _from_hub(text, revision, offline, overrides)
    except LegroomError as error:
        if revision is not None and find(text):
            error.hint = f"{text} is bundled: leave the revision out to use the bundled facts"
        raise


def from_bundled(bundled: Bundled, name: str = "", overrides: Mapping[str, Any] | None = None) -> Model:
    """A bundled entry as a `Model`, under the given Hub id."""
    hub_id = name if "/" in name else title(bundled, name or bundled.name)
    config = overridden(expanded(bundled, hub_id), overrides)
    model = model_from_config(config, name=hub_id, source=f"bundled: {bundled.source}")
    return replace(model, assumed=True) if bundled.entry.get("assumed") else model


def _from_mirror(bundled: Bundled, name: str, overrides: Mapping[str, Any] | None) -> Model:
    """The model of a mirror. Unquantized mirrors equal the original; of quantized ones only the method is known, since
    the mirror may leave other modules at 16 bits."""
    model = from_bundled(bundled, name, overrides)
    if model.quantization is None or bundled.base is None:
        return model
    return replace(model, assumed=True, quantization=_by_another_maker(model.quantization))


def _by_another_maker(scheme: Quantization) -> Quantization:
    """The scheme with the usual list of unquantized modules instead of the original checkpoint's."""
    if any(each.is_nvfp4 for each in (scheme, *(own for _, own in scheme.rules))):
        ignored = ["lm_head", LINEAR_ATTENTION]
        usual = quantization({"quantization_config": {"quant_algo": "NVFP4", "ignore": ignored}})
        assert usual is not None
        return replace(usual, list_assumed=True)
    return replace(scheme, list_assumed=True)


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The config with values replaced; sub-configs are merged, as in vLLM."""
    if not overrides:
        return config
    changed = dict(config)
    for key, value in overrides.items():
        inner = changed.get(key)
        inside = isinstance(inner, Mapping) and isinstance(value, Mapping) and key.endswith("_config")
        changed[key] = overridden(inner, value) if inside and isinstance(inner, Mapping) else value
    return changed


def _without_files(text: str, limits: Isolation, overrides: Mapping[str, Any] | None) -> Model:
    given = limits.models.get(text)
    brought = json.dumps([given.config, given.checkpoint_bytes]) if given else ""
    return _model_of_request(text, brought, json.dumps(dict(overrides or {})))


@lru_cache(maxsize=64)
def _model_of_request(text: str, brought: str, overrides_json: str) -> Model:
    """One object for requests with the same model, by which figures are cached."""
    overrides = json.loads(overrides_json)
    if brought:
        config, checkpoint_bytes = json.loads(brought)
        model = model_from_config(overridden(config, overrides), name=text, source="the given config.json")
        return replace(model, checkpoint_bytes=checkpoint_bytes) if checkpoint_bytes else model
    if bundled := find(text):
        return from_bundled(bundled, text, overrides)
    if bundled := mirrored(text):
        return _from_mirror(bundled, text, overrides)
    error = _unknown(text, "is not a model that is known without looking it up")
    error.hint = f"give its config.json; {error.hint}" if nearest(text) else "give its config.json"
    raise error


def _from_path(path: Path, overrides: Mapping[str, Any] | None) -> Model:
    if path.is_dir():
        tensors = local_tensors(path)
        name = path.resolve().name
        config = overridden(config_of_folder(path), overrides)
        return _with_tensors(model_from_config(config, name=name, source=f"folder {name}"), tensors)
    if path.suffix.lower() == ".gguf":
        from legroom.facts.gguf import read_gguf  # few users have one

        return read_gguf(path)
    name = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    config = config_of_folder(path.parent) if path.name == "config.json" else read_json_object(path)
    return model_from_config(overridden(config, overrides), name=name, source=f"file {path.name}")


def _from_hub(name: str, revision: str | None, offline: bool | None, overrides: Mapping[str, Any] | None) -> Model:
    if not is_hub_id(name):
        raise _unknown(name, "is neither a bundled model, a path, nor a Hub id (owner/name)")
    from legroom.facts import huggingface  # it takes a third of a second to import huggingface_hub

    if offline is None:
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    answer = huggingface.fetch(name, revision, offline)
    model = model_from_config(overridden(answer.config, overrides), name=name, source=answer.source)
    return replace(model, checkpoint_bytes=answer.checkpoint_bytes) if answer.checkpoint_bytes else model


def _with_tensors(model: Model, tensors: Iterable[Tensor]) -> Model:
    headers = tuple(tensors)
    return replace(model, checkpoint_bytes=total_bytes(headers)) if headers else model


def _unknown(name: str, why: str) -> LegroomError:
    close = nearest(name)
    hint = (
        f"nearest bundled: {', '.join(close)}"
        if close
        else "pass a Hub id, a folder with a config.json, or a config.json"
    )
    return LegroomError(f"{name!r} {why}", hint)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _looks_like_a_path(text: str) -> bool:
    return text.startswith(("/", "./", "../", "~")) or text.endswith((".json", ".gguf", os.sep)) or text.count("/") > 1


def is_hub_id(text: str) -> bool:
    owner, slash, repo = text.partition("/")
    allowed = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
    return bool(slash and owner and repo) and set(owner + repo) <= allowed
