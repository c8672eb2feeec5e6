"""Verification against a small stand-in server; a real vLLM is verified in tests/real_vllm."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.cli.main import main
from legroom.errors import LegroomError
from legroom.live.metrics.endpoint import is_loopback
from legroom.render.verify_page import percentiles, verification_svg, verification_text
from legroom.units import GIB, MIB
from legroom.verify.load_run import (
    PRESETS,
    KvPool,
    Load,
    LoadRequest,
    LoadRun,
    LoadSample,
    needed_blocks,
    read_load,
    safe_concurrency,
    token_ids,
)
from legroom.verify.openai_client import RequestOutcome
from legroom.verify.verification_checks import (
    PassCriteria,
    PlannedPool,
    kv_use_check,
    memory_check,
    planned_pool,
    pool_check,
    preemption_check,
)
from legroom.verify.verification_run import VerificationRequest, verify

VOCABULARY = tuple(range(10, 60))


class StandIn:
    """Answers like vLLM's API server does, from a pool of blocks that is only counted."""

    def __init__(self, context=512, blocks=65, block_size=16, **faults):
        self.context, self.blocks, self.block_size, self.faults = context, blocks, block_size, faults
        self.held = self.running = self.preemptions = self.seen = 0
        self.keys: set[str] = set()

    async def handle(self, request):
        from aiohttp import web

        self.keys.add(request.headers.get("Authorization", ""))
        if request.path == "/health":
            return web.Response(status=self.faults.get("health_status", 200))
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": self.faults.get("name", "tiny"), "max_model_len": self.context}]})
        if request.path == "/metrics":
            return web.Response(text=self.metrics())
        if request.path == "/tokenize":
            return web.json_response({"tokens": list(VOCABULARY)})
        return await self.complete(request, await request.json())

    async def complete(self, request, body):
        from aiohttp import web

        self.seen += 1
        prompt, output = body["prompt"], body["max_tokens"]
        if isinstance(prompt, list) and self.faults.get("no_ids"):
            return web.json_response({"error": {"message": "prompt must be text"}}, status=400)
        length = len(prompt) if isinstance(prompt, list) else len(prompt.split())
        if length + output > self.faults.get("longest", self.context) or self.seen == self.faults.get("fail_at"):
            return web.json_response({"error": {"message": self.faults.get("says", "no memory for this")}}, status=500)
        need = -(-(length + output) // self.block_size)
        self.held, self.running = self.held + need, self.running + 1
        if self.held > self.blocks - 1:
            self.preemptions += 1
        try:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
            await asyncio.sleep(self.faults.get("takes_s", 0.02))
            if self.faults.get("cut_at") == self.seen:
                return response
            usage = {"prompt_tokens": length, "completion_tokens": output}
            await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
            return response
        finally:
            self.held, self.running = self.held - need, self.running - 1

    def metrics(self) -> str:
        label = '{engine="0",model_name="tiny"}'
        size = f'engine="0",num_gpu_blocks="{self.blocks}",block_size="{self.block_size}"'
        return (
            f"# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{label} {self.held / (self.blocks - 1)}\n"
            f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{label} {self.running}\n"
            f"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{label} 0\n"
            f"# TYPE vllm:num_preemptions counter\nvllm:num_preemptions_total{label} {self.preemptions}\n"
            f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{{size}}} 1\n"
        )


@contextmanager
def serving(stand_in: StandIn) -> Iterator[str]:
    from aiohttp import web

    loop, ready, ports = asyncio.new_event_loop(), threading.Event(), []

    async def start():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", stand_in.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ports.append(site._server.sockets[0].getsockname()[1])
        return runner

    def serve():
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        loop.call_soon(ready.set)
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=serve)
    thread.start()
    ready.wait(120)
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


def checked(stand_in: StandIn, **wish) -> tuple[dict[str, bool | None], object]:
    with serving(stand_in) as url:
        verification = verify(VerificationRequest(url, **({"load": "64/16", "requests": 24} | wish)))
    return {check.name: check.ok for check in verification.checks}, verification


def test_a_server_that_answers_everything_is_verified():
    passed, verification = checked(StandIn())
    assert verification.ok, verification_text(verification)
    assert [name for name, ok in passed.items() if ok] == [
        "health",
        "completion",
        "full context",
        "load",
        "preemptions",
        "kv use",
    ]


def test_a_server_without_a_health_route_is_verified_all_the_same():
    passed, verification = checked(StandIn(health_status=404))
    assert verification.ok and passed["health"]


def test_a_server_that_says_it_is_not_healthy_is_not_verified():
    with pytest.raises(LegroomError, match="/health answered 503"):
        checked(StandIn(health_status=503))


def test_by_default_as_many_run_as_always_fit_the_pool():
    _, verification = checked(StandIn(blocks=65, block_size=16))
    assert verification.load.concurrency == 64 // 5


def test_more_than_fits_is_seen_as_preemptions():
    passed, verification = checked(StandIn(blocks=33), concurrency=16, requests=48)
    assert (verification.ok, passed["preemptions"]) == (False, False)
    assert any("--max-num-seqs 6 never preempts" in remark for remark in verification.notes)
    with_room, _ = checked(StandIn(blocks=33), concurrency=16, requests=48, limits=PassCriteria(max_preemptions=1000))
    assert with_room["preemptions"]


def test_a_full_context_that_fails_ends_it_before_the_load():
    stand_in = StandIn(longest=256)
    passed, verification = checked(stand_in)
    assert (verification.ok, passed["full context"], verification.load) == (False, False, None)
    assert "no memory" in verification_text(verification)
    assert stand_in.seen == 2


@pytest.mark.parametrize("fault", [{"fail_at": 10}, {"cut_at": 10}], ids=["an error", "a stream cut short"])
def test_one_failed_request_is_enough_to_fail(fault):
    passed, verification = checked(StandIn(**fault), concurrency=1)
    assert (verification.ok, passed["load"], len(verification.load.failed)) == (False, False, 1)


def test_a_server_that_takes_no_token_ids_is_asked_with_text():
    passed, verification = checked(StandIn(no_ids=True), concurrency=2)
    assert passed["completion"] and passed["full context"] and passed["load"]
    assert any("token ids" in remark for remark in verification.notes)


def test_it_ends_when_the_time_is_up():
    _, verification = checked(StandIn(takes_s=0.1), concurrency=1, requests=200, timeout_s=3.0)
    assert not verification.ok
    assert "--timeout" in verification.load.interrupted


def test_a_pool_other_than_planned_is_not_verified():
    passed, verification = checked(StandIn(blocks=65), planned=PlannedPool(80, 16, 78, 82))
    assert (verification.ok, passed["pool"]) == (False, False)


def test_the_api_key_is_sent_and_never_shown():
    stand_in = StandIn()
    _, verification = checked(stand_in, api_key="sk-very-secret-key")
    assert stand_in.keys == {"Bearer sk-very-secret-key"}
    assert "very-secret" not in verification_text(verification) + json.dumps(verification.json()) + verification_svg(
        verification
    )


@pytest.mark.parametrize("url", ["ftp://x", "http://", "not a url"])
def test_what_is_no_address_is_said_as_that(url, capsys):
    assert main(["verify", url]) == 2
    assert "the address of" in capsys.readouterr().err


def test_a_remote_server_is_not_loaded_unasked(capsys):
    assert main(["verify", "http://192.0.2.7:8000"]) == 2
    assert "--yes-load-remote" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_unreachable(capsys):
    assert main(["verify", "http://127.0.0.1:9"]) == 3
    assert "did not answer" in capsys.readouterr().err


def test_the_command_writes_its_report_and_picture(tmp_path, capsys):
    report, picture = tmp_path / "r.txt", tmp_path / "v.svg"
    with serving(StandIn()) as url:
        words = [
            "verify",
            url,
            "--load",
            "64/16",
            "--requests",
            "20",
            "--report",
            str(report),
            "--svg",
            str(picture),
            "--json",
        ]
        assert main(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verified"] is True
    assert document["load"]["answered"] == 20
    assert report.read_text().startswith("Verified")
    assert "KV use" in picture.read_text()


@pytest.mark.parametrize(
    "words",
    [
        ["--load", "no-such-load"],
        ["--requests", "0"],
        ["--timeout", "0"],
        ["--plan", "/no/plan"],
        ["--concurrency", "x"],
        ["--trace", "a", "--load", "b"],
    ],
    ids=" ".join,
)
def test_a_wrong_call_says_so(words, capsys):
    with serving(StandIn()) as url:
        assert main(["verify", url, *words]) == 2
    assert capsys.readouterr().err.startswith("error:")


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("http://127.0.0.1:8000", True),
        ("localhost:8000", True),
        ("http://[::1]:1", True),
        ("http://10.0.0.1", False),
        ("https://example.org", False),
        ("http://localhost.example.org", False),
    ],
)
def test_what_stays_on_this_machine_is_known(address, local):
    assert is_loopback(address) is local


# Loads


@given(
    name=st.sampled_from([*PRESETS, "700/300", "prompt=uniform(1,5000) output=exponential(900)"]),
    context=st.integers(8, 40_000),
    count=st.integers(1, 40),
)
def test_every_request_of_a_load_fits_the_context(name, context, count):
    load = read_load(name, context, count)
    assert len(load.requests) == count
    assert all(one.prompt_len >= 1 and one.output_len >= 1 and one.tokens <= context for one in load.requests)


LENGTHS = st.lists(st.tuples(st.integers(1, 900), st.integers(1, 100)), min_size=1, max_size=40)


@given(LENGTHS, st.integers(2, 500), st.sampled_from([1, 16, 128]), st.integers(1, 64))
def test_the_default_number_at_a_time_always_fits_the_pool(lengths, blocks, size, most):
    load = Load("x", tuple(LoadRequest(*pair) for pair in lengths))
    pool = KvPool(blocks, size)
    count = safe_concurrency(load, pool, 1000, most)
    assert 1 <= count <= most
    assert count == 1 or needed_blocks(load, pool, count) <= pool.usable_blocks
    if count < min(most, len(lengths)):
        assert needed_blocks(load, pool, count + 1) > pool.usable_blocks


def test_a_pool_shared_by_groups_is_counted_by_full_requests():
    load = Load("x", (LoadRequest(10, 10),) * 50)
    assert safe_concurrency(load, KvPool(101, 16, full_request_blocks=20), 128, 64) == 5


def test_prompts_that_share_a_beginning_begin_with_the_same_tokens():
    first, second = (LoadRequest(40, 1, (("system", 0, 30),)) for _ in range(2))
    one, two = token_ids(first, VOCABULARY, 1), token_ids(second, VOCABULARY, 2)
    assert (len(one), len(two)) == (40, 40)
    assert one[:30] == two[:30]
    assert one[30:] != two[30:]


def test_a_trace_gives_its_lengths(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"arrival": n, "prompt_len": 10 + n, "output_len": 5}) + "\n" for n in range(3)))
    load = read_load(str(path), 1000, 100)
    assert [(one.prompt_len, one.output_len) for one in load.requests] == [(10, 5), (11, 5), (12, 5)]


# Judgement


def run_of(points=(), **more) -> LoadRun:
    return LoadRun("x", 10, 4, (RequestOutcome(10, 5, 0.1, 0.2),) * 10, tuple(points), 5.0, 0, **more)


def test_counters_that_go_backwards_mean_a_restart():
    check = preemption_check(replace(run_of(), preemptions=-3), PassCriteria())
    assert (check.ok, "restarted" in check.text) == (False, True)


def test_a_pool_fuller_than_the_load_can_make_it_is_not_as_planned():
    load, pool = Load("x", (LoadRequest(12, 4),) * 10), KvPool(101, 16)
    low, high = LoadSample(0, 0.06, 4, 0, 0, own_requests=4), LoadSample(0, 0.5, 4, 0, 0, own_requests=4)
    assert kv_use_check(run_of([low]), load, pool, 1000).ok
    assert kv_use_check(run_of([high]), load, pool, 1000).ok is False


def test_with_other_clients_the_need_is_not_judged():
    load, pool = Load("x", (LoadRequest(12, 4),) * 10), KvPool(101, 16)
    assert kv_use_check(run_of([LoadSample(0, 0.9, 30, 5, 0, own_requests=4)]), load, pool, 1000).ok is None


def readings(*sizes: int) -> list[LoadSample]:
    return [LoadSample(float(at), 0.5, 1, 0, 0, size) for at, size in enumerate(sizes)]


def test_memory_that_settles_after_the_ramp_is_stable():
    assert memory_check(readings(60 * GIB, 62 * GIB, *[63 * GIB] * 8), PassCriteria(), "GPU memory", 80 * GIB).ok


def test_memory_that_keeps_growing_is_not():
    check = memory_check(
        readings(*(60 * GIB + n * 512 * MIB for n in range(12))), PassCriteria(), "GPU memory", 80 * GIB
    )
    assert (check.ok, "grew by" in check.text) == (False, True)


def test_host_memory_that_grows_while_blocks_are_used_for_the_first_time_is_not_judged():
    grown = readings(*(2 * GIB + n * 64 * MIB for n in range(12)))
    assert memory_check(grown, PassCriteria(), "resident memory", None, pool_was_cycled=False).ok is None
    assert memory_check(grown, PassCriteria(), "resident memory", None, pool_was_cycled=True).ok is False


def test_memory_that_cannot_be_read_is_said_to_be():
    assert memory_check(readings(1, 2, 3, 4, 5), PassCriteria(), "", None).ok is None


@pytest.mark.parametrize(("blocks", "ok"), [(100, True), (97, True), (94, False), (110, False)])
def test_the_pool_may_lie_anywhere_in_the_band_of_the_plan(blocks, ok):
    check = pool_check(KvPool(blocks, 16), PlannedPool(100, 16, 95, 105))
    assert check and check.ok is ok


def test_a_plan_of_legroom_is_read_with_its_band(tmp_path, capsys):
    assert main(["plan", "llama-3.1-8b", "--gpu", "h100", "--max-model-len", "8192", "--json"]) == 0
    path = tmp_path / "plan.json"
    path.write_text(capsys.readouterr().out)
    planned = planned_pool(str(path))
    assert planned.low_blocks < planned.num_blocks < planned.high_blocks
    assert planned.max_model_len == 8192


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kv": {}}', "null", '{"kv": {"num_blocks": "x", "block_size": 1}, "args": {}}']
)
def test_what_is_no_plan_is_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(LegroomError):
        planned_pool(str(path))


def test_what_a_server_says_reaches_no_terminal_page_or_picture_unescaped(tmp_path, capsys):
    evil = "<script>x</script>\x1b[2J\x1b]0;owned\x07\x00\u202eabc\r"
    page, picture = tmp_path / "r.html", tmp_path / "v.svg"
    with serving(StandIn(name=evil, says=evil, fail_at=1)) as url:
        words = ["verify", url, "--requests", "4", "--report", str(page), "--svg", str(picture)]
        assert main(words) == 1
    for text in (capsys.readouterr().out, page.read_text(), picture.read_text()):
        assert "owned" in text and not any(character in text for character in "\x1b\x07\x00\u202e\r")
    ElementTree.fromstring(picture.read_text())
    assert page.read_text().startswith("<!doctype html>") and "<script>" not in page.read_text()


def test_the_p99_of_a_hundred_requests_is_not_their_slowest():
    assert percentiles([float(number) for number in range(1, 101)]) == "p50 50.00 s  p99 99.00 s  max 100.00 s"
