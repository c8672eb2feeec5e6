"""The middleware between a client and a server: what passes, what waits, what is turned away."""

import asyncio
import json
import os

import pytest
from guard_asgi import Call, Server, settle, vllm_state

from legroom.guard import Guard

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

WHOLE_POOL = {"prompt": [1] * 64, "max_tokens": 64}  # 8 blocks of 16 tokens; ten are there
SMALL = {"prompt": [1] * 8, "max_tokens": 8}


def series(page):
    lines = (line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def test_a_request_that_fits_passes_with_its_body_untouched():
    async def test():
        server = Server()
        call = await Call(Guard(server), body=SMALL)
        assert (call.status, call.body) == (200, b'{"ok": true}')
        assert json.loads(server.bodies[0]) == SMALL

    asyncio.run(test())


def test_requests_beyond_the_pool_wait_and_enter_in_order():
    async def test():
        server, order = Server(), []
        guard = Guard(server)
        server.open.clear()
        calls = [Call(guard, body=WHOLE_POOL) for _ in range(5)]
        for number, call in enumerate(calls):
            call.task.add_done_callback(lambda _, number=number: order.append(number))
        await settle()
        assert (server.inside, guard.door.pool.waiting) == (1, 4)
        server.open.set()
        await asyncio.gather(*(call.task for call in calls))
        assert server.most_inside == 1
        assert order == [0, 1, 2, 3, 4]
        assert all(call.status == 200 for call in calls)
        assert guard.door.pool.held_blocks == 0

    asyncio.run(test())


def test_no_more_sequences_enter_than_vllm_runs():
    async def test():
        server = Server()
        server.open.clear()
        guard = Guard(server)
        calls = [Call(guard, body=SMALL) for _ in range(6)]
        await settle()
        assert server.inside == 4
        server.open.set()
        await asyncio.gather(*(call.task for call in calls))

    asyncio.run(test())


def test_a_full_queue_answers_429_with_retry_after(policy):
    async def test():
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

    asyncio.run(test())


def test_bodies_that_wait_have_a_bound_together(monkeypatch):
    async def test():
        monkeypatch.setattr("legroom.guard.door.MOST_WAITING_BYTES", 400)
        server = Server()
        server.open.clear()
        guard = Guard(server)
        calls = [Call(guard, body=WHOLE_POOL) for _ in range(3)]
        await settle()
        assert [call.status for call in calls] == [None, None, 429]
        server.open.set()
        await asyncio.gather(*(call.task for call in calls))
        assert guard.door._waiting_bytes == 0

    asyncio.run(test())


def test_a_wait_that_takes_too_long_ends_in_429_with_retry_after(policy):
    async def test():
        server = Server()
        server.open.clear()
        guard = Guard(server, policy=policy("[queue]\nwait_s = 0.01"))
        first, second = Call(guard, body=WHOLE_POOL), Call(guard, body=WHOLE_POOL)
        await second
        assert (second.status, second.error["code"]) == (429, "queue_timeout")
        assert "retry-after" in second.headers
        server.open.set()
        await first

    asyncio.run(test())


def test_a_client_that_leaves_while_it_waits_leaves_the_queue():
    async def test():
        server = Server()
        server.open.clear()
        guard = Guard(server)
        first, second, third = (Call(guard, body=WHOLE_POOL) for _ in range(3))
        await settle()
        second.leave()
        await second
        assert guard.door.pool.waiting == 1
        assert second.status is None
        server.open.set()
        await asyncio.gather(first.task, third.task)
        assert len(server.bodies) == 2
        assert guard.door.meters.left_queue == 1

    asyncio.run(test())


def test_a_request_that_is_cancelled_while_it_waits_leaves_nothing_behind():
    async def test():
        server = Server()
        guard = Guard(server)
        server.open.clear()
        first, second = Call(guard, body=WHOLE_POOL), Call(guard, body=WHOLE_POOL)
        await settle()
        before = asyncio.all_tasks()
        second.task.cancel()
        await settle()
        assert guard.door.pool.waiting == 0
        assert len(before - asyncio.all_tasks()) == 2, "its own task, and the one that listened to its client"
        server.open.set()
        await first

    asyncio.run(test())


def test_a_client_that_waited_can_still_leave_while_it_is_served():
    async def test():
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

    asyncio.run(test())


def test_what_an_aborted_request_held_is_given_back_a_moment_later(policy):
    async def test():
        server = Server()
        server.open.clear()
        guard = Guard(server, policy=policy("[pool]\nabort_grace_s = 0.02"))
        call = Call(guard, body=SMALL)
        await settle()
        call.leave()
        await call
        assert server.left == 1
        assert guard.door.pool.held_blocks == 1
        await asyncio.sleep(0.05)
        assert guard.door.pool.held_blocks == 0

    asyncio.run(test())


@pytest.mark.parametrize(("status", "kept"), [(200, 8), (400, 0)])
def test_a_response_in_the_background_keeps_its_place_unless_it_was_refused(status, kept):
    async def test():
        guard = Guard(Server(status=status))
        await Call(guard, "/v1/responses", {"input": "hi", "background": True})
        assert guard.door.pool.held_blocks == kept

    asyncio.run(test())


def test_a_request_that_can_never_fit_gets_400_with_the_numbers():
    async def test():
        call = await Call(Guard(Server()), body={"prompt": [1] * 64, "max_tokens": 64, "n": 3})
        assert (call.status, call.error["code"]) == (400, "never_fits")
        assert "384" in call.error["message"]
        assert "160" in call.error["message"]

    asyncio.run(test())


def test_a_request_that_is_too_large_only_by_estimate_is_served_alone():
    async def test():
        server = Server()
        text = {"prompt": ["x" * 100, "y" * 100], "max_tokens": 4}
        call = await Call(Guard(server), body=text)
        assert call.status == 200

    asyncio.run(test())


@pytest.mark.parametrize("path", ["/health", "/version", "/v1/models", "/ping", "/docs"])
def test_other_paths_pass_untouched_even_while_draining(path):
    async def test():
        server = Server()
        guard = Guard(server)
        guard.door.draining = True
        assert (await Call(guard, path, method="GET", raw=b"")).status == 200

    asyncio.run(test())


def test_streams_pass_chunk_by_chunk():
    async def test():
        chunks = [b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"]
        call = await Call(Guard(Server(chunks=chunks, kind=b"text/event-stream")), body={**SMALL, "stream": True})
        assert [message["body"] for message in call.messages[1:]] == [*chunks, b""]

    asyncio.run(test())


def test_lifespan_and_websockets_pass():
    async def test():
        server = Server()
        guard = Guard(server)
        await guard({"type": "lifespan"}, None, None)
        await guard({"type": "websocket", "path": "/v1/realtime"}, None, None)
        assert [scope["type"] for scope in server.scopes] == ["lifespan", "websocket"]

    asyncio.run(test())


def test_the_metrics_page_gets_the_guards_series_and_its_right_length():
    async def test():
        guard = Guard(Server(answer=b"vllm:x 1\n", kind=b"text/plain"))
        await Call(guard, body=SMALL)
        call = await Call(guard, "/metrics", method="GET", raw=b"", headers=[(b"accept-encoding", b"gzip")])
        found = series(call.body.decode())
        assert found["vllm:x"] == 1
        assert found["legroom_guard_admitted_total"] == 1
        assert found["legroom_guard_pool_tokens"] == 160
        assert found['legroom_guard_wait_seconds_bucket{le="+Inf"}'] == 1
        assert int(call.headers["content-length"]) == len(call.body)

    asyncio.run(test())


def test_the_metrics_page_parses_as_prometheus_reads_it():
    async def test():
        from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
        from prometheus_client.parser import text_string_to_metric_families as plain

        for kind, answer, parse in (
            (b"text/plain; version=0.0.4", b"", plain),
            (b"application/openmetrics-text; version=1.0.0", b"# EOF\n", open_metrics),
        ):
            guard = Guard(Server(answer=answer, kind=kind))
            call = await Call(guard, "/metrics", method="GET", raw=b"")
            families = {family.name: family for family in parse(call.body.decode())}
            assert families["legroom_guard_rejected"].type == "counter"
            assert families["legroom_guard_wait_seconds"].type == "histogram"

    asyncio.run(test())


def test_drain_and_status_are_for_who_has_the_token():
    async def test():
        guard = Guard(Server(), token="secret")
        right = [(b"authorization", b"Bearer secret")]
        assert (await Call(guard, "/-/legroom/status", method="GET", raw=b"")).status == 401
        assert (await Call(guard, "/-/legroom/drain", {"on": "yes"}, headers=right)).status == 400
        assert (await Call(guard, "/-/legroom/drain", {"on": True}, headers=right)).status == 200
        refused = await Call(guard, body=SMALL)
        assert (refused.status, refused.error["code"]) == (503, "draining")
        assert "retry-after" in refused.headers
        status = json.loads((await Call(guard, "/-/legroom/status", method="GET", raw=b"", headers=right)).body)
        assert (status["draining"], status["running"], status["waiting"]) == (True, 0, 0)
        await Call(guard, "/-/legroom/drain", {"on": False}, headers=right)
        assert (await Call(guard, body=SMALL)).status == 200

    asyncio.run(test())


def test_a_drain_with_too_large_a_body_is_answered_and_a_strangers_body_is_not_read(policy):
    async def test():
        guard = Guard(Server(), policy=policy("[requests]\nbody_bytes = 1024"), token="secret")
        right = [(b"authorization", b"Bearer secret")]
        large = await Call(guard, "/-/legroom/drain", raw=b" " * 1025, headers=right)
        assert (large.status, large.error["code"]) == (413, "body_too_large")
        stranger = await Call(guard, "/-/legroom/drain", raw=b" " * 1025)
        assert (stranger.status, stranger.body_was_read) == (401, False)

    asyncio.run(test())


def test_without_a_token_there_is_nothing_to_drain():
    async def test():
        assert (await Call(Guard(Server()), "/-/legroom/drain", {"on": True})).status == 404

    asyncio.run(test())


def test_a_pool_of_unknown_size_lets_in_or_turns_away_as_the_policy_says(policy):
    async def test():
        lost = vllm_state(blocks=None)
        guard = Guard(Server(answer=b"", kind=b"text/plain"))
        assert (await Call(guard, body=SMALL, app=lost)).status == 200
        assert "legroom_guard_fail_open 1" in guard.door.page()
        closed = Guard(Server(answer=b"", kind=b"text/plain"), policy=policy('[pool]\nwhen_unknown = "closed"'))
        call = await Call(closed, body=SMALL, app=lost)
        assert (call.status, call.error["code"]) == (503, "pool_unknown")

    asyncio.run(test())


def test_the_pool_is_learnt_from_the_metrics_page_where_the_configuration_does_not_say():
    async def test():
        page = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="11"} 1.0\n'
        guard = Guard(Server(answer=page, kind=b"text/plain"))
        await Call(guard, body=SMALL, app=vllm_state(blocks=None))
        assert guard.door.status()["pool_tokens"] == 160

    asyncio.run(test())


def test_strangers_without_the_servers_key_take_nobodys_place():
    async def test():
        server = Server(status=401)
        server.open.clear()
        guard, app = Guard(server), vllm_state(api_key=["right"])
        wrong = [Call(guard, body=WHOLE_POOL, app=app, headers=[(b"authorization", b"Bearer wrong")]) for _ in range(3)]
        await settle()
        assert (guard.door.pool.running, guard.door.pool.waiting) == (0, 0)
        right = Call(guard, body=WHOLE_POOL, app=app, headers=[(b"authorization", b"Bearer right")])
        await settle()
        assert guard.door.pool.running == 1
        server.open.set()
        await asyncio.gather(right.task, *(call.task for call in wrong))

    asyncio.run(test())


def test_a_policy_that_changes_is_taken_over_and_a_broken_one_is_not(policy, monkeypatch):
    async def test():
        path = policy("[requests]\nmax_output_tokens = 5")
        server = Server()
        guard = Guard(server, policy=path)
        now_s = guard.door.clock()
        guard.door.clock = lambda: now_s
        for number, (text, expected) in enumerate((("max_output_tokens = 6", 6), ("max_output_tokens = 'x'", 6))):
            policy(f"[requests]\n{text}")
            os.utime(path, ns=(number + 1, number + 1))
            now_s += 2
            await Call(guard, body={"prompt": [1], "max_tokens": 50})
            assert json.loads(server.bodies[-1])["max_tokens"] == expected
        assert "legroom_guard_policy_reload_errors_total 1" in guard.door.page()
        assert "line 2" in guard.door.status()["policy_error"]

    asyncio.run(test())


def test_a_broken_policy_at_the_start_says_why_without_a_traceback(policy):
    with pytest.raises(SystemExit, match="line 2"):
        Guard(Server(), policy=policy("[requests]\nmax_output = 5"))


def test_usage_in_answers_tightens_the_bound():
    async def test():
        answer = b'{"choices": [], "usage": {"prompt_tokens": 25, "total_tokens": 26, "completion_tokens": 1}}'
        guard = Guard(Server(answer=answer))
        body = {"model": "m", "prompt": "x" * 100, "max_tokens": 1}
        for _ in range(40):
            await Call(guard, body=body)
        assert guard.door.lessons.of("m").bound(100, True, 0) < 40

    asyncio.run(test())


def test_vllms_own_refusals_get_a_retry_after():
    async def test():
        call = await Call(Guard(Server(status=503)), body=SMALL)
        assert int(call.headers["retry-after"]) >= 1

    asyncio.run(test())


def test_uploads_are_not_read_at_the_door_and_take_a_full_place():
    async def test():
        server = Server()
        guard = Guard(server)
        server.open.clear()
        call = Call(guard, "/v1/audio/transcriptions", raw=b"--form")
        await settle()
        assert guard.door.pool.held_blocks == 8
        server.open.set()
        await call
        assert server.bodies == [b"--form"]

    asyncio.run(test())


def test_a_prompt_that_may_be_too_long_is_counted_by_the_servers_tokenizer(policy):
    async def test():
        server = Server(answer=b'{"count": 3}')
        guard = Guard(server, policy=policy("[requests]\nmax_prompt_tokens = 10"))
        call = await Call(guard, body={"model": "m", "prompt": "abcdefghijklmnop", "max_tokens": 1})
        assert call.status == 200
        assert [scope["path"] for scope in server.scopes] == ["/tokenize", "/v1/completions"]

    asyncio.run(test())
