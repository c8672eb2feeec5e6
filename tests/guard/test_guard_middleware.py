"""The middleware between a client and a server: what passes, what waits, what is refused."""

import asyncio
import json
import os
from types import SimpleNamespace

import pytest
from guard_asgi import Call, Server, settle, until, vllm_state

from legroom.guard import Guard

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

WHOLE_POOL = {"prompt": [1] * 64, "max_tokens": 64}  # 8 blocks of 16 tokens; ten are there
SMALL = {"prompt": [1] * 8, "max_tokens": 8}


async def test_a_request_that_fits_passes_with_its_body_untouched():
    server = Server()
    call = await Call(Guard(server), body=SMALL)
    assert (call.status, call.body) == (200, b'{"ok": true}')
    assert json.loads(server.bodies[0]) == SMALL


async def test_requests_beyond_the_pool_wait_and_enter_in_order():
    server, order = Server(), []
    guard = Guard(server)
    server.open.clear()
    calls = [Call(guard, body=WHOLE_POOL) for _ in range(5)]
    for number, call in enumerate(calls):
        call.task.add_done_callback(lambda _, number=number: order.append(number))
    await settle()
    assert (server.inside, guard.admission.pool.waiting) == (1, 4)
    server.open.set()
    await asyncio.gather(*(call.task for call in calls))
    assert server.most_inside == 1
    assert order == [0, 1, 2, 3, 4]
    assert all(call.status == 200 for call in calls)
    assert guard.admission.pool.held_blocks == 0


async def test_no_more_sequences_enter_than_vllm_runs():
    server = Server()
    server.open.clear()
    guard = Guard(server)
    calls = [Call(guard, body=SMALL) for _ in range(6)]
    await settle()
    assert server.inside == 4
    server.open.set()
    await asyncio.gather(*(call.task for call in calls))


async def test_a_full_queue_answers_429_with_retry_after(policy):
    server = Server()
    server.open.clear()
    guard = Guard(server, policy=policy("[queue]\nrequests = 1"))
    calls = [Call(guard, body=WHOLE_POOL) for _ in range(3)]
    await settle()
    assert calls[2].status == 429
    assert int(calls[2].headers["retry-after"]) >= 1
    assert calls[2].error["type"] == "rate_limit_error"
    assert calls[2].error["code"] == "queue_full"
    server.open.set()
    await asyncio.gather(*(call.task for call in calls))


async def test_bodies_that_wait_have_a_bound_together(monkeypatch):
    monkeypatch.setattr("legroom.guard.pool.admission.MOST_WAITING_BYTES", 400)
    server = Server()
    server.open.clear()
    guard = Guard(server)
    calls = [Call(guard, body=WHOLE_POOL) for _ in range(3)]
    await settle()
    assert [call.status for call in calls] == [None, None, 429]
    server.open.set()
    await asyncio.gather(*(call.task for call in calls))
    assert guard.admission._waiting_bytes == 0


async def test_a_wait_that_takes_too_long_ends_in_429_with_retry_after(policy):
    server = Server()
    server.open.clear()
    guard = Guard(server, policy=policy("[queue]\nwait_s = 0.01"))
    first, second = Call(guard, body=WHOLE_POOL), Call(guard, body=WHOLE_POOL)
    await second
    assert (second.status, second.error["code"]) == (429, "queue_timeout")
    assert "retry-after" in second.headers
    server.open.set()
    await first


async def test_a_client_that_leaves_while_it_waits_leaves_the_queue():
    server = Server()
    server.open.clear()
    guard = Guard(server)
    first, second, third = (Call(guard, body=WHOLE_POOL) for _ in range(3))
    await settle()
    second.leave()
    await second
    assert guard.admission.pool.waiting == 1
    assert second.status is None
    server.open.set()
    await asyncio.gather(first.task, third.task)
    assert len(server.bodies) == 2
    assert guard.admission.metrics.left_queue == 1


async def test_a_request_that_is_cancelled_while_it_waits_leaves_nothing_behind():
    server = Server()
    guard = Guard(server)
    server.open.clear()
    first, second = Call(guard, body=WHOLE_POOL), Call(guard, body=WHOLE_POOL)
    await settle()
    before = asyncio.all_tasks()
    second.task.cancel()
    await settle()
    assert guard.admission.pool.waiting == 0
    assert len(before - asyncio.all_tasks()) == 2, "its own task, and the one that listened to its client"
    server.open.set()
    await first


async def test_a_client_that_waited_can_still_leave_while_it_is_served():
    server = Server()
    server.open.clear()
    guard = Guard(server)
    first, second = Call(guard, body=WHOLE_POOL), Call(guard, body=WHOLE_POOL)
    await settle()
    server.open.set()
    await first
    server.open.clear()
    await settle()
    second.leave()
    await settle()
    server.open.set()
    await second
    assert second.status == 200 or server.left == 1


async def test_what_an_aborted_request_held_is_given_back_a_moment_later(policy):
    server = Server()
    server.open.clear()
    guard = Guard(server, policy=policy("[pool]\nabort_grace_s = 0.02"))
    call = Call(guard, body=SMALL)
    await settle()
    call.leave()
    await call
    assert server.left == 1
    assert guard.admission.pool.held_blocks == 1
    await asyncio.sleep(0.05)
    assert guard.admission.pool.held_blocks == 0


@pytest.mark.parametrize(("status", "kept"), [(200, 8), (400, 0)])
async def test_a_response_in_the_background_keeps_its_place_unless_it_was_refused(status, kept):
    guard = Guard(Server(status=status))
    await Call(guard, "/v1/responses", {"input": "hi", "background": True})
    assert guard.admission.pool.held_blocks == kept


async def test_a_request_that_can_never_fit_gets_400_with_the_numbers():
    call = await Call(Guard(Server()), body={"prompt": [1] * 64, "max_tokens": 320}, app=vllm_state(max_model_len=1024))
    assert (call.status, call.error["code"]) == (400, "never_fits")
    assert "384" in call.error["message"]
    assert "160" in call.error["message"]


async def test_a_request_that_is_too_large_only_by_estimate_is_served_alone():
    server = Server()
    text = {"prompt": ["x" * 100, "y" * 100], "max_tokens": 4}
    call = await Call(Guard(server), body=text)
    assert call.status == 200


@pytest.mark.parametrize("path", ["/health", "/version", "/v1/models", "/ping", "/docs"])
async def test_other_paths_pass_untouched_even_while_draining(path):
    server = Server()
    guard = Guard(server)
    guard.admission.draining = True
    assert (await Call(guard, path, method="GET", raw=b"")).status == 200


async def test_streams_pass_chunk_by_chunk():
    chunks = [b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"]
    call = await Call(Guard(Server(chunks=chunks, kind=b"text/event-stream")), body={**SMALL, "stream": True})
    assert [message["body"] for message in call.messages[1:]] == [*chunks, b""]


async def test_lifespan_and_websockets_pass():
    server = Server()
    guard = Guard(server)
    await guard({"type": "lifespan"}, None, None)
    await guard({"type": "websocket", "path": "/v1/realtime"}, None, None)
    assert [scope["type"] for scope in server.scopes] == ["lifespan", "websocket"]


async def test_a_policy_that_changes_is_taken_over_and_a_broken_one_is_not(policy, monkeypatch):
    path = policy("[requests]\nmax_output_tokens = 5")
    server = Server()
    guard = Guard(server, policy=path)
    now_s = guard.admission.clock()
    guard.admission.clock = lambda: now_s
    for number, (text, expected) in enumerate((("max_output_tokens = 6", 6), ("max_output_tokens = 'x'", 6))):
        policy(f"[requests]\n{text}")
        os.utime(path, ns=(number + 1, number + 1))
        now_s += 2
        await Call(guard, body={"prompt": [1], "max_tokens": 50})
        assert json.loads(server.bodies[-1])["max_tokens"] == expected
    assert b"legroom_guard_policy_reload_errors_total 1.0" in guard.admission.page()
    assert "line 2" in guard.admission.status()["policy_error"]


async def test_a_policy_that_was_cut_off_is_a_warning_with_each_limit_that_went(policy, capsys):
    path = policy("[requests]\nmax_output_tokens = 64\nmax_sequences = 1\nmax_images = 2\n[weights]\nsecret = 2.0")
    guard = Guard(Server(), policy=path)
    policy("[requests]\nmax_output_tokens = 6")
    guard.admission.reload(force=True)
    warned = capsys.readouterr().err
    assert warned.startswith("WARNING") and "secret" not in warned
    for changed in ("max_output_tokens 64 -> 6", "max_sequences 1 -> 0", "max_images 2 -> unset", "weights"):
        assert changed in warned


def test_a_broken_policy_at_the_start_says_why_without_a_traceback(policy):
    with pytest.raises(SystemExit, match="line 2"):
        Guard(Server(), policy=policy("[requests]\nmax_output = 5"))


async def test_usage_in_answers_tightens_the_bound():
    answer = b'{"choices": [], "usage": {"prompt_tokens": 25, "total_tokens": 26, "completion_tokens": 1}}'
    guard = Guard(Server(answer=answer))
    body = {"model": "m", "prompt": "x" * 100, "max_tokens": 1}
    for _ in range(40):
        await Call(guard, body=body)
    assert guard.admission.learner.model_tokens("m").bound(100, True, 0) < 40


async def test_vllms_own_refusals_get_a_retry_after():
    call = await Call(Guard(Server(status=503)), body=SMALL)
    assert int(call.headers["retry-after"]) >= 1


@pytest.mark.parametrize(("errored", "status"), [(True, 503), (False, 500)])
async def test_the_500_of_an_engine_that_has_ended_becomes_a_503_with_retry_after(errored, status):
    app = vllm_state()
    app.state.engine_client = SimpleNamespace(errored=errored)
    call = await Call(Guard(Server(status=500)), body=SMALL, app=app)
    assert call.status == status and ("retry-after" in call.headers) is errored
    assert len(call.body) == int(call.headers["content-length"])


async def test_uploads_are_not_read_before_admission_and_take_a_full_place():
    server = Server()
    guard = Guard(server)
    server.open.clear()
    call = Call(guard, "/v1/audio/transcriptions", raw=b"--form")
    await settle()
    assert guard.admission.pool.held_blocks == 8
    server.open.set()
    await call
    assert server.bodies == [b"--form"]


async def test_an_upload_that_does_not_arrive_in_time_gives_its_place_back(policy):
    async def reads_the_form(_, receive, send):
        while (message := await receive())["type"] == "http.request":
            assert message["more_body"]
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": b"the client left"})

    guard = Guard(reads_the_form, policy=policy("[queue]\nbody_timeout_s = 0.1\n[pool]\nabort_grace_s = 0"))
    call = await Call(guard, "/v1/audio/transcriptions", raw=b"--form", more_body=True)
    assert (call.status, call.error["code"]) == (408, "body_timeout")
    await until(lambda: guard.admission.pool.running == 0)


async def test_a_prompt_that_may_be_too_long_is_counted_by_the_servers_tokenizer(policy):
    server = Server(answer=b'{"count": 3}')
    guard = Guard(server, policy=policy("[requests]\nmax_prompt_tokens = 10"))
    call = await Call(guard, body={"model": "m", "prompt": "abcdefghijklmnop", "max_tokens": 1})
    assert call.status == 200
    assert [scope["path"] for scope in server.scopes] == ["/tokenize", "/v1/completions"]
