"""Pickles of plain data, read without running anything.

`pickle`'s own reader with an allow-list of opcodes: lists, dicts, tuples, text and numbers are all it can make, and
every opcode that would look up, call or build anything else ends the reading. What it makes is counted, so that a small
file cannot fill the memory.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
from collections.abc import Callable
from typing import Any

from legroom.errors import LegroomError

MAX_FILE_BYTES = 256 << 20
MAX_MADE_BYTES = 2 << 30
_CONTAINER_BYTES, _SCALAR_BYTES = 120, 32
"""About what CPython takes for an empty container with its slot, and for a number or a reference."""
_MAX_NUMBER_BITS = 512
_CONTAINERS = ("MARK", "EMPTY_LIST", "EMPTY_DICT", "LIST", "DICT", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3")
_NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "BINFLOAT")
_LONGS = ("LONG", "LONG1", "LONG4")
_TEXTS = ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "SHORT_BINSTRING", "BINSTRING")
_OTHERS = (
    *("PROTO", "FRAME", "STOP", "POP", "POP_MARK", "DUP", "NONE", "NEWTRUE", "NEWFALSE", "EMPTY_TUPLE"),
    *("APPEND", "APPENDS", "SETITEM", "SETITEMS", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET"),
    "LONG_BINGET",
)
_DAMAGED = (pickle.UnpicklingError, EOFError, LookupError, AttributeError, TypeError, ValueError, struct.error)


class NotPlainData(LegroomError):
    """A pickle that holds more than plain data, is cut short, or is too large."""


class _Opcodes(dict[int, Callable[[Any], None]]):
    def __missing__(self, code: int) -> Callable[[Any], None]:
        name = next((name for name, known in _CODES.items() if ord(known) == code), f"0x{code:02x}")
        raise NotPlainData(
            f"the pickle is not plain data ({name}); nothing was run",
            "a snapshot of torch.cuda.memory._dump_snapshot holds plain data alone",
        )


class _PlainUnpickler(pickle._Unpickler):
    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, content: bytes, max_made_bytes: int) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self.bytes_left = max_made_bytes

    def spend(self, count: int) -> None:
        self.bytes_left -= count
        if self.bytes_left < 0:
            raise NotPlainData("the pickle makes more data than legroom reads", "record a shorter history")

    def set_items(self, items: list[Any]) -> None:
        target: dict[Any, Any] = self.stack[-1]
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Hashing a tuple visits all that is in it, as often as it is in it.
            if not isinstance(key, str | int | float | bool | None):
                raise NotPlainData("the pickle has a key that is neither text nor a number")
            target[key] = value

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.stack.append({})
        self.set_items(items)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def load_setitems(self) -> None:
        self.set_items(self.pop_mark())


def _allowed(name: str) -> Callable[[_PlainUnpickler], None]:
    code = ord(_CODES[name])
    overridden = {"DICT": "load_dict", "SETITEM": "load_setitem", "SETITEMS": "load_setitems"}.get(name)
    load: Any = getattr(_PlainUnpickler, overridden) if overridden else pickle._Unpickler.dispatch[code]
    cost = _CONTAINER_BYTES if name in _CONTAINERS else _SCALAR_BYTES

    def step(unpickler: _PlainUnpickler) -> None:
        unpickler.spend(cost)
        load(unpickler)
        if name in _TEXTS:
            unpickler.spend(len(unpickler.stack[-1]))
        elif name in _LONGS and unpickler.stack[-1].bit_length() > _MAX_NUMBER_BITS:
            raise NotPlainData("the pickle holds a number that is no size or address")

    return step


_CODES = {opcode.name: opcode.code for opcode in pickletools.opcodes}
_PlainUnpickler.dispatch = _Opcodes(
    {ord(_CODES[name]): _allowed(name) for name in (*_CONTAINERS, *_NUMBERS, *_LONGS, *_TEXTS, *_OTHERS)}
)


def is_pickle(head: bytes) -> bool:
    """Whether a file that begins like this is a pickle of protocol 2 or later, as torch writes them."""
    return len(head) >= 2 and head[0] == pickle.PROTO[0] and 2 <= head[1] <= 5


def read_plain_pickle(content: bytes, max_made_bytes: int = MAX_MADE_BYTES) -> Any:
    """The data of a pickle; NotPlainData for anything else."""
    if not is_pickle(content):
        raise NotPlainData("this is no pickle of Python 3")
    try:
        return _PlainUnpickler(content, max_made_bytes).load()
    except _DAMAGED as error:
        raise NotPlainData(f"the pickle is cut short or damaged: {error}"[:200], "copy the whole file") from error
