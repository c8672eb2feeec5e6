"""What the words of a description say of its cause, where no program printed the failure."""

from __future__ import annotations

import pytest

from legroom.diagnosis.cause_words import concepts, word_evidence, words
from legroom.diagnosis.causes import causes
from legroom.diagnosis.log_diagnosis import read_log
from legroom.diagnosis.verdict import Diagnosis

QUEUE = (
    "vLLM on one L40S: with forty agents at once everything crawls. Requests are thrown out of the running batch and "
    "computed again from the start, the queue only grows, and nothing ever errors."
)
PRINTED = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`."


def diagnosed(text: str) -> Diagnosis:
    return read_log([text.encode()]).runs[0]


def test_words_lose_their_endings_and_quantities_count_by_their_kind() -> None:
    assert list(words("Loading shards of 24 GB at 0.95, 32k")) == ["load", "shard", "of", "#gib", "at", "#share", "#k"]
    assert list(words("max_model_len")) == ["max-model-len", "max", "model", "len"]
    assert list(words("显存不足")) == ["显存", "存不", "不足"]


@pytest.mark.parametrize(
    "text",
    [
        "the job ended an hour ago and its VRAM is not released",
        "任务结束后显存没有释放",
        "still occupied after the evaluation finished: 12 GB of GPU memory",
    ],
)
def test_concepts_are_heard_in_any_words_and_language(text: str) -> None:
    assert {"%release", "%gpu_memory"} <= set(concepts(text))


def test_a_description_without_a_printed_failure_has_its_cause_by_its_words() -> None:
    found = diagnosed(QUEUE)
    assert found.rests_on == "words"
    assert found.findings[0].cause == "kv_preemption_thrash"
    (line,) = found.findings[0].evidence
    assert line.id == "words_told"
    assert line.facts["clause"] in QUEUE
    assert str(line.facts["clause"]) in found.findings[0].why
    assert sum(finding.confidence for finding in found.findings) <= 1


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "Converting the bf16 checkpoint to FP8 while it loads needs room for both copies of a layer, and vllm does "
            "not survive that step although the converted model takes half of the card.",
            "quantization_kernel_workspace",
        ),
        (
            "I upgraded the driver on the box and since then vllm says that the runtime is newer than what the driver "
            "supports, so nothing starts.",
            "driver_or_cuda_mismatch",
        ),
        (
            "Our vllm answers carry the raw tool call tags instead of the parsed arguments when the chat template of "
            "the model is used, and the client chokes on it.",
            "not_memory",
        ),
    ],
)
def test_causes_are_known_by_words_that_no_message_has(text: str, cause: str) -> None:
    assert diagnosed(text).findings[0].cause == cause


def test_a_printed_failure_is_not_weighed_against_words() -> None:
    alone = diagnosed(PRINTED)
    beside = diagnosed(f"{QUEUE}\n\n{PRINTED}")
    assert beside.findings[0].cause == alone.findings[0].cause == "no_cache_blocks"
    assert beside.findings[0].confidence == alone.findings[0].confidence


def test_a_few_words_and_lines_of_programs_are_no_description() -> None:
    assert word_evidence("vLLM is slow", ()) is None
    assert (
        word_evidence("INFO 11-18 10:00:00 [core.py:1] Initializing a V1 LLM engine with config: model='a'", ()) is None
    )


def test_a_cause_that_is_not_likelier_than_not_is_asked_for() -> None:
    vague = "We use vLLM in production with the defaults of its chart since this morning and it is not right at all."
    found = diagnosed(vague)
    assert found.verdict == "cause above"
    assert found.needed


def test_every_cause_can_be_told_in_words() -> None:
    told = word_evidence(QUEUE, ())
    assert told is not None
    assert set(told.likelihoods) == {cause.label for cause in causes()}
