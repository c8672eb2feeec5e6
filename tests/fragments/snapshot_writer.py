"""Memory snapshots in the form that torch 2.11 writes, of made-up processes."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

MIB, GIB = 1 << 20, 1 << 30
BASE = 0x7F0000000000


def frame(
    name: str, line: int = 1, file: str = "/srv/site-packages/vllm/v1/worker/gpu_model_runner.py"
) -> dict[str, Any]:
    return {"name": name, "filename": file, "line": line}


TORCH_FRAME = frame("empty", 9, "/srv/site-packages/torch/nn/functional.py")


def block(
    size: int, state: str = "active_allocated", place: str = "load", requested: int | None = None
) -> dict[str, Any]:
    frames = [TORCH_FRAME, frame(place)] if state != "inactive" else []
    return {"size": size, "requested_size": requested or size, "state": state, "frames": frames}


@dataclass
class SnapshotWriter:
    settings: dict[str, Any] = field(default_factory=dict)
    segments: list[dict[str, Any]] = field(default_factory=list)
    trace: list[dict[str, Any]] = field(default_factory=list)

    def segment(self, *blocks: dict[str, Any], pool: tuple[int, int] = (0, 0), expandable: bool = False) -> int:
        size = sum(entry["size"] for entry in blocks)
        address = BASE + 16 * GIB * len(self.segments)
        place = address
        for entry in blocks:
            entry["address"] = place
            place += entry["size"]
        self.segments.append(
            {
                "device": 0,
                "address": address,
                "total_size": size,
                "stream": 0,
                "segment_type": "large",
                "segment_pool_id": pool,
                "is_expandable": expandable,
                "blocks": list(blocks),
                "frames": [],
            }
        )
        return address

    def event(self, action: str, address: int = 0, size: int = 0, **more: Any) -> None:
        self.trace.append({"action": action, "addr": address, "size": size, "stream": 0, "frames": [], **more})

    def document(self) -> dict[str, Any]:
        usual = {"expandable_segments": False, "max_split_size": -1, "roundup_power2_divisions": {"1": 0, "2": 0}}
        return {
            "segments": self.segments,
            "device_traces": [self.trace],
            "allocator_settings": {**usual, **self.settings},
            "external_annotations": [],
        }

    def content(self, protocol: int = 4) -> bytes:
        return pickle.dumps(self.document(), protocol)


def pinned_segments(count: int = 7, card_free: int = 100 * GIB) -> SnapshotWriter:
    """`count` segments of 1 GiB, each with 300 MiB in use in its middle; then 2 GiB were asked for, and refused."""
    writer = SnapshotWriter()
    addresses = []
    for _ in range(count):
        place = writer.segment(
            block(600 * MIB, "inactive"), block(300 * MIB, place="pin"), block(124 * MIB, "inactive")
        )
        addresses.append(place)
    for address in addresses:
        writer.event("segment_alloc", address, GIB)
        writer.event("alloc", address, GIB)
    for address in addresses:
        writer.event("free_requested", address, GIB)
        writer.event("free_completed", address, GIB)
    for address in addresses:
        writer.event("alloc", address, 600 * MIB)
        writer.event("alloc", address + 600 * MIB, 300 * MIB)
    for address in addresses:
        writer.event("free_completed", address, 600 * MIB)
    writer.event("oom", 0, 2 * GIB, device_free=card_free)
    return writer
