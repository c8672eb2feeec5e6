"""The actor undoes only what it is asked to, ends what a killed one left, and knows what it can do where."""

import asyncio
from dataclasses import replace

import pytest
from stand_in_world import Killed, World

from legroom.actions.platform import ActionFailed, FlagChange, FlagsFixed, kept_override
from legroom.actions.server_drain import PlatformDrain
from legroom.live.detectors import DetectorFinding, Watcher
from legroom.live.journal.journal import Journal
from legroom.live.journal.journal_records import JournalUnavailable
from legroom.live.metrics.endpoint import endpoint
from legroom.sidecar.acting import Actor
from legroom.sidecar.action_policy import ActionLimits
from legroom.sidecar.open_incidents import OpenIncident
from legroom.sidecar.server_restart import ActionContext, RestartOrder, ServerRestart
from legroom.sidecar.watch_config import GroupConfig, ServerConfig, SidecarConfig

LIMITS = ActionLimits(per_hour=100, per_day=100, first_pause_s=0.0, drain_deadline_s=0.05, restart_deadline_s=0.3)
A, B = "http://a", "http://b"


class Scene:
    """Two servers of one group, each a world of its own, and actors that share their journal."""

    def __init__(self, folder, journal, act=("restart",)):
        self.folder, self.journal = folder, journal
        self.worlds = {A: World(), B: World()}
        servers = tuple(ServerConfig(endpoint(name), "g", world, world) for name, world in self.worlds.items())
        act = frozenset(act)
        self.config = SidecarConfig(servers, {"g": GroupConfig("g", act, LIMITS)}, act)
        self.reports, self.later = [], []

    @property
    def context(self):
        async def keep(call):
            return call(self.journal)

        async def look(server):
            return await self.worlds[server.name].look(server)

        return ActionContext(keep, self.later.append, look, self.folder, 0.005)

    def actor(self):
        return Actor(self.config, self.context, self.reports.append)

    def change_flags(self, name):
        """A restart with new flags, to its end."""
        server = next(server for server in self.config.servers if server.name == name)
        order = RestartOrder(server, LIMITS, "restart-with-flags", "a test", False, None, FlagChange({"--seed": "1"}))
        return asyncio.run(ServerRestart(self.context, order).run())


@pytest.fixture
def scene(tmp_path):
    with Journal.open(tmp_path / "journal.db") as journal:
        yield Scene(tmp_path, journal)


def asked(scene, action, server, undo=None):
    """A person's order, and what came of it."""

    async def go():
        actor = scene.actor()
        await actor.act_on_request(action, server, undo, 2, 0)
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
        ("restart-with-flags", "undone"),
        ("undo", "done"),
    ]


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


def test_what_was_left_in_one_group_is_ended_one_at_a_time(scene):
    for world, name in ((scene.worlds[A], A), (scene.worlds[B], B)):
        world.die_at = "restart"
        with pytest.raises(Killed):
            scene.change_flags(name)
    acted = []

    async def next_legroom():
        actor = scene.actor()
        for name, world in scene.worlds.items():
            world.look = watched(world.look, lambda name=name: acted.append((name, dict(actor._acting_on))))
        await actor.recover()
        await ended(actor)
        assert actor._busy == actor._acting_on == {}

    def watched(look, note):
        async def noted(server):
            note()
            return await look(server)

        return noted

    asyncio.run(next_legroom())
    assert states(scene) == ["done", "done"]
    assert acted and all(acting_on == {"g": name} for name, acting_on in acted)


@pytest.mark.parametrize("act", ["restart", "drain"])
def test_how_an_action_ended_is_kept_until_the_journal_can_be_written(tmp_path, act, monkeypatch):
    def full(self, *_):
        raise JournalUnavailable("the disk is full")

    with Journal.open(tmp_path / "journal.db") as journal:
        scene = Scene(tmp_path, journal, (act,))
        with monkeypatch.context() as patched:
            patched.setattr(Journal, "finish_action", full)
            considered(scene, hanging(scene))
        assert len(journal.unfinished_actions()) == len(scene.later) == 1
        scene.later[0](journal)
        assert states(scene) == ["done"]


def test_a_platform_that_does_not_answer_is_told_once_and_nothing_is_begun(scene):
    async def silent():
        raise ActionFailed("the platform does not answer")

    scene.worlds[A].state = silent
    incident = hanging(scene)
    for _ in range(3):
        considered(scene, incident)
        incident.ask_again_s = 0.0
    assert [(report.name, "platform" in report.text) for report in scene.reports] == [("refusal", True)]
    assert scene.journal.actions() == ()


def test_flags_that_cannot_be_written_leave_the_server_as_it_runs(tmp_path):
    async def refused(change):
        raise ActionFailed("it starts a script")

    with Journal.open(tmp_path / "journal.db") as journal:
        scene = Scene(tmp_path, journal, ("restart-with-flags",))
        world, incident = scene.worlds[A], hanging(scene)
        world.write_flags, incident.change = refused, FlagChange({"--seed": "1"})
        considered(scene, incident)
        assert states(scene) == ["undone"]
        assert (world.starts, world.closed) == (1, False)
        assert "a script" in scene.reports[-1].text


def test_where_flags_cannot_be_changed_a_restart_that_helps_is_made_without_them(tmp_path):
    async def fixed():
        raise FlagsFixed("it starts a script")

    with Journal.open(tmp_path / "journal.db") as journal:
        scene = Scene(tmp_path, journal, ("restart", "restart-with-flags"))
        world, incident = scene.worlds[A], hanging(scene)
        world.override_place, incident.change = fixed, FlagChange({"--seed": "1"})
        considered(scene, incident)
        assert [(report.name, "a script" in report.text) for report in scene.reports] == [("refusal", True)]
        incident.ask_again_s = 0.0
        considered(scene, incident)
        assert [(action.name, action.state) for action in journal.actions()] == [("restart", "done")]


# Draining


def hanging(scene, server=A, kind="stuck_engine"):
    """An incident that is in the journal and is seen now."""
    finding = DetectorFinding(kind, server, "critical", "It hangs", "no token comes", 0.0, 0.0, restart_helps=True)
    scene.journal.open_incident(server, kind, "It hangs", {"by": "sidecar"}, 0.0, f"{server}|{kind}")
    return OpenIncident(
        f"{server}|{kind}", server, "g", kind, "It hangs", 0.0, "critical", finding, remedies_known=True
    )


def considered(scene, *incidents):
    """What one legroom does about incidents before it stops."""

    async def go():
        actor = scene.actor()
        for incident in incidents:
            actor.consider(incident, Watcher(incident.server), 2, 1)
            await ended(actor)

    asyncio.run(go())


def over(scene, incident):
    """Another legroom sees that it is over."""

    async def go():
        actor = scene.actor()
        actor.end_drain_of(incident)
        scene.journal.close_incident(scene.journal.incident_id(incident.key), "over")
        await ended(actor)

    asyncio.run(go())


def taken_over(scene):
    async def go():
        actor = scene.actor()
        await actor.recover()
        await ended(actor)

    asyncio.run(go())


@pytest.fixture
def draining(tmp_path):
    with Journal.open(tmp_path / "journal.db") as journal:
        yield Scene(tmp_path, journal, ("drain",))


def states(scene):
    return [action.state for action in scene.journal.actions()]


def test_a_drain_that_one_legroom_began_is_ended_by_the_next_when_the_incident_is_over(draining):
    considered(draining, hanging(draining))
    assert draining.worlds[A].closed
    over(draining, hanging(draining))
    assert not draining.worlds[A].closed
    assert states(draining) == ["undone"]


def test_a_server_is_drained_once_for_an_incident_however_often_legroom_starts(draining):
    considered(draining, hanging(draining))
    considered(draining, hanging(draining))
    assert states(draining) == ["done"]


def test_a_drain_whose_incident_ended_unseen_is_ended_at_the_next_start(draining):
    considered(draining, hanging(draining))
    taken_over(draining)
    assert draining.worlds[A].closed, "its incident lasts"
    draining.journal.close_incident(1, "over")
    taken_over(draining)
    assert not draining.worlds[A].closed


def test_a_server_stays_drained_while_another_incident_of_it_lasts(draining):
    first, second = hanging(draining), hanging(draining, kind="unreachable")
    considered(draining, first, second)
    over(draining, first)
    assert draining.worlds[A].closed
    over(draining, second)
    assert not draining.worlds[A].closed


def test_a_drain_that_does_not_end_is_tried_again(draining):
    world, tries = draining.worlds[A], []
    considered(draining, hanging(draining))
    really_end = world.end

    async def stiff():
        tries.append("end")
        if len(tries) < 3:
            raise ActionFailed("the guard cannot be reached")
        await really_end()

    world.end = stiff
    over(draining, hanging(draining))
    assert (world.closed, len(tries)) == (False, 3)
    assert [report.text for report in draining.reports].count(
        "new work is still turned away: the guard cannot be reached"
    ) == 1


def test_a_server_that_is_only_watched_is_neither_drained_nor_restarted(tmp_path):
    with Journal.open(tmp_path / "journal.db") as journal:
        scene = Scene(tmp_path, journal, ("drain", "restart"))
        considered(scene, hanging(scene, "found:8000"))
        assert [report.text for report in scene.reports] == [
            "not acting: no platform is named for found:8000, so legroom cannot restart it"
        ]
        assert journal.actions() == ()


def test_a_server_without_a_way_to_drain_is_not_drained(tmp_path):
    with Journal.open(tmp_path / "journal.db") as journal:
        scene = Scene(tmp_path, journal, ("drain",))
        considered(scene, hanging(scene, "found:8000"))
        assert "work at found:8000" in scene.reports[0].text


def test_a_platform_that_drains_by_itself_keeps_no_work_from_a_server_that_goes_on(draining):
    server = replace(draining.config.servers[0], drain_method=PlatformDrain("Kubernetes"))
    draining.config = replace(draining.config, servers=(server,))
    considered(draining, hanging(draining))
    assert draining.journal.actions() == ()
    assert "to stop new work" in draining.reports[-1].text


def test_a_mistake_while_acting_is_not_repeated_at_every_look(draining):
    incident = hanging(draining)

    async def broken():
        raise KeyError("a mistake")

    draining.worlds[A].begin = broken
    considered(draining, incident, incident, incident)
    assert [report.text for report in draining.reports if "acting failed" in report.text] == [
        "acting failed: KeyError('a mistake')"
    ]


# Budgets


@pytest.mark.parametrize("jump_s", [0.0, 7200.0, 86_401.0, 10 * 86_400.0, -86_401.0])
def test_a_clock_that_is_set_gives_no_restart_back(tmp_path, monkeypatch, jump_s):
    now = [1.8e9]
    monkeypatch.setattr("legroom.sidecar.acting.time.time", lambda: now[0])
    with Journal.open(tmp_path / "journal.db", clock=lambda: now[0]) as journal:
        scene = Scene(tmp_path, journal)

        async def go():
            actor = scene.actor()
            await actor.act_on_request("restart", A, None, 2, 0)
            await ended(actor)
            now[0] += jump_s
            return await actor._attempt_ages("g"), await actor._attempt_ages("another")

        ages_s, others_s = asyncio.run(go())
    assert [age_s < 60.0 for age_s in ages_s] == [True]
    assert others_s == []
