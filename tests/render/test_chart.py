from hypothesis import given
from hypothesis import strategies as st

from legroom.drawing.chart import Segment, bar, cell_counts, labels, ruler
from legroom.drawing.terminal import Style

amounts = st.lists(st.integers(0, 2**40), min_size=1, max_size=9)


@given(amounts, st.integers(9, 200))
def test_cells_fill_the_width_exactly(parts, width):
    assert sum(cell_counts(parts, width)) == (width if sum(parts) else 0)


@given(amounts, st.integers(9, 200))
def test_a_part_that_is_there_is_seen_and_one_that_is_not_is_not(parts, width):
    shown = cell_counts(parts, width)
    if sum(parts):
        assert all((count > 0) == (part > 0) for part, count in zip(parts, shown, strict=True))


@given(st.lists(st.integers(10, 100), min_size=2, max_size=6))
def test_cells_are_in_proportion_to_within_a_cell(parts):
    width = 2 * sum(parts)
    assert all(abs(count - 2 * part) <= 1 for part, count in zip(parts, cell_counts(parts, width), strict=True))


def two(unicode: bool = True, colour: bool = False) -> str:
    segments = [Segment("a", 3, "blue", "█", "A"), Segment("b", 1, "red", "▒", "B")]
    return bar(segments, 8, Style(unicode=unicode, colour=colour))


def test_parts_differ_by_glyph_without_colour():
    assert two() == "██████▒▒"


def test_parts_differ_by_letter_without_unicode():
    assert two(unicode=False) == "AAAAAABB"


def test_parts_differ_by_colour_where_there_is_colour():
    assert two(colour=True).count("█") == 8
    assert "\x1b[" in two(colour=True)


def test_a_label_stands_above_its_part_only_where_it_has_room():
    segments = [Segment("weights", 30, "blue"), Segment("activations", 5, "red"), Segment("KV", 15, "green")]
    assert labels(segments, 50) == "weights" + " " * 28 + "KV"


def test_the_ruler_holds_its_text_or_puts_it_behind():
    style = Style()
    assert ruler(30, 40, "budget", style) == "└────────── budget ──────────┘"
    assert ruler(6, 40, "budget", style) == "└────┘ budget"
