"""What a request may ask for, held at the middleware's admission."""

import asyncio
import gc
import json

import pytest
from guard_asgi import Call, Server, vllm_state

from legroom.guard import Guard
from legroom.guard.request.body import MOST_VALUES, parse_body

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


async def test_an_answer_over_the_bound_is_capped(policy):
    server = Server()
    guard = Guard(server, policy=policy("[requests]\nmax_output_tokens = 5"))
    await Call(guard, body={"prompt": [1], "max_tokens": 50, "keep": "日本"})
    body = json.loads(server.bodies[0])
    assert (body["max_tokens"], body["keep"]) == (5, "日本")
    headers = dict(server.scopes[0]["headers"])
    assert headers[b"content-length"] == str(len(server.bodies[0])).encode()


async def test_neither_key_of_a_chat_says_more_than_the_bound(policy):
    server = Server()
    guard = Guard(server, policy=policy("[requests]\nmax_output_tokens = 5"))
    for named in ({"max_completion_tokens": 0, "max_tokens": 50}, {"max_completion_tokens": 50, "max_tokens": 60}):
        await Call(guard, "/v1/chat/completions", {"messages": [], **named})
    first, second = map(json.loads, server.bodies)
    assert (first["max_completion_tokens"], first["max_tokens"]) == (0, 5)
    assert (second["max_completion_tokens"], second["max_tokens"]) == (5, 5)


async def test_an_answer_over_the_bound_is_rejected_where_the_policy_says_so(policy):
    guard = Guard(Server(), policy=policy('[requests]\nmax_output_tokens = 5\noutput_over = "reject"'))
    call = await Call(guard, body={"prompt": [1], "max_tokens": 50})
    assert (call.status, call.error["code"], call.error["param"]) == (400, "output_too_long", "max_tokens")


@pytest.mark.parametrize("over", ["cap", "reject"])
async def test_a_request_that_names_no_length_is_bounded_in_either_mode(policy, over):
    server = Server()
    guard = Guard(server, policy=policy(f'[requests]\nmax_output_tokens = 5\noutput_over = "{over}"'))
    assert (await Call(guard, "/v1/chat/completions", {"messages": []})).status == 200
    assert (await Call(guard, body={"prompt": [1]})).status == 200
    assert json.loads(server.bodies[0])["max_tokens"] == 5
    assert json.loads(server.bodies[1])["max_tokens"] == 5, "vLLM's own default is more"


async def test_a_number_of_any_size_is_answered_and_leaves_the_metrics_page_readable():
    guard = Guard(Server())
    call = await Call(guard, body={"prompt": [1], "max_tokens": 10**400, "logprobs": 1})
    assert call.status == 200
    unknown = vllm_state(blocks=None, max_model_len=None, max_num_seqs=None)
    lost = Guard(Server(answer=b"", kind=b"text/plain"))
    assert (await Call(lost, body={"prompt": [1], "max_tokens": 10**400, "n": 10**400}, app=unknown)).status == 200
    assert b"legroom_guard_reserved_tokens 0.0" in lost.admission.page()


async def test_a_chat_without_a_length_gets_the_policys(policy):
    server = Server()
    guard = Guard(server, policy=policy("[requests]\ndefault_output_tokens = 7"))
    await Call(guard, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    assert json.loads(server.bodies[0])["max_tokens"] == 7


@pytest.mark.parametrize(
    ("bound", "body", "code"),
    [
        ("max_sequences = 2", {"prompt": [1], "n": 3}, "too_many_sequences"),
        ("max_sequences = 2", {"prompt": [1], "best_of": 3}, "too_many_sequences"),
        ("max_prompts = 1", {"prompt": [[1], [2]]}, "too_many_sequences"),
        ("max_logprobs = 3", {"prompt": [1], "logprobs": 4}, "too_many_logprobs"),
        ("max_prompt_logprobs = 3", {"prompt": [1], "prompt_logprobs": -1}, "too_many_prompt_logprobs"),
        ("max_prompt_tokens = 3", {"prompt": [1, 2, 3, 4]}, "prompt_too_long"),
    ],
)
async def test_each_bound_is_held(policy, bound, body, code):
    call = await Call(Guard(Server(), policy=policy(f"[requests]\n{bound}")), body=body)
    assert (call.status, call.error["code"]) == (400, code)
    assert set(call.error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "http://a/b"}]}]},
        ),
        ("/v1/responses", {"input": "hi", "previous_response_id": "r1"}),
        ("/v1/audio/transcriptions", {}),
    ],
)
async def test_what_does_not_stand_in_the_request_is_not_held_against_the_longest_prompt(policy, path, body):
    guard = Guard(Server(), policy=policy('[requests]\nmax_prompt_tokens = 1000\n[pool]\ncount = "bytes"'))
    app = vllm_state(blocks=1001, max_model_len=4096)
    assert (await Call(guard, path, body, app=app)).status == 200
    long = {**body, "input": "x" * 2000, "messages": [{"role": "user", "content": "x" * 2000}]}
    assert (await Call(guard, path, long, app=app)).status == (200 if "audio" in path else 400)


def image(url="data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAJxAAACcQ"):
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize(
    ("bound", "parts", "code"),
    [
        ("max_images = 1", [image(), image()], "too_many_media"),
        ("media_bytes = 10", [image()], "media_too_large"),
        ("image_pixels = 1000", [image()], "media_too_large"),
        ('remote_media = "reject"', [image("https://example.org/cat.png")], "remote_media"),
        (
            "max_audios = 0",
            [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
            "too_many_media",
        ),
    ],
)
async def test_each_bound_on_media_is_held(policy, bound, parts, code):
    body = {"messages": [{"role": "user", "content": parts}]}
    call = await Call(Guard(Server(), policy=policy(f"[requests]\n{bound}")), "/v1/chat/completions", body)
    assert (call.status, call.error["code"]) == (400, code)


@pytest.mark.parametrize("raw", [b"{bad", b"", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}"])
async def test_a_body_that_is_no_json_object_gets_400(raw):
    call = await Call(Guard(Server()), raw=raw)
    assert (call.status, call.error["code"]) == (400, "malformed_json")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
async def test_a_body_is_read_in_every_encoding_that_the_server_reads(encoding):
    call = await Call(Guard(Server()), raw='{"prompt": [1], "max_tokens": 1}'.encode(encoding))
    assert call.status == 200


async def test_a_body_too_deep_to_be_written_again_gets_400():
    guard = Guard(Server())
    for depth in range(900, 1000):
        raw = b'{"messages": [], "tools": ' + b"[" * depth + b"]" * depth + b"}"
        assert (await Call(guard, "/v1/chat/completions", raw=raw)).status in (200, 400)


@pytest.mark.parametrize("piece", [b"[],", b"{},", b'"ab",', b'"\\\\",', b'"a\\"b",', b'{"a":1},'])
def test_more_lists_objects_and_strings_than_any_request_has_are_not_read(piece):
    with pytest.raises(ValueError, match="more than 250,000 lists"):
        parse_body(b"[" + piece * (2 * MOST_VALUES + 2) + b"1]")
    parse_body(b"[" + piece * 1000 + b" " * MOST_VALUES + b"1]")


@pytest.mark.parametrize("text", ["[{", "]}", '"', "\\", '["\\', "[\\n"])
def test_brackets_and_quotes_inside_of_text_are_text(text):
    whole = {"prompt": text * MOST_VALUES}
    assert parse_body(json.dumps(whole).encode()) == whole


LISTS = b"[" + b"[]," * 100_000 + b" " * (1 << 20)


def test_the_collector_rests_while_a_large_body_is_read_and_works_again_after():
    seen = []
    gc.callbacks.append(lambda phase, _: seen.append(phase))
    try:
        parse_body(LISTS + b"[]]")
    finally:
        gc.callbacks.pop()
    assert gc.isenabled()
    assert len(seen) <= 2
    with pytest.raises(ValueError, match="Expecting"):
        parse_body(LISTS)
    assert gc.isenabled()


async def test_a_body_over_the_limit_gets_413(policy):
    guard = Guard(Server(), policy=policy("[requests]\nbody_bytes = 2000"))
    assert (await Call(guard, raw=b"x" * 2001)).status == 413
    announced = await Call(guard, raw=b"{}", headers=[(b"content-length", b"99999")])
    assert (announced.status, announced.error["code"]) == (413, "body_too_large")


async def test_an_upload_over_the_limit_gets_413(policy):
    server = Server()
    guard = Guard(server, policy=policy("[requests]\nbody_bytes = 2000\n[pool]\nabort_grace_s = 0"))
    path = "/v1/audio/transcriptions"
    announced = await Call(guard, path, raw=b"x", headers=[(b"content-length", b"99999")])
    assert (announced.status, server.scopes) == (413, [])
    sent = await Call(guard, path, raw=b"x" * 2001)
    assert (sent.status, sent.error["code"], server.bodies) == (413, "body_too_large", [])
    assert (await Call(guard, path, raw=b"x" * 2000)).status == 200


async def test_the_time_for_a_body_is_one_for_all_of_it(policy):
    guard = Guard(Server(), policy=policy("[queue]\nbody_timeout_s = 0.25"))
    sent, pieces = [], 0

    async def receive():
        nonlocal pieces
        pieces += 1
        await asyncio.sleep(0.1)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "app": vllm_state()}
    await guard(scope, receive, send)
    assert sent[0]["status"] == 408
    assert pieces <= 3


async def test_a_body_that_never_comes_gets_408(policy):
    guard = Guard(Server(), policy=policy("[queue]\nbody_timeout_s = 0.1"))
    sent = []

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "app": vllm_state()}
    await guard(scope, receive, send)
    assert sent[0]["status"] == 408
