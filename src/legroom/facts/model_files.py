"""A model's config from a folder or a file on this machine, with what lies beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.config.media_items import PROCESSOR_KEY, processor_files
from legroom.facts.config.mistral_params import config_from_params

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
