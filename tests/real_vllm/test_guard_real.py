"""The guard inside a real vLLM, and in front of it: bursts that never preempt, bounds, the metrics page, draining."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from guarded_server import TOKEN, Endpoint, GuardedServer, guarded_server, proxy_before
from tiny_models import write_lora, write_model

from legroom.guard.serving.proxy import Proxy
from legroom.guard.weight.engine_limits import limits_of_metrics

BLOCKS, BLOCK_SIZE = 17, 128


@pytest.fixture(scope="module")
def server(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedServer]:
    folder = tmp_path_factory.mktemp("guarded")
    flags = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "16M", "--num-gpu-blocks-override", str(BLOCKS))
    adapter = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"tuned={write_lora(folder / 'lora')}")
    with guarded_server(vllm_python, folder, write_model(folder / "tiny"), *flags, *adapter) as server:
        yield server


@pytest.fixture(autouse=True)
def _default_policy(request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue("server")
    if server.policy.read_text() != "[requests]\nmax_output_tokens = 0\n":
        server.set_policy("[requests]\nmax_output_tokens = 0\n")


async def burst(url: str, count: int, prompt: int, output: int) -> list[tuple[int, str | None, int]]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(number: int) -> tuple[int, str | None, int]:
            ids = [5 + (number * 7 + at) % 240 for at in range(prompt)]
            body = {"model": "tiny", "prompt": ids, "max_tokens": output, "ignore_eos": True}
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                usage = (await answer.json()).get("usage") or {}
                return answer.status, answer.headers.get("retry-after"), usage.get("completion_tokens", 0)

        return await asyncio.gather(*(one(number) for number in range(count)))


def test_the_guard_learns_the_pool_from_vllm_itself(server):
    server.post({"model": "tiny", "prompt": [5], "max_tokens": 1})
    assert server.metric("legroom_guard_pool_tokens") == (BLOCKS - 1) * BLOCK_SIZE
    assert "admits up to 2,048 KV tokens" in server.log.read_text()


def test_the_metrics_page_says_what_vllms_own_configuration_says(server):
    limits = limits_of_metrics(server.page())
    assert (limits.num_blocks, limits.block_size, limits.full_request_blocks) == (BLOCKS, BLOCK_SIZE, 8)
    assert limits.max_model_len == 1024


def test_a_burst_of_many_times_the_pool_never_preempts_under_the_strict_policy_and_nothing_admitted_fails(server):
    server.set_policy('[pool]\nadmit = "strict"')
    answers = asyncio.run(burst(server.url, 64, prompt=150, output=200))  # 3 blocks each: 12 times the pool
    assert server.metric("vllm:num_preemptions_total") == 0
    served = [answer for answer in answers if answer[0] == 200]
    assert len(served) >= 5
    assert all(tokens == 200 for _, _, tokens in served)
    assert all(status == 429 and int(after) >= 1 for status, after, _ in answers if status != 200)
    assert server.metric("legroom_guard_reserved_tokens") == 0
    assert server.metric("legroom_guard_waiting") == 0


def test_a_short_queue_turns_a_burst_away_with_retry_after(server):
    server.set_policy('[queue]\nrequests = 2\n[pool]\nadmit = "strict"')
    answers = asyncio.run(burst(server.url, 40, prompt=150, output=100))
    refused = [answer for answer in answers if answer[0] == 429]
    assert refused
    assert all(int(after) >= 1 for _, after, _ in refused)
    assert len(refused) + sum(status == 200 for status, _, _ in answers) == 40
    assert server.metric("vllm:num_preemptions_total") == 0


def test_caps_are_held_by_vllm(server):
    server.set_policy("[requests]\nmax_output_tokens = 5")
    _, _, answer = server.post({"model": "tiny", "prompt": [5, 6], "max_tokens": 50, "ignore_eos": True})
    assert answer["usage"]["completion_tokens"] == 5
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
    assert server.post(chat, "/v1/chat/completions")[2]["usage"]["completion_tokens"] == 5


def test_prompts_are_counted_by_vllms_tokenizer_where_the_bound_decides(server):
    server.set_policy("[requests]\nmax_prompt_tokens = 20")
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    assert server.post(chat, "/v1/chat/completions")[0] == 200, "the bound is over 20, the prompt is not"
    long = {"model": "tiny", "prompt": "x" * 40, "max_tokens": 1}
    status, _, answer = server.post(long)
    assert (status, answer["error"]["code"]) == (400, "prompt_too_long")
    assert "40 tokens" in answer["error"]["message"] or "41 tokens" in answer["error"]["message"]
    assert server.metric("legroom_guard_tokenize_calls_total") == 2


def test_what_can_never_fit_and_what_is_no_json_gets_400(server):
    server.set_policy("[pool]\ntokens = 256")
    status, _, answer = server.post({"model": "tiny", "prompt": [5] * 500, "max_tokens": 500})
    assert (status, answer["error"]["code"]) == (400, "never_fits")
    assert server.post(b"{bad")[2]["error"]["code"] == "malformed_json"


def test_more_sequences_than_the_pool_holds_are_served_as_vllm_serves_them(server):
    many = {"model": "tiny", "prompt": [5] * 10, "max_tokens": 3, "n": 40, "temperature": 1}
    assert server.post(many)[0] == 200
    assert server.post({"model": "tiny", "prompt": [[5, 6]] * 50, "max_tokens": 3})[0] == 200


def test_a_burst_under_the_default_policy_is_served_whole(server):
    answers = asyncio.run(burst(server.url, 24, prompt=60, output=300))
    assert [(status, tokens) for status, _, tokens in answers] == [(200, 300)] * 24
    assert server.metric("legroom_guard_reserved_tokens") == 0


def test_a_client_that_leaves_gives_its_place_back(server):
    async def leave() -> None:
        async with aiohttp.ClientSession() as session:
            body = {"model": "tiny", "prompt": [5] * 100, "max_tokens": 900, "ignore_eos": True, "stream": True}
            async with session.post(f"{server.url}/v1/completions", json=body) as answer:
                await answer.content.readany()
                assert server.metric("legroom_guard_reserved_tokens") == 1024

    asyncio.run(leave())
    until = time.monotonic() + 20
    while server.metric("legroom_guard_reserved_tokens") and time.monotonic() < until:
        time.sleep(0.2)
    assert server.metric("legroom_guard_reserved_tokens") == 0


def test_draining_turns_new_requests_away_and_leaves_health_alone(server):
    right = {"authorization": f"Bearer {TOKEN}"}
    assert server.post({"on": True}, "/-/legroom/drain", **right)[2]["draining"] is True
    try:
        status, headers, _ = server.post({"model": "tiny", "prompt": [5]})
        assert (status, int(headers["retry-after"]) >= 1) == (503, True)
        assert urllib.request.urlopen(f"{server.url}/health", timeout=10).status == 200
    finally:
        server.post({"on": False}, "/-/legroom/drain", **right)
    assert server.post({"model": "tiny", "prompt": [5], "max_tokens": 1})[0] == 200


@pytest.fixture(scope="module")
def proxy(server: GuardedServer) -> Iterator[tuple[Endpoint, Proxy]]:
    with proxy_before(server) as proxy:
        yield proxy


def test_the_proxy_in_front_learns_the_same_pool_and_passes_streams(proxy):
    endpoint, guard = proxy
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 5, "ignore_eos": True, "stream": True}

    async def stream() -> list[str]:
        address = f"{endpoint.url}/v1/completions"
        async with aiohttp.ClientSession() as session, session.post(address, json=body) as answer:
            return (await answer.text()).split("\n\n")

    lines = asyncio.run(stream())
    assert guard.admission.status()["pool_tokens"] == (BLOCKS - 1) * BLOCK_SIZE
    assert lines[-2] == "data: [DONE]"
    assert len(lines) >= 6


def test_a_request_for_an_adapter_is_weighed_and_reaches_the_adapter(server, proxy):
    wish = {"prompt": [5] * 20, "max_tokens": 8, "ignore_eos": True}
    before = server.metric("legroom_guard_admitted_total")
    answers = [place.post(wish | {"model": model}) for place in (server, proxy[0]) for model in ("tiny", "tuned")]
    assert [(status, answer["model"]) for status, _, answer in answers] == [(200, "tiny"), (200, "tuned")] * 2
    assert server.metric("legroom_guard_admitted_total") == before + 4
    assert proxy[0].post(wish | {"model": "nobody"})[0] == 404


def test_a_websocket_passes_the_middleware_and_is_refused_by_the_proxy(server, proxy):
    async def status(url: str) -> int:
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
                await session.ws_connect(f"{url}/v1/realtime")
            return refusal.value.status

    # A text model has no such path, and vLLM says so itself; bench/guard_kinds.py has one that talks.
    assert asyncio.run(status(server.url)) in (403, 404)
    assert asyncio.run(status(proxy[0].url)) == 501
