"""The guard inside a real vLLM, and in front of it: bursts that never preempt, bounds, the metrics page, draining."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from metrics_page import metric
from tiny_models import SERVE_ENV, serve_words, write_model

from legroom.guard.limits import limits_of_metrics
from legroom.guard.proxy.server import Proxy, ProxyOptions
from legroom.guard.proxy.wire import upstream_of

ROOT = Path(__file__).parents[2]
BLOCKS, BLOCK_SIZE = 17, 128
TOKEN = "a token of the tests"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Server:
    """A vLLM that serves with the guard."""

    def __init__(self, port: int, policy: Path) -> None:
        self.port, self.url, self.policy = port, f"http://127.0.0.1:{port}", policy

    def post(self, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[int, dict[str, str], Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, dict(answer.headers), json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, {name.lower(): value for name, value in error.headers.items()}, json.loads(error.read())

    def page(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        return metric(self.url, name)

    def set_policy(self, text: str) -> None:
        self.policy.write_text(text)
        time.sleep(1.1)  # the file is looked at once a second


@pytest.fixture(scope="module")
def server(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("guarded")
    policy = folder / "policy.toml"
    policy.write_text("")
    port = free_port()
    # float32: bfloat16 takes AMX instructions, which some virtual machines announce and do not run.
    words = serve_words(
        vllm_python, write_model(folder / "tiny"), port, "--dtype", "float32", "--served-model-name", "tiny",
        "--max-model-len", "1024", "--kv-cache-memory-bytes", "16M", "--num-gpu-blocks-override", str(BLOCKS),
        "--middleware", "legroom.guard.Guard",
    )  # fmt: skip
    env = os.environ | SERVE_ENV | {
        "PYTHONPATH": str(ROOT / "src"), "LEGROOM_GUARD_POLICY": str(policy), "LEGROOM_GUARD_TOKEN": TOKEN,
    }  # fmt: skip
    log = folder / "log"
    child = subprocess.Popen(words, env=env, stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True)
    found = Server(port, policy)
    try:
        for _ in range(1200):
            try:
                urllib.request.urlopen(f"{found.url}/health", timeout=2)
                break
            except OSError:
                assert child.poll() is None, log.read_text()[-3000:]
                time.sleep(0.5)
        found.log = log  # type: ignore[attr-defined]
        yield found
    finally:
        os.killpg(child.pid, signal.SIGINT)
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


@pytest.fixture(autouse=True)
def _default_policy(request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue("server")
    if server.policy.read_text():
        server.set_policy("")


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


def test_the_proxy_in_front_learns_the_same_pool_and_passes_streams(server):
    async def through() -> tuple[int, list[str]]:
        proxy = Proxy(ProxyOptions(upstream_of(server.url), port=0))
        stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        running = asyncio.ensure_future(proxy.run(stop, ready.set_result))
        port = await ready
        async with asyncio.timeout(30):
            while not proxy.admission.limits.known:
                await asyncio.sleep(0.05)
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 5, "ignore_eos": True, "stream": True}
        address = f"http://127.0.0.1:{port}/v1/completions"
        async with aiohttp.ClientSession() as session, session.post(address, json=body) as answer:
            lines = (await answer.text()).split("\n\n")
        stop.set()
        await running
        return proxy.admission.status()["pool_tokens"], lines

    pool, lines = asyncio.run(through())
    assert pool == (BLOCKS - 1) * BLOCK_SIZE
    assert lines[-2] == "data: [DONE]"
    assert len(lines) >= 6
