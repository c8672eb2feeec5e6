"""What cannot be written is kept, in order and up to a bound, and nothing is acted on meanwhile."""

import sqlite3
from contextlib import closing

import pytest

from legroom.live.journal import journal_buffer
from legroom.live.journal.journal import Journal
from legroom.live.journal.journal_buffer import BufferedJournal
from legroom.live.journal.journal_records import JournalUnavailable
from legroom.live.metrics.sample import EngineSample, Sample


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def patient(tmp_path, clock):
    Journal.open(tmp_path / "j.db").close()
    return BufferedJournal(tmp_path / "j.db", busy_s=0.01, clock=clock)


def opened(title):
    return lambda journal: journal.open_incident("a", "stuck", title, {})


def sample(time_s):
    return Sample(time_s, "a", (EngineSample("m", "0", running=1),))


def test_a_lock_delays_what_is_written_and_changes_no_order(patient, tmp_path, clock):
    with closing(sqlite3.connect(tmp_path / "j.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert not patient.write(opened("first"))
        assert "locked" in patient.problem
        assert not patient.write(opened("second"))
        assert not patient.add_samples([sample(100.0)])
        assert patient.waiting == 3
        with pytest.raises(JournalUnavailable, match="locked"):
            patient.open_journal()
        other.execute("ROLLBACK")
    clock.now_s += 60
    assert patient.write(opened("third"))
    assert (patient.problem, patient.waiting, patient.lost) == (None, 0, 0)
    with Journal.open(tmp_path / "j.db") as journal:
        assert [entry.title for entry in reversed(journal.incidents())] == ["first", "second", "third"]
        assert len(journal.samples("a", 0, 200)) == 1


def test_a_full_disk_is_waited_out(patient, tmp_path, clock):
    assert patient.write(opened("before"))
    inner = patient._open._db
    inner.execute(f"PRAGMA max_page_count = {inner.execute('PRAGMA page_count').fetchone()[0]}")
    assert not patient.write(opened("x" * 50_000))
    assert "full" in patient.problem
    inner.execute("PRAGMA max_page_count = 1000000")
    assert not patient.write(opened("too soon to try again"))
    clock.now_s += 60
    assert patient.write(opened("after"))
    assert patient.lost == 0


def test_memory_is_bounded_and_what_is_lost_is_counted(patient, tmp_path, monkeypatch):
    monkeypatch.setattr(journal_buffer, "_MAX_SAMPLES", 10)
    monkeypatch.setattr(journal_buffer, "_MAX_WRITES", 5)
    with closing(sqlite3.connect(tmp_path / "j.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for at in range(8):
            patient.write(opened(f"number {at}"))
            patient.add_samples([sample(float(at)), sample(at + 0.5)])
        assert patient.waiting == 15
        assert patient.lost == 3 + 6
        other.execute("ROLLBACK")
    patient.open_journal()
    patient.close()
    with Journal.open(tmp_path / "j.db") as journal:
        assert journal.incidents()[0].title == "number 7"


def test_a_journal_that_cannot_be_opened_yet_is_tried_again(tmp_path, clock):
    (tmp_path / "folder").write_text("in the way")
    patient = BufferedJournal(tmp_path / "folder" / "j.db", clock=clock)
    assert not patient.write(opened("first"))
    (tmp_path / "folder").unlink()
    clock.now_s += 60
    assert patient.write(opened("second"))
    assert patient.open_journal().incidents(limit=1)[0].title == "second"


@pytest.mark.parametrize("value", [10**30, "\ud800", object()])
def test_what_can_never_be_written_holds_up_nothing(patient, value):
    patient.write(lambda journal: journal.open_incident(value, "stuck", "never", {}))
    assert patient.write(opened("after"))
    assert (patient.lost, patient.waiting, patient.problem) == (1, 0, None)
    assert patient.error_text
    assert [entry.title for entry in patient.open_journal().incidents()] == ["after"]


def test_a_damage_that_only_a_read_finds_is_set_aside(patient, tmp_path):
    patient.write(opened("before"))
    with closing(sqlite3.connect(tmp_path / "j.db", isolation_level=None)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        page = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'actions'").fetchone()[0]
        size = db.execute("PRAGMA page_size").fetchone()[0]
    patient.close()
    raw = bytearray((tmp_path / "j.db").read_bytes())
    raw[(page - 1) * size : page * size] = b"\xff" * size
    (tmp_path / "j.db").write_bytes(raw)
    with pytest.raises(JournalUnavailable, match="damaged"):
        patient.call(lambda journal: journal.actions())
    assert "damaged" in patient.replaced
    assert patient.call(lambda journal: journal.incidents()) == ()
    with Journal.open(tmp_path / "j.db") as journal:
        assert journal._db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda path: path.unlink(), "removed"),
        (lambda path: path.rename(path.with_name("elsewhere")), "removed"),
        (lambda path: path.write_bytes(b""), "damaged"),
        (lambda path: path.write_bytes(b"\xff" * 8192), "damaged"),
    ],
)
def test_harm_to_the_file_under_a_live_journal_is_noticed_and_later_writes_are_kept(patient, tmp_path, harm, said):
    patient.write(opened("before"))
    harm(tmp_path / "j.db")
    assert patient.add_samples([]) and said in patient.replaced
    assert patient.write(opened("after"))
    with Journal.open(tmp_path / "j.db") as journal:
        assert [entry.title for entry in journal.incidents()] == ["after"]
    assert len(list(tmp_path.glob("j.db.damaged-*T??????"))) == (said == "damaged")


def test_a_journal_that_nobody_harmed_stays_the_same_file(patient, tmp_path):
    for number in range(5):
        patient.write(opened(f"number {number}"))
        with Journal.open(tmp_path / "j.db") as other:
            other.maintain()
    assert patient.replaced is None
    assert len(patient.open_journal().incidents()) == 5


def test_a_truncated_journal_is_not_said_to_be_locked_by_a_backup(tmp_path):
    with Journal.open(tmp_path / "j.db") as journal:
        journal.open_incident("a", "stuck", "before", {})
        (tmp_path / "j.db").write_bytes(b"")
        with pytest.raises(JournalUnavailable, match="truncated"):
            Journal.open(tmp_path / "j.db", busy_s=0.01)
