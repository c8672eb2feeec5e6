"""API servers of one vLLM: each has an admission of its own, and what is said to one of them is meant for all."""

import asyncio
import contextlib
import json
import uuid

import pytest
from guard_asgi import Call, Server, settle, vllm_state

from legroom.guard.serving.control import Peers, merge_statuses
from legroom.guard.serving.middleware import Guard

AUTHORIZED = [(b"authorization", b"Bearer t")]
BUSY = {"prompt": [1], "max_tokens": 4}


@pytest.fixture(autouse=True)
def family(monkeypatch):
    """Tests that run beside each other have one parent, too."""
    name = uuid.uuid4().hex
    monkeypatch.setattr("legroom.guard.serving.control._parent_identity", lambda: name)
    return name


class Living(Server):
    """A server that quantiles until it is told to stop."""

    def __init__(self):
        super().__init__()
        self.stop = asyncio.Event()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            await self.stop.wait()
        else:
            await super().__call__(scope, receive, send)


@contextlib.asynccontextmanager
async def api_servers(count, **state):
    """So many guards, each before a server of its own; gives both."""
    servers = [Living() for _ in range(count)]
    guards = [Guard(server, token="t") for server in servers]
    scope = {"type": "lifespan", "app": vllm_state(api_server_count=count, **state)}
    quantiles = [asyncio.ensure_future(guard(scope, None, None)) for guard in guards]
    try:
        await settle()
        yield guards, servers
    finally:
        for server in servers:
            server.stop.set()
        await asyncio.gather(*quantiles)


def control(guard, path="status", **body):
    app = vllm_state(api_server_count=3)
    return Call(guard, f"/-/legroom/{path}", body, "POST" if body else "GET", AUTHORIZED, app)


async def test_a_drain_reaches_every_api_server_and_so_does_its_end():
    async with api_servers(3) as (guards, _):
        answer = await control(guards[1], "drain", on=True)
        assert json.loads(answer.body)["api_servers_heard"] == 3
        assert [(await Call(guard, body=BUSY)).status for guard in guards] == [503] * 3
        await control(guards[2], "drain", on=False)
        assert [(await Call(guard, body=BUSY)).status for guard in guards] == [200] * 3


async def test_the_status_of_one_counts_the_requests_of_all_and_changes_nothing():
    async with api_servers(3) as (guards, servers):
        for server in servers:
            server.open.clear()
        calls = [Call(guard, body=BUSY) for guard in guards]
        await settle()
        assert json.loads((await control(guards[0])).body)["running"] == 3
        for server in servers:
            server.open.set()
        assert [(await call).status for call in calls] == [200] * 3


async def test_a_sibling_that_is_gone_holds_nobody_up():
    async with api_servers(2) as (guards, servers):
        servers[1].stop.set()
        await settle()
        answer = json.loads((await control(guards[0], "drain", on=True)).body)
        assert (answer["draining"], answer["api_servers_heard"]) == (True, 1)


async def test_nobody_without_the_token_drains_a_peer(family):
    drained = []
    member = Peers(2, "t", lambda on: drained.append(on) or {}, family)
    stranger = Peers(2, "wrong", lambda _: {}, family)
    assert await member.join()
    assert await stranger.statuses(drain=True) == []
    assert drained == []
    member.leave()


def test_they_meet_on_the_loop_that_vllm_runs_on(family):
    uvloop = pytest.importorskip("uvloop")

    async def meet():
        both = [Peers(2, "t", lambda on, number=number: {number: on}, family) for number in "ab"]
        assert all([await member.join() for member in both])
        assert await both[0].statuses(drain=True) == [{"b": True}]
        for member in both:
            member.leave()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(meet())


async def test_who_listens_under_a_free_name_learns_neither_the_token_nor_what_another_would_believe(family):
    heard, drained = [], []

    async def listen(reader, writer):
        heard.append(await reader.readline())
        writer.close()

    stranger = await asyncio.start_unix_server(listen, f"\0legroom-guard-{family}-1")
    member = Peers(2, "the token", lambda on: drained.append(on) or {}, family)
    await member.join()
    assert await member.statuses(drain=True) == []
    assert b"the token" not in heard[0]
    reader, writer = await asyncio.open_unix_connection(f"\0legroom-guard-{family}-0")
    writer.write(heard[0])
    assert (await reader.read(), drained) == (b"", [])
    writer.close()
    stranger.close()
    member.leave()


@pytest.mark.parametrize("line", [b"", b"no\n", b"[]\n", b"{}\n", b'{"drain": {}, "proof": 1}\n', b"x" * 100_000])
async def test_what_is_no_question_is_not_answered(family, line):
    member = Peers(1, "t", lambda _: {"draining": True}, family)
    await member.join()
    reader, writer = await asyncio.open_unix_connection(f"\0legroom-guard-{family}-0")
    writer.write(line)
    writer.write_eof()
    with contextlib.suppress(ConnectionResetError):  # it does not read what is too long to its end
        assert await reader.read() == b""
    writer.close()
    member.leave()


def test_all_drain_only_where_each_does():
    own, other = {"draining": True, "running": 1, "rejected": {"a": 1}}, {"draining": False, "rejected": {"a": 2}}
    both = merge_statuses(own, [other])
    assert (both["draining"], both["running"], both["rejected"]) == (False, 1, {"a": 3})
