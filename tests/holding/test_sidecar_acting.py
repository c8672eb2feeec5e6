"""The actor undoes only what it is asked to, ends what a killed one left, and knows what it can do where."""

import asyncio

import pytest
from stand_in_world import Killed, World

from legroom.actions.platform import ActionFailed, FlagChange
from legroom.actions.undo import kept_override
from legroom.holding.policy import Limits
from legroom.holding.sidecar_acting import Actor
from legroom.holding.sidecar_config import GroupConfig, ServerConfig, SidecarConfig
from legroom.holding.sidecar_restart import Hands, Order, Restart
from legroom.live.address import endpoint
from legroom.live.journal import Journal

LIMITS = Limits(per_hour=100, per_day=100, first_pause_s=0.0, drain_deadline_s=0.05, restart_deadline_s=0.3)
A, B = "http://a", "http://b"


class Scene:
    """Two servers of one group, each a world of its own, and actors that share their journal."""

    def __init__(self, folder, journal, act=("restart",)):
        self.folder, self.journal = folder, journal
        self.worlds = {A: World(), B: World()}
        servers = tuple(ServerConfig(endpoint(name), "g", world, world) for name, world in self.worlds.items())
        act = frozenset(act)
        self.config = SidecarConfig(servers, {"g": GroupConfig("g", act, LIMITS)}, act)
        self.said = []

    @property
    def hands(self):
        async def keep(call):
            return call(self.journal)

        async def look(server):
            return await self.worlds[server.name].look(server)

        return Hands(keep, look, self.folder, 0.005)

    def actor(self):
        return Actor(self.config, self.hands, self.said.append)

    def change_flags(self, name):
        """A restart with new flags, to its end."""
        server = next(one for one in self.config.servers if one.name == name)
        order = Order(server, LIMITS, "restart-with-flags", "a test", False, None, FlagChange({"--seed": "1"}))
        return asyncio.run(Restart(self.hands, order).run())


@pytest.fixture
def scene(tmp_path):
    with Journal.open(tmp_path / "journal.db") as journal:
        yield Scene(tmp_path, journal)


def asked(scene, action, server, undo=None):
    """A person's order, and what came of it."""

    async def go():
        actor = scene.actor()
        await actor.by_hand(action, server, undo, 2, 0)
        await ended(actor)

    asyncio.run(go())


async def ended(actor):
    while actor._tasks:
        await asyncio.gather(*actor._tasks)


def test_what_was_changed_at_one_server_is_not_undone_at_another(scene):
    changed = scene.change_flags(A)
    with pytest.raises(ActionFailed, match=f"action {changed.action_id} changed {A}, not {B}"):
        asked(scene, "undo", B, changed.action_id)
    assert (scene.worlds[A].flags, scene.worlds[B].starts) == ("--seed 1", 1)
    asked(scene, "undo", A, changed.action_id)
    assert (scene.worlds[A].flags, scene.worlds[A].starts) == (None, 3)


@pytest.mark.parametrize(("action", "with_number"), [("undo", False), ("restart", True)])
def test_an_undo_needs_a_number_and_a_restart_takes_none(scene, action, with_number):
    changed = scene.change_flags(A)
    with pytest.raises(ActionFailed, match="needs the number"):
        asked(scene, action, A, changed.action_id if with_number else None)
    assert scene.worlds[A].starts == 2


def test_killed_with_flags_that_do_not_start_the_next_legroom_puts_the_old_ones_back(scene):
    world = scene.worlds[A]
    world.flags, world.die_at, world.comes_back = "old", "restart", False
    with pytest.raises(Killed):
        scene.change_flags(A)

    async def next_legroom():
        actor = scene.actor()
        await actor.recover()
        world.comes_back = True
        await ended(actor)

    asyncio.run(next_legroom())
    assert (world.flags, world.up) == ("old", True)
    assert [(action.name, action.state) for action in scene.journal.actions()] == [
        ("restart-with-flags", "undone"), ("undo", "done"),
    ]  # fmt: skip


def test_killed_while_it_puts_old_flags_back_the_next_legroom_ends_that(scene):
    changed = scene.change_flags(A)
    world = scene.worlds[A]
    world.die_at = "restart"
    with pytest.raises(Killed):
        asked(scene, "undo", A, changed.action_id)

    async def next_legroom():
        actor = scene.actor()
        await actor.recover()
        await ended(actor)

    asyncio.run(next_legroom())
    assert (world.flags, world.starts) == (None, 3)
    assert scene.journal.action(changed.action_id).state == "undone"
    assert kept_override(changed.action_id, scene.folder) is None
