"""Host memory: what flags pin, where it lies by release, and the limit below which nothing runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from legroom import plan
from legroom.facts.releases import release
from legroom.memory.host_needs import HostSettings, host_failure, host_needs, pinned_bytes
from legroom.units import GIB
from legroom.vllm.args import ServeArgs


def needs(vllm: str = "0.32.0", others: tuple[str, ...] = (), gpus: int = 1, **more):
    return host_needs(HostSettings(ServeArgs(others=others, **more), release(vllm), gpus))


def share(found, word: str) -> int:
    return sum(each.bytes for each in found.shares if word in each.what)


@pytest.mark.parametrize(("size", "taken"), [(0, 0), (1, 1), (4096, 4096), (4097, 8192), (70 * GIB, 128 * GIB)])
def test_page_locked_memory_of_torch_comes_in_powers_of_two(size, taken):
    assert pinned_bytes(size) == taken


def test_offloaded_kv_takes_the_next_power_of_two_until_it_is_a_shared_file(vllm="0.26.0"):
    found = needs(vllm, ("--kv-offloading-size", "70"))
    assert share(found, "offloaded KV") == 128 * GIB
    assert found.shm_bytes == GIB


def test_from_0_27_on_offloaded_kv_lies_in_dev_shm_to_the_byte():
    found = needs("0.27.0", ("--kv-offloading-size", "70"))
    assert share(found, "offloaded KV") == 0
    assert found.shm_bytes == 71 * GIB


def test_the_simple_connector_locks_what_it_is_told():
    found = needs("0.26.0", ("--kv-offloading-size", "70"), env={"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"})
    assert share(found, "offloaded KV") == 70 * GIB


def test_a_connector_named_in_its_config_counts_too():
    config = '{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1073741824}}'
    assert share(needs("0.26.0", ("--kv-transfer-config", config)), "offloaded KV") == GIB


def test_offloaded_kv_is_divided_among_the_ranks_before_it_is_rounded():
    assert share(needs("0.26.0", ("--kv-offloading-size", "70"), gpus=2), "offloaded KV") == 2 * 64 * GIB


def test_a_limit_below_the_least_is_a_failure_and_one_above_is_none():
    found = needs()
    failure = host_failure(found, found.least_bytes - 1)
    assert failure is not None
    assert failure.id == "host_ram_oom"
    assert host_failure(found, found.least_bytes) is None


def test_the_least_is_not_more_than_what_is_held():
    for others in ((), ("--kv-offloading-size", "16"), ("--enable-sleep-mode",)):
        assert needs(others=others).least_bytes <= needs(others=others).held_bytes


@pytest.mark.parametrize("offload_gb", [0, 4, 16, 64])
def test_the_checkpoint_is_read_whole_and_no_more_is_offloaded_than_the_layers_have(offload_gb):
    host = plan("llama-3.1-8b", "h100", cpu_offload_gb=offload_gb, advice=False).json()["host"]
    offloaded = sum(each["bytes"] for each in host["shares"] if "offloaded weights" in each["what"])
    assert 14.9 * GIB < host["checkpoint_bytes"] < 15.1 * GIB
    # 13 GiB of layers, in tensors whose pinned memory comes in powers of two.
    assert min(offload_gb, 13) * GIB <= offloaded <= min(offload_gb + 1, 15.01) * GIB * (offload_gb > 0)


def test_a_given_limit_is_the_containers_unless_less_is_needed_to_load():
    found = replace(needs(), checkpoint_bytes=60 * GIB)
    assert found.limit_bytes > 60 * GIB
    assert replace(found, given_limit_bytes=40 * GIB).limit_bytes == 40 * GIB
    assert replace(found, given_limit_bytes=GIB).limit_bytes == found.request_bytes > GIB
    assert replace(found, given_limit_bytes=500 * GIB).limit_bytes == found.limit_bytes
