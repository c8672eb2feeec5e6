from legroom.drawing.terminal import Style
from legroom.drawing.text import columns, plural, visible_len, wrap


def test_columns_line_up_whatever_the_colours():
    red = Style(colour=True).paint("ab", "red")
    lines = columns([(red, "1"), ("abcd", "22")], "<>")
    assert [visible_len(line) for line in lines] == [8, 8]
    assert lines[1] == "abcd  22"


def test_wrapping_keeps_a_flag_whole():
    lines = wrap("set --max-num-batched-tokens lower", 12)
    assert "--max-num-batched-tokens" in lines


def test_plural_counts():
    assert plural(1, "GPU") == "1 GPU"
    assert plural(2000, "GPU") == "2,000 GPUs"
