from __future__ import annotations

from fake_server import FakeServer
from test_memory_creep import hours

from legroom.live.detectors.host_memory_creep import HostMemoryCreep
from legroom.live.detectors.memory_creep import MemoryCreep
from legroom.live.remedies import remedies_for
from legroom.units import GIB, MIB


def test_growth_of_the_workers_host_memory_is_said() -> None:
    server = FakeServer(HostMemoryCreep, interval_s=300)
    finding = hours(server, 6, 300 * MIB, noise=50 * MIB, field="host_rss_bytes")
    assert finding is not None and finding.kind == "host_memory_creep"
    assert "the workers hold" in finding.reason
    assert finding.restart_helps and finding.situation == "chronic"


def test_what_the_gpus_hold_is_another_matter() -> None:
    assert hours(FakeServer(HostMemoryCreep, interval_s=300), 6, 300 * MIB, field="reserved_bytes") is None
    assert hours(FakeServer(MemoryCreep, interval_s=300), 6, 300 * MIB, field="host_rss_bytes") is None


def test_noise_of_a_process_that_gives_back_what_it_takes_is_no_growth() -> None:
    server = FakeServer(HostMemoryCreep, interval_s=300)
    assert hours(server, 9, 0, noise=500 * MIB, field="host_rss_bytes") is None


def test_the_answer_says_how_much_an_hour_takes() -> None:
    server = FakeServer(HostMemoryCreep, interval_s=300)
    finding = hours(server, 6, 300 * MIB, field="host_rss_bytes")
    assert finding is not None
    (remedy,) = remedies_for(finding, server.window)
    assert "0.29 GiB" in remedy.why


def test_growth_of_the_api_server_is_said_without_anything_inside_the_workers() -> None:
    server = FakeServer(HostMemoryCreep, interval_s=300)
    finding = hours(server, 6, 300 * MIB, noise=50 * MIB, field="api_server_rss_bytes")
    assert finding is not None and "the API server holds" in finding.reason


def test_workers_that_hold_still_do_not_hide_an_api_server_that_grows() -> None:
    server = FakeServer(HostMemoryCreep, interval_s=300)
    server.others = {"host_rss_bytes": 60 * GIB}
    finding = hours(server, 6, 300 * MIB, field="api_server_rss_bytes")
    assert finding is not None and "API server" in finding.reason
