"""The live page of `legroom watch`: a table of servers, the selected one with its curves, and incidents."""

import time
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Static

from legroom.drawing.svg import Curve, curve_lines, scaled_curve
from legroom.drawing.terminal import Colour, Style
from legroom.drawing.text import columns, wrap
from legroom.errors import LegroomError
from legroom.live.server_view import ServerView
from legroom.render.incident_text import duration_text
from legroom.render.watch_text import STATE_COLOURS, state_mark, two_columns, view_figures
from legroom.sidecar.watch_config import SidecarConfig
from legroom.sidecar.watch_session import HistoryPoint, IncidentChange, WatchSession, stream

_REDRAWN_S = 0.5
_NARROW = 90
_OTHER_COLUMNS = 58  # Width of the other columns with their gaps.
_ORDER = ("critical", "unreachable", "warning", "healthy", "idle")
_COLUMNS = ("state", "server", "KV", "running", "waiting", "tokens/s", "what")


class WatchPage(App[None]):
    """Redraws the session's state twice a second."""

    TITLE = "legroom watch"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: 1; padding: 0 1; }
    #servers { height: auto; max-height: 40%; margin: 0 0 1 0; }
    #one { height: 1fr; padding: 0 1; }
    #incidents { height: auto; max-height: 30%; padding: 0 1; border-top: solid $surface-lighten-2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "quit", key_display="q", priority=True),
        Binding("p", "pause", "pause"),
        Binding("down,j", "next", "next server", show=False),
        Binding("up,k", "previous", "previous server", show=False),
    ]

    def __init__(self, session: WatchSession, config: SidecarConfig) -> None:
        super().__init__()
        self.session, self.config = session, config
        self.problem: LegroomError | None = None
        self.chosen = ""
        self.paused = False
        self._drawn: dict[str, tuple[str, ...]] = {}
        self._redrawn_s = 0.0

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield DataTable(id="servers", cursor_type="row", zebra_stripes=False)
        with VerticalScroll(id="one"):
            yield Static(id="detail")
        yield Static(id="incidents")
        yield Footer()

    def on_mount(self) -> None:
        """Starts to scrape and to redraw, once Textual has made the widgets."""
        table = self.query_one("#servers", DataTable)
        for name in _COLUMNS:
            table.add_column(name, key=name)
        self.run_worker(self._scrape_until_closed(), exclusive=True)
        self.set_interval(_REDRAWN_S, self._redraw_in_time)
        self.redraw()

    async def _scrape_until_closed(self) -> None:
        """Scrape the servers in the background; an error closes the page and is kept in `problem`."""
        self.session.log = lambda text: self.notify(text, timeout=10)
        try:
            await stream(self.config, self.session, lambda view: None)
        except LegroomError as error:
            self.problem = error
            self.exit()

    def _redraw_in_time(self) -> None:
        """Redraws if enough time has passed; a large fleet waits longer, as a thousand servers take 0.1 s to draw."""
        now_s = time.monotonic()
        if now_s - self._redrawn_s >= _REDRAWN_S * min(6.0, 1 + len(self.session.views) / 200) - 0.1:
            self._redrawn_s = now_s
            self.redraw()

    def redraw(self) -> None:
        """Refresh every widget from the session's views, unless paused."""
        if self.paused or not self.query("#head"):  # widgets are removed before the last tick
            return
        views = sorted(self.session.views.values(), key=lambda view: (_ORDER.index(view.state), view.server))
        if views and self.chosen not in self.session.views:
            self.chosen = views[0].server
        counts = {state: sum(view.state == state for view in views) for state in STATE_COLOURS}
        summary = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "scraping ..."
        head = f"\x1b[1mlegroom watch\x1b[0m  {time.strftime('%H:%M:%S')}  {summary}"
        self.query_one("#head", Static).update(Text.from_ansi(head))
        self._fill_table(views)
        width = max(60, self.size.width - 4)
        detail, chosen = "Waiting for the first scrape.", self.session.views.get(self.chosen)
        if chosen is not None:
            detail = detail_panel(chosen, list(self.session.history.get(self.chosen, ())), width)
        self.query_one("#detail", Static).update(Text.from_ansi(detail))
        self.query_one("#incidents", Static).update(Text.from_ansi(incidents_panel(list(self.session.changes), width)))

    def _fill_table(self, views: Sequence[ServerView]) -> None:
        """Update the table's changed cells only, as a fleet has a thousand rows."""
        table = self.query_one("#servers", DataTable)
        server_width = max((len(view.server) for view in views), default=0)
        room = max(20, self.size.width - server_width - _OTHER_COLUMNS)
        moved = False
        for server in self._drawn.keys() - self.session.views.keys():
            table.remove_row(server)
            del self._drawn[server]
        for view in views:
            words, before = _table_cells(view, room), self._drawn.get(view.server)
            if words == before:
                continue
            moved = moved or before is None or words[0] != before[0]
            self._drawn[view.server] = words
            if before is None:
                table.add_row(*map(Text.from_ansi, words), key=view.server)
                continue
            for name, word, old in zip(_COLUMNS, words, before, strict=True):
                if word != old:
                    table.update_cell(view.server, name, Text.from_ansi(word), update_width=True)
        if moved:  # the gravest state first, then by name
            table.sort("state", "server", key=lambda cells: (_ORDER.index(cells[0].plain.split()[-1]), cells[1].plain))
            if self.chosen in self._drawn:
                table.move_cursor(row=table.get_row_index(self.chosen))

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Shows the details of the server that the cursor is on."""
        if event.row_key.value:
            self.chosen = str(event.row_key.value)
            self.redraw()

    def action_pause(self) -> None:
        """Freezes the page, or lets it go on; scraping goes on either way."""
        self.paused = not self.paused
        self.notify("paused: scraping goes on, the page stands still" if self.paused else "going on")

    def action_next(self) -> None:
        """Key binding: selects the next server of the table."""
        self.query_one("#servers", DataTable).action_cursor_down()

    def action_previous(self) -> None:
        """Key binding: selects the server above."""
        self.query_one("#servers", DataTable).action_cursor_up()


def _table_cells(view: ServerView, room: int) -> tuple[str, ...]:
    """State, server, KV cache use, running, waiting, tokens/s and a sentence cut to `room` columns."""
    style = Style(colour=True)
    share = "" if view.kv_use is None else f"{view.kv_use:.0%}"
    running = "" if view.running is None else f"{view.running:,.0f}"
    waiting = "" if view.waiting is None else f"{view.waiting:,.0f}"
    tokens = "" if view.generation_tokens_per_s is None else f"{view.generation_tokens_per_s:,.0f}"
    server = view.server.removeprefix("http://")
    return state_mark(view.state, style), server, share, running, waiting, tokens, shortened(view.sentence, room)


def shortened(text: str, width: int) -> str:
    """The text in at most `width` characters; one that is cut ends in an ellipsis."""
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"


def detail_panel(view: ServerView, history: Sequence[HistoryPoint], width: int) -> str:
    """One server's state, sentence, figures and curves, as lines of `width` columns."""
    style = Style(width=width, colour=True)
    named = shortened(f"{view.server}  {', '.join(view.models)}", width - 16)
    lines = [f"{state_mark(view.state, style)}  {style.paint(named, 'bold')}"]
    lines += [style.paint(line, STATE_COLOURS[view.state]) for line in wrap(view.sentence, width)]
    shown = view_figures(view)
    one_column = [(style.paint(name, "grey"), text) for name, text in shown]
    lines += ["", *(columns(one_column, "<<") if width < _NARROW else two_columns(shown, style)), ""]
    curves = [
        Curve("KV use", "blue", 4, [sample.kv_use or 0.0 for sample in history], 1.0, "100%"),
        scaled_curve("running", "green", [sample.running for sample in history]),
        scaled_curve("waiting", "orange", [sample.waiting for sample in history]),
        scaled_curve("tokens/s", "purple", [sample.generation_tokens_per_s for sample in history]),
    ]
    return "\n".join([*lines, *(line for curve in curves for line in curve_lines(curve, style, growing=True))])


def incidents_panel(changes: Sequence[IncidentChange], width: int) -> str:
    """A line for each of the last eight incidents that opened or closed, newest first; `none so far` without any."""
    style = Style(width=width, colour=True)
    lines = [style.paint("incidents", "bold")]
    for change in changes[:8]:
        clock = time.strftime("%H:%M:%S", time.localtime(change.time_s))
        number = f"#{change.id} " if change.id is not None else ""
        finding = change.incident.finding
        lasted = duration_text(max(0.0, change.time_s - change.incident.opened_s))
        reason = f"over after {lasted}" if change.is_over else finding.reason if finding else ""
        colour: Colour = "green" if change.is_over else "red" if change.incident.severity == "critical" else "orange"
        text = f"{clock}  {number}{change.incident.server.removeprefix('http://')}  {change.incident.title}: {reason}"
        lines.append(style.paint(shortened(text, width), colour))
    return "\n".join(lines if changes else [*lines, style.paint("none so far", "grey")])
