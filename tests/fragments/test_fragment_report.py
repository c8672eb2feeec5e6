"""What a reading comes to."""

from snapshot_writer import GIB, MIB, SnapshotWriter, block, pinned_segments

from legroom.fragments.fragment_report import FragmentReport, fragment_report
from legroom.fragments.fragment_sources import read_summary
from legroom.fragments.torch_snapshot import read_snapshot
from legroom.render.fragments_text import segment_rows


def report_of(writer: SnapshotWriter, **more: int) -> FragmentReport:
    return fragment_report(read_snapshot(writer.content())[0], **more)  # type: ignore[arg-type]


def test_pieces_that_pin_segments_are_fragmentation_that_expandable_segments_would_have_cured() -> None:
    report = report_of(pinned_segments())
    assert report.would_expandable_segments_help is True
    assert report.fragmentation_ratio == 0.8816
    failed = report.part("failed_request")
    assert failed is not None and failed.details["served_by"][0] == "expandable_segments:True"


def test_a_burst_that_is_larger_than_what_is_free_is_not_fragmentation() -> None:
    writer = SnapshotWriter()
    for _ in range(7):
        address = writer.segment(block(GIB, place="weights"))
        writer.event("segment_alloc", address, GIB)
        writer.event("alloc", address, GIB)
    writer.event("oom", 0, 2 * GIB, device_free=512 * MIB)
    report = report_of(writer)
    failed = report.part("failed_request")
    assert report.would_expandable_segments_help is False
    assert failed is not None and failed.details["served_by"] == []


def test_nothing_failed_so_nothing_is_said_of_settings() -> None:
    writer = SnapshotWriter()
    writer.segment(block(100 * MIB), block(50 * MIB, "inactive"))
    report = report_of(writer)
    assert report.would_expandable_segments_help is None
    assert not report.has_problem


def test_a_request_that_fits_the_largest_piece_is_no_problem() -> None:
    writer = SnapshotWriter()
    writer.segment(block(100 * MIB), block(50 * MIB, "inactive"))
    assert report_of(writer, needed_bytes=40 * MIB).part("failed_request") is None


def test_with_expandable_segments_on_they_would_not_have_helped() -> None:
    writer = SnapshotWriter({"expandable_segments": True})
    address = writer.segment(block(7 * GIB), expandable=True)
    writer.event("segment_map", address, 7 * GIB)
    writer.event("alloc", address, 7 * GIB)
    writer.event("oom", 0, 2 * GIB, device_free=GIB)
    assert report_of(writer).would_expandable_segments_help is False


def test_whole_free_pages_of_expandable_segments_are_not_in_pieces() -> None:
    writer = SnapshotWriter({"expandable_segments": True})
    writer.segment(block(10 * MIB), block(50 * MIB, "inactive"), expandable=True)
    parts = {part.part: part.bytes for part in report_of(writer).parts}
    assert (parts["free_whole_segments"], parts["free_in_pieces"]) == (40 * MIB, 10 * MIB)


def test_a_leak_is_named_by_its_line() -> None:
    before, after = SnapshotWriter(), SnapshotWriter()
    for writer, leaked in ((before, 3), (after, 40)):
        writer.segment(block(500 * MIB, place="weights"))
        for _ in range(leaked):
            writer.segment(block(4 * MIB, place="keep_request"))
    earlier, later = (read_snapshot(writer.content())[0] for writer in (before, after))
    leak = fragment_report(later, earlier=earlier).part("leak")
    assert leak is not None and leak.bytes == 37 * 4 * MIB
    assert leak.details["sites"] == [
        {"place": "vllm/v1/worker/gpu_model_runner.py:1 keep_request", "bytes": 37 * 4 * MIB, "blocks": 37}
    ]


def test_a_process_that_only_breathes_does_not_leak() -> None:
    writer = pinned_segments()
    (reading,) = read_snapshot(writer.content())
    assert fragment_report(reading, earlier=reading).part("leak") is None


def test_the_json_has_the_keys_of_the_contract() -> None:
    assert list(report_of(pinned_segments()).to_json()) == [
        "allocated_bytes",
        "reserved_bytes",
        "largest_free_bytes",
        "fragmentation_ratio",
        "would_expandable_segments_help",
        "parts",
    ]


SUMMARY = """
|                  PyTorch CUDA memory summary, device ID 3                 |
|            CUDA OOMs: 2            |        cudaMalloc retries: 5         |
|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |
| Allocated memory      |   2100 MiB |   7168 MiB |  13468 MiB |  11368 MiB |
|       from large pool |   2100 MiB |   7168 MiB |  13468 MiB |  11368 MiB |
| Requested memory      |   2090 MiB |   7168 MiB |  13468 MiB |  11368 MiB |
| GPU reserved memory   |   7168 MiB |   7168 MiB |   7168 MiB |      0 B   |
| Non-releasable memory |   5068 MiB |   5968 MiB |  12000 MiB |   6932 MiB |
"""


def test_the_text_of_memory_summary_tells_totals() -> None:
    reading = read_summary("before it\n" + SUMMARY)
    report = fragment_report(reading)
    parts = {part.part: part.bytes for part in report.parts}
    assert (reading.device, reading.state.ooms, reading.state.alloc_retries) == ("3", 2, 5)
    assert parts == {"allocated": 2100 * MIB, "rounding": 10 * MIB, "free_in_pieces": 5068 * MIB}
    assert report.largest_free_bytes is None


def test_a_summary_can_be_asked_about_a_request() -> None:
    report = fragment_report(read_summary(SUMMARY), needed_bytes=2 * GIB)
    assert report.would_expandable_segments_help is True


def test_segments_that_look_the_same_are_one_row_wherever_they_lie() -> None:
    writer = SnapshotWriter()
    for number in range(8):
        first, second = (block(GIB), block(GIB, "inactive"))
        writer.segment(*((first, second) if number % 2 else (second, first)))
    rows, left_out = segment_rows(report_of(writer), 14)
    assert ([row.count for row in rows], left_out) == ([4, 4], 0)
