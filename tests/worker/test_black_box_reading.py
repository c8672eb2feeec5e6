"""Reading a record of the black box: what a worker wrote, what no worker writes, and what a later release adds."""

from __future__ import annotations

import json

import pytest
from worker_stand_in import fail_in_a_step, written

from legroom import black_box
from legroom.errors import LegroomError
from legroom.worker.recorder import BlackBoxRecorder


def test_a_record_is_read_as_it_was_written(worker):
    fail_in_a_step(BlackBoxRecorder())
    (record,) = written(worker)
    assert black_box.parse_record(json.dumps(record.to_json())) == record


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"legroom": "recording"}',
        '{"legroom": "black box", "version": 99}',
        '{"legroom": "black box", "version": 1}',
        '{"legroom": "black box", "version": 1, "time_s": 1, "trigger": "boom", "worker": {"pid": 1}}',
        '{"legroom": "black box", "version": 1, "time_s": 1, "trigger": "asked", "worker": {"pid": "x"}}',
        '{"legroom": "black box", "version": 1, "time_s": 1, "trigger": "asked", "worker": []}',
        "[" * 100_000,
    ],
)
def test_what_is_no_record_is_refused_with_a_reason(text):
    with pytest.raises(LegroomError):
        black_box.parse_record(text)


def test_a_later_releases_keys_are_passed_over():
    text = '{"legroom":"black box","version":1,"time_s":1,"trigger":"asked","worker":{"pid":1,"new":2},"more":3}'
    assert black_box.parse_record(text).worker.pid == 1


HOSTILE = {
    "a negative size": ("allocator", "reserved_bytes", -1),
    "a size beyond any": ("allocator", "allocated_bytes", 10**300),
    "a time that is none": ("worker", "pid", float("nan")),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_figures_that_no_worker_writes_are_refused(worker, what):
    fail_in_a_step(BlackBoxRecorder())
    document = json.loads(next(worker.records.glob("*.json")).read_text())
    part, name, value = HOSTILE[what]
    document[part][name] = value
    with pytest.raises(LegroomError, match="damaged"):
        black_box.parse_record(json.dumps(document))


def test_letters_that_move_a_cursor_are_taken_out_of_a_record(worker):
    fail_in_a_step(BlackBoxRecorder())
    document = json.loads(next(worker.records.glob("*.json")).read_text())
    document["step"]["largest"][0]["id"] = "a\x1b[2Jb"
    document["settings"] = {"model": "m\x1b", "max_model_len": [1], "block_size": 16}
    record = black_box.parse_record(json.dumps(document))
    assert record.step.largest[0].id == "a[2Jb"
    assert record.settings == {"block_size": 16}


def test_a_request_for_the_log_probabilities_of_every_word_is_read(worker):
    fail_in_a_step(BlackBoxRecorder())
    document = json.loads(next(worker.records.glob("*.json")).read_text())
    document["step"]["largest"][0] |= {"logprobs": -1, "prompt_logprobs": -1}
    largest = black_box.parse_record(json.dumps(document)).step.largest[0]
    assert (largest.logprobs, largest.prompt_logprobs) == (-1, -1)


def test_a_record_that_a_tool_has_indented_is_still_known_by_its_beginning():
    assert black_box.is_record(b'{\n    "legroom": "black box",\n    "version": 1')
    assert not black_box.is_record(b'{\n    "legroom": "plan"')
