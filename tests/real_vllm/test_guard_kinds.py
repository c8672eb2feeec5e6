"""The guard before other kinds of servers: one that embeds and scores, and one with two engines and two API servers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from guarded_server import TOKEN, Endpoint, GuardedServer, guarded_server, proxy_before
from tiny_models import write_lora, write_model

from legroom.guard.serving.proxy import Proxy

Places = tuple[GuardedServer, Endpoint]


@pytest.fixture(scope="module")
def pooling(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    folder = tmp_path_factory.mktemp("pooling")
    flags = ("--runner", "pooling", "--convert", "embed", "--max-model-len", "512", "--kv-cache-memory-bytes", "16M")
    with (
        guarded_server(vllm_python, folder, write_model(folder / "tiny"), *flags) as server,
        proxy_before(server) as (endpoint, _),
    ):
        yield server, endpoint


@pytest.mark.parametrize("place", [0, 1], ids=["middleware", "proxy"])
def test_embeddings_scores_and_ranks_are_weighed_and_answered(pooling, place):
    server, before = pooling[0], pooling[0].metric("legroom_guard_admitted_total")
    texts = ["one", "two", "three"]
    status, _, embedded = pooling[place].post({"model": "tiny", "input": texts}, "/v1/embeddings")
    assert (status, [len(row["embedding"]) for row in embedded["data"]]) == (200, [128] * 3)
    status, _, scored = pooling[place].post({"model": "tiny", "text_1": "one", "text_2": texts}, "/score")
    assert (status, scored["data"][0]["score"]) == (200, pytest.approx(1.0, abs=1e-3))
    status, _, ranked = pooling[place].post({"model": "tiny", "query": "two", "documents": texts}, "/rerank")
    assert (status, ranked["results"][0]["document"]["text"]) == (200, "two")
    assert server.metric("legroom_guard_admitted_total") == before + 3
    assert server.metric("legroom_guard_reserved_tokens") == 0


@pytest.mark.parametrize("place", [0, 1], ids=["middleware", "proxy"])
def test_an_input_that_is_too_long_gets_vllms_own_answer(pooling, place):
    status, _, answer = pooling[place].post({"model": "tiny", "input": "x" * 600}, "/v1/embeddings")
    assert status == 400
    assert "512" in answer["error"]["message"]


@pytest.fixture(scope="module")
def several(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[GuardedServer, Proxy, Endpoint]]:
    folder = tmp_path_factory.mktemp("several")
    flags = ("--data-parallel-size", "2", "--max-model-len", "512", "--kv-cache-memory-bytes", "16M")
    flags += ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"tuned={write_lora(folder / 'lora')}")
    with (
        guarded_server(vllm_python, folder, write_model(folder / "tiny"), *flags) as server,
        proxy_before(server) as (endpoint, proxy),
    ):
        yield server, proxy, endpoint


def test_a_burst_on_two_engines_behind_two_api_servers_is_served_whole(several):
    server, _, endpoint = several
    body = {"model": "tiny", "prompt": [5] * 20, "max_tokens": 100, "ignore_eos": True}
    with ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(lambda number: (server, endpoint)[number % 2].post(body), range(32)))
    assert [answer["usage"]["completion_tokens"] for _, _, answer in answers] == [100] * 32
    engines = [line for line in server.page().splitlines() if line.startswith("vllm:generation_tokens_total{")]
    assert len(engines) == 2 and all(float(line.rpartition(" ")[2]) > 0 for line in engines)


def test_the_proxy_takes_the_pools_of_both_engines_for_one(several):
    _, proxy, _ = several
    assert proxy.admission.limits.ranks == 2


def test_an_adapter_answers_with_tokens_of_its_own_through_the_middleware_and_the_proxy(several):
    server, _, endpoint = several
    wish = {"prompt": [5, 40, 77], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    for place in (server, endpoint):
        base, tuned = (place.post(wish | {"model": model})[2]["choices"][0]["token_ids"] for model in ("tiny", "tuned"))
        assert len(base) == len(tuned) == 8 and base != tuned


def test_both_api_servers_drain_when_one_is_asked(several):
    server, _, _ = several
    right = {"authorization": f"Bearer {TOKEN}"}
    assert server.post({"on": True}, "/-/legroom/drain", **right)[2]["draining"] is True
    try:
        assert {server.post({"model": "tiny", "prompt": [5]})[0] for _ in range(12)} == {503}
    finally:
        server.post({"on": False}, "/-/legroom/drain", **right)
    assert {server.post({"model": "tiny", "prompt": [5], "max_tokens": 1})[0] for _ in range(12)} == {200}
