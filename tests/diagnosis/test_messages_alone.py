"""Every message of every release that says memory was short, alone and wrapped: its cause, or a question."""

from __future__ import annotations

import re
import textwrap

import pytest
from release_messages import ReleaseMessage, all_messages

from legroom.diagnosis.log_diagnosis import read_log
from legroom.diagnosis.verdict import Diagnosis

CAUSES = {
    r"Error in memory profiling": {"gpu_shared_or_not_free", "not_memory"},
    r"[Ff]ree memory on device": {"gpu_shared_or_not_free"},
    r"Too large swap space|memory on node .* is less than|Insufficient space in": {"host_ram_oom"},
    r"available Mamba cache blocks": {"hybrid_state_cache_limit"},
    r"[Nn]o free blocks|free blocks from the pool|No usable cache memory": {"kv_preemption_thrash"},
    r"max seq len .*larger than": {"kv_too_small_for_max_len"},
    r"No available memory for the cache blocks|Cannot auto-fit|Externally held weights": {"no_cache_blocks"},
    r"when warming up|occurred during profile run|total available device memory": {"profiling_activation_peak"},
    r"device's HBM memory|insufficient memory to allocate": {"weights_too_big"},
    r"increased after sleeping": {"sleep_mode_or_rlhf_colocation"},
}
"""What the text of such a message means."""
QUESTIONS = r"^Insufficient memory$"
"""Texts that do not say which memory."""
ENDS_A_RUN = ("exception", "error", "critical")


def shortages() -> list[ReleaseMessage]:
    known = re.compile("|".join((*CAUSES, QUESTIONS)))
    return [m for m in all_messages() if m.level.startswith(ENDS_A_RUN) and known.search(m.template)]


def as_line(message: ReleaseMessage) -> str:
    """The message with plausible values, as the last line of a traceback."""
    fields = iter(message.fields)

    def value(match: re.Match[str]) -> str:
        field = next(fields, None)
        told = f"{field.kind} {field.unit} {field.expression}".lower() if field else ""
        if "gib" in told or "gb" in told:
            return "12.50"
        if "ratio" in told or "utilization" in told:
            return "0.9"
        return "4096" if re.search("int|count|len|num|size|bytes|tokens|max|memory", told) else "x"

    text = re.sub(r"\{[^{}]*\}", value, message.template) if message.fields else message.template
    error = message.level.partition(":")[2] or "ERROR 01-02 03:04:05 [core.py:1]"
    return f"{error}: {text}"


def diagnosis(text: str) -> Diagnosis:
    return read_log([text.encode()], "log").runs[0]


def is_right(message: ReleaseMessage, found: Diagnosis) -> bool:
    if re.search(QUESTIONS, message.template):
        return found.verdict == "cause above" and len(found.needed) > 0
    causes = next(causes for words, causes in CAUSES.items() if re.search(words, message.template))
    return bool(found.findings) and found.findings[0].cause in causes


def test_every_shortage_is_named_by_its_line_alone() -> None:
    messages = shortages()
    wrong = [as_line(message) for message in messages if not is_right(message, diagnosis(as_line(message)))]
    assert len(messages) >= 45
    assert not wrong


@pytest.mark.parametrize("width", [60, 72, 80, 100])
def test_a_line_that_is_wrapped_at_words_is_named_as_well(width: int) -> None:
    messages = shortages()
    wrapped = ["\n".join(textwrap.wrap(as_line(message), width)) for message in messages]
    right = [is_right(message, diagnosis(text)) for message, text in zip(messages, wrapped, strict=True)]
    assert sum(right) >= 0.95 * len(right)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("RuntimeError: CUDA error: out of memory during model loading", "weights_too_big"),
        ("ERROR vllm.worker: CUDA out of memory during forward pass", "runtime_activation_burst"),
        ("torch.OutOfMemoryError: CUDA out of memory during profiling", "profiling_activation_peak"),
        (
            "ValueError: The model's max seq len (32768) is larger than the maximum number of\n"
            "tokens that can be stored in KV cache (4096).",
            "kv_too_small_for_max_len",
        ),
    ],
)
def test_words_that_say_when_place_it(text: str, cause: str) -> None:
    assert diagnosis(text).findings[0].cause == cause


def test_a_bare_failed_allocation_is_a_question() -> None:
    found = diagnosis("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB")
    assert found.verdict == "cause above"
    assert "load_model, profile_run" in found.needed[0]
