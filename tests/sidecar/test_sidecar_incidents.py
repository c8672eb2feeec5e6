"""Findings become incidents once, end once, and go on after the sidecar was killed."""

import asyncio
import contextlib
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from legroom.actions.platform import ActionFailed
from legroom.live.detectors import DetectorFinding
from legroom.live.journal.journal_records import Incident, Note
from legroom.live.metrics.endpoint import endpoint
from legroom.live.metrics.window import Window
from legroom.live.remedies import ProposedRemedy
from legroom.planning.plan_document import PlanDocument
from legroom.sidecar import decisions
from legroom.sidecar.decisions import RemedySearch, first_accepted_change
from legroom.sidecar.notifier import Notifier, Webhook
from legroom.sidecar.open_incidents import IncidentKeeper
from legroom.sidecar.sidecar_http import SidecarMetrics
from legroom.sidecar.watch_config import ServerConfig


def finding(kind="stuck_engine", severity="critical", time_s=10.0):
    return DetectorFinding(kind, "a", severity, f"title of {kind}", "because", time_s - 5, time_s)


def test_a_finding_opens_one_incident_and_its_end_closes_it():
    keeper = IncidentKeeper()
    (opened,) = keeper.update("a", "g", [finding()]).opened
    assert (opened.kind, opened.opened_s, opened.detail()["by"]) == ("stuck_engine", 5.0, "sidecar")
    assert keeper.update("a", "g", [finding(time_s=15.0)]).opened == ()
    assert keeper.update("b", "g", []).closed == ()
    assert keeper.update("a", "g", []).closed == (opened,)
    assert keeper.all() == ()


def test_information_is_no_incident():
    assert IncidentKeeper().update("a", "g", [finding("no_traffic", "info")]).opened == ()


def test_getting_worse_is_said_once():
    keeper = IncidentKeeper()
    keeper.update("a", "g", [finding(severity="warning")])
    assert len(keeper.update("a", "g", [finding(severity="critical")]).worse) == 1
    assert keeper.update("a", "g", [finding(severity="critical")]).worse == ()


def left_open(server="a"):
    return Incident(7, server, "stuck_engine", "hangs", 1.0, None, None, {"by": "sidecar"}, key="the key")


def test_an_incident_of_an_earlier_sidecar_goes_on():
    keeper = IncidentKeeper()
    assert keeper.take_over([left_open(), left_open("gone")], {"a": "g"}, {}) == {"the key"}
    assert [incident.server for incident in keeper.all()] == ["a"]
    assert keeper.update("a", "g", [finding()]).opened == ()
    (adopted,) = keeper.all()
    assert (adopted.key, adopted.opened_s) == ("the key", 1.0)


def test_an_incident_that_ended_meanwhile_is_closed_after_a_while():
    keeper = IncidentKeeper()
    keeper.take_over([left_open()], {"a": "g"}, {})
    closed = [keeper.update("a", "g", []).closed for _ in range(12)]
    assert [len(ended) for ended in closed] == [0] * 11 + [1]


def test_an_adopted_incident_is_repeated_with_why_it_was_opened():
    keeper = IncidentKeeper()
    keeper.take_over(
        [replace(left_open(), detail={"by": "sidecar", "finding": {"reason": "no token"}})], {"a": "g"}, {}
    )
    (message, *_) = asyncio.run(sent(1, keeper, [True], "alertmanager"))
    assert (message["incident"], message["text"]) == (7, "no token")


async def sent(messages, keeper, answers, style="json", notify=None):
    """What a webhook took that takes or refuses messages as in `answers`, its last answer for all others: as many
    `messages` as are expected, and what comes in a while after them."""
    taken, turn = [], itertools.chain(answers, itertools.repeat(answers[-1]))

    async def post(hook, message, tries=4):
        if not next(turn):
            raise ActionFailed("it is down")
        taken.append(message)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("legroom.sidecar.notifier.post_with_retries", post)
        patched.setattr("legroom.sidecar.notifier.REPEAT_S", 0.02)
        notifier = Notifier((Webhook("http://h", style),), SidecarMetrics(), lambda text: None)
        if notify is not None:
            notifier.notify(notify)
        sending = asyncio.create_task(notifier.run(keeper.all))
        async with asyncio.timeout(90):
            while len(taken) < messages:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.3)
        sending.cancel()
    return taken


@pytest.mark.parametrize("style", ["json", "slack"])
def test_a_webhook_that_was_down_hears_once_of_an_incident_that_is_still_open(style):
    keeper = IncidentKeeper()
    (incident,) = keeper.update("a", "g", [finding()]).opened
    incident.number = 7
    taken = asyncio.run(sent(1, keeper, [False, False, False, True], style, incident))
    assert [message["incident"] for message in taken] == [7]


def test_a_closed_incident_that_a_webhook_did_not_take_is_not_repeated():
    keeper = IncidentKeeper()
    (incident,) = keeper.update("a", "g", [finding()]).opened
    incident.number = 7
    keeper.update("a", "g", [])
    assert asyncio.run(sent(0, keeper, [False, True], notify=incident)) == []


@pytest.mark.parametrize(("severity", "messages"), [(None, 1), ("warning", 1), ("critical", 0)])
def test_a_restarted_sidecar_sends_what_the_journal_does_not_know_as_delivered(severity, messages):
    told = {Webhook("http://h").key: severity} if severity else {}
    noted = Note(0.0, "h was told", {"told": told})
    left = replace(left_open(), detail={"by": "sidecar", "severity": "critical"}, notes=(noted,))
    keeper = IncidentKeeper()
    keeper.take_over([left], {"a": "g"}, {})
    assert len(asyncio.run(sent(messages, keeper, [True]))) == messages


def test_a_message_that_is_on_its_way_when_the_sidecar_ends_arrives(monkeypatch):
    async def ends() -> list[str]:
        begun, goes_on, taken = asyncio.Event(), asyncio.Event(), []

        async def slowly(hook, message, tries):
            begun.set()
            await goes_on.wait()
            taken.append(message["kind"])

        monkeypatch.setattr("legroom.sidecar.notifier.post_with_retries", slowly)
        notifier = Notifier((Webhook("http://h"),), SidecarMetrics(), lambda text: None)
        sending = asyncio.create_task(notifier.run(lambda: ()))
        (incident,) = IncidentKeeper().update("a", "g", [finding()]).opened
        incident.number = 7
        notifier.notify(incident)
        await begun.wait()
        asyncio.get_running_loop().call_soon(goes_on.set)
        await notifier.drain(60.0)
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
        return taken

    assert asyncio.run(ends()) == ["stuck_engine"]


def test_an_incident_that_takes_hours_to_be_found_again_is_not_closed_before():
    keeper = IncidentKeeper()
    keeper.take_over([left_open()], {"a": "g"}, {"stuck_engine": 7200.0})
    assert all(keeper.update("a", "g", []).closed == () for _ in range(100))
    keeper.all()[0].lasts_until_s = 0.0
    assert len(keeper.update("a", "g", []).closed) == 1


@pytest.mark.parametrize(("told", "again"), [("warning", 1), ("critical", 0)])
def test_what_was_told_before_a_restart_is_not_told_again(told, again):
    notes = (Note(2.0, "worse", {"severity": told}), Note(3.0, "acknowledged by me", {"acknowledged": True}))
    adopted = replace(left_open(), notes=notes, detail={"by": "sidecar", "severity": "warning"})
    keeper = IncidentKeeper()
    keeper.take_over([adopted], {"a": "g"}, {})
    assert keeper.all()[0].acknowledged
    assert len(keeper.update("a", "g", [finding(severity="critical")]).worse) == again


def test_a_severity_that_swings_is_told_once():
    keeper = IncidentKeeper()
    worse = [keeper.update("a", "g", [finding(severity=severity)]).worse for severity in ("warning", "critical") * 3]
    assert sum(map(len, worse)) == 1


@pytest.mark.parametrize(
    ("version", "settings", "flags"),
    [
        ("0.32.0", {"max_num_seqs": 32}, {"--max-num-seqs": "32"}),
        ("0.32.0", {"enable_prefix_caching": False}, {"--no-enable-prefix-caching": ""}),
        ("0.6.0", {"enable_prefix_caching": False}, {"--enable-prefix-caching": None}),
        ("0.32.0", {"enforce_eager": True}, {"--enforce-eager": ""}),
        ("0.32.0", {"hf_overrides": {"a": 1}}, {"--hf-overrides": '{"a": 1}'}),
    ],
)
def test_computed_settings_become_flags_of_the_servers_release(version, settings, flags):
    assert first_accepted_change((ProposedRemedy("why", settings),), PlanDocument(vllm=version)).flags == flags


@pytest.mark.parametrize(
    ("version", "settings"),
    [
        ("0.32.0", {"model": "org/smaller"}),
        ("0.32.0", {"tensor_parallel_size": 2}),
        ("0.6.0", {"max_cudagraph_capture_size": 8}),
    ],
)
def test_what_is_for_people_or_for_another_release_is_passed_over(version, settings):
    remedies = (ProposedRemedy("why", settings), ProposedRemedy("next", {"max_num_seqs": 8}))
    assert first_accepted_change(remedies, PlanDocument(vllm=version)).flags == {"--max-num-seqs": "8"}
    assert first_accepted_change(remedies[:1], PlanDocument(vllm=version)) is None


def test_flags_are_changed_only_where_a_plan_is_known():
    remedies = (ProposedRemedy("words"), ProposedRemedy("better", {"max_num_seqs": 8}, {"A": "1"}))
    assert first_accepted_change(remedies, None) is None
    assert first_accepted_change(remedies, PlanDocument()).flags == {"--max-num-seqs": "8"}
    assert first_accepted_change(remedies[:1], PlanDocument()) is None
    assert first_accepted_change(remedies, PlanDocument(vllm="of next year")) is None


def test_the_change_that_is_computed_is_noted_with_its_remedies(monkeypatch):
    monkeypatch.setattr(decisions, "remedies_for", lambda *_: (ProposedRemedy("better", {"max_num_seqs": 8}),))
    noted = []
    (incident,) = IncidentKeeper().update("a", "g", [finding()]).opened
    server = ServerConfig(endpoint("http://a:8000"), "g", plan=PlanDocument(vllm="0.32.0"))

    async def search():
        search = RemedySearch(SimpleNamespace(note=lambda incident, text, detail: noted.append(detail)))
        search.begin(incident, server, Window("a"))
        await asyncio.gather(*search.tasks)

    asyncio.run(search())
    assert [note["change"] for note in noted] == [str(incident.change)] == ["--max-num-seqs 8"]
