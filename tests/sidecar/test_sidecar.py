"""The sidecar as a process: it watches, serves its pages, restarts what hangs, and survives what happens to it.

What it restarts is a stand-in with /metrics, not vLLM; tests/real_vllm/test_restart.py has the real one.
"""

import asyncio
import http.client
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from forked import Forked, take_streams
from free_ports import free_port
from stand_in import RUN, answers, start_server, starts, stop_server, wait_for, write_config

from legroom.live import run_record
from legroom.live.detectors import DetectorFinding
from legroom.live.journal.journal import Journal
from legroom.live.metrics.sample import EngineSample, Sample, ScrapeFailure
from legroom.sidecar.notifier import message_of
from legroom.sidecar.sidecar import Sidecar, run_sidecar
from legroom.sidecar.watch_config import read_config


def forked_sidecar(config, log):
    """A process of its own, without starting Python anew."""

    def work():
        take_streams(log, log)
        return run_sidecar(read_config(config))

    return Forked(work)


class Place:
    def __init__(self, folder):
        self.folder, self.port, self.own = folder, free_port(), free_port()
        self.sidecars = []

    def sidecar(self, **settings):
        self.config = write_config(self.folder, self.port, self.own, **settings)
        return self.another()

    def another(self):
        """With the same files, which the one before may still have in use."""
        self.sidecars.append(forked_sidecar(self.config, self.folder / "said"))
        wait_for(lambda: answers(f"http://127.0.0.1:{self.own}/healthz"))
        return self.sidecars[-1]

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.own}{path}", timeout=30) as answer:
            return answer.read().decode()

    def post(self, path, body, token="act-token"):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.own}{path}", json.dumps(body).encode(), {"Authorization": f"Bearer {token}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def journal(self):
        return Journal.open(self.folder / "journal.db")

    def said(self):
        return (self.folder / "said").read_text()


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path)
    start_server(tmp_path, place.port)
    yield place
    for sidecar in place.sidecars:
        sidecar.kill()
        sidecar.wait()
    stop_server(tmp_path)


def test_a_server_that_hangs_is_restarted_and_the_story_is_in_the_journal(place):
    sidecar = place.sidecar()
    (place.folder / "stuck").touch()
    wait_for(lambda: len(starts(place.folder)) == 2)
    wait_for(lambda: '"outcome": "over, after restart (done)"' in place.get("/incidents"))
    sidecar.terminate()
    assert sidecar.wait(120) == 0
    with place.journal() as journal:
        (action,) = journal.actions()
        assert (action.state, action.group) == ("done", "llama")
        story = journal.incident(action.incident_id)
        assert story.kind == "stuck_engine"
        assert any(note.text.startswith("what helps") for note in story.notes)
        assert journal.samples(story.server, 0.0), "samples are kept too"


def test_its_pages_tell_and_act_for_whoever_has_the_token(place):
    place.sidecar(act=["notify"])
    wait_for(lambda: "legroom_server_up{" in place.get("/metrics"))
    assert json.loads(place.get("/healthz"))["journal"] == "ok"
    assert json.loads(place.get("/incidents")) == {"incidents": []}
    server = f"http://127.0.0.1:{place.port}"
    assert place.post("/act", {"server": server}, token="guess")[0] == 401
    assert place.post("/ack", {"incident": "x"})[0] == 400
    assert place.post("/ack", {"incident": 99})[0] == 400
    assert place.post("/ack", {"incident": 10**30})[0] == 400
    assert place.post("/act", {"server": "http://other"})[0] == 400
    assert place.post("/act", {"server": server, "undo": 7})[0] == 400
    assert place.post("/act", {"server": server, "action": "undo", "undo": 10**30})[0] == 400
    status, answer = place.post("/act", {"server": server, "action": "restart"})
    assert (status, answer["accepted"]) == (202, True)
    wait_for(lambda: len(starts(place.folder)) == 2)
    wait_for(lambda: 'legroom_actions_total{name="restart",outcome="done"} 1.0' in place.get("/metrics"))


def test_a_server_that_answered_an_earlier_sidecar_is_revived(place):
    sidecar = place.sidecar()

    def has_samples():
        with place.journal() as journal:
            return journal.last_answers_s()

    wait_for(has_samples)
    sidecar.kill()
    sidecar.wait()
    stop_server(place.folder)  # as after a node's reboot: the new sidecar never sees it alive
    place.another()
    wait_for(lambda: len(starts(place.folder)) == 2)
    wait_for(lambda: '"outcome": "over, after restart (done)"' in place.get("/incidents"))


def test_without_being_told_to_act_it_only_tells(place):
    place.sidecar(act=["notify"])
    (place.folder / "stuck").touch()
    wait_for(lambda: "not told to act" in place.said())
    number = json.loads(place.get("/incidents"))["incidents"][0]["id"]
    assert place.post("/ack", {"incident": number, "by": "me"})[0] == 200
    assert len(starts(place.folder)) == 1
    with place.journal() as journal:
        assert journal.actions() == ()
        assert "acknowledged by me" in [note.text for note in journal.incident(number).notes]


def test_flags_that_cure_are_written_for_the_restart_and_undone_by_hand(place):
    flags = place.folder / "flags.json"
    server = 'flags_file = "flags.json"\n[servers.answers.stuck_engine]\n"--max-num-seqs" = "8"'
    place.sidecar(act=["restart-with-flags"], server=server)
    (place.folder / "stuck").touch()
    wait_for(lambda: len(starts(place.folder)) == 2)
    assert json.loads(flags.read_text())["flags"] == {"--max-num-seqs": "8"}
    with place.journal() as journal:
        wait_for(lambda: journal.actions()[0].state == "done")
        (action,) = journal.actions()
        assert action.detail["change"] == "--max-num-seqs 8"
        asked = {"action": "undo", "server": f"http://127.0.0.1:{place.port}", "undo": action.id}
        wait_for(lambda: place.post("/act", asked)[0] == 202)
        wait_for(lambda: journal.action(action.id).state == "undone")
        assert not flags.exists()
        assert len(starts(place.folder)) == 3
        assert place.post("/act", asked)[0] == 400, "there is nothing left to undo"


def test_asked_before_the_journal_can_be_read_it_says_ask_again(place):
    (place.folder / "journal.db").mkdir()
    place.sidecar(act=["notify"])
    asked = {"server": f"http://127.0.0.1:{place.port}"}
    assert place.post("/act", asked)[0] == 503
    (place.folder / "journal.db").rmdir()
    wait_for(lambda: place.post("/act", asked)[0] == 202)


def test_stopped_while_it_drains_it_ends_the_drain(place):
    sidecar = place.sidecar(act=["notify"])
    (place.folder / "busy").write_text("2")
    wait_for(lambda: place.post("/act", {"server": f"http://127.0.0.1:{place.port}"})[0] == 202)
    wait_for((place.folder / "draining").exists)
    sidecar.terminate()
    assert sidecar.wait(120) == 0
    assert not (place.folder / "draining").exists()
    assert len(starts(place.folder)) == 1
    with place.journal() as journal:
        assert [action.state for action in journal.actions()] == ["undone"]


@contextmanager
def webhook(port=0):
    """Its port, and what it hears."""
    heard = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self):
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    hook = HTTPServer(("127.0.0.1", port), Hook)
    threading.Thread(target=hook.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hook.server_port, heard
    finally:
        hook.shutdown()
        hook.server_close()


def test_messages_reach_a_webhook_and_a_dead_one_holds_up_nothing(place):
    with webhook() as (port, heard):
        hooks = f'[[notify]]\nurl = "http://127.0.0.1:1/dead"\n[[notify]]\nurl = "http://127.0.0.1:{port}"'
        place.sidecar(act=["restart"], server=hooks)
        (place.folder / "stuck").touch()
        wait_for(lambda: any(message["closed_s"] for message in heard))
    assert heard[0]["kind"] == "stuck_engine"
    (closed, *_) = (message for message in heard if message["closed_s"])
    with place.journal() as journal:
        assert journal.incident(closed["incident"]).kind == closed["kind"]
    assert any("was restarted" in message["text"] for message in heard)


def test_what_a_killed_sidecar_could_not_deliver_is_sent_by_the_next_one_and_only_once(place):
    port, heard_each = free_port(), []
    sidecar = place.sidecar(act=["notify"], server=f'[[notify]]\nurl = "http://127.0.0.1:{port}"')
    (place.folder / "stuck").touch()
    with place.journal() as journal:
        wait_for(journal.incidents)
        for _ in range(2):
            os.kill(sidecar.pid, signal.SIGKILL)
            sidecar.wait()
            with webhook(port) as (port, heard):
                sidecar = place.another()
                wait_for(lambda: any("told" in note.detail for note in journal.incident(1).notes))
                wait_for(lambda: json.loads(place.get("/healthz"))["servers"])
            heard_each.append([message["kind"] for message in heard])
    assert heard_each == [["stuck_engine"], []]


@pytest.mark.parametrize("harm", [lambda path: path.write_bytes(b""), lambda path: path.unlink()])
def test_harm_to_the_journal_of_a_live_sidecar_is_told_and_its_open_incident_is_written_again(place, harm):
    place.sidecar(act=["notify"])
    (place.folder / "stuck").touch()
    wait_for(lambda: json.loads(place.get("/incidents"))["incidents"])
    harm(place.folder / "journal.db")
    wait_for(lambda: json.loads(place.get("/healthz"))["journal_replaced"])
    wait_for(lambda: "begun anew" in place.said())
    wait_for(lambda: json.loads(place.get("/incidents"))["incidents"])
    with place.journal() as journal:
        assert [incident.kind for incident in journal.incidents()] == ["stuck_engine"]


def test_killed_in_the_middle_of_a_restart_the_next_one_ends_it(place):
    sidecar = place.sidecar()
    (place.folder / "stuck").touch()
    with place.journal() as journal:
        wait_for(lambda: any(action.stage("launched") for action in journal.actions()), every_s=0.001)
        os.kill(sidecar.pid, signal.SIGKILL)
        sidecar.wait()
        place.another()
        wait_for(lambda: journal.actions() and not journal.unfinished_actions())
        assert journal._db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        first = journal.actions()[0]
        count = sum(token.startswith(f"{first.id}-") for token in starts(place.folder))
        assert (first.state, count) in (("done", 1), ("undone", 0))


def test_a_locked_journal_stops_the_acting_and_not_the_watching(place):
    place.sidecar()
    with place.journal() as journal, closing(sqlite3.connect(journal.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        (place.folder / "stuck").touch()
        wait_for(lambda: "locked" in json.loads(place.get("/healthz"))["journal"])
        wait_for(lambda: "The engine hangs" in place.said())
        assert "legroom_journal_writable 0.0" in place.get("/metrics")
        assert len(starts(place.folder)) == 1
        other.execute("ROLLBACK")
        wait_for(lambda: len(starts(place.folder)) == 2)
        wait_for(journal.incidents)


def test_a_damaged_journal_is_set_aside_and_acting_goes_on(place):
    (place.folder / "journal.db").write_bytes(b"\xff" * 8192)  # as a broken disk leaves it
    place.sidecar()
    wait_for(lambda: json.loads(place.get("/healthz"))["acting"] == ["notify", "restart"])
    (place.folder / "stuck").touch()
    wait_for(lambda: len(starts(place.folder)) == 2)
    wait_for(lambda: "the journal was damaged: it is kept as" in place.said())
    assert json.loads(place.get("/healthz"))["journal"] == "ok"
    with place.journal() as journal:
        wait_for(lambda: any(action.state == "done" for action in journal.actions()))
    assert len(list(place.folder.glob("journal.db.damaged-*T??????"))) == 1


def test_the_state_of_a_sidecar_that_cannot_act_is_told(place):
    place.config = write_config(place.folder, place.port, place.own)
    (place.folder / "journal.db").mkdir()
    place.another()
    wait_for(lambda: "not acting" in place.said())
    health = json.loads(place.get("/healthz"))
    assert health["acting"] == [] and "journal.db" in health["journal"]


def test_a_name_that_another_site_gave_to_this_address_is_refused(place):
    place.sidecar()
    for name, status in (("evil.example", 421), ("localhost", 200), (f"127.0.0.1:{place.own}", 200)):
        asked = http.client.HTTPConnection("127.0.0.1", place.own, timeout=30)
        asked.request("GET", "/incidents", headers={"Host": name})
        assert asked.getresponse().status == status
        asked.close()


def test_silence_during_a_restart_of_its_own_is_no_incident(tmp_path):
    """A new sidecar that ends the restart of a killed one sees the server silent until it is back."""

    async def scenario():
        sidecar = Sidecar(read_config(write_config(tmp_path, free_port(), free_port())), print)
        (server,) = sidecar._servers
        sidecar._actor._acting_on["llama"] = server
        for number in range(100):
            sidecar.take(ScrapeFailure(1e9 + 5 * number, server, "refused", "nothing listens there"))
        sidecar._actor._acting_on.clear()
        sidecar.take(Sample(1e9 + 600, server, (EngineSample("m", "0", running=0.0),)))
        return sidecar.health()["incidents_open"]

    assert asyncio.run(scenario()) == 0


def test_silence_before_run_began_a_start_does_not_count_when_run_is_gone(tmp_path, monkeypatch):
    """A run that is stopped while it starts the server is given the usual time to come back."""

    async def scenario():
        sidecar = Sidecar(read_config(write_config(tmp_path, free_port(), free_port())), print)
        (server,) = sidecar._servers
        samples = sidecar._config.thresholds.unreachable_hold.samples
        opened = []
        for number in range(2 * samples):
            is_starting = number == samples - 1
            monkeypatch.setattr(run_record, "run_under_way", lambda _, said=is_starting: "starting" if said else None)
            sidecar.take(ScrapeFailure(1e9 + 5 * number, server, "refused", "nothing listens there"))
            opened.append(sidecar.health()["incidents_open"])
        return samples, opened

    samples, opened = asyncio.run(scenario())
    assert opened == [0] * (2 * samples - 1) + [1]


def test_a_page_about_a_server_that_run_is_starting_says_so_in_its_title(tmp_path, monkeypatch):
    async def scenario():
        sidecar = Sidecar(read_config(write_config(tmp_path, free_port(), free_port())), print)
        (server,) = sidecar._servers
        stopped = DetectorFinding("stuck_engine", server, "critical", "The engine is stopped", "", 0.0, 0.0)
        (incident,) = sidecar._keeper.update(server, "llama", [stopped]).opened
        titles = []
        for under_way in ("`legroom run` is starting the server", None):
            monkeypatch.setattr(run_record, "run_under_way", lambda _, said=under_way: said)
            sidecar.take(ScrapeFailure(1e9, server, "refused", "nothing listens there"))
            titles.append(message_of(incident)["title"])
        return titles

    starting, stopped = asyncio.run(scenario())
    assert "is starting the server" in starting and stopped == "The engine is stopped"


def test_a_second_sidecar_with_the_same_journal_is_refused(place):
    place.sidecar()
    second = subprocess.run([sys.executable, "-c", RUN, place.config], capture_output=True, text=True, check=False)
    assert second.returncode != 0
    assert "already watches" in second.stderr


def test_a_port_in_use_is_said(place):
    config = write_config(place.folder, place.port, place.port)
    assert forked_sidecar(config, place.folder / "said").wait() != 0
    assert "cannot listen on 127.0.0.1" in place.said()
