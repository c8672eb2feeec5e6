"""A drain keeps new work away, waits for nothing to be left, and gives up at its deadline."""

import asyncio

import pytest
from aiohttp import web
from loopback import listening

from legroom.actions.platform import ActionFailed
from legroom.actions.server_drain import (
    CommandDrain,
    Drained,
    GuardDrain,
    NoDrain,
    PlatformDrain,
    ReadinessFileDrain,
    wait_until_empty,
)

UNDRAINED = NoDrain()


def counts(*values):
    left = list(values)

    async def busy():
        return left.pop(0) if len(left) > 1 else left[0]

    return busy


def test_it_waits_until_nothing_runs():
    drained = asyncio.run(wait_until_empty(UNDRAINED, counts(5, 3, 1, 0), 10, poll_s=0.001))
    assert drained.empty
    assert "drained in" in str(drained)


def test_it_gives_up_at_the_deadline_and_says_what_is_left():
    drained = asyncio.run(wait_until_empty(UNDRAINED, counts(5, 4), 0.02, poll_s=0.005))
    assert (drained.empty, drained.left) == (False, 4)
    assert "4 requests are left" in str(drained)


def test_a_server_that_does_not_answer_is_not_empty():
    drained = asyncio.run(wait_until_empty(UNDRAINED, counts(None), 0.02, poll_s=0.005))
    assert drained == Drained(False, drained.waited_s, None)
    assert "unknown number" in str(drained)


def test_one_empty_look_between_two_busy_ones_is_not_enough():
    asked = []

    async def busy():
        asked.append(1)
        return [0, 2, 0, 0][len(asked) - 1]

    assert asyncio.run(wait_until_empty(UNDRAINED, busy, 10, poll_s=0.001)).empty
    assert len(asked) == 4


def test_what_the_drain_counts_itself_counts_too():
    class Counting(PlatformDrain):
        in_flight_now = [3.0, 1.0, 0.0, 0.0]  # noqa: RUF012

        async def in_flight(self):
            return self.in_flight_now.pop(0)

    drain_method = Counting("guard")
    assert asyncio.run(wait_until_empty(drain_method, counts(0), 10, poll_s=0.001)).empty
    assert drain_method.in_flight_now == []


def with_guard(status, work, tls=None, **checking):
    """A stand-in for the guard's drain endpoint."""
    heard = []

    async def drain(request):
        heard.append((request.headers.get("Authorization"), await request.json()))
        return web.json_response({}, status=status)

    async def state(request):
        return web.json_response({"draining": True, "running": 2, "waiting": 1})

    async def go():
        routes = web.post("/-/legroom/drain", drain), web.get("/-/legroom/status", state)
        async with listening(*routes, tls=tls) as port:
            url = f"https://localhost:{port}/" if tls else f"http://127.0.0.1:{port}/"
            return await work(GuardDrain(url, "t0ken", **checking))

    return heard, go


def test_the_guard_is_told_with_its_token():
    async def work(drain_method):
        await drain_method.begin()
        assert await drain_method.in_flight() == 3
        await drain_method.end()

    heard, go = with_guard(200, work)
    asyncio.run(go())
    assert heard == [("Bearer t0ken", {"on": True}), ("Bearer t0ken", {"on": False})]


@pytest.mark.parametrize(
    ("status", "said"), [(404, "no drain endpoint"), (403, "refused the token"), (500, "answered 500")]
)
def test_a_guard_that_refuses_is_a_sentence(status, said):
    _, go = with_guard(status, lambda drain_method: drain_method.begin())
    with pytest.raises(ActionFailed, match=said):
        asyncio.run(go())


def test_a_guard_with_a_certificate_of_ones_own_is_told_as_the_server_is_asked(certificate):
    file, tls = certificate
    for checking in ({"ca_file": str(file)}, {"verify_tls": False}):
        heard, go = with_guard(200, lambda drain_method: drain_method.begin(), tls, **checking)
        asyncio.run(go())
        assert len(heard) == 1
    with pytest.raises(ActionFailed, match="cannot be reached"):
        asyncio.run(with_guard(200, lambda drain_method: drain_method.begin(), tls)[1]())


def test_a_guard_that_is_not_there_is_a_sentence():
    with pytest.raises(ActionFailed, match="cannot be reached") as failure:
        asyncio.run(GuardDrain("http://127.0.0.1:1", "t0ken").begin())
    assert "t0ken" not in failure.value.message


def test_a_readiness_file_appears_and_goes(tmp_path):
    drain_method = ReadinessFileDrain(tmp_path / "draining", 0)
    asyncio.run(drain_method.begin())
    assert drain_method.path.exists()
    asyncio.run(drain_method.end())
    asyncio.run(drain_method.end())
    assert not drain_method.path.exists()


def test_commands_begin_and_end_it(tmp_path):
    drain_method = CommandDrain(f"echo closed > {tmp_path}/said", "exit 4")
    asyncio.run(drain_method.begin())
    assert (tmp_path / "said").read_text() == "closed\n"
    with pytest.raises(ActionFailed, match="drain failed"):
        asyncio.run(drain_method.end())
