"""Black boxes and servers' pages as sources."""

import json

import pytest

from legroom.black_box import AllocatorState, BlackBox, CardMemory, FailedRequest, MemoryReading, WorkerProcess
from legroom.errors import LegroomError
from legroom.fragments.fragment_report import fragment_report
from legroom.fragments.fragment_sources import readings_of_content, readings_of_metrics
from legroom.live.metrics.exposition import parse_sample
from legroom.units import GIB, MIB

PAGE = """\
vllm:num_requests_running{engine="0",model_name="m"} 40.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0
legroom_worker_allocated_bytes{gpu="0",rank="0"} 2.0e+09
legroom_worker_reserved_bytes{gpu="0",rank="0"} 5.0e+09
legroom_worker_largest_free_bytes{gpu="0",rank="0"} 1.0e+09
legroom_worker_inactive_split_bytes{gpu="0",rank="0"} 2.5e+09
legroom_worker_non_torch_bytes{gpu="0",rank="0"} 7.0e+08
legroom_worker_allocated_bytes{gpu="1",rank="1"} 2.0e+09
legroom_worker_reserved_bytes{gpu="1",rank="1"} 2.5e+09
"""


def black_box(wanted: int, free: int) -> bytes:
    state = AllocatorState(2 * GIB, 7 * GIB, largest_free_bytes=600 * MIB, inactive_split_bytes=5 * GIB)
    history = tuple(MemoryReading(float(look), non_torch_bytes=600 * MIB + look * MIB) for look in range(50))
    record = BlackBox(
        1.0,
        "out_of_memory",
        WorkerProcess(1),
        FailedRequest(wanted),
        CardMemory("0", free_bytes=free),
        state,
        history=history,
    )
    return json.dumps(record.to_json()).encode()


def test_a_black_box_says_whether_expandable_segments_would_have_served_the_request() -> None:
    (reading,) = readings_of_content(black_box(2 * GIB, 100 * MIB), "box")
    assert fragment_report(reading).would_expandable_segments_help is True


def test_a_request_larger_than_all_that_was_free_would_not_have_been_served() -> None:
    (reading,) = readings_of_content(black_box(6 * GIB, 100 * MIB), "box")
    assert fragment_report(reading).would_expandable_segments_help is False


def test_a_neighbour_that_holds_the_card_is_named() -> None:
    """As on the H200, where a second process held 55.7 GiB and 2.32 GiB were refused."""
    state = AllocatorState(89_588_187_136, 89_649_053_696, largest_free_bytes=2 * MIB, inactive_split_bytes=60_866_560)
    card = CardMemory("0", free_bytes=507_052_032, others_bytes=59_814_379_520)
    record = BlackBox(1.0, "out_of_memory", WorkerProcess(1), FailedRequest(2_489_319_424), card, state)
    (reading,) = readings_of_content(json.dumps(record.to_json()).encode(), "box")
    failed = fragment_report(reading).part("failed_request")
    assert failed is not None and "55.71 GiB" in failed.text


def test_growth_beside_pytorch_is_read_from_the_last_minutes() -> None:
    (reading,) = readings_of_content(black_box(2 * GIB, 0), "box")
    growth = fragment_report(reading).part("non_torch_growth")
    assert growth is not None and growth.bytes == 49 * MIB


def test_a_servers_page_tells_the_fullest_worker_and_the_last_kv_blocks() -> None:
    first, second = readings_of_metrics(PAGE, parse_sample(PAGE.encode(), 0.0, "here"))
    parts = {part.part: part for part in fragment_report(first).parts}
    assert (first.device, second.device) == ("0", "1")
    assert parts["free_in_pieces"].bytes == 2_500_000_000
    assert parts["non_torch"].bytes == 700_000_000
    assert parts["kv_last_blocks"].details["slots"] == 300


def test_a_page_without_the_plugin_says_how_to_turn_it_on() -> None:
    page = "\n".join(line for line in PAGE.splitlines() if not line.startswith("legroom")) + "\n"
    with pytest.raises(LegroomError) as error:
        readings_of_metrics(page, parse_sample(page.encode(), 0.0, "here"))
    assert "LEGROOM_WORKER_MEMORY=1" in error.value.hint


def test_a_worker_without_a_gpu_tells_its_processs_memory_and_the_last_kv_blocks() -> None:
    page = "\n".join(line for line in PAGE.splitlines() if not line.startswith("legroom")) + "\n"
    page += 'legroom_worker_host_rss_bytes{gpu="cpu",rank="0"} 6.0e+08\n'
    (reading,) = readings_of_metrics(page, parse_sample(page.encode(), 0.0, "here"))
    report = fragment_report(reading)
    assert (reading.device, report.reading.state.allocated_bytes) == ("cpu", 600_000_000)
    assert [part.part for part in report.parts] == ["allocated", "kv_last_blocks"]
    assert (report.fragmentation_ratio, report.has_problem) == (0.0, False)


@pytest.mark.parametrize("value", ["1e999", "1.2.3"])
def test_a_gauge_that_is_no_number_of_bytes_is_passed_over(value: str) -> None:
    page = f'{PAGE}legroom_worker_reserved_bytes{{gpu="7",rank="7"}} {value}\n'
    assert len(readings_of_metrics(page, parse_sample(PAGE.encode(), 0.0, "here"))) == 2
