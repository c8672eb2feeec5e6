"""A restart is drained, recorded step by step, and ended by the next legroom wherever this one was killed."""

import asyncio

import pytest
from stand_in_world import Killed, World

from legroom.actions.platform import ActionFailed, FlagChange, Override, State, keep_override, kept_override
from legroom.live.journal.journal import Journal
from legroom.live.metrics.endpoint import endpoint
from legroom.sidecar.action_policy import ActionLimits
from legroom.sidecar.server_restart import ActionContext, RestartOrder, ServerRestart
from legroom.sidecar.watch_config import ServerConfig

LIMITS = ActionLimits(drain_deadline_s=0.05, restart_deadline_s=0.5)


@pytest.fixture
def journal(tmp_path):
    with Journal.open(tmp_path / "journal.db") as opened:
        yield opened


def restart_of(world, journal, tmp_path, **more):
    async def keep(call):
        return call(journal)

    server = ServerConfig(endpoint("http://a"), "g", world, world)
    order = RestartOrder(server, LIMITS, "restart", "it hangs", more.pop("failing", False), **more)
    return ServerRestart(ActionContext(keep, lambda write: write(journal), world.look, tmp_path, 0.005), order)


def run(world, journal, tmp_path, **more):
    return asyncio.run(restart_of(world, journal, tmp_path, **more).run())


def stages(journal, number):
    return [stage.name for stage in journal.action(number).stages]


def test_a_restart_closes_the_door_waits_restarts_and_opens_it(journal, tmp_path):
    world = World()
    outcome = run(world, journal, tmp_path)
    assert outcome.state == "done"
    assert world.done == ["closed", "launched", "restart", "opened"]
    assert stages(journal, outcome.action_id) == ["draining", "drained", "launched", "restarted"]
    assert journal.action(outcome.action_id).state == "done"


def test_a_server_that_does_not_drain_is_left_alone(journal, tmp_path):
    world = World(running=3.0)
    outcome = run(world, journal, tmp_path)
    assert (outcome.state, world.starts, world.closed) == ("undone", 1, False)
    assert "3 requests are left" in outcome.text


def test_a_failing_server_is_not_waited_for(journal, tmp_path):
    world = World(running=3.0)
    assert run(world, journal, tmp_path, failing=True).state == "done"
    assert world.starts == 2


def test_a_drain_that_does_not_begin_stops_a_restart_of_a_server_that_serves(journal, tmp_path):
    world = World()

    async def broken():
        raise ActionFailed("the guard cannot be reached")

    world.begin = broken
    outcome = run(world, journal, tmp_path)
    assert (outcome.state, world.starts) == ("undone", 1)
    assert "not be stopped" in outcome.text
    assert run(world, journal, tmp_path, failing=True).state == "done"


def test_a_server_that_does_not_come_back_is_a_failure(journal, tmp_path):
    world = World()
    world.comes_back = False
    outcome = run(world, journal, tmp_path)
    assert (outcome.state, journal.action(outcome.action_id).state) == ("failed", "failed")
    assert "within 0.5 s" in outcome.text


@pytest.mark.parametrize(("guard", "may_refuse"), [("http://a", False), ("http://proxy", True)])
def test_a_server_that_is_still_starting_at_the_deadline_is_said_to_be(journal, tmp_path, guard, may_refuse):
    class Starting(World):
        url = guard

        async def state(self):
            return State(f"start {self.starts}", self.up, underway=not self.up)

        async def end(self):
            raise ActionFailed("the guard cannot be reached")

    world = Starting()
    world.comes_back = False
    outcome = run(world, journal, tmp_path)
    assert "the world is still starting it" in outcome.text
    assert ("cannot be reached" in outcome.text) == may_refuse


def test_a_change_of_flags_keeps_the_old_ones_for_undo(journal, tmp_path):
    world = World()
    world.flags = "old"
    outcome = run(world, journal, tmp_path, change=FlagChange({"--seed": "1"}))
    assert (outcome.state, world.flags) == ("done", "--seed 1")
    override = kept_override(outcome.action_id, tmp_path)
    assert override == Override("flags", "old")
    back = run(world, journal, tmp_path, restore=(outcome.action_id, override))
    assert (back.state, world.flags, world.starts) == ("done", "old", 3)
    assert journal.action(outcome.action_id).state == "undone"
    assert kept_override(outcome.action_id, tmp_path) is None


MOMENTS = [("closed", "undone", 1), ("launched", "undone", 1), ("restart", "done", 2), ("opened", "done", 2)]


@pytest.mark.parametrize(("moment", "state", "starts"), MOMENTS)
def test_killed_at_any_step_it_is_finished_or_undone_and_never_done_twice(journal, tmp_path, moment, state, starts):
    world = World()
    world.die_at = moment
    with pytest.raises(Killed):
        run(world, journal, tmp_path)
    (action,) = journal.unfinished_actions()
    outcome = asyncio.run(restart_of(world, journal, tmp_path).resume(action))
    assert (outcome.state, world.starts, world.closed) == (state, starts, False)
    assert journal.unfinished_actions() == ()


@pytest.mark.parametrize(("moment", "state"), [("flags written", "undone"), ("restart", "done")])
def test_killed_with_flags_half_changed_they_are_all_there_or_all_gone(journal, tmp_path, moment, state):
    world = World()
    world.flags = "old"
    world.die_at = moment
    change = FlagChange({"--seed": "1"})
    with pytest.raises(Killed):
        run(world, journal, tmp_path, change=change)
    (action,) = journal.unfinished_actions()
    outcome = asyncio.run(restart_of(world, journal, tmp_path).resume(action))
    assert (outcome.state, world.flags) == (state, "old" if state == "undone" else "--seed 1")


def test_a_server_left_stopped_is_started(journal, tmp_path):
    world = World()
    world.die_at = "launched"
    with pytest.raises(Killed):
        run(world, journal, tmp_path)
    world.up = False  # the platform stopped it and went no further
    (action,) = journal.unfinished_actions()
    outcome = asyncio.run(restart_of(world, journal, tmp_path).resume(action))
    assert (outcome.state, world.starts, world.up) == ("done", 2, True)


def test_stopped_before_the_server_was_touched_it_is_undone(journal, tmp_path):
    world = World(running=1.0)

    async def go():
        task = asyncio.create_task(restart_of(world, journal, tmp_path).run())
        while not journal.unfinished_actions() or "closed" not in world.done:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())
    assert (world.starts, world.closed) == (1, False)
    assert [action.state for action in journal.actions()] == ["undone"]


def test_no_platform_is_said(journal, tmp_path):
    async def keep(call):
        return call(journal)

    with pytest.raises(ActionFailed, match="no platform"):
        ServerRestart(
            ActionContext(keep, None, None, tmp_path),
            RestartOrder(ServerConfig(endpoint("a"), "g"), LIMITS, "restart", "", False),
        )


def test_what_was_kept_for_undo_is_found_again(tmp_path):
    keep_override(1, Override("p", None), tmp_path)
    assert kept_override(1, tmp_path) == Override("p", None)
