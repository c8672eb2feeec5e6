"""Judgements in memory that all processes of a gate share: what one has worked out, no other works out again.

There is no lock. A record that is read while another process writes it fails its checksum, and counts as not there.
"""

from __future__ import annotations

import json
import mmap
import struct
import zlib

from legroom.gate.judgement import Judgement
from legroom.records import dataclass

_SLOTS = 4_096
_SLOT_BYTES = 2_048
"""A judgement is some hundred characters; one that does not fit is remembered by its own process alone."""
_HEAD = struct.Struct("=32sdII")
"""The key, until when one process searches, the length of the record and its checksum."""
_MOST_BYTES = _SLOT_BYTES - _HEAD.size


@dataclass(frozen=True, slots=True)
class SharedJudgement:
    judgement: Judgement
    searched_until_s: float = 0.0
    """Until then, on the monotonic clock, one of the processes searches for flags that fix it."""


class SharedJudgements:
    """Made before the processes part. A key has one slot, and the last judgement with that slot stays."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SLOTS * _SLOT_BYTES)

    def get(self, key: bytes) -> SharedJudgement | None:
        at = _start(key)
        stored_key, until_s, length, checksum = _HEAD.unpack_from(self._memory, at)
        if stored_key != key or length > _MOST_BYTES:
            return None
        record = self._memory[at + _HEAD.size : at + _HEAD.size + length]
        if _checksum(key, until_s, record) != checksum:
            return None
        return SharedJudgement(Judgement.from_record(json.loads(record)), until_s)

    def put(self, key: bytes, judgement: Judgement, searched_until_s: float = 0.0) -> None:
        record = json.dumps(judgement.to_record(), separators=(",", ":")).encode()
        if len(record) > _MOST_BYTES:
            return
        head = _HEAD.pack(key, searched_until_s, len(record), _checksum(key, searched_until_s, record))
        at = _start(key)
        self._memory[at : at + _HEAD.size + len(record)] = head + record


def _start(key: bytes) -> int:
    return int.from_bytes(key[:4], "big") % _SLOTS * _SLOT_BYTES


def _checksum(key: bytes, until_s: float, record: bytes) -> int:
    return zlib.crc32(record, zlib.crc32(struct.pack("=32sd", key, until_s)))
