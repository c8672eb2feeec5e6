"""Who holds the card, by the text: the first fix names the program, or takes the card that is idle."""

from __future__ import annotations

import pytest

from legroom.diagnosis.finding import Fix
from legroom.diagnosis.log_diagnosis import read_log
from legroom.render.translation import in_language

CHECK = (
    "ValueError: Free memory on device cuda:0 ({}/23.65 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 21.28 GiB)."
)
TABLE = (
    "|   0  NVIDIA L4          On  |   00000000:07:00.0 Off |           0 |\n"
    "| N/A   35C    P0   70W /  72W |   {}MiB /  23034MiB |      0%  Default |\n"
    "|   1  NVIDIA L4          On  |   00000000:0A:00.0 Off |           0 |\n"
    "| N/A   30C    P0   12W /  72W |   {}MiB /  23034MiB |      0%  Default |\n"
)


def first_fix(text: str) -> Fix:
    finding = read_log([text.encode()]).runs[0].findings[0]
    assert finding.cause == "gpu_shared_or_not_free"
    return finding.fixes[0]


@pytest.mark.parametrize(
    "told", [TABLE.format(22500, 3), "GPU 0 is used by a colleague, GPU 1 is free.", "0号卡已占满，1号卡空闲。"]
)
def test_an_idle_card_is_taken(told: str) -> None:
    fix = first_fix(f"{told}\n{CHECK.format('0.9')}")
    assert dict(fix.env) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert fix.command[:3] == ("CUDA_VISIBLE_DEVICES=1", "vllm", "serve")


@pytest.mark.parametrize("told", ["GPU 2 and 3 are idle.", "GPUs 2-3 are unused.", "2、3号卡空闲。"])
def test_as_many_idle_cards_are_taken_as_the_server_has_ranks(told: str) -> None:
    fix = first_fix(f"Four cards, GPU 0 is taken. {told} I run with --tensor-parallel-size 2.\n{CHECK.format('0.9')}")
    assert dict(fix.env) == {"CUDA_VISIBLE_DEVICES": "2,3"}


def test_a_card_in_use_and_the_card_that_failed_are_not_idle() -> None:
    assert not first_fix(f"{TABLE.format(22500, 9000)}\n{CHECK.format('0.9')}").env
    assert not first_fix(f"{TABLE.format(22500, 3)}\n{CHECK.format('0.9').replace('cuda:0', 'cuda:1')}").env


@pytest.mark.parametrize(
    ("told", "step"),
    [
        ("I also run Ollama on this machine.", "ollama stop"),
        ("In my Jupyter notebook I ran the cell again.", "restart the kernel"),
        ("A training job (python train.py) is using 19 GB of the card.", "until the training has ended"),
        ("sglang serves another model on it.", "--mem-fraction-static"),
    ],
)
def test_the_program_that_the_text_names_is_freed_in_its_own_way(told: str, step: str) -> None:
    assert step in first_fix(f"{told} vLLM 0.11.0 says\n{CHECK.format('4.1')}").steps[0]


def test_a_table_of_two_cards_lets_the_model_be_split() -> None:
    listed = "0, NVIDIA L4, 22500 MiB, 23034 MiB\n1, NVIDIA L4, 1 MiB, 23034 MiB\n"
    error = (
        '  File "/opt/vllm/model_executor/layers/linear.py", line 200, in create_weights\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 136.00 MiB. GPU 0 has a total capacity of 22.03 "
        "GiB of which 80.00 MiB is free. Of the allocated memory 21.60 GiB is allocated by PyTorch, and 90.00 MiB is "
        "reserved by PyTorch but unallocated."
    )
    text = f"{listed}vllm serve Qwen/Qwen2.5-14B-Instruct\n{error}"
    assert read_log([text.encode()]).runs[0].findings[0].fixes[0].flags["tensor_parallel_size"] == 2


def test_a_variable_with_which_it_started_is_the_first_fix() -> None:
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has 23.6 GiB total."
    text = f"With vLLM 0.8.2 and VLLM_USE_V1=0 the same model works, with V1 I get\n{error}"
    fix = read_log([text.encode()]).runs[0].findings[0].fixes[0]
    assert (dict(fix.env), fix.proven) == ({"VLLM_USE_V1": "0"}, True)


def test_a_release_that_worked_comes_second_where_the_message_counts() -> None:
    error = (
        "ValueError: To serve at least one request with the model's max seq len (32768), 4.00 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (1.50 GiB). Based on the available memory, the estimated "
        "maximum model length is 12288."
    )
    fixes = read_log([f"vLLM 0.15.1 was fine, 0.16.0 gives\n{error}".encode()]).runs[0].findings[0].fixes
    assert [fix.kind for fix in fixes[:2]] == ["max_model_len", "engine_version_or_V0"]
    assert "vllm==0.15.1" in fixes[1].steps[0]


def test_a_distilled_model_is_not_the_one_that_taught_it() -> None:
    text = "vLLM runs out of memory when loading DeepSeek R1 Distill Qwen 32B on an L4."
    assert read_log([text.encode()]).runs[0].case.startup.args.model != "DeepSeek-R1"


BESIDE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 594.00 MiB. GPU 0 has a total capacity of {} GiB of "
    "which 288.31 MiB is free. Including non-PyTorch memory, this process has {} GiB memory in use."
)


@pytest.mark.parametrize(
    ("total", "own", "is_desktop"), [(23.57, 21.90, True), (23.57, 18.0, False), (22.03, 20.36, False)]
)
def test_the_desktop_is_the_usual_holder_of_a_little_on_a_card_with_a_screen(total, own, is_desktop) -> None:
    text = "Capturing CUDA graphs\n" + BESIDE.format(total, own)
    fixes = read_log([text.encode()]).runs[0].findings[0].fixes
    fix = next(fix for fix in fixes if fix.kind == "free_gpu_or_kill_orphans")
    assert ("usually the desktop (screen, browser)" in fix.why) == is_desktop
    assert any("CUDA_VISIBLE_DEVICES=N" in step for step in fix.steps) != is_desktop
    assert "orphaned worker" in fix.why


def test_who_holds_the_card_is_said_in_chinese_without_a_rest() -> None:
    why = read_log([f"Capturing CUDA graphs\n{BESIDE.format(23.57, 21.9)}".encode()]).runs[0].findings[0].why
    assert "（未列出名称；本进程 21.90 GiB）" in in_language(why, "zh")
