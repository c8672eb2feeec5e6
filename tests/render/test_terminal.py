import io

from legroom.drawing.terminal import Style, style_of


class Stream(io.StringIO):
    def __init__(self, tty: bool, encoding: str = "utf-8") -> None:
        super().__init__()
        self._tty, self._encoding = tty, encoding

    def isatty(self) -> bool:
        return self._tty

    @property
    def encoding(self) -> str:
        return self._encoding


def test_a_pipe_gets_no_colour():
    assert not style_of(Stream(tty=False), {}).colour


def test_a_terminal_gets_colour():
    assert style_of(Stream(tty=True), {"TERM": "xterm"}).colour


def test_no_color_wins_over_everything():
    assert not style_of(Stream(tty=True), {"NO_COLOR": "1", "FORCE_COLOR": "1"}).colour


def test_force_color_paints_a_pipe():
    assert style_of(Stream(tty=False), {"FORCE_COLOR": "1"}).colour


def test_a_dumb_terminal_gets_ascii_without_colour():
    style = style_of(Stream(tty=True), {"TERM": "dumb"})
    assert not style.colour
    assert not style.unicode


def test_a_stream_that_cannot_encode_blocks_gets_ascii():
    assert not style_of(Stream(tty=False, encoding="latin-1"), {}).unicode


def test_the_width_follows_columns_within_reason():
    assert style_of(Stream(tty=False), {"COLUMNS": "90"}).width == 90
    assert style_of(Stream(tty=False), {"COLUMNS": "500"}).width == 100
    assert style_of(Stream(tty=False), {"COLUMNS": "10"}).width == 66
    assert style_of(Stream(tty=False), {"COLUMNS": "wide"}).width == 80


def test_columns_that_only_look_like_a_number_are_ignored():
    assert style_of(Stream(tty=False), {"COLUMNS": "9\u00b2"}).width == 80


def test_paint_leaves_text_alone_without_colour():
    assert Style().paint("x", "red") == "x"
