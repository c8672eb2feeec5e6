"""`legroom.watch`."""

from collections.abc import Iterator
from typing import Any

from legroom.drawing.terminal import PLAIN, Style
from legroom.errors import LegroomError
from legroom.live.server_view import ServerView
from legroom.records import dataclass
from legroom.render.watch_text import servers_text
from legroom.sidecar.watch_config import simple_config, with_interval
from legroom.sidecar.watch_session import WatchSession, check_once, watched_views


@dataclass(frozen=True)
class WatchReport:
    """The state of one server at one scrape, as text or JSON."""

    view: ServerView

    @property
    def state(self) -> str:
        """`healthy`, `idle`, `warning`, `critical` or `unreachable`."""
        return self.view.state

    def text(self, style: Style | None = None) -> str:
        """The text of `legroom watch --once`."""
        return servers_text([self.view], style or PLAIN)

    def json(self) -> dict[str, Any]:
        """The object that `legroom watch --json` prints for this server and scrape."""
        return self.view.to_json()

    def __str__(self) -> str:
        return self.text()


def watch(*servers: str, interval_s: float = 5.0, once: bool = False) -> Iterator[WatchReport]:
    """Scrapes vLLM servers and yields a report for each scrape until the iterator is closed; `once`: one a server."""
    if not servers:
        raise LegroomError("which server?", 'legroom.watch("http://host:8000")')
    config, session = with_interval(simple_config(servers), interval_s), WatchSession()
    if once:
        check_once(config, session, min(1.0, interval_s))
        return iter([WatchReport(view) for view in session.views.values()])
    return (WatchReport(view) for view in watched_views(config, session))
