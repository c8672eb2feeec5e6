"""The proxy between a client and a server over real sockets."""

import asyncio
import contextlib
import json
import shutil
import ssl
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from guard_asgi import until
from guard_wire import OK, WHOLE_POOL, Client, Upstream, answer_of, ask, connected, error, proxied, request
from hypothesis import given
from hypothesis import strategies as st

from legroom.errors import LegroomError
from legroom.guard.serving.client_connection import origin_form
from legroom.guard.serving.proxy import REPEATED_SIGNAL_S, Proxy, ProxyOptions
from legroom.guard.serving.upstream import request_head, upstream_of
from legroom.live.metrics.endpoint import endpoint
from legroom.live.metrics.scrape import open_session, scrape
from legroom.live.metrics.scrape_recording import Recorder, replay
from legroom.sidecar.watch_session import WatchSession


async def test_a_request_and_its_answer_pass():
    upstream = Upstream()
    async with proxied(upstream) as (_, port):
        status, headers, body = await ask(port, headers="authorization: Bearer k\r\n")
        assert (status, headers["content-type"], body) == (200, "application/json", b"{}")
        head, sent = upstream.requests[-1]
        assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
        assert b"authorization: Bearer k\r\n" in head
        assert b"x-forwarded-for: 127.0.0.1\r\n" in head
        assert json.loads(sent) == {"prompt": [1], "max_tokens": 4}


async def test_connections_are_kept_on_both_sides():
    upstream = Upstream()
    async with connected(upstream) as (_, client):
        for _ in range(5):
            assert (await client.ask())[0] == 200
        assert upstream.connections == 1


async def test_headers_of_one_connection_do_not_pass():
    upstream = Upstream()
    upstream.answer = OK.replace(b"\r\n\r\n", b"\r\nconnection: keep-alive, x-own\r\nx-own: 1\r\nx-far: 2\r\n\r\n")
    async with proxied(upstream) as (_, port):
        own = "connection: keep-alive, x-mine\r\nx-mine: 1\r\nte: trailers\r\nx-kept: 2\r\n"
        _, headers, _ = await ask(port, headers=own)
        head = upstream.requests[-1][0]
        assert b"x-mine" not in head
        assert b"te:" not in head
        assert b"x-kept: 2" in head
        assert "x-own" not in headers
        assert headers["x-far"] == "2"


async def test_a_stream_passes_chunk_by_chunk_without_waiting_for_its_end():
    more, last = asyncio.Event(), asyncio.Event()

    def stream(_):
        yield b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        yield b"9\r\ndata: 1\n\n\r\n"
        yield more
        yield b"9\r\ndata: 2\n\n\r\n"
        yield last
        yield b"9\r\ndata: 3\n\n\r\n0\r\n\r\n"

    async with connected(Upstream(stream)) as (proxy, client):
        await client.send(request(b'{"prompt": [1], "max_tokens": 4, "stream": true}'))
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head
        assert await client.reader.readexactly(14) == b"9\r\ndata: 1\n\n\r\n"
        (reservation,) = proxy.admission.pool._running.values()
        more.set()
        assert await client.reader.readexactly(14) == b"9\r\ndata: 2\n\n\r\n"
        assert reservation.steps_seen == 2
        last.set()
        assert await client.reader.readexactly(19) == b"9\r\ndata: 3\n\n\r\n0\r\n\r\n"
        await until(lambda: proxy.admission.pool.running == 0)


async def test_an_answer_that_ends_with_its_connection_passes_whole():
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nhello"
    async with proxied(Upstream(answer, close=True)) as (_, port):
        assert (await ask(port))[2] == b"hello"


async def test_requests_beyond_the_pool_wait_before_admission():
    upstream = Upstream()
    async with proxied(upstream) as (proxy, port):
        upstream.open.clear()
        calls = [asyncio.ensure_future(ask(port, WHOLE_POOL)) for _ in range(4)]
        await until(lambda: proxy.admission.pool.waiting == 3)
        upstream.open.set()
        assert [status for status, _, _ in await asyncio.gather(*calls)] == [200] * 4
        assert proxy.admission.pool.held_blocks == 0


async def test_a_client_that_leaves_frees_its_place_and_the_server_sees_it(tmp_path):
    (tmp_path / "policy.toml").write_text("[pool]\nabort_grace_s = 0.01")
    upstream = Upstream()
    async with proxied(upstream, tmp_path / "policy.toml") as (proxy, port):
        upstream.open.clear()
        first, second = await Client.connect(port), await Client.connect(port)
        await first.send(request(WHOLE_POOL))
        await until(lambda: upstream.inside == 1)
        await second.send(request(WHOLE_POOL))
        await until(lambda: proxy.admission.pool.waiting == 1)
        second.close()
        await until(lambda: proxy.admission.pool.waiting == 0)
        first.close()
        await until(lambda: upstream.left == 1)
        await until(lambda: proxy.admission.pool.held_blocks == 0)


async def test_a_server_that_is_down_gets_502_with_an_openai_body():
    async with proxied() as (proxy, port):
        proxy.upstreams.upstream = upstream_of("http://127.0.0.1:1")
        proxy.upstreams.close()
        status, headers, body = await ask(port)
        assert (status, error(body)["code"], error(body)["type"]) == (502, "upstream_down", "server_error")
        assert headers["retry-after"] == "5"
        assert proxy.admission.pool.running == 0 or proxy.admission.policy.pool.abort_grace_s


async def test_a_server_that_dies_amidst_its_answer_leaves_the_client_with_half_of_it():
    half = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf"
    async with connected(Upstream(half, close=True)) as (_, client):
        await client.send(request())
        got = b""
        with contextlib.suppress(ConnectionError):
            got = await client.reader.read()
        assert b"502" not in got


async def test_a_kept_connection_that_the_server_dropped_is_replaced():
    upstream = Upstream()
    async with connected(upstream) as (_, client):
        assert (await client.ask())[0] == 200
        upstream.drop_next = True
        assert (await client.ask())[0] == 200


async def test_a_connection_that_was_idle_for_long_is_not_used_though_nobody_swept_it():
    upstream = Upstream()
    async with connected(upstream) as (proxy, client):
        assert (await client.ask())[0] == 200
        kept = list(proxy.upstreams._idle)
        for connection in kept:
            connection.idle_since_s -= 60
        assert (await client.ask())[0] == 200
        assert upstream.connections == 2
        assert all(connection.transport.is_closing() for connection in kept)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", 431),
        (b"GET /v1/realtime HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", 501),
        (request(b"{bad"), 400),
        (request(b"[]"), 400),
    ],
)
async def test_what_cannot_be_served_is_answered_in_openais_words(sent, status):
    async with connected() as (_, client):
        await client.send(sent)
        got, _, body = await client.answer()
        assert got == status
        assert set(error(body)) == {"message", "type", "param", "code"}


async def test_a_body_that_grows_past_the_limit_is_cut_off_with_an_answer(tmp_path):
    (tmp_path / "policy.toml").write_text("[requests]\nbody_bytes = 2000")
    async with connected(policy=tmp_path / "policy.toml") as (_, client):
        await client.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(3):
            await client.send(b"400\r\n" + b"x" * 1024 + b"\r\n")
        status, headers, _ = await client.answer()
        assert (status, headers["connection"]) == (413, "close")


async def test_slow_clients_are_cut_off():
    async with connected() as (proxy, client):
        await client.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{")
        await until(lambda: proxy.buffered_bytes == 1)
        (connection,) = proxy.clients
        connection.sweep(proxy.now_s + 3600)
        status, _, body = await client.answer()
        assert (status, error(body)["code"]) == (408, "body_timeout")
        assert proxy.buffered_bytes == 0


async def test_idle_clients_are_let_go():
    async with connected() as (proxy, client):
        await until(lambda: proxy.clients)
        (connection,) = proxy.clients
        assert connection.timeout_keep_alive == 75
        connection.timeout_keep_alive = 0.05
        await client.ask()
        assert await client.reader.read() == b""


async def test_a_client_that_does_not_read_holds_the_server_back_and_is_cut_off_in_the_end():
    def flood(_):
        yield b"HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\n\r\n"
        for _ in range(400):
            yield b"x" * 250_000

    async with connected(Upstream(flood)) as (proxy, client):
        client.writer.transport.pause_reading()
        await client.send(request())
        await until(lambda: any(each.stalled_since_s for each in proxy.clients))
        (connection,) = proxy.clients
        assert connection.transport.get_write_buffer_size() < 2_000_000
        connection.sweep(proxy.now_s + 3600)  # something may have left the buffers before this one
        connection.sweep(proxy.now_s + 7200)
        await until(lambda: not proxy.clients)
        client.writer.transport.abort()


async def test_a_server_that_never_begins_to_answer_gets_504():
    upstream = Upstream()
    async with connected(upstream) as (proxy, client):
        upstream.open.clear()
        await client.send(request())
        await until(lambda: upstream.inside == 1)
        proxy.sweep(proxy.now_s + 3600)
        status, _, body = await client.answer()
        assert (status, error(body)["code"]) == (504, "upstream_timeout")


async def test_pipelined_requests_are_answered_in_order():
    upstream = Upstream(lambda head: [OK if b"completions" in head else OK.replace(b"{}", b"[]")])
    async with connected(upstream) as (_, client):
        await client.send(request() + request(b"", "/v1/models", "GET") + request())
        assert [(await client.answer())[2] for _ in range(3)] == [b"{}", b"[]", b"{}"]


async def test_a_client_that_asks_before_it_sends_is_told_to_go_on():
    async with connected() as (_, client):
        await client.send(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 15\r\n\r\n"
        )
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b'{"prompt": [1]}')
        assert (await client.answer())[0] == 200


async def test_head_requests_and_answers_without_a_body_pass():
    def answer(head):
        if head.startswith(b"HEAD"):
            return [b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n"]
        return [b"HTTP/1.1 204 No Content\r\n\r\n"]

    async with connected(Upstream(answer)) as (_, client):
        await client.send(b"HEAD /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"content-length: 10" in await client.reader.readuntil(b"\r\n\r\n")
        await client.send(b"DELETE /v1/x HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")


async def test_the_metrics_page_of_the_server_gets_the_guards_series():
    page = b"vllm:x 1\n"
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(page), page)
    async with proxied(Upstream(answer)) as (_, port):
        _, _, body = await ask(port, b"", "/metrics", "GET")
        assert body.startswith(b"vllm:x 1\n")
        assert b"legroom_guard_pool_tokens 160.0" in body


async def test_a_guard_before_a_guard_shows_each_series_once():
    async with proxied() as (proxy, port):
        inner = b"vllm:x 1\n" + proxy.admission.page(stopped_engines=1, start_requested=0) + b"vllm:y 2\n"
    async with proxied(Upstream(answer_of(inner))) as (_, port):
        lines = (await ask(port, b"", "/metrics", "GET"))[2].splitlines()
        assert len(set(lines)) == len(lines)
        assert {b"vllm:x 1", b"vllm:y 2", b"legroom_guard_pool_tokens 160.0"} <= set(lines)
        # which only the one inside of vLLM can see
        assert {b"legroom_guard_stopped_engines 1.0", b"legroom_guard_start_requested 0.0"} <= set(lines)


async def test_the_pool_is_learnt_from_the_servers_metrics_page():
    page = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="21"} 1.0\n'
    models = b'{"data": [{"id": "m", "max_model_len": 256}]}'

    def answer(head):
        body = page if b"/metrics" in head else models
        return [b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)]

    async with proxied(Upstream(answer), plan=None) as (proxy, _):
        await until(lambda: proxy.admission.limits.known)
        assert (proxy.admission.status()["pool_tokens"], proxy.admission.limits.max_model_len) == (320, 256)


async def test_a_key_of_the_servers_own_is_shown_for_what_the_guard_asks_and_not_for_clients():
    asked = []

    def answer(head):
        asked.append(head)
        return [OK]

    upstream = Upstream(answer)
    async with proxied(upstream, plan=None, api_key="own-key") as (_, port):
        await until(lambda: any(b"/v1/models" in head for head in asked))
        assert (await ask(port))[0] == 200
    own = next(head for head in asked if b"/v1/models" in head)
    assert b"authorization: bearer own-key" in own.lower()
    assert b"own-key" not in upstream.requests[-1][0]


async def test_drain_and_status_work_as_in_the_middleware():
    async with proxied(token="secret") as (_, port):
        right = "authorization: Bearer secret\r\n"
        assert (await ask(port, b"", "/-/legroom/status", "GET"))[0] == 401
        status, _, body = await ask(port, b'{"on": true}', "/-/legroom/drain", headers=right)
        assert (status, json.loads(body)["draining"]) == (200, True)
        status, headers, _ = await ask(port)
        assert status == 503
        assert int(headers["retry-after"]) >= 1


async def test_stopping_lets_running_requests_finish_and_takes_no_new_ones():
    upstream = Upstream()
    async with proxied(upstream) as (proxy, port):
        upstream.open.clear()
        idle, busy = await Client.connect(port), await Client.connect(port)
        await busy.send(request())
        await until(lambda: upstream.inside == 1)
        proxy.stop.set()
        assert await idle.reader.read() == b""
        upstream.open.set()
        status, headers, _ = await busy.answer()
        assert (status, headers["connection"]) == (200, "close")
        with pytest.raises(ConnectionError):
            await Client.connect(port)


async def test_a_second_signal_ends_the_wait_for_what_runs():
    upstream = Upstream()
    async with proxied(upstream, drain_timeout_s=3600) as (proxy, port):
        upstream.open.clear()
        client = await Client.connect(port)
        await client.send(request())
        await until(lambda: upstream.inside == 1)
        now_s = proxy.admission.clock()
        proxy.admission.clock = lambda: now_s
        proxy.on_signal(proxy.stop)
        await until(lambda: proxy.is_draining)
        proxy.on_signal(proxy.stop)  # at once: the same signal, passed on
        assert proxy._drain_until_s > now_s
        now_s += REPEATED_SIGNAL_S + 1
        proxy.on_signal(proxy.stop)
        await until(lambda: not proxy.clients)
        client.close()


async def test_a_port_in_use_is_said():
    async with proxied() as (_, port):
        with pytest.raises(LegroomError, match="cannot listen"):
            await Proxy(ProxyOptions(upstream_of("http://127.0.0.1:1"), port=port)).start()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:pa%20ss@host:81/v1/", "http://***@host:81"),
        ("host:8000", "http://host:8000"),
        ("https://[::1]/base", "https://[::1]:443/base"),
    ],
)
def test_addresses_are_read_and_their_secrets_masked(url, shown):
    assert upstream_of(url).shown == shown


def test_credentials_in_the_address_are_used_where_the_client_has_none():
    upstream = upstream_of("http://user:pass@host")
    assert b"authorization: Basic dXNlcjpwYXNz" in request_head("GET", b"/", [], upstream, None, "")
    own = request_head("GET", b"/", [(b"authorization", b"Bearer k")], upstream, None, "")
    assert b"Basic" not in own


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", "http://[", ""])
def test_what_is_no_address_is_said(url):
    with pytest.raises(LegroomError):
        upstream_of(url)


@pytest.mark.parametrize(
    ("target", "origin"),
    [
        (b"/v1/completions?x=1#y", b"/v1/completions?x=1"),
        (b"http://host/v1/completions", b"/v1/completions"),
        (b"http://host?x", b"/?x"),
        (b"*", b"*"),
    ],
)
def test_targets_are_reduced_to_origin_form(target, origin):
    assert origin_form(target) == origin


@given(st.binary(max_size=60))
def test_any_bytes_are_answered_or_closed_and_the_proxy_lives(data):
    async def test():
        async with proxied() as (proxy, port):
            client = await Client.connect(port)
            await client.send(data)
            await asyncio.sleep(0)
            client.close()
            assert (await ask(port))[0] == 200
            assert proxy.buffered_bytes == 0

    asyncio.run(test())


@pytest.fixture
def own_certificate(tmp_path):
    """A server's certificate that nobody but its owner has signed, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=own",
    ]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"]
    subprocess.run(words, check=True, capture_output=True)
    return tmp_path / "cert.pem", tmp_path / "key.pem"


@pytest.mark.parametrize(("trusted", "status"), [(True, 200), (False, 502)])
async def test_an_https_server_with_a_certificate_of_your_own_is_served_once_it_is_named(
    own_certificate, monkeypatch, trusted, status
):
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*own_certificate)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(own_certificate[0]))
    async with connected(tls=tls) as (_, client):
        answered, _, body = await client.ask()
        assert answered == status
        assert trusted or b"its certificate is not trusted (self-signed certificate); SSL_CERT_FILE names" in body


async def test_watch_sees_the_queue_and_the_refusals_of_a_real_guard(policy, tmp_path):
    """The guard's page, scraped over HTTP, through the watcher, its recording and its journal's waiting requests."""
    page = b'vllm:num_requests_running{engine="0",model_name="m"} 1\nvllm:num_requests_waiting{engine="0"} 0\n'
    page += b'vllm:generation_tokens_total{engine="0",model_name="m"} 7\n'
    upstream = Upstream(lambda head: [answer_of(page if b"/metrics" in head else b"{}")])
    upstream.open.clear()
    rules = "[queue]\nrequests = 3\nwait_s = 60"
    async with proxied(upstream, Path(policy(rules))) as (proxy, port), open_session() as session:
        target = endpoint(f"http://127.0.0.1:{port}")
        session_of_watch = WatchSession(recorder=Recorder(tmp_path / "recording"))
        session_of_watch.take(replace(await scrape(session, target), time_s=time.time() - 5))
        asked = [asyncio.ensure_future(ask(port, WHOLE_POOL)) for _ in range(12)]
        await until(lambda: proxy.admission.metrics.rejected["queue_full"] == 8, 5)
        session_of_watch.take(await scrape(session, target))
        view = session_of_watch.add_immediate_findings(target.server)
        for call in asked:
            call.cancel()
    assert view.waiting == 3 and view.state == "warning"
    assert {finding.kind for finding in view.findings} == {"refused_load"}
    session_of_watch.close()
    *_, replayed = replay(tmp_path / "recording")
    assert (replayed.waiting, replayed.guards[0].refused) == (3, 8)
