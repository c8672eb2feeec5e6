"""The middleware inside vLLM: its page and its switches, what it learns of the engine, whom vLLM turns away itself."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys

import pytest
from guard_asgi import Call, Server, settle, vllm_state

from legroom.guard import Guard
from legroom.guard.serving.middleware import checked_paths

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

WHOLE_POOL = {"prompt": [1] * 64, "max_tokens": 64}  # 8 blocks of 16 tokens; ten are there
SMALL = {"prompt": [1] * 8, "max_tokens": 8}


def series(page):
    lines = (line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in lines}


async def test_the_metrics_page_gets_the_guards_series_and_its_right_length():
    guard = Guard(Server(answer=b"vllm:x 1\n", kind=b"text/plain"))
    await Call(guard, body=SMALL)
    call = await Call(guard, "/metrics", method="GET", raw=b"", headers=[(b"accept-encoding", b"gzip")])
    shown = series(call.body.decode())
    assert shown["vllm:x"] == 1
    assert shown["legroom_guard_admitted_total"] == 1
    assert shown["legroom_guard_pool_tokens"] == 160
    assert shown['legroom_guard_wait_seconds_bucket{le="+Inf"}'] == 1
    assert int(call.headers["content-length"]) == len(call.body)


async def test_an_engine_that_is_stopped_shows_on_the_page_before_a_request_finds_out():
    code = "import time; time.sleep(600)"
    with subprocess.Popen(["VLLM::EngineCore", "-c", code], executable=sys.executable) as engine:
        try:
            guard = Guard(Server(answer=b"vllm:x 1\n", kind=b"text/plain"))
            page = (await Call(guard, "/metrics", method="GET", raw=b"")).body.decode()
            assert series(page)["legroom_guard_stopped_engines"] == 0
            engine.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, engine.pid, os.WSTOPPED)
            page = (await Call(guard, "/metrics", method="GET", raw=b"")).body.decode()
            assert series(page)["legroom_guard_stopped_engines"] == 1
        finally:
            engine.kill()


async def test_the_metrics_page_parses_as_prometheus_reads_it():
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


async def test_drain_and_status_are_for_who_has_the_token():
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


async def test_a_drain_with_too_large_a_body_is_answered_and_a_strangers_body_is_not_read(policy):
    guard = Guard(Server(), policy=policy("[requests]\nbody_bytes = 1024"), token="secret")
    right = [(b"authorization", b"Bearer secret")]
    large = await Call(guard, "/-/legroom/drain", raw=b" " * 1025, headers=right)
    assert (large.status, large.error["code"]) == (413, "body_too_large")
    stranger = await Call(guard, "/-/legroom/drain", raw=b" " * 1025)
    assert (stranger.status, stranger.body_was_read) == (401, False)


async def test_without_a_token_there_is_nothing_to_drain():
    assert (await Call(Guard(Server()), "/-/legroom/drain", {"on": True})).status == 404


async def test_a_pool_of_unknown_size_lets_in_or_turns_away_as_the_policy_says(policy):
    lost = vllm_state(blocks=None)
    guard = Guard(Server(answer=b"", kind=b"text/plain"))
    assert (await Call(guard, body=SMALL, app=lost)).status == 200
    assert b"legroom_guard_fail_open 1.0" in guard.admission.page()
    closed = Guard(Server(answer=b"", kind=b"text/plain"), policy=policy('[pool]\nwhen_unknown = "closed"'))
    call = await Call(closed, body=SMALL, app=lost)
    assert (call.status, call.error["code"]) == (503, "pool_unknown")


async def test_the_pool_is_learnt_from_the_metrics_page_where_the_configuration_does_not_say():
    page = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="11"} 1.0\n'
    guard = Guard(Server(answer=page, kind=b"text/plain"))
    await Call(guard, body=SMALL, app=vllm_state(blocks=None))
    assert guard.admission.status()["pool_tokens"] == 160


async def test_strangers_without_the_servers_key_take_nobodys_place():
    server = Server(status=401)
    server.open.clear()
    guard, app = Guard(server), vllm_state(api_key=["right"])
    wrong = [Call(guard, body=WHOLE_POOL, app=app, headers=[(b"authorization", b"Bearer wrong")]) for _ in range(3)]
    await settle()
    assert (guard.admission.pool.running, guard.admission.pool.waiting) == (0, 0)
    right = Call(guard, body=WHOLE_POOL, app=app, headers=[(b"authorization", b"Bearer right")])
    await settle()
    assert guard.admission.pool.running == 1
    server.open.set()
    await asyncio.gather(right.task, *(call.task for call in wrong))


@pytest.mark.parametrize(
    ("version", "covered"),
    [
        ("0.9.0", ("/v1",)),
        ("0.21.0", ("/v1",)),
        ("0.22.0", ("/v1", "/v2", "/inference")),
        ("0.32.0", ("/v1", "/v2", "/inference", "/cohere")),
        ("a fork", ("/v1",)),
        ("", ("/v1",)),
    ],
)
def test_only_paths_that_the_release_asks_a_key_for_pass_without_one(version, covered):
    assert checked_paths(version) == covered


async def test_a_path_that_vllm_serves_without_a_key_is_guarded_without_one():
    guard, app = Guard(Server()), vllm_state(api_key=["right"])
    huge = {"token_ids": [1] * 50, "sampling_params": {"max_tokens": 100, "prompt_logprobs": -1}}
    assert (await Call(guard, "/inference/v1/generate", body=huge, app=app)).status == 400


async def test_a_server_that_nobody_asked_yet_shows_its_pool_on_the_metrics_page():
    call = await Call(Guard(Server(answer=b"x 1\n", kind=b"text/plain")), "/metrics", method="GET", raw=b"")
    assert b"legroom_guard_pool_tokens 160" in call.body
    assert b"legroom_guard_fail_open 0" in call.body


def test_a_pool_that_stays_unknown_is_said_once(caplog):
    async def test():
        guard = Guard(Server(answer=b"", kind=b"text/plain"))
        now_s = guard.admission.clock()
        guard.admission.clock = lambda: now_s
        with caplog.at_level("INFO", "legroom.guard"):
            for _ in range(3):
                await Call(guard, "/metrics", method="GET", raw=b"", app=vllm_state(blocks=None))
                now_s += 60
        assert caplog.text.count("is not known") == 1

    guard_log = logging.getLogger("legroom.guard")
    guard_log.addHandler(caplog.handler)
    try:
        asyncio.run(test())
    finally:
        guard_log.removeHandler(caplog.handler)
