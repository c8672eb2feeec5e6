"""A GGUF file's header: the architecture it describes and the bytes and types of its tensors."""

import math
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from legroom.errors import LegroomError
from legroom.facts import read_data
from legroom.facts.config.model_config import model_from_config
from legroom.facts.model import Model
from legroom.units import cdiv

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES = 1_000_000
_LONGEST_STRING = 16 * 2**20

TYPES = {int(kind): tuple(row) for kind, row in read_data("gguf.json")["types"].items()}
"""ggml's type number -> name, elements a block, bytes a block (ggml/src/ggml.c, ggml-common.h)."""

_ARCHITECTURES: dict[str, tuple[str, str]] = read_data("gguf.json")["architectures"]
"""llama.cpp's name of an architecture -> the names a config.json would have."""


def read_gguf(path: Path) -> Model:
    """The model of a GGUF file, with `checkpoint_bytes` the sum of its tensors; LegroomError where it is none."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise LegroomError(f"{path.name} is not a GGUF file", "it does not start with GGUF")
            version, tensor_count, entry_count = struct.unpack("<IQQ", file.read(20))
            if version not in (2, 3):
                raise LegroomError(f"{path.name} is GGUF version {version}", "versions 2 and 3 are read")
            if max(tensor_count, entry_count) > _MOST_ENTRIES:
                raise LegroomError(f"{path.name} is not a GGUF file that can be read", "its counts are not plausible")
            metadata: dict[str, Any] = {}
            for _ in range(entry_count):
                key = _read_string(file)
                metadata[key] = _read_value(file, _read_scalar(file, "<I"))
            tensors: Tensors = {}
            for _ in range(tensor_count):
                title = _read_string(file)
                dimensions = _read_scalar(file, "<I")
                if dimensions > 8:
                    raise LegroomError(f"{path.name} is not a whole GGUF file", "download it again")
                shape = struct.unpack(f"<{dimensions}Q", file.read(8 * dimensions))
                kind, _offset = struct.unpack("<IQ", file.read(12))
                if kind not in TYPES:
                    raise LegroomError(f"{path.name} has tensors of a type ({kind}) that legroom does not know")
                type_name, elements, block_bytes = TYPES[kind]
                tensors[title] = (type_name, shape, cdiv(math.prod(shape), elements) * block_bytes)
    except OSError as error:
        raise LegroomError(f"{path} could not be read: {error.strerror or error}") from error
    except (struct.error, UnicodeDecodeError, OverflowError) as error:
        raise LegroomError(f"{path.name} is not a whole GGUF file", "download it again") from error
    config = _hf_config(metadata, tensors, path.name)
    name = str(metadata.get("general.name") or path.stem)
    model = model_from_config(config, name=name, source=f"GGUF header of {path.name}")
    return replace(model, checkpoint_bytes=sum(size for _, _, size in tensors.values()))


Tensors = dict[str, tuple[str, tuple[int, ...], int]]


def _read_scalar(file: BinaryIO, form: str) -> Any:
    """The next little-endian value of the file in `struct`'s format `form`."""
    return struct.unpack(form, file.read(struct.calcsize(form)))[0]


def _read_string(file: BinaryIO) -> str:
    """The next length-prefixed string; OverflowError where it is too long, struct.error where it is cut short."""
    length = _read_scalar(file, "<Q")
    if length > _LONGEST_STRING:
        raise OverflowError
    text: bytes = file.read(length)
    if len(text) < length:
        raise struct.error
    return text.decode("utf-8")


def _read_value(file: BinaryIO, kind: int) -> Any:
    """The next metadata value of GGUF type `kind`, a long array as its length; struct.error or OverflowError if bad."""
    if kind == _STRING:
        return _read_string(file)
    if kind == _ARRAY:
        inner, count = struct.unpack("<IQ", file.read(12))
        if count > _LONGEST_STRING:
            raise OverflowError
        # Only its length matters here (the vocabulary); small ones may be one value a layer.
        values = [_read_value(file, inner) for _ in range(count)]
        return values if count <= 1024 else count
    if kind not in _SCALARS:
        raise struct.error
    return _read_scalar(file, _SCALARS[kind])


def _hf_config(metadata: Mapping[str, Any], tensors: Tensors, name: str) -> dict[str, Any]:
    """A GGUF file's metadata in the fields of a Hugging Face config.json; LegroomError without an architecture."""
    short = str(metadata.get("general.architecture") or "")
    if not short:
        raise LegroomError(f"{name} does not say its architecture", "its general.architecture is missing")
    architecture, model_type = _ARCHITECTURES.get(short, (short, short))

    def field(key: str) -> Any:
        """The metadata value that is stored under the architecture's name and this key; None without one."""
        return metadata.get(f"{short}.{key}")

    embedding = tensors.get("token_embd.weight")
    vocab = field("vocab_size") or metadata.get("tokenizer.ggml.tokens")
    vocab_size = embedding[1][1] if embedding and len(embedding[1]) > 1 else vocab
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": "float16",
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": field("attention.head_count"),
        "num_key_value_heads": field("attention.head_count_kv"),
        "head_dim": field("attention.key_length"),
        "sliding_window": field("attention.sliding_window"),
        "max_position_embeddings": field("context_length"),
        "num_experts": field("expert_count"),
        "num_experts_per_tok": field("expert_used_count"),
        "moe_intermediate_size": field("expert_feed_forward_length"),
        "shared_expert_intermediate_size": field("expert_shared_feed_forward_length"),
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in tensors,
        "quantization_config": _dominant_quantization(tensors),
    }
    return {key: value for key, value in config.items() if value is not None}


def _dominant_quantization(tensors: Tensors) -> dict[str, Any] | None:
    """The quantization_config for the GGUF type that most tensor bytes have; None where that is unquantized."""
    sums: Counter[str] = Counter()
    for kind, _, size in tensors.values():
        sums[kind] += size
    most = max(sums, key=lambda kind: sums[kind], default="")
    if not re.match(r"(I?T?Q|MXFP)\d", most):
        return None
    return {"quant_method": "gguf", "bits": int(re.findall(r"\d+", most)[0])}
