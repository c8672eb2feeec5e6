"""What a watcher writes into the journal, and `legroom incidents` and `legroom incident`, which read it."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from made_up_looks import SERVER, calm, sample, trouble

from legroom.cli.incidents import duration_seconds
from legroom.cli.main import main
from legroom.errors import LegroomError
from legroom.live.journal.journal import Journal
from legroom.live.metrics.sample import ScrapeFailure
from legroom.sidecar.watch_session import WatchSession


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


# The session and the journal


def test_an_incident_is_journalled_with_its_samples_and_what_helps(tmp_path):
    with Journal.open(tmp_path / "j.db") as journal:
        session = WatchSession(journal=journal)
        for look in [*calm(4, 0), *trouble(20, 4), *calm(30, 24)]:
            session.take(look)
        session.close()
        listed = journal.incidents()
        assert listed
        assert all(one.closed_s is not None for one in listed)
        whole = journal.incident(listed[-1].id)
        assert whole and any(note.detail.get("answers") for note in whole.notes)
        assert len(journal.samples(SERVER, 1_700_000_000.0, 1_700_001_000.0)) > 40


def test_what_another_watcher_keeps_already_is_not_journalled_twice(tmp_path):
    with Journal.open(tmp_path / "j.db") as journal:
        for _ in range(2):
            session = WatchSession(journal=journal)
            for look in trouble():
                session.take(look)
        kinds = [one.kind for one in journal.incidents()]
        assert len(kinds) == len(set(kinds))


def test_what_a_killed_watcher_left_open_is_closed_and_hides_nothing(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with Journal.open(tmp_path / "j.db") as journal:
        left = journal.open_incident(SERVER, "pool_pressure", "t", {"by": "watch", "pid": ended.pid}, 1.6e9, "left")
        session = WatchSession(journal=journal)
        for look in trouble():
            session.take(look)
        found = [one for one in journal.incidents() if one.kind == "pool_pressure"]
        assert [one.closed_s is None for one in sorted(found, key=lambda one: one.id)] == [False, True]
        stale = journal.incident(left)
        assert stale and stale.outcome == "lasted when its watcher was ended"


def test_what_a_sidecar_keeps_is_left_to_it(tmp_path):
    with Journal.open(tmp_path / "j.db") as journal:
        journal.open_incident(SERVER, "pool_pressure", "t", {"by": "sidecar"}, 1.6e9, "kept")
        session = WatchSession(journal=journal)
        for look in trouble():
            session.take(look)
        session.close()
        assert [one.closed_s for one in journal.incidents() if one.kind == "pool_pressure"] == [None]


def test_a_full_disk_is_said_and_watching_goes_on(tmp_path, monkeypatch):
    from legroom.live.journal.journal_records import JournalUnavailable

    said: list[str] = []
    with Journal.open(tmp_path / "j.db") as journal:

        def full(*_: object, **__: object) -> int:
            raise JournalUnavailable("the disk under the journal is full")

        monkeypatch.setattr(journal, "open_incident", full)
        session = WatchSession(journal=journal, log=said.append)
        for look in trouble():
            session.take(look)
    assert session.open_incidents
    assert said == ["the disk under the journal is full: watching without it"]


def test_a_server_that_stops_answering_keeps_its_place():
    session = WatchSession()
    session.take(sample(1))
    view = session.take(ScrapeFailure(1_700_000_010.0, SERVER, "timeout", "did not answer within 4 s"))
    assert (view.state, view.sentence) == ("unreachable", "did not answer within 4 s")
    assert session.take(sample(3)).state == "healthy"


def test_a_rising_pool_is_forecast():
    session = WatchSession()
    view = None
    for number in range(30):
        view = session.take(sample(number, kv_use=0.2 + 0.01 * number))
    assert view and view.forecast and "pool full in" in view.sentence


# legroom incidents, legroom incident


@pytest.fixture
def journalled(home):
    with Journal.open() as journal:
        session = WatchSession(journal=journal)
        for look in [*calm(4, 0), *trouble(20, 4), *calm(30, 24)]:
            session.take(look)
        session.close()
        return journal.incidents()[0].id


def test_incidents_are_listed(journalled, capsys):
    assert main(["incidents"]) == 0
    assert "gpu1:8000" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["/proc/self/mem", "/dev/null", "/tmp", __file__])
@pytest.mark.parametrize("command", [["incidents"], ["incident", "1"]], ids=" ".join)
def test_a_file_that_is_no_journal_is_said_to_be_none(command, name, capsys):
    assert main([*command, "--journal", name]) == 2
    assert f"{name} is not a journal" in capsys.readouterr().err


def test_incidents_as_json(journalled, capsys):
    assert main(["incidents", "--json", "--server", SERVER]) == 0
    listed = json.loads(capsys.readouterr().out)["incidents"]
    assert {one["server"] for one in listed} == {SERVER}
    assert all("detail" in one for one in listed)


@pytest.mark.parametrize("name", ["gpu1:8000", "http://gpu1:8000/metrics"])
def test_incidents_of_a_server_are_found_by_its_address(name, journalled, capsys):
    assert main(["incidents", "--json", "--server", name, "--limit", "99999999999999999999"]) == 0
    assert json.loads(capsys.readouterr().out)["incidents"]


@pytest.mark.parametrize("name", ["a:1", "prod/vllm-0"])
def test_incidents_of_a_server_are_found_by_the_name_it_is_listed_under(name, home, capsys):
    with Journal.open() as journal:
        journal.open_incident(name, "pool_pressure", "t", {}, 1.7e9, "k")
    assert main(["incidents", "--json", "--server", name]) == 0
    assert [one["server"] for one in json.loads(capsys.readouterr().out)["incidents"]] == [name]


def test_a_journal_is_read_where_nothing_can_be_written_beside_it(journalled, home, capsys):
    (home / "journal.db-shm").mkdir()  # what SQLite would have to write
    assert main(["incidents", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["incidents"]
    assert main(["incident", str(journalled)]) == 0


def test_incidents_of_another_server_or_time_are_left_out(journalled, capsys):
    main(["incidents", "--server", "http://other:1"])
    main(["incidents", "--open"])
    assert capsys.readouterr().out == "No incidents.\n" * 2


def test_without_a_journal_there_are_none_and_none_is_made(home, capsys):
    assert main(["incidents"]) == 0
    assert "No incidents" in capsys.readouterr().out
    assert not home.exists()


def test_the_story_of_one_incident(journalled, capsys):
    assert main(["incident", str(journalled)]) == 0
    out = capsys.readouterr().out
    for part in ("What was seen", "KV use", "What was diagnosed", "What was done", "What is recommended"):
        assert part in out


def test_the_story_as_json_and_as_a_picture(journalled, tmp_path, capsys):
    picture = tmp_path / "i.svg"
    assert main(["incident", f"#{journalled}", "--json", "--svg", str(picture)]) == 0
    story = json.loads(capsys.readouterr().out)
    assert story["samples"] and story["recommended"] and story["notes"]
    assert "began" in "".join(ET.fromstring(picture.read_text()).itertext())


@pytest.mark.parametrize("number", ["99999", "x", "-1", "9" * 30, "²"])
def test_an_incident_that_is_not_there(number, journalled, capsys):
    assert main(["incident", number]) == 2
    assert capsys.readouterr().err.startswith("error:")


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("5min", 300), ("5m", 300), ("1.5h", 5400), ("2d", 172800)])
def test_times_ago_as_people_write_them(text, seconds):
    assert duration_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "2 fortnights", "-1d", "1e999h"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(LegroomError):
        duration_seconds(text)
