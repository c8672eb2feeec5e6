"""Clients and servers that do to the proxy what none should: odd targets, half requests, answers left unread."""

import asyncio
import json
import socket
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from guard_asgi import until
from guard_wire import OK, WHOLE_POOL, Client, Upstream, answer_of, ask, connected, error, proxied, request

from legroom.guard.serving.client_connection import STALLED_S, unsent_bytes
from legroom.guard.serving.upstream import upstream_of

TOO_LARGE = b'{"prompt": [1], "max_tokens": 100, "logprobs": 500}'
BODY = b'{"prompt": [1], "max_tokens": 4}'
GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"


def in_chunks(body, size=1000):
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n"


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "target",
    [
        "/v1/completions#x",
        "/v1/completions?#x",
        "abcdefghijkl://x/v1/completions",
        "http://a%3Fb@x/v1/completions",
        "http://x/v1/completions#/v1/models",
    ],
)
async def test_no_spelling_of_the_target_passes_admission(target):
    upstream = Upstream()
    async with proxied(upstream) as (_, port):
        assert (await ask(port, TOO_LARGE, target))[0] == 400
        assert not upstream.requests


async def test_what_is_sent_on_is_the_target_that_was_read():
    upstream = Upstream()
    async with proxied(upstream) as (_, port):
        await ask(port, path="http://a%3Fb@x/v1/completions?y=1#z")
        assert upstream.requests[-1][0].startswith(b"POST /v1/completions?y=1 HTTP/1.1\r\n")


async def test_bodies_of_a_connection_that_is_cut_are_counted_off_once():
    upstream = Upstream()
    async with connected(upstream) as (proxy, client):
        upstream.open.clear()
        await client.send(request())
        await until(lambda: upstream.inside == 1)
        await client.send(request(BODY + b" " * 100_000) + b"\x00nonsense")
        await until(lambda: not proxy.clients)
        assert proxy.buffered_bytes == 0


async def test_a_client_that_asks_amidst_an_answer_is_told_to_go_on_after_it():
    more = asyncio.Event()

    def answer(_):
        yield b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\nAAAA"
        yield more
        yield b"BBBB"

    async with connected(Upstream(answer)) as (proxy, client):
        await client.send(request())
        await client.reader.readuntil(b"AAAA")
        head, _, body = request(headers="expect: 100-continue\r\n").partition(b"\r\n\r\n")
        await client.send(head + b"\r\n\r\n")
        (connection,) = proxy.clients
        await until(lambda: connection.pipeline)
        more.set()
        assert await client.reader.readuntil(b"\r\n\r\n") == b"BBBBHTTP/1.1 100 Continue\r\n\r\n"
        await client.send(body)
        assert (await client.answer())[2] == b"AAAABBBB"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 99999999999\r\n\r\n", b"413"),
        (b"POST /v1/completions HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n{}", b"200"),
    ],
)
async def test_nobody_is_told_to_go_on_in_vain(head, status):
    async with connected() as (_, client):
        await client.send(head)
        assert (await client.reader.readline()).split()[1] == status


@pytest.mark.parametrize("asked", [b"", b"connection: keep-alive\r\n"])
async def test_a_client_of_http_1_0_is_told_and_shown_the_end(asked):
    async with connected() as (_, client):
        await client.send(b"GET /v1/models HTTP/1.0\r\n%b\r\n" % asked)
        head, _, body = (await client.reader.read()).partition(b"\r\n\r\n")
        assert (b"\r\nconnection: close" in head, body) == (True, b"{}")


@pytest.mark.parametrize("path", [b"/health", b"/-/legroom/status"])
async def test_the_guards_own_answers_to_head_have_no_body(path):
    async with connected() as (proxy, client):
        proxy.upstreams.upstream = upstream_of("http://127.0.0.1:1")
        await client.send(b"HEAD %b HTTP/1.1\r\nhost: x\r\n\r\n" % path + GET)
        await client.reader.readuntil(b"\r\n\r\n")
        assert await client.reader.readexactly(9) == b"HTTP/1.1 "


async def test_a_client_that_pipelines_without_end_is_read_no_further():
    upstream = Upstream()
    async with connected(upstream) as (proxy, client):
        upstream.open.clear()
        client.writer.write(request(BODY + b" " * 1000) * 4000)
        await until(lambda: upstream.inside == 1)
        await asyncio.sleep(0.1)
        assert proxy.buffered_bytes < 1_000_000
        assert len(upstream.requests) == 1


@asynccontextmanager
async def beside_a_full_pool():
    """A proxy with the whole pool taken by one request, and a second client of it."""
    upstream = Upstream()
    upstream.open.clear()
    async with connected(upstream) as (proxy, client):
        await client.send(request(WHOLE_POOL))
        await until(lambda: upstream.inside)
        yield proxy, await Client.connect(client.writer.get_extra_info("peername")[1])


async def test_a_request_behind_the_last_answer_of_a_connection_takes_no_place():
    async with beside_a_full_pool() as (proxy, other):
        refused = b"POST /v1/completions HTTP/1.0\r\nconnection: keep-alive\r\ncontent-length: 1\r\n\r\n{"
        await other.send(refused + request(WHOLE_POOL))
        assert (await other.answer())[0] == 400
        assert await other.reader.read() == b""
        assert proxy.admission.pool.waiting == 0
        assert proxy.buffered_bytes == len(WHOLE_POOL), "that of the request inside alone"
        other.close()


async def test_prompts_of_streams_are_counted_by_the_servers_tokenizer_in_passing():
    counted = OK.replace(b"length: 2", b"length: 14").replace(b"{}", b'{"count": 100}')

    def answer(head):
        yield counted if b"/tokenize" in head else OK

    async with connected(Upstream(answer)) as (proxy, client):
        await client.ask(b'{"model": "m", "prompt": "%b", "max_tokens": 4, "stream": true}' % (b"x" * 100))
        await until(lambda: proxy.admission.learner.model_tokens("m").observations(ascii_only=True) == 1)


async def test_a_client_that_leaves_its_answers_unread_gets_no_further_ones_until_it_reads():
    upstream = Upstream(answer_of(b"x" * 60_000))
    async with connected(upstream) as (proxy, client):
        client.writer.transport.pause_reading()
        await client.send(GET * 250)
        await until(lambda: any(each.stalled_since_s for each in proxy.clients))
        (connection,) = proxy.clients
        await asyncio.sleep(0.2)
        assert len(upstream.requests) < 250
        assert connection.transport.get_write_buffer_size() < 1_000_000
        client.writer.transport.resume_reading()
        assert [(await client.answer())[0] for _ in range(250)] == [200] * 250


async def test_requests_to_a_server_that_is_down_hold_no_place():
    async with proxied() as (proxy, port):
        proxy.upstreams.upstream = upstream_of("http://127.0.0.1:1")
        assert (await ask(port, WHOLE_POOL))[0] == 502
        assert proxy.admission.pool.running == 0


async def test_trailers_of_a_request_are_not_sent_on_as_headers():
    upstream = Upstream()
    async with connected(upstream) as (_, client):
        await client.send(CHUNKED + in_chunks(BODY) + b"x-user: admin\r\nauthorization: Bearer t\r\n\r\n")
        assert (await client.answer())[0] == 200
        assert b"admin" not in upstream.requests[-1][0]
        assert b"authorization" not in upstream.requests[-1][0]


async def test_trailers_count_into_the_size_of_the_head():
    async with connected() as (_, client):
        await client.send(CHUNKED + in_chunks(BODY) + b"".join(b"x-%d: %b\r\n" % (n, b"y" * 990) for n in range(70)))
        assert (await client.answer())[0] == 431


H2C = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"


@pytest.mark.parametrize("expects", ["", "expect: 100-continue\r\n"])
async def test_a_client_that_offers_http2_is_served_over_http1(expects):
    upstream = Upstream()
    async with connected(upstream) as (_, client):
        whole = request(headers=H2C + expects)
        await client.send(whole[:-5])
        await client.send(whole[-5:] + request(headers=H2C))
        for _ in range(2):
            assert (await client.answer())[0] == 200
            head, body = upstream.requests[-1]
            assert body == BODY
            assert b"upgrade" not in head
            assert b"http2-settings" not in head


@pytest.mark.parametrize("upgrade", ["websocket", "h2c, WebSocket"])
async def test_websockets_are_refused(upgrade):
    async with proxied() as (_, port):
        headers = f"connection: upgrade\r\nupgrade: {upgrade}\r\n"
        assert (await ask(port, b"", "/v1/realtime", "GET", headers))[0] == 501


class Dying(Upstream):
    """Takes the second request of a connection, and drops the connection when `die` is set."""

    def __init__(self):
        super().__init__()
        self.die = asyncio.Event()

    async def _answer(self, writer, head):
        if len(self.requests) == 2 and b"legroom-guard" not in head:
            await self.die.wait()
            writer.transport.abort()
            return
        await super()._answer(writer, head)


@pytest.mark.parametrize(("method", "status", "times"), [("POST", 502, 2), ("GET", 200, 3)])
async def test_a_request_that_the_server_has_worked_on_is_not_sent_twice_unless_that_is_harmless(method, status, times):
    upstream = Dying()
    async with connected(upstream) as (proxy, client):
        await client.ask()
        await client.send(request(method=method))
        await until(lambda: len(upstream.requests) == 2)
        for connection in proxy.upstreams.busy:
            connection.sent_s -= 2
        upstream.die.set()
        assert (await client.answer())[0] == status
        assert len(upstream.requests) == times


async def test_a_body_in_tiny_chunks_is_counted_by_its_bytes():
    upstream = Upstream()
    async with connected(upstream) as (proxy, client):
        await client.send(CHUNKED + in_chunks(BODY + b" " * 20_000, 2))
        await until(lambda: proxy.buffered_bytes == len(BODY) + 20_000)
        await client.send(b"\r\n")
        assert (await client.answer())[0] == 200
        assert upstream.requests[-1][1] == BODY + b" " * 20_000


async def test_a_client_that_reads_slowly_but_steadily_is_not_cut_off():
    async with proxied(Upstream(answer_of(b"x" * 40_000_000))) as (proxy, port):
        with socket.create_connection(("127.0.0.1", port)) as slow:
            slow.sendall(GET)
            await until(lambda: any(each.stalled_since_s for each in proxy.clients))
            (connection,) = proxy.clients
            now_s = connection.stalled_since_s
            for _ in range(3):  # without a pause for the event loop, so that no other sweep comes between
                before_bytes = unsent_bytes(connection.transport)
                connection.sweep(now_s)
                while unsent_bytes(connection.transport) == before_bytes:
                    slow.recv(100_000)
                    time.sleep(0.001)
                now_s += STALLED_S - 1
                connection.sweep(now_s)
                assert not connection.transport.is_closing()
            connection.sweep(now_s + STALLED_S + 1)
            assert connection.transport.is_closing()


def page_and_models(page, models):
    def answer(head):
        if b"/metrics" in head:
            return [answer_of(page)] if page else [answer_of(b"", b"404 Not Found")]
        return [answer_of(models)] if b"/v1/models" in head else [OK]

    return answer


MODELS = b'{"data": [{"id": "m", "max_model_len": 131072}]}'


async def test_the_models_length_is_learnt_also_where_the_policy_names_the_pool(policy):
    upstream = Upstream(page_and_models(None, MODELS))
    async with proxied(upstream, Path(policy("[pool]\ntokens = 1000000")), plan=None) as (proxy, _):
        await until(lambda: proxy.admission.limits.max_model_len == 131072)
        assert proxy.admission.status()["pool_tokens"] == 1_000_000


async def test_a_server_that_says_nothing_any_more_keeps_the_pool_that_it_had():
    upstream = Upstream(page_and_models(b'vllm:cache_config_info{block_size="16",num_gpu_blocks="21"} 1\n', MODELS))
    async with proxied(upstream, plan=None) as (proxy, _):
        await until(lambda: proxy.admission.limits.known)
        upstream.answer = answer_of(b"", b"503 Service Unavailable")
        assert not await proxy.learn_limits_once()
        assert (proxy.admission.limits.num_blocks, proxy.admission.limits.max_model_len) == (21, 131072)


async def test_why_the_pool_is_not_known_is_the_last_reason():
    upstream = Upstream(answer_of(b"", b"503 Service Unavailable"))
    async with proxied(upstream, plan=None) as (proxy, _):
        await until(lambda: "does not answer" in proxy.admission.limits.source)
        upstream.answer = OK
        await proxy.learn_limits_once()
        assert proxy.admission.limits.source.startswith("no vllm:cache_config_info")


@pytest.mark.parametrize("concurrency", ["nan", "inf", "1e-320", "-1", "0"])
async def test_a_metrics_page_with_nonsense_still_tells_the_pool(concurrency):
    page = (
        b'vllm:cache_config_info{block_size="16",num_gpu_blocks="21",kv_cache_max_concurrency="%b",'
        b'kv_cache_size_tokens="320"} 1\n' % concurrency.encode()
    )
    models = b'{"data": [{"id": "m", "max_model_len": 1e999}]}'
    async with proxied(Upstream(page_and_models(page, models)), plan=None) as (proxy, _):
        await until(lambda: proxy.admission.limits.known)
        assert proxy.admission.limits.full_request_blocks is None


@pytest.fixture
def often(monkeypatch):
    """The proxy's chores many times a second."""
    monkeypatch.setattr("legroom.guard.serving.proxy.SWEEP_INTERVAL_S", 0.01)


async def test_what_goes_wrong_in_a_chore_does_not_end_it(monkeypatch, often):
    async with proxied() as (proxy, port):
        called = []

        def broken(*_):
            called.append(1)
            raise ValueError("a bug")

        monkeypatch.setattr(proxy.upstreams, "sweep", broken)
        await until(lambda: len(called) >= 2)
        assert (await ask(port))[0] == 200


async def test_a_client_that_leaves_the_queue_is_counted():
    upstream = Upstream()
    async with proxied(upstream) as (proxy, port):
        upstream.open.clear()
        inside, waiting = await Client.connect(port), await Client.connect(port)
        await inside.send(request(WHOLE_POOL))
        await until(lambda: upstream.inside == 1)
        await waiting.send(request(WHOLE_POOL))
        await until(lambda: proxy.admission.pool.waiting == 1)
        waiting.close()
        await until(lambda: proxy.admission.pool.waiting == 0)
        assert proxy.admission.metrics.left_queue == 1
        inside.close()


async def test_a_changed_policy_is_taken_over_without_a_request(tmp_path, often):
    path = tmp_path / "policy.toml"
    path.write_text("[queue]\nrequests = 5")
    async with proxied(policy=path) as (proxy, _):
        path.write_text("[queue]\nrequests = 19")
        proxy.admission.clock = lambda: time.monotonic() + 2  # the file is looked at once a second
        await until(lambda: proxy.admission.policy.queue.requests == 19)


async def test_half_a_request_is_answered_when_the_proxy_stops():
    async with connected() as (proxy, client):
        await client.send(request()[:-5])
        await until(lambda: proxy.buffered_bytes)
        proxy.stop.set()
        status, headers, body = await client.answer()
        assert (status, error(body)["code"], headers["connection"]) == (503, "draining", "close")
        assert int(headers["retry-after"]) >= 1


async def test_a_body_counts_until_the_server_has_taken_it():
    upstream = Upstream()
    async with proxied(upstream) as (proxy, port):
        upstream.open.clear()
        body = json.dumps({"prompt": "x" * 100, "max_tokens": 1, "user": "y" * 300_000}).encode()
        call = asyncio.ensure_future(ask(port, body))
        await until(lambda: upstream.inside == 1)
        assert proxy.buffered_bytes == len(body)
        upstream.open.set()
        assert (await call)[0] == 200
        assert proxy.buffered_bytes == 0
        assert upstream.requests[0][1] == body


async def test_bodies_that_a_stuck_server_does_not_read_are_bounded_and_more_get_503():
    class Stuck(Upstream):
        async def __call__(self, reader, writer):
            await self.open.wait()

    stuck = Stuck()
    stuck.open.clear()
    async with proxied(stuck, most_buffered_bytes=2_000_000) as (proxy, port):
        body = json.dumps({"prompt": [1], "max_tokens": 1, "user": "y" * 900_000}).encode()
        calls = [asyncio.ensure_future(ask(port, body)) for _ in range(2)]
        await until(lambda: proxy.buffered_bytes == 2 * len(body))
        assert (await ask(port, body))[0] == 503
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_a_body_that_the_server_does_not_take_in_time_gets_503_and_is_held_no_longer():
    class Stuck(Upstream):
        async def __call__(self, reader, writer):
            await self.open.wait()

    stuck = Stuck()
    stuck.open.clear()
    async with proxied(stuck) as (proxy, port):
        body = json.dumps({"prompt": [1], "max_tokens": 1, "user": "y" * 20_000_000}).encode()
        call = asyncio.ensure_future(ask(port, body))
        await until(lambda: proxy.buffered_bytes == len(body))
        await asyncio.sleep(0.3)  # until the socket's own buffers are full
        now_s = proxy.admission.clock()
        proxy.sweep(now_s + 29)
        await asyncio.sleep(0)
        assert not call.done()
        proxy.sweep(now_s + 60)
        status, headers, answer = await call
        assert (status, json.loads(answer)["error"]["code"]) == (503, "upstream_timeout")
        assert "retry-after" in headers
        await until(lambda: proxy.buffered_bytes == 0 and proxy.admission.pool.running == 0, 5)


@pytest.mark.parametrize(("when_down", "status"), [("page", 200), ("503", 503)])
async def test_the_metrics_page_says_that_the_server_does_not_answer(tmp_path, when_down, status):
    (tmp_path / "policy.toml").write_text(f'[proxy]\nmetrics_when_down = "{when_down}"')

    class Refuses(Upstream):
        async def __call__(self, reader, writer):
            writer.close()

    async with proxied(Refuses(), tmp_path / "policy.toml") as (_, port):
        client = await Client.connect(port)
        await client.send(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = await client.answer()
        assert answer[0] == status
        assert b"legroom_guard_upstream_up 0" in answer[2]
        client.close()
