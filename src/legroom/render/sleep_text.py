"""The states of a server that may sleep, as a table: what each holds of the card and of the host, and what stays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from legroom.drawing.terminal import PLAIN, Style
from legroom.drawing.text import columns, wrap
from legroom.units import gib, human_bytes

if TYPE_CHECKING:
    from legroom.memory.server_states import ServerState

_MARGIN = "  "
_WORDS = {
    "serving": "serving",
    "asleep_1": "asleep, level 1",
    "asleep_2": "asleep, level 2",
    "updating_weights": "updating weights",
}


def sleep_text(states: Sequence[ServerState], style: Style = PLAIN) -> str:
    """The table and what to know of it, ending in a newline."""
    return "\n".join((*_table(states, style), "", *_remarks(states, style))) + "\n"


def _table(states: Sequence[ServerState], style: Style) -> Iterator[str]:
    yield _MARGIN + style.paint("By state", "bold")
    rows = [tuple(style.paint(word, "dim") for word in ("", "each card", "host", "to wake"))]
    rows += [(_WORDS[state.name], gib(state.device.bytes), gib(state.host.bytes), _wake(state)) for state in states]
    yield from (_MARGIN + line for line in columns(rows, "<>><"))


def _wake(state: ServerState) -> str:
    if state.name == "asleep_2":
        return "as long as the checkpoint takes to read"
    return f"{state.wake_s:.1f} s" if state.wake_s is not None else ""


def _remarks(states: Sequence[ServerState], style: Style) -> Iterator[str]:
    asleep = next(state for state in states if state.name == "asleep_1")
    stays = ", ".join(f"{term.label} {human_bytes(term.bytes)}" for term in asleep.device.terms)
    yield from wrap(f"What stays on the card: {stays}.", style.width, _MARGIN)
    yield from wrap(
        "Host memory is beside what the processes hold. Level 1 copies the weights to page-locked memory in pieces "
        "that are rounded up to powers of two, and torch keeps that memory after the server wakes.",
        style.width,
        _MARGIN,
    )
