"""`legroom fragments` from the outside."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from legroom.cli.main import main

SAMPLES = Path(__file__).parents[2] / "docs" / "samples"


def test_a_refused_request_is_a_problem_and_the_document_says_what_would_have_served_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["fragments", str(SAMPLES / "pinned-segments.pickle"), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["allocated_bytes"], document["reserved_bytes"]) == (2_202_009_600, 7_516_192_768)
    assert document["would_expandable_segments_help"] is True


def test_two_snapshots_name_the_line_that_leaks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fragments", str(SAMPLES / "leak-before.pickle"), str(SAMPLES / "leak-after.pickle")]) == 1
    assert "keep_multimodal_input" in capsys.readouterr().out


def test_a_snapshot_without_a_problem_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fragments", str(SAMPLES / "leak-before.pickle"), "--need", "1GiB"]) == 0
    assert "Nothing is wrong" in capsys.readouterr().out


def test_the_picture_has_a_box_for_every_run_of_blocks(tmp_path: Path) -> None:
    picture = tmp_path / "segments.svg"
    main(["fragments", str(SAMPLES / "pinned-segments.pickle"), "--svg", str(picture)])
    boxes = ElementTree.parse(picture).getroot().findall("{http://www.w3.org/2000/svg}rect")
    # The page, the one row of seven alike, what is in use in it, and the two of the legend.
    assert len(boxes) == 5


def test_a_snapshot_of_2_gb_is_refused_unread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = tmp_path / "large.pickle"
    with large.open("wb") as file:
        file.write(b"\x80\x04")
        file.truncate(2 << 30)
    assert main(["fragments", str(large)]) == 2
    assert "snapshots of up" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"\x80", b"\x80\x04", b"PK\x03\x04", b"hello", b"{}", b"\x00" * 99])
def test_what_tells_of_no_allocator_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert main(["fragments", str(tmp_path / "file")]) == 2


def test_a_server_that_is_not_there_ends_with_3() -> None:
    assert main(["fragments", "http://127.0.0.1:9"]) == 3


def test_a_device_that_the_source_lacks_is_refused() -> None:
    assert main(["fragments", str(SAMPLES / "leak-before.pickle"), "--gpu", "5"]) == 2
