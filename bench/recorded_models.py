"""A model of a file of real start-ups, written as the config.json that legroom reads models from.

Such files state architecture facts under their config.json names, and the precision of the weights in words
("awq 4-bit g128"), because the published start-up seldom shows the quantization config itself.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from legroom.facts.flags import flag_name

_PAIR = re.compile(r"'(?P<name>[a-z_]+)': (?P<value>True|False|-?\d+(?:\.\d+)?|'[^']*'|\{[^{}]*\}?)")
_SWITCHES_OFF = "--no-"


def recorded_words(text: str) -> list[str]:
    """The words of the command line that would say the same; what cannot be read is left out."""
    if text.lstrip().startswith("--"):
        try:
            return shlex.split(text)
        except ValueError:
            return []
    return [word for name, value in _pairs(text) for word in _words(name, value)]


def _pairs(text: str) -> Iterator[tuple[str, Any]]:
    for pair in _PAIR.finditer(text):
        written = pair["value"]
        if written.startswith("{") and not written.endswith("}"):
            written += "}"  # the excerpt was cut inside the last value
        try:
            yield pair["name"], ast.literal_eval(written)
        except (ValueError, SyntaxError):
            continue


def _words(name: str, value: Any) -> list[str]:
    flag = flag_name(name)
    if value is True:
        return [flag]
    if value is False:
        return [f"{_SWITCHES_OFF}{flag[2:]}"]
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]


_BOOKKEEPING = frozenset({"source", "base", "num_parameters", "notes", "weight_quantization", "config"})
UNSCORED_SOURCES = ("deduced", "assumed")
"""How the source begins of facts that were fitted to a log or guessed; predicting from them would prove nothing."""

_PER_TOKEN = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
_GROUP_SIZE = 128


def _compressed(bits: int, kind: str, group_size: int | None, activations: Mapping[str, Any] | None) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": "group" if group_size else "channel",
        "group_size": group_size,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    layout = "pack-quantized" if bits == 4 else f"{kind}-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": _GROUP_SIZE, "desc_act": False, "sym": True}
_MXFP4_KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]

# The first words found decide. The methods named last are left as the config states them, if it does.
_BY_WORDS: tuple[tuple[str, dict[str, Any], frozenset[str]], ...] = (
    (
        "awq",
        {"quant_method": "awq", "bits": 4, "group_size": _GROUP_SIZE, "zero_point": True, "version": "gemm"},
        frozenset(),
    ),
    ("marlin", _GPTQ, frozenset()),
    ("gptq", _GPTQ, frozenset()),
    (
        "nf4",
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": "bfloat16",
        },
        frozenset(),
    ),
    ("nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, frozenset({"modelopt"})),
    ("mxfp4", {"quant_method": "mxfp4", "modules_to_not_convert": _MXFP4_KEPT}, frozenset({"mxfp4"})),
    ("fp8 per-channel", _compressed(8, "float", None, {**_PER_TOKEN, "type": "float"}), frozenset()),
    (
        "fp8",
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        frozenset({"fp8", "modelopt"}),
    ),
    ("int8 w8a8", _compressed(8, "int", None, {**_PER_TOKEN, "type": "int"}), frozenset()),
    ("int4", _compressed(4, "int", _GROUP_SIZE, None), frozenset()),
)


def config_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json that these facts amount to: the real one where they carry it."""
    if isinstance(facts.get("config"), Mapping):
        return dict(facts["config"])
    config = {name: value for name, value in facts.items() if name not in _BOOKKEEPING and value is not None}
    words = str(facts.get("weight_quantization") or "")
    for pattern, quantization, kept in _BY_WORDS:
        stated = config.get("quantization_config")
        method = stated.get("quant_method") if isinstance(stated, Mapping) else None
        if pattern in words and method not in kept:
            config["quantization_config"] = dict(quantization)
            break
    return config
