"""Recordings: what goes in comes out, whatever the file's compression, also when the end is missing."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.errors import LegroomError
from legroom.live.metrics.exposition import parse_sample
from legroom.live.metrics.sample import EngineSample, Sample, ScrapeFailure, ScrapeResult
from legroom.live.metrics.scrape_recording import Recorder, replay, sample_series

REAL = Path(__file__).parents[1] / "fixtures/live/metrics_0.32.0.txt"
SERVER = "http://host:8000"


def looks(count: int = 300) -> list[ScrapeResult]:
    """A real sample whose figures go on, with a failure now and then."""
    first = parse_sample(REAL.read_bytes(), 1000.0, SERVER)
    made: list[ScrapeResult] = []
    for number in range(count):
        if number % 50 == 49:
            made.append(ScrapeFailure(1000.0 + 5 * number, SERVER, "timeout", "slow"))
            continue
        (engine,) = first.engines
        fields = {name: getattr(engine, name) for name in engine.__dataclass_fields__}
        fields |= {"generation_tokens": 100.0 * number, "kv_use": number / 1000, "waiting": float(number % 7)}
        made.append(
            Sample(
                1000.0 + 5 * number, SERVER, (EngineSample(**fields),), 2.0, first.process_start_s, 7 * number or None
            )
        )
    return made


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_what_was_recorded_is_played_back(tmp_path: Path, name: str) -> None:
    given_looks = looks()
    with closing(Recorder(tmp_path / name)) as recorder:
        for look in given_looks:
            recorder.add(look)
    assert list(replay(tmp_path / name)) == given_looks


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_file_that_ends_anywhere_gives_what_is_whole(tmp_path: Path, name: str) -> None:
    given_looks = looks()
    with closing(Recorder(tmp_path / name)) as recorder:
        for look in given_looks:
            recorder.add(look)
    whole = (tmp_path / name).read_bytes()
    cut = tmp_path / f"cut-{name}"
    cut.write_bytes(whole[: len(whole) * 2 // 3])
    read = list(replay(cut))
    assert read == given_looks[: len(read)]


def test_a_recording_in_progress_can_be_read_up_to_the_last_flush(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.jsonl.zst")
    for look in looks(100):
        recorder.add(look)
    assert len(list(replay(tmp_path / "a.jsonl.zst"))) == 96
    recorder.close()


def test_several_servers_share_a_recording(tmp_path: Path) -> None:
    first, two = (
        Sample(1.0, name, (EngineSample("m", "0", running=number),)) for name, number in (("a", 1.0), ("b", 2.0))
    )
    with closing(Recorder(tmp_path / "a.jsonl")) as recorder:
        for _ in range(3):
            recorder.add(first)
            recorder.add(two)
    assert list(replay(tmp_path / "a.jsonl")) == [first, two] * 3


def test_an_engine_that_goes_away_is_gone_in_the_playback(tmp_path: Path) -> None:
    both = Sample(1.0, "a", (EngineSample("m", "0", running=1.0), EngineSample("m", "1", running=1.0)))
    alone = Sample(2.0, "a", (EngineSample("m", "0", running=1.0),))
    with closing(Recorder(tmp_path / "a.jsonl")) as recorder:
        recorder.add(both)
        recorder.add(alone)
    assert list(replay(tmp_path / "a.jsonl")) == [both, alone]


@pytest.mark.parametrize("text", ["", "hello\n", '{"a": 1}\n', "[]\n"])
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(LegroomError, match="not a recording"):
        list(replay(tmp_path / "x"))


@pytest.mark.parametrize("name", ["x.gz", "x.zst"])
def test_a_file_that_is_not_compressed_as_its_name_says_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("not compressed at all\n" * 10)
    with pytest.raises(LegroomError, match="not be read"):
        list(replay(tmp_path / name))


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"legroom":"recording","version":1}\n{"t":1,"s":"a","v":[[5,1]]}\n{"t":1}\n')
    with pytest.raises(LegroomError, match="line 2"):
        list(replay(file))


def test_a_line_that_is_cut_in_the_middle_of_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    fail = '{"t":1,"s":"a","fail":["refused","no"]}\n'
    file.write_text(f'{{"legroom":"recording","version":1}}\n{fail}{{"t": 17\n{fail}')
    with pytest.raises(LegroomError, match="line 3"):
        list(replay(file))


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\x7fELF\xff\xfe\x00\x90")
    with pytest.raises(LegroomError, match="not text"):
        list(replay(tmp_path / "x"))


def test_a_time_that_no_calendar_has_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"legroom":"recording","version":1}\n{"t":1e300,"s":"x","fail":["refused","y"]}\n')
    with pytest.raises(LegroomError, match="line 2"):
        list(replay(file))


def test_a_missing_file_and_a_folder_say_so(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(LegroomError, match="could not open"):
            list(replay(path))
    with pytest.raises(LegroomError, match="could not open"):
        Recorder(tmp_path / "no" / "folder.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_said() -> None:
    recorder = Recorder(Path("/dev/full"))
    with pytest.raises(LegroomError, match="No space left"):
        for look in looks(200):
            recorder.add(look)
    with pytest.raises(LegroomError, match="No space left"):
        recorder.close()


def test_no_credentials_get_into_a_recording(tmp_path: Path) -> None:
    with closing(Recorder(tmp_path / "a.jsonl")) as recorder:
        recorder.add(looks(1)[0])
    header, line = (tmp_path / "a.jsonl").read_text().splitlines()
    assert json.loads(header) == {"legroom": "recording", "version": 1}
    assert "@" not in line


NUMBERS = st.none() | st.floats(0, 1e9)
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=10)


@given(
    st.builds(
        EngineSample,
        TEXTS,
        TEXTS,
        kv_use=st.none() | st.floats(0, 1),
        running=st.floats(0, 100),
        waiting=NUMBERS,
        preemptions=NUMBERS,
        finished=st.none() | st.integers(0, 10**9).map(float),
        num_blocks=st.none() | st.integers(1, 10**6),
        block_size=st.none() | st.integers(1, 512),
        asleep=st.booleans(),
        prefix_caching=st.none() | st.booleans(),
        size_tokens=st.none() | st.integers(1, 10**9),
        max_concurrency=st.none() | st.floats(0, 1e4),
    )
)
def test_any_sample_is_the_same_after_being_written_as_text(engine: EngineSample) -> None:
    before = Sample(1.0, "a", (engine,))
    text = "".join(f"{series} {value!r}\n" for series, value in sample_series(before))
    assert parse_sample(text, 1.0, "a") == before


def test_a_look_without_an_engine_is_played_back(tmp_path: Path) -> None:
    path = tmp_path / "starting.jsonl"
    with closing(Recorder(path)) as recorder:
        recorder.add(Sample(1.0, "s", (), process_start_s=0.5))
    assert [(look.time_s, look.engines) for look in replay(path) if isinstance(look, Sample)] == [(1.0, ())]
