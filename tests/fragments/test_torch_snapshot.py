"""Memory snapshots of torch, read as readings of the allocator."""

import pickle

import pytest
from snapshot_writer import GIB, MIB, SnapshotWriter, block, pinned_segments

from legroom.errors import LegroomError
from legroom.fragments.torch_snapshot import NotPlainData, read_snapshot


def test_a_snapshot_says_what_is_allocated_and_reserved() -> None:
    state = read_snapshot(pinned_segments().content())[0].state
    assert (state.allocated_bytes, state.reserved_bytes) == (7 * 300 * MIB, 7 * GIB)
    assert (state.largest_free_bytes, state.inactive_split_bytes) == (600 * MIB, 7 * 724 * MIB)


def test_memory_of_private_pools_serves_nobody_else() -> None:
    writer = SnapshotWriter()
    writer.segment(block(10 * MIB), block(90 * MIB, "inactive"), pool=(0, 7))
    writer.segment(block(30 * MIB), block(10 * MIB, "inactive"))
    state = read_snapshot(writer.content())[0].state
    assert (state.private_pool_bytes, state.private_free_bytes) == (100 * MIB, 90 * MIB)
    assert (state.largest_free_bytes, state.usable_free_bytes) == (10 * MIB, 10 * MIB)


def test_blocks_are_put_down_to_the_innermost_line_that_is_not_torch() -> None:
    (reading,) = read_snapshot(pinned_segments().content())
    assert [(site.place, site.bytes, site.blocks) for site in reading.sites] == [
        ("vllm/v1/worker/gpu_model_runner.py:1 pin", 7 * 300 * MIB, 7)
    ]


def test_what_was_allocated_before_the_recording_began_is_in_the_history() -> None:
    writer = SnapshotWriter()
    address = writer.segment(block(64 * MIB), block(36 * MIB, "inactive"))
    writer.event("free_completed", address + 64 * MIB, 36 * MIB)
    history = read_snapshot(writer.content())[0].history
    assert history is not None
    assert history.first == ((address, 64 * MIB, 0), (address + 64 * MIB, 36 * MIB, 0))


def test_a_list_of_segments_alone_is_a_snapshot_too() -> None:
    content = pickle.dumps(pinned_segments().document()["segments"])
    assert read_snapshot(content)[0].state.reserved_bytes == 7 * GIB


@pytest.mark.parametrize("document", [{}, [], 5, {"segments": 3}, {"segments": [1]}, {"segments": [{"device": -1}]}])
def test_other_data_is_refused(document: object) -> None:
    with pytest.raises(LegroomError):
        read_snapshot(pickle.dumps(document))


@pytest.mark.parametrize("size", [-1, 1 << 70, "much", None, True, 0.5])
def test_a_size_that_is_none_is_refused(size: object) -> None:
    writer = pinned_segments()
    writer.segments[0]["blocks"][0]["size"] = size
    with pytest.raises(LegroomError, match="damaged"):
        read_snapshot(writer.content())


def test_a_list_that_is_referred_to_ten_thousand_times_is_not_walked_ten_thousand_times() -> None:
    blocks = [{"size": 0, "address": 0, "state": "inactive", "frames": []}] * 100_000
    segment = {"device": 0, "address": 0, "total_size": 0, "blocks": blocks}
    with pytest.raises(NotPlainData, match="more entries"):
        read_snapshot(pickle.dumps({"segments": [segment] * 10_000}))


def test_devices_are_read_apart_and_the_fullest_comes_first() -> None:
    writer = pinned_segments(2)
    writer.segments[1]["device"] = 1
    writer.segments[1]["total_size"] += GIB
    assert [reading.device for reading in read_snapshot(writer.content())] == ["1", "0"]


@pytest.mark.parametrize("place", ["state", "filename", "name", "line"])
def test_data_in_the_place_of_text_is_never_written_out(place: str) -> None:
    laughs: list[object] = ["ha"]
    for _ in range(60):
        laughs = [laughs, laughs]
    writer = pinned_segments(1)
    used = writer.segments[0]["blocks"][1]
    (used if place == "state" else used["frames"][1])[place] = laughs
    assert read_snapshot(writer.content())[0].state.reserved_bytes == GIB
