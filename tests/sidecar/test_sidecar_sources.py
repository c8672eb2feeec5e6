"""Servers come and go where they are found, and a source that cannot begin is said in a sentence."""

import asyncio
import time
from dataclasses import replace

import pytest

from legroom.errors import LegroomError
from legroom.live.journal import journal_buffer
from legroom.live.journal.journal import Journal
from legroom.live.metrics.endpoint import Endpoint
from legroom.live.metrics.sample import ScrapeFailure
from legroom.live.thresholds import DEFAULT, Hold
from legroom.sidecar import sidecar as sidecar_module
from legroom.sidecar import sources
from legroom.sidecar.sidecar import Sidecar
from legroom.sidecar.sources import combined_source
from legroom.sidecar.watch_config import KubernetesConfig, PrometheusConfig, simple_config

HASTY = replace(DEFAULT, unreachable_hold=Hold(1, 0.0))


def config_in(folder, addresses=(), **more):
    config = simple_config(addresses, thresholds=HASTY, journal=folder / "journal.db", port=0, interval_s=0.05)
    return replace(config, **more)


def down(server):
    return ScrapeFailure(time.time(), server, "refused", "nothing listens there")


def ran(config, steps):
    """A sidecar whose source takes these steps and ends it."""

    async def go():
        sidecar = Sidecar(config, lambda text: None)

        async def source(take, server_removed, expected, /):
            await steps(sidecar, take, server_removed)
            sidecar.stop()
            await asyncio.sleep(60)

        await sidecar.run(source)

    asyncio.run(go())


def outcomes(folder):
    with Journal.open(folder / "journal.db") as journal:
        return [incident.outcome for incident in journal.incidents()]


def test_a_server_that_is_no_longer_listed_leaves_nothing_behind(tmp_path):
    seen = []

    async def steps(sidecar, take, server_removed):
        take(down("pod-a"))
        seen.append((sidecar.health(), sidecar.metrics_and_content_type()[0]))
        server_removed("pod-a")
        seen.append((sidecar.health(), sidecar.metrics_and_content_type()[0]))

    ran(config_in(tmp_path), steps)
    (before, figures), (after, none) = seen
    assert (before["servers"], before["incidents_open"], b"pod-a" in figures) == (1, 1, True)
    assert (after["servers"], after["incidents_open"], b"pod-a" in none) == (0, 0, False)
    assert outcomes(tmp_path) == ["no longer watched"]


def test_a_server_of_the_config_stays_whatever_a_source_lists(tmp_path):
    async def steps(sidecar, take, server_removed):
        take(down("http://a:8000"))
        server_removed("http://a:8000")
        assert sidecar.health()["incidents_open"] == 1

    ran(config_in(tmp_path, ["http://a:8000"]), steps)
    assert outcomes(tmp_path) == [None]


def test_incidents_of_servers_that_nobody_watches_end_at_the_next_start(tmp_path):
    with Journal.open(tmp_path / "journal.db") as journal:
        for server, by in (("http://old", "sidecar"), ("http://a:8000", "sidecar"), ("http://page", "watch")):
            journal.open_incident(server, "stuck_engine", "It hangs", {"by": by}, 0.0, server)

    async def nothing(sidecar, take, server_removed):
        pass

    ran(config_in(tmp_path, ["http://a:8000"]), nothing)
    with Journal.open(tmp_path / "journal.db") as journal:
        assert {incident.server: incident.outcome for incident in journal.incidents()} == {
            "http://old": "no longer watched",
            "http://a:8000": None,
            "http://page": None,
        }


def stuck_in(folder, *servers):
    """What an earlier sidecar left."""
    with Journal.open(folder / "journal.db") as journal:
        for server in servers:
            journal.open_incident(server, "unreachable", "Silent", {"by": "sidecar"}, 0.0, f"key of {server}")


@pytest.mark.parametrize(
    "source_name", [{"prometheus": PrometheusConfig("http://p")}, {"kubernetes": KubernetesConfig("a=b")}]
)
def test_an_incident_of_a_server_that_is_found_elsewhere_goes_on_after_a_restart(tmp_path, source_name):
    stuck_in(tmp_path, "ns/pod-a", "ns/pod-b")
    told = []

    async def steps(sidecar, take, server_removed):
        sidecar._notifier.notify = lambda *said: told.append(said)
        assert sidecar._expected_servers() == {"ns/pod-a", "ns/pod-b"}
        take(down("ns/pod-a"))
        take(down("ns/pod-a"))
        assert sidecar._expected_servers() == {"ns/pod-b"}
        assert told == []
        server_removed("ns/pod-b")
        assert len(told) == 1

    ran(config_in(tmp_path, **source_name), steps)
    assert outcomes(tmp_path) == ["no longer watched", None]


def test_a_journal_that_was_away_at_the_start_is_gone_on_with_when_it_is_back(tmp_path, monkeypatch):
    monkeypatch.setattr(sidecar_module, "_MIN_FLUSH_INTERVAL_S", 0.01)
    monkeypatch.setattr(journal_buffer, "_PAUSE_S", 0.01)
    stuck_in(tmp_path, "http://a:8000", "http://b:8000")
    with Journal.open(tmp_path / "journal.db") as journal:
        journal.begin_action(None, "default", "restart", {"by": "sidecar", "server": "http://a:8000"})
    (tmp_path / "journal.db").rename(tmp_path / "away")
    (tmp_path / "journal.db").mkdir()

    async def steps(sidecar, take, server_removed):
        take(down("http://a:8000"))
        with pytest.raises(LegroomError, match="not known yet"):
            await sidecar.act_on_request("restart", "http://a:8000", None)
        (tmp_path / "journal.db").rmdir()
        (tmp_path / "away").rename(tmp_path / "journal.db")
        while not sidecar._has_taken_over or sidecar._actor._tasks:
            await asyncio.sleep(0.01)
        assert sidecar.health()["incidents_open"] == 2

    ran(config_in(tmp_path, ["http://a:8000", "http://b:8000"]), steps)
    with Journal.open(tmp_path / "journal.db") as journal:
        assert {(incident.server, incident.outcome) for incident in journal.incidents()} == {
            ("http://a:8000", "goes on as another incident"),
            ("http://a:8000", None),
            ("http://b:8000", None),
        }
        assert journal.unfinished_actions() == ()


def heard(config, *expected):
    """Which servers a source says are gone, until the first is."""
    server_removed = asyncio.Queue()

    async def go():
        source = combined_source(config, lambda text: None)
        task = asyncio.create_task(source(lambda look: None, server_removed.put_nowait, lambda: frozenset(expected)))
        first = await asyncio.wait_for(server_removed.get(), 30)
        task.cancel()
        return first

    return asyncio.run(go())


def test_prometheus_forgets_a_server(tmp_path, monkeypatch):
    left = [{"a", "b"}, {"b"}]

    class Listing:
        servers = frozenset()

        def expect(self, servers):
            pass

        async def poll(self, session, time_s):
            self.servers = frozenset(left.pop(0)) if left else self.servers
            return []

    monkeypatch.setattr(sources, "prometheus_source", lambda config: Listing())
    assert heard(config_in(tmp_path, prometheus=PrometheusConfig("http://p"))) == "a"


def test_kubernetes_no_longer_lists_a_pod(tmp_path, monkeypatch):
    answers = [
        {"ns/a": Endpoint("http://a:8000/metrics")},
        LegroomError("the Kubernetes API does not answer"),
        {"ns/a": Endpoint("http://a:8000/metrics"), "ns/b": Endpoint("http://b:8000/metrics")},
        {"ns/a": Endpoint("http://a:8000/metrics")},
    ]

    def discovered(pods, selector, namespace):
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, LegroomError):
            raise answer
        return answer

    async def scraped(places, interval_s, take, rounds):
        await asyncio.sleep(0)

    monkeypatch.setattr(sources, "pods_api", lambda context: None)
    monkeypatch.setattr(sources, "discovered_endpoints", discovered)
    monkeypatch.setattr(sources, "scrape_fleet", scraped)
    assert heard(config_in(tmp_path, kubernetes=KubernetesConfig("app=vllm"))) == "http://b:8000"


def test_a_server_that_was_awaited_is_gone_when_no_source_has_it():
    server_removed = []
    discovery = sources._Discovery(2, server_removed.append, lambda: frozenset({"a", "b"}))
    discovery.report_removed("kubernetes", frozenset({"a"}), frozenset())
    assert server_removed == []
    discovery.report_removed("prometheus", frozenset(), frozenset())
    assert server_removed == ["b"]


def test_pods_are_looked_at_while_the_cluster_does_not_answer(tmp_path, monkeypatch):
    answers = [{"ns/a": Endpoint("http://a:8000/metrics")}]
    looked, enough = [], asyncio.Event()

    def discovered(pods, selector, namespace):
        if not answers:
            raise LegroomError("the Kubernetes API does not answer")
        return answers.pop()

    async def scraped(places, interval_s, take, rounds):
        looked.append([place.server for place in places])
        if len(looked) == 3:
            enough.set()
        await asyncio.sleep(0)

    monkeypatch.setattr(sources, "pods_api", lambda context: None)
    monkeypatch.setattr(sources, "discovered_endpoints", discovered)
    monkeypatch.setattr(sources, "scrape_fleet", scraped)
    config = config_in(tmp_path, kubernetes=KubernetesConfig("app=vllm"))

    async def go():
        task = asyncio.create_task(
            combined_source(config, lambda text: None)(lambda look: None, lambda name: None, frozenset)
        )
        await asyncio.wait_for(enough.wait(), 60)
        task.cancel()

    asyncio.run(go())
    assert looked[:3] == [["http://a:8000"]] * 3


def test_a_source_that_cannot_begin_ends_with_its_own_sentence(tmp_path, monkeypatch):
    def unconnected(context):
        raise LegroomError("no Kubernetes cluster is configured here")

    monkeypatch.setattr(sources, "pods_api", unconnected)
    config = config_in(tmp_path, kubernetes=KubernetesConfig("app=vllm"))
    with pytest.raises(LegroomError, match="no Kubernetes cluster"):
        asyncio.run(Sidecar(config, lambda text: None).run(combined_source(config, lambda text: None)))
