"""Certificates that change, and verdicts that arrive late."""

import asyncio
import json
import ssl
import threading
import time
from types import SimpleNamespace

import pytest
from running_gate import RunningGate, deployment, review

from legroom.exports.gate_certificates import new_authority, new_certificate
from legroom.gate import verdict as verdict_cache
from legroom.gate.verdict import CacheOptions, NoVerdict, Verdict, VerdictCache
from legroom.gate.webhook import CertificateFiles, GateApp, GateMetrics, GatePolicy, reload_certificates

FITS = ("--model", "Qwen/Qwen3-8B", "--max-model-len", "8192")
POD = {"kind": "Pod"}
REFUSAL = Verdict("does_not_fit", ("No.",), is_searched=False)
SEARCHED = Verdict("does_not_fit", ("No.", "Fix."))


def serial(gate):
    import socket

    with (
        socket.create_connection(("localhost", gate.port)) as plain,
        gate.context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        return secure.getpeercert()["serialNumber"]


def count(counter):
    return counter.collect()[0].samples[0].value


async def becomes(condition, seconds=90):
    """Waits in the event loop for something that another task or thread does."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def waited_for(condition, seconds=90):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.2)
    return False


def test_a_new_certificate_is_used_without_a_restart(tmp_path):
    gate = RunningGate(tmp_path)
    try:
        before = serial(gate)
        gate.write(new_certificate(gate.authority, ["localhost"]))
        assert waited_for(lambda: serial(gate) != before)
        assert gate.ask(deployment(*FITS))["allowed"] is True
        assert gate.figure("legroom_gate_certificate_reloads_total") == 1
    finally:
        gate.end()


@pytest.fixture
def watched(tmp_path):
    """A certificate that can be replaced, the context that serves it and one that trusts it."""
    authority, files = new_authority(), CertificateFiles.in_folder(str(tmp_path))

    def write():
        pair = new_certificate(authority, ["localhost"])
        files.certificate.write_bytes(pair.certificate)
        files.key.write_bytes(pair.key)

    write()
    trust = ssl.create_default_context(cadata=authority.certificate.decode())
    return SimpleNamespace(
        files=files, write=write, metrics=GateMetrics(), served=files.server_context(), context=trust
    )


def test_every_change_of_the_files_is_loaded(watched):
    async def go():
        task = asyncio.create_task(reload_certificates(watched.served, watched.files, watched.metrics, 0.02))
        for loads in (1, 2):
            await asyncio.sleep(0)  # it has seen the files as they were
            watched.write()
            await becomes(lambda loads=loads: count(watched.metrics.certificate_reloads) >= loads)
        task.cancel()

    asyncio.run(go())
    assert watched.served.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_certificate_that_cannot_be_loaded_leaves_the_old_one_in_use(watched):
    async def go():
        server = await asyncio.start_server(lambda _, writer: writer.close(), "localhost", 0, ssl=watched.served)
        watched.port = server.sockets[0].getsockname()[1]
        before = await asyncio.to_thread(serial, watched)
        task = asyncio.create_task(reload_certificates(watched.served, watched.files, watched.metrics, 0.02))
        await asyncio.sleep(0)
        watched.files.certificate.write_text("broken")
        await becomes(lambda: count(watched.metrics.certificate_reload_failures))
        after = await asyncio.to_thread(serial, watched)
        task.cancel()
        server.close()
        return before, after

    before, after = asyncio.run(go())
    assert before == after


LONG_S = 120.0
"""Longer than a test takes on any machine; `SlowPlanner.closing` ends the wait."""


class SlowPlanner:
    """Replaces planning: a verdict and a search each take some seconds, or until `closing` is set."""

    def __init__(self, plan_s=0.0, search_s=0.0, verdict=Verdict("fits"), searched=SEARCHED):  # noqa: B008
        self.plan_s, self.search_s, self.verdict, self.searched = plan_s, search_s, verdict, searched
        self.plans = self.searches = 0
        self.closing = threading.Event()

    def __call__(self, manifest, default_gpu, *, search="full", hub=False, search_until_s=0.0):
        if search == "full":
            self.searches += 1
            self.closing.wait(self.search_s)
            if self.searched is None:
                raise RuntimeError("the search failed")
            return self.searched
        self.plans += 1
        self.closing.wait(self.plan_s)
        return self.verdict


@pytest.fixture
def cached(monkeypatch):
    """Make a cache whose planning is replaced, and a coroutine that uses it; run it and close the cache."""

    def run(planner, use, on_search_dropped=lambda: None, **options):
        async def go():
            cache = VerdictCache(CacheOptions(**options), on_search_dropped)
            try:
                return await use(cache)
            finally:
                planner.closing.set()
                cache.close()

        monkeypatch.setattr(verdict_cache, "plan_verdict", planner)
        return asyncio.run(go())

    return run


def decide(cache, manifest=POD):
    return cache.decide(cache.get(manifest)[0], manifest)


def test_a_verdict_that_came_too_late_is_there_the_next_time(cached):
    async def use(cache):
        with pytest.raises(NoVerdict, match="timeout"):
            await decide(cache)
        planner.closing.set()
        await becomes(lambda: cache.get(POD)[1])
        return cache.get(POD)[1]

    planner = SlowPlanner(LONG_S)
    assert cached(planner, use, deadline_s=0.05) == Verdict("fits")


def test_a_search_that_fails_leaves_the_verdict(cached):
    planner = SlowPlanner(verdict=REFUSAL, searched=None)
    verdict = cached(planner, decide, wait_for_fixes_s=LONG_S, deadline_s=LONG_S)
    assert (verdict.outcome, verdict.is_searched) == ("does_not_fit", True)


def test_concurrent_requests_for_one_object_share_one_plan(cached):
    async def use(cache):
        return set(await asyncio.gather(*(decide(cache) for _ in range(20))))

    planner = SlowPlanner(0.05)
    assert cached(planner, use, deadline_s=LONG_S) == {Verdict("fits")}
    assert planner.plans == 1


def test_more_objects_at_once_than_may_wait_are_let_through(cached):
    async def use(cache):
        first = [asyncio.create_task(decide(cache, {"n": number})) for number in range(2)]
        await becomes(lambda: planner.plans)
        with pytest.raises(NoVerdict, match="overload"):
            await decide(cache, {"n": 2})
        planner.closing.set()
        await asyncio.gather(*first)

    planner = SlowPlanner(LONG_S)
    cached(planner, use, max_pending=2, deadline_s=LONG_S)


def test_a_plan_that_is_cancelled_by_the_end_of_the_gate_gives_no_verdict(cached, capsys):
    async def use(cache):
        waiting = [asyncio.create_task(decide(cache, {"n": number})) for number in range(2)]
        await becomes(lambda: planner.plans)
        cache.close()  # the second is still queued
        with pytest.raises(NoVerdict, match="error"):
            await waiting[1]
        planner.closing.set()
        await waiting[0]

    planner = SlowPlanner(LONG_S)
    cached(planner, use, deadline_s=LONG_S)
    assert "CancelledError" in capsys.readouterr().err


def test_the_cache_is_bounded(cached):
    async def use(cache):
        for number in range(5):
            await decide(cache, {"n": number})
        return [cache.get({"n": number})[1] is not None for number in range(5)]

    assert cached(SlowPlanner(), use, max_verdicts=3) == [False, False, True, True, True]


def test_an_answer_does_not_wait_for_a_search_and_the_next_one_has_its_result(cached):
    async def use(cache):
        first = await decide(cache)  # the search goes on until the planner closes
        await decide(cache)
        planner.closing.set()
        await becomes(lambda: cache.get(POD)[1].is_searched)
        return first, cache.get(POD)[1]

    planner = SlowPlanner(search_s=LONG_S, verdict=REFUSAL)
    assert cached(planner, use, deadline_s=LONG_S) == (REFUSAL, SEARCHED)
    assert planner.searches == 1


def test_an_answer_waits_for_a_search_as_long_as_was_chosen(cached):
    planner = SlowPlanner(search_s=0.1, verdict=REFUSAL)
    assert cached(planner, decide, wait_for_fixes_s=LONG_S, deadline_s=LONG_S) == SEARCHED


def test_a_search_for_which_the_queue_is_full_starts_with_the_next_request(cached):
    dropped = []

    async def use(cache):
        objects = [{"n": number} for number in range(3)]
        for each in objects:  # the first is running, the second waits, the third is dropped
            await decide(cache, each)
        planner.closing.set()
        await becomes(lambda: all(cache.get(each)[1].is_searched for each in objects[:2]))
        searched = [cache.get(each)[1].is_searched for each in objects]
        await decide(cache, objects[2])
        await becomes(lambda: cache.get(objects[2])[1].is_searched)
        return searched, cache.get(objects[2])[1].is_searched

    planner = SlowPlanner(search_s=LONG_S, verdict=REFUSAL)
    result = cached(planner, use, lambda: dropped.append(1), max_searches=1, deadline_s=LONG_S)
    assert (result, len(dropped)) == (([True, True, False], True), 1)


def test_a_folder_without_a_certificate_ends_the_start(capsys, tmp_path):
    from legroom.cli.main import main

    assert main(["gate", "--tls-dir", str(tmp_path), "--port", "0"]) == 2
    assert "no certificate" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["warn", "enforce"])
def test_an_answer_before_the_search_is_done_says_so_and_is_counted(cached, mode):
    async def use(cache):
        metrics, replies = GateMetrics(), []
        app = GateApp(GatePolicy(mode), cache, metrics)

        async def receive():
            return {"type": "http.request", "body": json.dumps(review(deployment())).encode()}

        async def send(message):
            replies.append(message)

        await app({"type": "http", "path": "/validate", "method": "POST"}, receive, send)
        return replies[-1]["body"].decode(), metrics

    body, metrics = cached(SlowPlanner(search_s=LONG_S, verdict=REFUSAL), use, deadline_s=LONG_S)
    assert "being searched" in body
    assert count(metrics.answered_before_search) == 1


def test_waiting_for_flags_longer_than_the_deadline_is_refused(capsys):
    from legroom.cli.main import main

    assert main(["gate", "--deadline", "2", "--wait-for-flags", "3"]) == 2
    assert "--wait-for-flags" in capsys.readouterr().err
