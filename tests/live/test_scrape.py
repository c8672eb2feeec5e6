"""Scraping: a real HTTP server that behaves and one that does not; addresses and their secrets."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from loopback import listening

from legroom.errors import LegroomError
from legroom.live.metrics.endpoint import Endpoint, endpoint, masked_url
from legroom.live.metrics.sample import Sample, ScrapeFailure, ScrapeResult
from legroom.live.metrics.scrape import ScrapeFailed, open_session, scrape, scrape_fleet, scrape_result

METRICS = 'vllm:num_requests_running{model_name="m",engine="0"} 3\n'
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def ask(handler: Handler, timeout_s: float = 2.0, tls: ssl.SSLContext | None = None, **options: object) -> ScrapeResult:
    """What a scrape at a server with this handler brings."""

    async def run() -> ScrapeResult:
        async with listening(web.get("/metrics", handler), tls=tls) as port, open_session() as session:
            address = f"{'https' if tls else 'http'}://user:secret@localhost:{port}"
            return await scrape_result(session, endpoint(address, **options), timeout_s)  # type: ignore[arg-type]

    return asyncio.run(run())


async def good(request: web.Request) -> web.Response:
    return web.Response(text=METRICS)


def test_a_server_that_behaves_gives_a_sample() -> None:
    began_s = time.time()
    seen = ask(good)
    assert isinstance(seen, Sample) and seen.running == 3
    assert began_s <= seen.time_s <= time.time()


def test_credentials_of_the_address_go_into_the_header_and_nowhere_else() -> None:
    seen_headers = []

    async def handler(request: web.Request) -> web.Response:
        seen_headers.append(request.headers.get("Authorization"))
        return web.Response(text=METRICS)

    seen = ask(handler)
    assert seen_headers == ["Basic dXNlcjpzZWNyZXQ="]
    assert "secret" not in repr(seen) and "user" not in seen.server


def test_a_token_is_sent_as_bearer_and_never_printed() -> None:
    target = endpoint("https://host", token="s3cret")
    assert target.headers["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in repr(target)


@pytest.mark.parametrize(
    ("status", "kind"), [(401, "auth"), (403, "auth"), (404, "not_found"), (500, "http_error"), (503, "http_error")]
)
def test_a_status_that_is_not_fine_says_which(status: int, kind: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, text="no")

    seen = ask(handler)
    assert isinstance(seen, ScrapeFailure)
    assert seen.kind == kind and str(status) in seen.message


def test_a_redirect_is_not_followed_because_it_could_carry_the_credentials_elsewhere() -> None:
    async def handler(request: web.Request) -> web.Response:
        raise web.HTTPFound("http://u:pw@elsewhere/metrics?key=1")

    seen = ask(handler)
    assert isinstance(seen, ScrapeFailure)
    assert seen.kind == "redirect" and "elsewhere" in seen.message and "pw" not in seen.message


def test_a_slow_server_is_given_up_after_the_timeout() -> None:
    async def handler(request: web.Request) -> web.Response:
        while request.transport is not None:  # until the client has gone
            await asyncio.sleep(0.01)
        return web.Response(text=METRICS)

    seen = ask(handler, timeout_s=0.2)
    assert isinstance(seen, ScrapeFailure) and seen.kind == "timeout"


def test_half_an_answer_is_no_sample() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "5000"})
        await response.prepare(request)
        await response.write(METRICS.encode())
        assert request.transport is not None
        request.transport.close()
        return response

    seen = ask(handler)
    assert isinstance(seen, ScrapeFailure) and seen.kind == "cut_short"


def test_a_web_page_is_no_metrics() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text="<html>hello</html>", content_type="text/html")

    seen = ask(handler)
    assert isinstance(seen, ScrapeFailure) and seen.kind == "not_metrics" and "HTML" in seen.message


def test_an_endless_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legroom.live.metrics.scrape.MAX_BYTES", 100_000)

    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=METRICS * 10_000)

    seen = ask(handler)
    assert isinstance(seen, ScrapeFailure) and seen.kind == "too_big"


def test_a_certificate_that_nobody_signed_is_refused_with_a_reason(certificate: tuple[Path, ssl.SSLContext]) -> None:
    seen = ask(good, tls=certificate[1])
    assert isinstance(seen, ScrapeFailure)
    assert seen.kind == "tls" and "self" in seen.message


def test_a_certificate_of_a_named_authority_or_no_check_is_fine(certificate: tuple[Path, ssl.SSLContext]) -> None:
    assert isinstance(ask(good, tls=certificate[1], ca_file=str(certificate[0])), Sample)
    assert isinstance(ask(good, tls=certificate[1], verify_tls=False), Sample)


def test_a_closed_port_raises_with_the_reason_and_the_exit_code() -> None:
    async def run() -> None:
        async with open_session() as session:
            await scrape(session, endpoint("http://user:pw@127.0.0.1:9"), 1.0)

    with pytest.raises(ScrapeFailed) as raised:
        asyncio.run(run())
    assert (raised.value.kind, raised.value.exit_code) == ("refused", 3)
    assert "pw" not in raised.value.message


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("host:8000", "http://host:8000/metrics"),
        ("http://host:8000/", "http://host:8000/metrics"),
        ("http://host:8000/v1", "http://host:8000/metrics"),
        ("https://a:b@host/vllm/metrics", "https://host/vllm/metrics"),
        ("http://[::1]:8000", "http://[::1]:8000/metrics"),
    ],
)
def test_addresses_are_taken_as_people_write_them(given: str, url: str) -> None:
    assert endpoint(given).url == url


@pytest.mark.parametrize("bad", ["", "ftp://host", "http://", "http://host:99999", "http://u:pw@:80"])
def test_what_is_no_address_is_refused_without_its_secret(bad: str) -> None:
    with pytest.raises(LegroomError) as raised:
        endpoint(bad)
    assert "pw" not in raised.value.message


def test_a_key_in_the_query_is_sent_and_never_shown() -> None:
    target = endpoint("http://host:1/metrics?key=s3cret")
    assert target.full_url.endswith("?key=s3cret")
    assert "s3cret" not in repr(target) + target.server + target.url


def test_a_printed_address_shows_neither_user_nor_password_nor_query() -> None:
    assert masked_url("https://u:p@host:1/x?key=v") == "https://host:1/x?[masked]"


def test_a_slow_server_of_a_fleet_holds_up_nobody_and_is_not_asked_twice() -> None:
    asked = {"a": 0, "slow": 0, "b": 0}

    async def run() -> tuple[ScrapeResult, int]:
        others_were_asked, slow_answered = asyncio.Event(), asyncio.Event()

        async def handler(request: web.Request) -> web.Response:
            name = request.match_info["name"]
            asked[name] += 1
            if name == "slow":
                await others_were_asked.wait()
            elif min(asked["a"], asked["b"]) == 3:
                others_were_asked.set()
            return web.Response(text=METRICS)

        slow: list[ScrapeResult] = []

        def take(seen: ScrapeResult) -> None:
            if seen.server.endswith("/slow"):
                slow.append(seen)
                slow_answered.set()

        async with listening(web.get("/{name}/metrics", handler)) as port:
            targets = [Endpoint(f"http://127.0.0.1:{port}/{name}/metrics") for name in asked]
            fleet = asyncio.create_task(scrape_fleet(targets, 0.02, take, timeout_s=60))
            await others_were_asked.wait()
            times = asked["slow"]
            await slow_answered.wait()
            fleet.cancel()
            await asyncio.wait([fleet])
        return slow[0], times

    seen, times = asyncio.run(run())
    assert isinstance(seen, Sample), "slow is not gone"
    assert times == 1
