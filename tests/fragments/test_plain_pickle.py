"""Pickles are read as plain data, whatever they would do elsewhere."""

import contextlib
import pickle
import resource
import struct
from pathlib import Path

import psutil
import pytest
from forked import Forked
from hypothesis import given
from hypothesis import strategies as st

from legroom.fragments.torch_snapshot import NotPlainData, read_plain_pickle

SCALARS = st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats(allow_nan=False) | st.text()
DATA = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner) | st.tuples(inner),
    max_leaves=30,
)


@given(DATA, st.integers(2, 5))
def test_reads_plain_data_as_python_does(value: object, protocol: int) -> None:
    assert read_plain_pickle(pickle.dumps(value, protocol)) == value


def test_reads_what_is_referred_to_twice_as_one_object() -> None:
    shared = ["a"]
    first, second = read_plain_pickle(pickle.dumps([shared, shared]))
    assert first is second


class Touch:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path(self.path),)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_runs_nothing_of_a_pickle_that_would_run_code(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "ran"
    content = pickle.dumps({"segments": [Touch(str(target))]}, protocol)
    with pytest.raises(NotPlainData, match="nothing was run"):
        read_plain_pickle(content)
    assert not target.exists()


@pytest.mark.parametrize("opcode", b"cRbioPQ\x81\x82\x83\x84\x92\x93")
def test_refuses_every_opcode_that_looks_up_or_calls(opcode: int) -> None:
    with pytest.raises(NotPlainData, match="nothing was run"):
        read_plain_pickle(b"\x80\x04]" + bytes([opcode]) + b"os\nsystem\n.")


@given(st.binary(max_size=200))
def test_any_bytes_are_data_or_refused(content: bytes) -> None:
    with contextlib.suppress(NotPlainData):
        read_plain_pickle(b"\x80\x04" + content)


def test_a_pickle_that_is_cut_short_is_refused_wherever_it_is_cut() -> None:
    content = pickle.dumps({"segments": [{"size": 5, "name": "x" * 300, "at": 2**80, "share": 0.5}]})
    for end in range(len(content)):
        with pytest.raises(NotPlainData):
            read_plain_pickle(content[:end])


@pytest.mark.parametrize(
    "bomb",
    [
        b"\x80\x04]\x94" + b"(h\x00h\x00e" * 20_000 + b".",
        b"\x80\x02]r\xff\xff\xff\xff.",
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x",
        b"\x80\x04\x8b" + struct.pack("<I", 1 << 31) + b"1",
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
        b"\x80\x04" + b"]" * 50_000 + b"a" * 49_999 + b".",
        b"\x80\x04" + b")\x85" * 50_000 + b".",
        b"\x80\x04" + b"(" * 500_000 + b".",
    ],
    ids=["refers to itself", "far memo", "long text", "long number", "long frame", "deep list", "deep tuple", "marks"],
)
def test_bombs_take_little_time_and_memory(bomb: bytes) -> None:
    def read() -> int:
        # In a process of its own, whose memory the kernel counts and bounds.
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (200 << 20),) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
        with contextlib.suppress(NotPlainData):
            read_plain_pickle(bomb, max_made_bytes=64 << 20)
        return 0

    assert Forked(read).wait() == 0


def test_a_small_file_cannot_make_more_than_was_allowed() -> None:
    content = b"\x80\x04]\x94(" + b"]" * 100_000 + b"e."
    with pytest.raises(NotPlainData, match="more data"):
        read_plain_pickle(content, max_made_bytes=1 << 20)


def test_a_key_that_would_be_walked_to_be_hashed_is_refused() -> None:
    with pytest.raises(NotPlainData, match="key"):
        read_plain_pickle(pickle.dumps({(1, 2): 3}))
