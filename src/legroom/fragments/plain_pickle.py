"""Pickles of plain data, read without executing anything.

Python's own reader calls what a pickle names. This one knows no names: lists, dicts, tuples, sets of nothing, text and
numbers are all it can make, and every opcode that would look up, call or build anything else ends the reading. What it
makes is counted, so that a small file cannot grow to fill the memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from legroom.errors import LegroomError

MOST_FILE_BYTES = 256 << 20
MOST_MADE_BYTES = 2 << 30
"""Roughly, by what CPython takes for an object of each kind."""
_CONTAINER_BYTES, _ITEM_BYTES, _SCALAR_BYTES = 120, 24, 32
_LONGEST_NUMBER_BYTES = 64
_MARK = object()


class NotPlainData(LegroomError):
    """A pickle that holds more than plain data, is cut short, or is too large."""


def _cut_short() -> NotPlainData:
    return NotPlainData("the pickle is cut short", "copy the whole file")


class _Reader:
    def __init__(self, content: bytes, most_made_bytes: int) -> None:
        self.content, self.position = content, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.left = most_made_bytes

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.content):
            raise _cut_short()
        piece = self.content[self.position : end]
        self.position = end
        return piece

    def byte(self) -> int:
        if self.position >= len(self.content):
            raise _cut_short()
        value = self.content[self.position]
        self.position += 1
        return value

    def number(self, length: int) -> int:
        return int.from_bytes(self.take(length), "little")

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise NotPlainData("the pickle makes more data than legroom reads", "record a shorter history")

    def push(self, value: Any, cost: int = _SCALAR_BYTES) -> None:
        self.spend(cost)
        self.stack.append(value)

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise NotPlainData("the pickle is damaged: an opcode lacks its argument")
        return self.stack.pop()

    def since_mark(self) -> list[Any]:
        for index in range(len(self.stack) - 1, -1, -1):
            if self.stack[index] is _MARK:
                items = self.stack[index + 1 :]
                del self.stack[index:]
                return items
        raise NotPlainData("the pickle is damaged: a mark is missing")

    def top(self, kind: type) -> Any:
        if not self.stack or type(self.stack[-1]) is not kind:
            raise NotPlainData(f"the pickle is damaged: a {kind.__name__} is missing")
        return self.stack[-1]

    def text(self, length: int) -> None:
        try:
            self.push(str(self.take(length), "utf-8", "surrogatepass"), length + _CONTAINER_BYTES)
        except UnicodeDecodeError as error:
            raise NotPlainData("the pickle is damaged: text that is no UTF-8") from error

    def long(self, length: int) -> None:
        if length > _LONGEST_NUMBER_BYTES:
            raise NotPlainData("the pickle holds a number that is no size or address")
        self.push(int.from_bytes(self.take(length), "little", signed=True))

    def append(self, items: list[Any]) -> None:
        self.spend(_ITEM_BYTES * len(items))
        self.top(list).extend(items)

    def set_items(self, items: list[Any]) -> None:
        if len(items) % 2:
            raise NotPlainData("the pickle is damaged: a key without a value")
        self.spend(_ITEM_BYTES * 2 * len(items))
        target = self.top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            # A tuple's hash walks all that is in it, however often it is in it.
            if not isinstance(key, str | int | float | bool | None):
                raise NotPlainData("the pickle has a key that is neither text nor a number")
            target[key] = value

    def mark(self) -> None:
        self.spend(_ITEM_BYTES)
        self.stack.append(_MARK)

    def fetch(self, index: int) -> None:
        self.spend(_ITEM_BYTES)
        try:
            self.stack.append(self.memo[index])
        except KeyError as error:
            raise NotPlainData("the pickle is damaged: it refers to what is not there") from error

    def store(self, index: int) -> None:
        if not self.stack or self.stack[-1] is _MARK:
            raise NotPlainData("the pickle is damaged: nothing to remember")
        self.spend(_ITEM_BYTES * 2)
        self.memo[index] = self.stack[-1]

    def tuple_of(self, count: int) -> None:
        items = [self.pop() for _ in range(count)][::-1]
        self.push(tuple(items), _CONTAINER_BYTES)

    def line(self) -> bytes:
        end = self.content.find(b"\n", self.position, self.position + 128)
        if end < 0:
            raise NotPlainData("the pickle is cut short or damaged")
        line = self.content[self.position : end]
        self.position = end + 1
        return line

    def skip_frame(self) -> None:
        if self.number(8) > len(self.content) - self.position:
            raise _cut_short()

    def since_mark_as_tuple(self) -> None:
        items = self.since_mark()
        self.push(tuple(items), _CONTAINER_BYTES + _ITEM_BYTES * len(items))

    def since_mark_as_list(self) -> None:
        items = self.since_mark()
        self.push(items, _CONTAINER_BYTES + _ITEM_BYTES * len(items))

    def since_mark_as_dict(self) -> None:
        items = self.since_mark()
        self.push({}, _CONTAINER_BYTES)
        self.set_items(items)

    def one_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.set_items([key, value])

    def text_number(self) -> None:
        line = self.line().rstrip(b"L")
        if line in (b"00", b"01"):
            self.push(line == b"01")
            return
        try:
            self.push(int(line))
        except ValueError as error:
            raise NotPlainData("the pickle is damaged: a number is none") from error

    def memo_line(self) -> int:
        line = self.line()
        if not line.isdigit():
            raise NotPlainData("the pickle is damaged: a number is none")
        return int(line)


_Step = Callable[[_Reader], object]
_OPCODES: dict[int, _Step] = {
    ord("("): _Reader.mark,
    ord("0"): _Reader.pop,
    ord("1"): _Reader.since_mark,
    ord("2"): lambda r: r.push(r.stack[-1] if r.stack else r.pop()),
    ord("N"): lambda r: r.push(None),
    0x88: lambda r: r.push(True),
    0x89: lambda r: r.push(False),
    ord("I"): _Reader.text_number,
    ord("L"): _Reader.text_number,
    ord("J"): lambda r: r.push(int.from_bytes(r.take(4), "little", signed=True)),
    ord("K"): lambda r: r.push(r.byte()),
    ord("M"): lambda r: r.push(r.number(2)),
    0x8A: lambda r: r.long(r.byte()),
    0x8B: lambda r: r.long(r.number(4)),
    ord("G"): lambda r: r.push(struct.unpack(">d", r.take(8))[0]),
    ord("X"): lambda r: r.text(r.number(4)),
    0x8C: lambda r: r.text(r.byte()),
    0x8D: lambda r: r.text(r.number(8)),
    ord("U"): lambda r: r.text(r.byte()),
    ord("T"): lambda r: r.text(r.number(4)),
    ord("]"): lambda r: r.push([], _CONTAINER_BYTES),
    ord("}"): lambda r: r.push({}, _CONTAINER_BYTES),
    ord(")"): lambda r: r.push(()),
    ord("a"): lambda r: r.append([r.pop()]),
    ord("e"): lambda r: r.append(r.since_mark()),
    ord("s"): _Reader.one_item,
    ord("u"): lambda r: r.set_items(r.since_mark()),
    ord("l"): _Reader.since_mark_as_list,
    ord("d"): _Reader.since_mark_as_dict,
    ord("t"): _Reader.since_mark_as_tuple,
    0x85: lambda r: r.tuple_of(1),
    0x86: lambda r: r.tuple_of(2),
    0x87: lambda r: r.tuple_of(3),
    0x94: lambda r: r.store(len(r.memo)),
    ord("q"): lambda r: r.store(r.byte()),
    ord("r"): lambda r: r.store(r.number(4)),
    ord("p"): lambda r: r.store(r.memo_line()),
    ord("h"): lambda r: r.fetch(r.byte()),
    ord("j"): lambda r: r.fetch(r.number(4)),
    ord("g"): lambda r: r.fetch(r.memo_line()),
    0x95: _Reader.skip_frame,
}
_CALLS = {
    ord("c"): "GLOBAL",
    0x93: "STACK_GLOBAL",
    ord("R"): "REDUCE",
    ord("b"): "BUILD",
    ord("i"): "INST",
    ord("o"): "OBJ",
    0x81: "NEWOBJ",
    0x92: "NEWOBJ_EX",
    ord("P"): "PERSID",
    ord("Q"): "BINPERSID",
    0x82: "EXT1",
    0x83: "EXT2",
    0x84: "EXT4",
}
_PROTO, _STOP = 0x80, ord(".")


def is_pickle(head: bytes) -> bool:
    """Whether a file that begins like this is a pickle of protocol 2 or later, as torch writes them."""
    return len(head) >= 2 and head[0] == _PROTO and 2 <= head[1] <= 5


def read_plain_pickle(content: bytes, most_made_bytes: int = MOST_MADE_BYTES) -> Any:
    """The data of a pickle; NotPlainData for anything else."""
    reader = _Reader(content, most_made_bytes)
    if not is_pickle(content):
        raise NotPlainData("this is no pickle of Python 3")
    reader.position = 2
    while (opcode := reader.byte()) != _STOP:
        step = _OPCODES.get(opcode)
        if step is None:
            if name := _CALLS.get(opcode):
                raise NotPlainData(
                    f"the pickle would run code when it is loaded ({name}); nothing was run",
                    "a snapshot of torch.cuda.memory._dump_snapshot holds plain data alone",
                )
            raise NotPlainData(f"the pickle has an opcode that plain data does not need (0x{opcode:02x})")
        step(reader)
    result = reader.pop()
    if reader.stack:
        raise NotPlainData("the pickle is damaged: more than one object")
    return result
