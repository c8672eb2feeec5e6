"""Versions as people write them, read against the releases legroom knows."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.errors import LegroomError
from legroom.facts.releases import known_releases, latest, release


@pytest.mark.parametrize(
    ("written", "version"),
    [
        ("0.10.2", "0.10.2"),
        ("v0.10.2", "0.10.2"),
        ("0.19", "0.19.0"),
        ("0.6.3.post1", "0.6.3.post1"),
        ("0.10.2+cu128", "0.10.2"),
        ("0.9.0.1", "0.9.0.1"),
        (" 0.32.0 ", "0.32.0"),
    ],
)
def test_a_known_release_is_found_without_a_note(written: str, version: str) -> None:
    found = release(written)
    assert (found.version, found.note) == (version, "")


@pytest.mark.parametrize(
    ("written", "version"),
    [
        ("0.10.7", "0.10.2"),
        ("0.6.3.post9", "0.6.3.post1"),
        ("0.11.1.dev12+g1a2b3c4", "0.11.0"),
        ("0.11.1rc2", "0.11.1"),
        ("0.99.0", "0.32.0"),
        ("1.0", "0.32.0"),
        ("nightly", "0.32.0"),
        ("latest", "0.32.0"),
        ("nightly-0bfc7a15d", "0.32.0"),
    ],
)
def test_an_unknown_release_falls_to_the_nearest_one_and_says_so(written: str, version: str) -> None:
    found = release(written)
    assert found.version == version
    assert written in found.note
    assert version in found.note


@pytest.mark.parametrize("written", ["0.3.3", "0.1", "", "abc", "0.x", "1..2", "-1", "0.4.0rc1" * 9])
def test_what_is_no_release_is_refused_with_the_known_range(written: str) -> None:
    with pytest.raises(LegroomError) as caught:
        release(written)
    assert "0.4.0 to 0.32.0" in caught.value.hint


def test_post_releases_sort_after_their_release_and_before_the_next() -> None:
    post = release("0.8.5.post1")
    assert post.at_least("0.8.5")
    assert post.before("0.9.0")
    assert release("0.8.5").before("0.8.5.post1")
    assert release("0.9.0.1").at_least("0.9.0")
    assert release("0.9.0.1").before("0.9.1")
    assert release("0.10.0").at_least("0.9.2")


def test_a_range_includes_both_ends() -> None:
    assert release("0.8.0").within("0.8.0", "0.8.5.post1")
    assert release("0.8.5.post1").within("0.8.0", "0.8.5.post1")
    assert not release("0.9.0").within("0.8.0", "0.8.5.post1")


def test_the_known_releases_are_in_their_own_order() -> None:
    known = known_releases()
    assert latest().version == known[-1]
    assert len(known) >= 78
    for older, newer in pairwise(known):
        assert release(older).before(newer)


@given(st.text(max_size=30))
@settings(deadline=None)
def test_any_text_is_a_release_or_a_clear_refusal(text: str) -> None:
    try:
        found = release(text)
    except LegroomError as refusal:
        assert refusal.hint
    else:
        assert found.version in known_releases()
