"""The journal keeps what it was told, whatever happens to the process, the disk or the file."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing

import pytest

from legroom.live.journal.journal import Journal, journal_path
from legroom.live.journal.journal_records import JournalUnavailable


@pytest.fixture
def journal(tmp_path):
    with Journal.open(tmp_path / "journal.db") as opened:
        yield opened


def test_an_incident_is_told_from_its_opening_to_its_end(journal):
    number = journal.open_incident("http://a:8000", "pool_pressure", "pool full", {"kv_use": 0.99}, time_s=100.0)
    journal.note(number, "12 requests wait", {"waiting": 12}, time_s=105.0)
    journal.close_incident(number, "over by itself", time_s=160.0)
    incident = journal.incident(number)
    assert (incident.server, incident.kind, incident.detail["kv_use"]) == ("http://a:8000", "pool_pressure", 0.99)
    assert [note.text for note in incident.notes] == ["12 requests wait"]
    assert (incident.opened_s, incident.closed_s, incident.outcome) == (100.0, 160.0, "over by itself")


def test_an_incident_closes_once(journal):
    number = journal.open_incident("a", "stuck", "no tokens", {})
    journal.close_incident(number, "restarted")
    journal.close_incident(number, "something else")
    assert journal.incident(number).outcome == "restarted"


def test_an_unknown_incident_is_none(journal):
    assert journal.incident(17) is None


def test_the_same_key_is_the_same_incident(journal):
    first = journal.open_incident("a", "stuck", "no tokens", {}, key="one")
    assert journal.open_incident("a", "stuck", "no tokens", {}, key="one") == first
    assert journal.open_incident("a", "stuck", "no tokens", {}, key="two") != first


def test_incidents_come_newest_first_and_can_be_narrowed(journal):
    for at, server in enumerate(("a", "b", "a")):
        number = journal.open_incident(server, "stuck", f"number {at}", {}, time_s=float(at))
        if at == 0:
            journal.close_incident(number, "over", time_s=0.5)
    assert [entry.title for entry in journal.incidents()] == ["number 2", "number 1", "number 0"]
    assert [entry.title for entry in journal.incidents(server="a", limit=1)] == ["number 2"]
    assert [entry.title for entry in journal.incidents(since_s=0.9)] == ["number 2", "number 1"]
    assert [entry.title for entry in journal.incidents(open_only=True)] == ["number 2", "number 1"]


def test_an_action_is_planned_before_it_starts_and_then_ends(journal):
    number = journal.begin_action(None, "llama", "restart", {"unit": "vllm.service"})
    assert journal.action(number).state == "planned"
    journal.reach_stage(number, "drained", {"running": 0})
    assert [(entry.id, entry.state) for entry in journal.unfinished_actions()] == [(number, "started")]
    journal.finish_action(number, "done", {"took_s": 31})
    ended = journal.action(number)
    assert (ended.state, ended.detail) == ("done", {"unit": "vllm.service", "took_s": 31})
    assert ended.stage("drained").detail == {"running": 0}
    assert journal.unfinished_actions() == ()


def test_an_action_ends_in_a_known_way(journal):
    number = journal.begin_action(None, "llama", "restart", {})
    with pytest.raises(ValueError, match="exploded"):
        journal.finish_action(number, "exploded")


def test_an_incident_lists_its_actions(journal):
    incident = journal.open_incident("a", "stuck", "no tokens", {})
    action = journal.begin_action(incident, "llama", "restart", {})
    assert [entry.id for entry in journal.incident(incident).actions] == [action]
    assert [entry.id for entry in journal.actions(group="llama")] == [action]
    assert journal.actions(group="other") == ()


def test_one_holder_a_group_has_the_lease_until_it_ends(tmp_path):
    now_s = [1000.0]
    with Journal.open(tmp_path / "j.db", clock=lambda: now_s[0]) as journal:
        assert journal.take_lease("llama", "one", 60)
        assert not journal.take_lease("llama", "two", 60)
        assert journal.take_lease("qwen", "two", 60)
        now_s[0] += 50
        assert journal.take_lease("llama", "one", 60), "one's own lease can be prolonged"
        now_s[0] += 59
        assert not journal.take_lease("llama", "two", 60)
        now_s[0] += 2
        assert journal.take_lease("llama", "two", 60)
        journal.release_lease("llama", "one")
        assert not journal.take_lease("llama", "one", 60), "only the holder releases a lease"
        journal.release_lease("llama", "two")
        assert journal.take_lease("llama", "one", 60)


def test_of_many_threads_one_gets_the_lease(journal):
    got = []
    threads = [
        threading.Thread(target=lambda name=f"t{at}": journal.take_lease("g", name, 60) and got.append(name))
        for at in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1


def test_secrets_never_reach_the_file(journal, tmp_path):
    number = journal.open_incident(
        "http://a",
        "down",
        "https://me:hunter22@host/metrics is down",
        {"headers": {"Authorization": "Bearer s3cret-s3cret"}},
    )
    journal.note(number, "asked with Bearer abcdefgh1234", {"url": "http://x/?token=s3cret-s3cret"})
    journal.begin_action(number, "g", "notify", {"url": "https://hooks.slack.com/services/T0/B0/s3cret-s3cret"})
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    for secret in (b"hunter22", b"s3cret", b"abcdefgh1234"):
        assert secret not in written


def test_the_journal_of_the_user_is_beside_calibration(tmp_path, monkeypatch):
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path / "home"))
    assert journal_path() == tmp_path / "home" / "journal.db"
    with Journal.open() as journal:
        journal.open_incident("a", "stuck", "no tokens", {})
    assert journal_path().stat().st_mode & 0o077 == 0, "others on the machine have no business in it"


def test_two_processes_may_write_it(tmp_path):
    path = tmp_path / "journal.db"
    with Journal.open(path) as first, Journal.open(path) as second:
        number = first.open_incident("a", "stuck", "no tokens", {})
        second.note(number, "seen by another")
        assert first.incident(number).notes[0].text == "seen by another"


def test_a_locked_journal_says_so(tmp_path):
    path = tmp_path / "journal.db"
    with Journal.open(path, busy_s=0.05) as journal, closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(JournalUnavailable, match="locked"):
            journal.open_incident("a", "stuck", "no tokens", {})
        other.execute("ROLLBACK")
        assert journal.open_incident("a", "stuck", "no tokens", {}) == 1


def test_a_full_disk_says_so_and_loses_nothing_that_was_written(journal):
    number = journal.open_incident("a", "stuck", "before", {})
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own limit gives its own "disk is full"
    with pytest.raises(JournalUnavailable, match="full"):
        journal.note(number, "x" * 100_000)
    journal._db.execute("PRAGMA max_page_count = 1000000")
    journal.note(number, "after")
    assert [note.text for note in journal.incident(number).notes] == ["after"]
    assert journal._db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_file_that_is_no_journal_is_left_alone(tmp_path):
    path = tmp_path / "journal.db"
    path.write_text("shopping list\n" * 100)
    with pytest.raises(JournalUnavailable, match="not a journal"):
        Journal.open(path)
    assert path.read_text().startswith("shopping list")


def test_a_folder_that_cannot_be_made_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalUnavailable, match="cannot be written"):
        Journal.open(tmp_path / "file" / "journal.db")


@pytest.mark.parametrize(("version", "said"), [(99, "newer legroom"), (1, "older legroom")])
def test_a_journal_of_another_legroom_is_not_touched(tmp_path, version, said):
    path = tmp_path / "journal.db"
    Journal.open(path).close()
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(JournalUnavailable, match=said):
        Journal.open(path)


WRITER = """
import sys
from pathlib import Path
from legroom.live.journal.journal import Journal
journal = Journal.open(Path(sys.argv[1]))
while True:
    number = journal.begin_action(None, "g", "restart", {})
    print(number, flush=True)
"""


def test_what_was_acknowledged_before_a_kill_is_there_after_it(tmp_path):
    path = tmp_path / "journal.db"
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        told = [int(writer.stdout.readline()) for _ in range(20)]
        os.kill(writer.pid, signal.SIGKILL)
        told += [int(line) for line in writer.stdout.read().splitlines()]
        writer.wait()
        with Journal.open(path) as journal:
            assert journal._db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert set(told) <= {action.id for action in journal.unfinished_actions()}


def test_old_incidents_are_forgotten_and_open_ones_never(tmp_path):
    now_s = 500 * 86400.0
    with Journal.open(tmp_path / "j.db", clock=lambda: 10.0) as journal:
        old = journal.open_incident("a", "stuck", "old", {})
        journal.note(old, "a line")
        journal.finish_action(journal.begin_action(old, "g", "restart", {}), "done")
        journal.close_incident(old, "over")
        still_open = journal.open_incident("a", "creep", "still there", {})
        journal.maintain(now_s)
        assert [entry.id for entry in journal.incidents()] == [still_open]
        assert journal.actions() == ()
