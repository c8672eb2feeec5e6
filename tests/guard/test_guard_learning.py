"""What answers teach the guard."""

import asyncio
import json

import pytest

from legroom.guard.request.body import demand_of
from legroom.guard.request.endpoints import Kind
from legroom.guard.weight.guarded_request import GuardedRequest
from legroom.guard.weight.learnt_tokens import FEWEST
from legroom.guard.weight.usage_learner import SAMPLE_EVERY, UsageLearner, usage_in

TEXT = "x" * 400


def request_of(kind=Kind.COMPLETION, **body):
    body = {"model": "m", **body}
    return GuardedRequest(json.dumps(body).encode(), demand_of(kind, body))


def usage(prompt, output):
    return b'{"usage": {"prompt_tokens": %d, "total_tokens": 9, "completion_tokens": %d}}' % (prompt, output)


def answered(learner, request, *pieces):
    for piece in pieces:
        learner.on_chunk(request, piece)
    learner.on_finished(request)


def test_usage_is_found_in_the_bytes_of_an_answer():
    assert usage_in(b'data: {"choices":[],"usage":' + usage(3, 9)[10:]) == (3, 9)
    assert usage_in(b'{"usage":{"input_tokens":5,"output_tokens":7}}') == (5, 7)
    assert usage_in(b'{"usage": null}') is None
    assert usage_in(b"nothing") is None


def test_answers_with_usage_teach_tokens_a_byte():
    learner = UsageLearner(None)
    for _ in range(FEWEST):
        answered(learner, request_of(prompt=TEXT), usage(100, 5))
    assert learner.model_tokens("m").bound(400, True, 0) < 130


def test_a_prompt_that_the_server_cut_teaches_nothing_about_text():
    learner = UsageLearner(None)
    for _ in range(FEWEST):
        answered(learner, request_of(prompt=TEXT, truncate_prompt_tokens=8), usage(8, 5))
    assert learner.model_tokens("m").bound(400, True, 0) >= 400


def test_open_ended_answers_teach_their_length_by_usage_or_by_their_pieces():
    told, silent = UsageLearner(None), UsageLearner(None)
    for _ in range(FEWEST):
        answered(told, request_of(prompt=TEXT, max_tokens=None), usage(100, 50))
        answered(silent, request_of(prompt=TEXT, max_tokens=None, stream=True), *[b'data: {"choices": []}\n\n'] * 50)
    assert 50 <= told.model_tokens("m").outputs.at(0.99) <= 60
    assert 75 <= silent.model_tokens("m").outputs.at(0.99) <= 90


def test_answers_whose_length_was_named_teach_nothing_about_open_ones():
    learner = UsageLearner(None)
    answered(learner, request_of(prompt=TEXT, max_tokens=9), usage(100, 9))
    assert learner.model_tokens("m").outputs.count == 0


def test_a_stream_that_names_its_usage_in_every_piece_teaches_once_and_at_its_end():
    learner = UsageLearner(None)
    request = request_of(prompt=TEXT, max_tokens=None, stream=True)
    answered(learner, request, *(b"data: " + usage(100, output) for output in range(1, 2 * FEWEST)))
    learnt = learner.model_tokens("m")
    assert (learnt.outputs.count, learnt.observations(True)) == (1, 1)
    assert learnt.outputs.at(1.0) >= 2 * FEWEST - 1


def test_an_answer_that_was_cut_short_teaches_nothing():
    learner = UsageLearner(None)
    learner.on_chunk(request_of(prompt=TEXT, max_tokens=None, stream=True), b"data: " + usage(100, 1))
    assert learner.model_tokens("m").outputs.count == 0


async def test_streams_without_usage_have_some_prompts_counted_in_passing():
    asked = []

    async def tokenize(body):
        asked.append(json.loads(body))
        return 100

    learner = UsageLearner(tokenize)
    for _ in range(FEWEST + 2 * SAMPLE_EVERY):
        learner.on_admitted(request_of(prompt=TEXT, stream=True))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert FEWEST <= len(asked) <= FEWEST + 3
    assert asked[0] == {"model": "m", "prompt": TEXT}
    assert learner.model_tokens("m").bound(400, True, 0) < 130


async def test_a_tokenizer_that_fails_teaches_nothing_and_harms_nobody():
    async def tokenize(_):
        raise OSError("gone")

    learner = UsageLearner(tokenize)
    for _ in range(3):
        learner.on_admitted(request_of(prompt=TEXT, stream=True))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert learner.model_tokens("m").bound(400, True, 0) >= 400


def test_images_are_weighed_by_what_answers_with_images_took():
    learner = UsageLearner(None)
    content = [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]
    for _ in range(FEWEST):
        answered(learner, request_of(Kind.CHAT, messages=[{"role": "user", "content": content}]), usage(600, 5))
    assert learner.model_tokens("m").media_tokens.value == 600


def test_ids_that_stand_in_place_of_a_chat_teach_nothing_about_text():
    learner = UsageLearner(None)
    ids = {"prompt_token_ids": [1] * 9000}
    messages = [{"role": "user", "content": TEXT}]
    answered(learner, request_of(Kind.CHAT, messages=messages, kv_transfer_params=ids), usage(9000, 5))
    assert learner.model_tokens("m").bound(400, True, 1) < 1000


CHAT = [{"role": "user", "content": TEXT}]


@pytest.mark.parametrize(
    ("kind", "body", "asked"),
    [
        (Kind.CHAT, {"messages": CHAT, "prompt": "a"}, {"model": "m", "messages": CHAT}),
        (Kind.COMPLETION, {"prompt": TEXT, "messages": CHAT}, {"model": "m", "prompt": TEXT}),
        (Kind.CHAT, {"messages": CHAT, "documents": [{"text": TEXT}]}, None),
        (Kind.MESSAGES, {"messages": CHAT, "system": TEXT}, None),
        (Kind.CHAT, {"messages": CHAT, "kv_transfer_params": {"prompt_token_ids": [1] * 900}}, None),
    ],
)
async def test_a_prompt_is_counted_by_its_own_key_and_only_where_that_is_all_of_it(kind, body, asked):
    seen = []

    async def tokenize(sent):
        seen.append(json.loads(sent))
        return 7

    request = request_of(kind, **body)
    count = await UsageLearner(tokenize).count(request.demand, request.body)
    assert (count, seen) == ((7, [asked]) if asked else (None, []))
