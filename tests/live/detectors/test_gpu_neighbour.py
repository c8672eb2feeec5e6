from __future__ import annotations

from fake_server import FakeServer

from legroom.live.detectors.gpu_neighbour import GpuNeighbour
from legroom.live.remedies import remedies_for
from legroom.units import GIB, MIB


def test_a_process_that_takes_memory_while_the_server_serves_is_said() -> None:
    server = FakeServer(GpuNeighbour)
    assert server.scrapes(6, others_bytes=0)[-1] is None
    finding = server.scrapes(4, others_bytes=30 * GIB)[-1]
    assert finding is not None and finding.cause == "gpu_shared_or_not_free"
    assert "hold 30.00 GiB" in finding.reason and "30.00 GiB more" in finding.reason


def test_one_that_was_there_from_the_start_is_no_news() -> None:
    server = FakeServer(GpuNeighbour)
    assert set(server.scrapes(20, others_bytes=60 * GIB)) == {None}


def test_a_small_process_takes_no_room_worth_a_word() -> None:
    server = FakeServer(GpuNeighbour)
    server.scrapes(4, others_bytes=0)
    assert set(server.scrapes(10, others_bytes=600 * MIB)) == {None}


def test_it_ends_when_the_memory_is_given_back() -> None:
    server = FakeServer(GpuNeighbour)
    server.scrapes(3, others_bytes=0)
    assert server.scrapes(4, others_bytes=9 * GIB)[-1] is not None
    assert server.scrapes(10, others_bytes=0)[-1] is None


def test_one_that_came_to_stay_is_news_for_a_quarter_of_an_hour() -> None:
    server = FakeServer(GpuNeighbour)
    server.scrapes(3, others_bytes=0)
    assert server.scrapes(60, others_bytes=40 * GIB)[-1] is not None
    assert server.scrapes(150, others_bytes=40 * GIB)[-1] is None


def test_a_server_that_tells_nothing_of_others_is_not_judged() -> None:
    assert set(FakeServer(GpuNeighbour).scrapes(10, reserved_bytes=60 * GIB)) == {None}


def test_the_answer_says_how_to_find_who_it_is() -> None:
    server = FakeServer(GpuNeighbour)
    server.scrapes(3, others_bytes=0)
    finding = server.scrapes(4, others_bytes=9 * GIB)[-1]
    assert finding is not None
    assert "nvidia-smi" in remedies_for(finding, server.window)[0].steps[0]
