"""The ledger of a card: the entries of torch's message, the moments they allow, and the tensor asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.diagnosis.diagnosis_json import diagnosis_json
from legroom.diagnosis.fixes.failed_run import Hints
from legroom.diagnosis.ledger import ledger_of
from legroom.diagnosis.log_diagnosis import read_log
from legroom.diagnosis.verdict import Diagnosis
from legroom.render.diagnosis_text import readings_text
from legroom.units import GIB
from legroom.vllm_logs.evidence import TorchOom

SEVEN_B = "vllm serve Qwen/Qwen2.5-7B-Instruct --max-model-len 32768"
SIZES = st.integers(min_value=0, max_value=40 * GIB)


def oom_line(wanted: str, total: float, free: float, allocated: float, unused: float = 0.01) -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {wanted}. GPU 0 has a total capacity of "
        f"{total:.2f} GiB of which {free:.2f} GiB is free. Including non-PyTorch memory, this process has "
        f"{total - free:.2f} GiB memory in use. Of the allocated memory {allocated:.2f} GiB is allocated by PyTorch, "
        f"and {unused:.2f} GiB is reserved by PyTorch but unallocated.\n"
    )


def diagnosis(log: str, command: str = "") -> Diagnosis:
    return read_log([log.encode()], "log", Hints(command=command)).runs[0]


@given(SIZES, SIZES, SIZES, SIZES, SIZES)
def test_the_entries_add_up_to_the_card(free: int, own: int, other: int, allocated: int, unused: int) -> None:
    total = free + own + other + allocated + unused
    process = own + allocated + unused
    seen = ledger_of(TorchOom(1, GIB, "CUDA", 0, total, free, process or None, (other,), allocated, 0, unused))
    if process:
        assert seen.other_processes_bytes == other
        assert seen.own_non_torch_bytes == own


@pytest.mark.parametrize(("reserved", "cause"), [(10.65, "gpu_shared_or_not_free"), (60.0, "weights_too_big")])
def test_what_is_neither_free_nor_torch_s_is_another_process_s(reserved: float, cause: str) -> None:
    log = (
        f"RuntimeError: NPU out of memory. Tried to allocate 30.00 MiB (NPU 6; 60.97 GiB total capacity; "
        f"{reserved - 0.02:.2f} GiB already allocated; 5.00 MiB free; {reserved:.2f} GiB reserved in total "
        "by PyTorch)\n"
    )
    assert diagnosis(log).findings[0].cause == cause


@pytest.mark.parametrize(
    ("allocated", "wanted", "flags", "cause"),
    [
        (9.0, "260.00 MiB", "", "weights_too_big"),
        (15.2, "9.25 GiB", " --max-num-batched-tokens 131072", "profiling_activation_peak"),
    ],
)
def test_the_sizes_place_a_bare_line(allocated: float, wanted: str, flags: str, cause: str) -> None:
    free = 7.95 if wanted.endswith("GiB") else 0.1
    total = 23.64 if wanted.endswith("GiB") else 9.6
    found = diagnosis(oom_line(wanted, total, free, allocated), SEVEN_B + flags)
    assert found.findings[0].cause == cause
    assert f"{wanted} is the size of" in found.findings[0].why


def test_the_lever_of_the_tensor_is_the_first_fix() -> None:
    found = diagnosis(oom_line("9.25 GiB", 23.64, 7.95, 15.2), f"{SEVEN_B} --max-num-batched-tokens 131072")
    assert "max_num_batched_tokens" in found.findings[0].fixes[0].flags


def test_without_a_model_no_tensor_is_claimed() -> None:
    found = diagnosis(oom_line("9.25 GiB", 23.64, 7.95, 15.2))
    assert (found.wanted, dict(found.expected)) == ((), {})
    assert "is the size of" not in found.findings[0].why


def test_the_working_is_shown_on_request() -> None:
    command = f"{SEVEN_B} --max-num-batched-tokens 131072"
    reading = read_log([oom_line("9.25 GiB", 23.64, 7.95, 15.2).encode()], "log", Hints(command=command))
    assert "131,072 batched tokens x 37,888" in readings_text([reading], explain_math=True).split("asked for: ")[1]
    ledger = diagnosis_json(reading.runs[0])["ledger"]
    assert ledger["seen"]["wanted_bytes"] == int(9.25 * GIB)
    assert set(ledger["expected"]) == {"load", "profile", "serving"}
    assert ledger["wanted"][0]["setting"] == "max_num_batched_tokens"
