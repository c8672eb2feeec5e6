"""The confidence of an answer is a probability: measured by kind of evidence, and never more than 1 in all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from legroom.diagnosis.confidence import confidences, diagnosis_accuracy
from legroom.diagnosis.finding import Strength
from legroom.diagnosis.log_diagnosis import read_log
from legroom.diagnosis.verdict import Diagnosis
from legroom.render.diagnosis_text import readings_text

BARE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB "
    "of which 1.00 GiB is free. Including non-PyTorch memory, this process has 22.64 GiB memory in use. Of the "
    "allocated memory 20.00 GiB is allocated by PyTorch, and 200.00 MiB is reserved by PyTorch but unallocated.\n"
)
FRAME = '  File "/x/vllm/v1/worker/gpu_model_runner.py", line 9, in profile_run\n'


def diagnosis(log: str) -> Diagnosis:
    return read_log([log.encode()], "log").runs[0]


@given(st.lists(st.sampled_from(list(Strength)[1:]), min_size=1, max_size=4), st.floats(0.5, 0.99))
def test_the_causes_of_one_answer_do_not_sum_above_one(strengths: list[Strength], first: float) -> None:
    named = {str(at): each for at, each in enumerate(sorted(strengths, reverse=True))}
    shares = confidences(named, first)
    assert next(iter(shares.items())) == ("0", first)
    assert sum(shares.values()) <= 1 + 1e-9
    assert [*shares.values()] == sorted(shares.values(), reverse=True)


def test_what_a_person_wrote_moves_the_odds_of_all_causes() -> None:
    before = {"a": Strength.USUAL, "b": Strength.FAINT}
    after = confidences(before, 0.5, {"a": 0.1, "b": 0.1, "c": 1.0})
    assert max(after, key=lambda label: after[label]) == "c"
    assert abs(sum(after.values()) - 1) < 1e-9
    assert confidences(before, 0.5, {"a": 1.0, "b": 0.1, "c": 0.1})["a"] > 0.5


def test_a_placed_failure_is_surer_than_a_bare_line() -> None:
    bare, placed = diagnosis(BARE), diagnosis(FRAME + BARE)
    assert (bare.rests_on, placed.rests_on) == ("unplaced_oom", "placed_oom")
    assert bare.findings[0].confidence == diagnosis_accuracy("unplaced_oom") < placed.findings[0].confidence


def test_a_message_of_vllm_is_surer_than_a_failed_allocation() -> None:
    message = diagnosis(
        "ValueError: Free memory on device cuda:0 (10.0/80.0 GiB) on startup is less than desired GPU memory "
        "utilization (0.9, 72.0 GiB).\n"
    )
    assert message.rests_on == "message"
    assert message.findings[0].confidence > diagnosis(FRAME + BARE).findings[0].confidence


def test_the_text_says_a_word_and_no_number() -> None:
    text = readings_text([read_log([(FRAME + BARE).encode()], "log")])
    assert "(likely)" in text
    assert "%)" not in text
