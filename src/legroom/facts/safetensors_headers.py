"""What a checkpoint's safetensors headers say: names, shapes, precisions and bytes, without reading a weight."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError
from legroom.records import dataclass

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
