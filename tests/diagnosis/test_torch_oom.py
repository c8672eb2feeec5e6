from __future__ import annotations

import pytest
from diagnosis_logs import TORCH
from hypothesis import given
from hypothesis import strategies as st

from legroom.diagnosis.ledger import ledger_of
from legroom.diagnosis.log_diagnosis import read_log
from legroom.units import GIB, MIB
from legroom.vllm_logs.evidence import TorchOom


def oom_of(log: str) -> TorchOom:
    oom = read_log([log.encode()]).runs[0].case.oom
    assert oom is not None
    return oom


def test_every_number_of_the_new_wording_is_read() -> None:
    log = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate "
        "1.50 GiB. GPU 3 has a total capacity of 79.25 GiB of "
        "which 1.25 GiB is free. Process 11 has 10.00 GiB memory in "
        "use. Process 12 has 512.00 MiB memory in use. Including "
        "non-PyTorch memory, this process has 67.50 GiB memory in use. "
        "71.00 GiB allowed; Of the allocated memory 60.00 GiB is "
        "allocated by PyTorch, with 2.00 GiB allocated in private "
        "pools (e.g., CUDA Graphs), and 3.00 GiB is reserved by "
        "PyTorch but unallocated."
    )
    oom = oom_of(log)
    assert oom.wanted_bytes == 1.5 * GIB
    assert (oom.gpu, oom.total_bytes, oom.free_bytes) == (3, 79.25 * GIB, 1.25 * GIB)
    assert oom.others_bytes == (10 * GIB, 512 * MIB)
    assert (oom.own_bytes, oom.torch_bytes, oom.pools_bytes) == (67.5 * GIB, 60 * GIB, 2 * GIB)
    assert (oom.unallocated_bytes, oom.allowed_bytes) == (3 * GIB, 71 * GIB)
    assert ledger_of(oom).outside_torch_bytes == int((79.25 - 1.25 - 60 - 3) * GIB)
    assert ledger_of(oom).other_processes_bytes == 10.5 * GIB
    assert ledger_of(oom).reserve_covers_request


def test_the_old_wording_gives_the_unused_reserve_as_a_difference() -> None:
    oom = oom_of(
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to "
        "allocate 160.00 MiB (GPU 1; 79.35 GiB total capacity; 70.00 "
        "GiB already allocated; 145.19 MiB free; 78.00 GiB reserved in total by PyTorch)"
    )
    assert (oom.gpu, oom.unallocated_bytes) == (1, 8 * GIB)


def test_a_message_wrapped_over_lines_is_read_whole() -> None:
    oom = oom_of(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate "
        "50.00 MiB.\nGPU 0 has a total capacity of 23.56 GiB of "
        "which 30.50 MiB is free.\n22.67 GiB allocated, 24.00 MiB in "
        "private pools (CUDA Graphs),\n508 MiB reserved by PyTorch "
        "but unallocated."
    )
    assert (oom.torch_bytes, oom.unallocated_bytes) == (round(22.67 * GIB), 508 * MIB)


def test_a_number_that_is_none_is_left_out() -> None:
    oom = oom_of(
        "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 44.5.3 GiB of which 1.00 GiB is "
        "free. Process 39 has 44.3.4 GiB memory in use."
    )
    assert (oom.total_bytes, oom.free_bytes, oom.others_bytes) == (None, 2**30, ())


def test_rocm_and_the_misspelt_capacity_of_torch_2_1_are_known() -> None:
    oom = oom_of(
        "HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has "
        "a total capacty of 63.98 GiB of which 1.00 GiB is free."
    )
    assert (oom.platform, oom.total_bytes) == ("HIP", round(63.98 * GIB))


def test_zero_bytes_in_use_means_that_it_is_not_known() -> None:
    log = TORCH.format(
        wanted="1.00 GiB", total="79.00 GiB", free="0 bytes", own="0 bytes", torch="70.00 GiB", unused="0 bytes"
    )
    oom = oom_of(log)
    assert oom.own_bytes is None
    assert ledger_of(oom).outside_torch_bytes == 9 * GIB


def test_one_listed_process_is_the_job_itself() -> None:
    oom = oom_of(
        "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has "
        "a total capacity of 44.53 GiB of which 187.94 MiB is free. "
        "Process 39 has 44.34 GiB memory in use. Of the allocated memory 43.67 GiB is allocated by PyTorch"
    )
    assert ledger_of(oom).other_processes_bytes == 0


@given(st.integers(1, 400_000), st.integers(400_001, 2_000_000), st.integers(0, 400_000))
def test_numbers_survive_the_wording(wanted_mib: int, total_mib: int, free_mib: int) -> None:
    log = TORCH.format(
        wanted=f"{wanted_mib}.00 MiB",
        total=f"{total_mib}.00 MiB",
        free=f"{free_mib}.00 MiB",
        own="1.00 GiB",
        torch="1.00 GiB",
        unused="4.00 MiB",
    )
    oom = oom_of(log)
    assert (oom.wanted_bytes, oom.total_bytes, oom.free_bytes) == (wanted_mib * MIB, total_mib * MIB, free_mib * MIB)
    assert ledger_of(oom).larger_than_card == (wanted_mib > total_mib)
    assert ledger_of(oom).reserve_covers_request == (free_mib + 4 >= wanted_mib)


@pytest.mark.parametrize("free", ["1.17 GiB", "1.20 GiB"])
def test_barely_enough_free_memory_is_not_called_enough(free: str) -> None:
    log = TORCH.format(wanted="1.16 GiB", total="8 GiB", free=free, own="5 GiB", torch="4.8 GiB", unused="9.00 MiB")
    assert not ledger_of(oom_of(log)).free_exceeds_request


def test_a_garbled_free_size_of_xla_leaves_the_rest_of_the_message() -> None:
    log = (
        "XlaRuntimeError: RESOURCE_EXHAUSTED: Attempting to allocate 2.00G. That was not possible. There are 1.2.3G "
        "free, and the largest contiguous region of free memory is 1.00G."
    )
    assert (oom_of(log).wanted_bytes, oom_of(log).free_bytes) == (2 * GIB, None)
