"""The live page, driven by Textual's pilot: what it shows, how it answers keys, and that it never writes to stdout."""

from __future__ import annotations

import asyncio
import re

import pytest
from metrics_server import Metrics, serving
from test_watch import SERVER, calm, sample, trouble

pytest.importorskip("textual")

from textual.widgets import DataTable, Static

from legroom.cli import watch_page
from legroom.cli.watch_page import WatchPage, detail_panel, incidents_panel
from legroom.live.metrics.sample import ScrapeFailure
from legroom.sidecar.watch_config import simple_config
from legroom.sidecar.watch_session import WatchSession

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path / "home"))


def page_of(session: WatchSession, monkeypatch) -> WatchPage:
    """A page whose scrapes were all made before."""

    async def nothing(*_: object) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(watch_page, "stream", nothing)
    return WatchPage(session, simple_config([SERVER]))


def fleet() -> WatchSession:
    session = WatchSession()
    for look in [*calm(40, 0), *trouble(50, 40)]:
        session.take(look)
    for number in range(60):
        session.take(sample(number, 0.2 + 0.008 * number, 12, server="http://gpu2:8000"))
    session.take(
        ScrapeFailure(1_700_000_400.0, "http://gpu3:8000", "refused", "http://gpu3:8000: nothing listens there")
    )
    return session


def shown(page: WatchPage, selector: str) -> str:
    return str(page.query_one(selector, Static).content)


def test_the_page_shows_every_server_with_its_state(monkeypatch):
    async def look() -> None:
        page = page_of(fleet(), monkeypatch)
        async with page.run_test(size=(120, 40)) as pilot:
            await pilot.pause()
            table = page.query_one("#servers", DataTable)
            rows = [" ".join(str(cell) for cell in table.get_row_at(row)) for row in range(3)]
            assert [row.split()[1] for row in rows] == ["critical", "unreachable", "healthy"]
            assert "nothing listens there" in rows[1]
            assert "pool full in" in rows[2]

    asyncio.run(look())


def test_the_arrow_chooses_the_server_that_is_shown(monkeypatch):
    async def look() -> None:
        page = page_of(fleet(), monkeypatch)
        async with page.run_test(size=(120, 40)) as pilot:
            await pilot.pause()
            assert "gpu1" in shown(page, "#detail")
            await pilot.press("down", "down")
            await pilot.pause()
            assert "gpu2" in shown(page, "#detail")
            await pilot.press("up")
            await pilot.pause()
            assert "gpu3" in shown(page, "#detail")
            await pilot.press("k")
            await pilot.pause()
            assert "gpu1" in shown(page, "#detail")

    asyncio.run(look())


def test_a_server_in_trouble_rises_to_the_top_and_the_choice_stays(monkeypatch):
    async def look() -> None:
        session = WatchSession()
        for number in range(1, 4):
            session.take(sample(1, server=f"http://gpu{number}:8000"))
        page = page_of(session, monkeypatch)
        async with page.run_test(size=(120, 40)) as pilot:
            await pilot.pause()
            await pilot.press("down")
            await pilot.pause()
            assert page.chosen == "http://gpu2:8000"
            session.take(ScrapeFailure(1_700_000_400.0, "http://gpu3:8000", "refused", "nothing listens there"))
            page.redraw()
            await pilot.pause()
            table = page.query_one("#servers", DataTable)
            assert [str(table.get_row_at(row)[1]) for row in range(3)] == ["gpu3:8000", "gpu1:8000", "gpu2:8000"]
            assert (page.chosen, table.cursor_row) == ("http://gpu2:8000", 2)

    asyncio.run(look())


def test_a_paused_page_stands_still_while_looks_go_on(monkeypatch):
    async def look() -> None:
        session = WatchSession()
        session.take(sample(1))
        page = page_of(session, monkeypatch)
        async with page.run_test(size=(120, 40)) as pilot:
            await pilot.pause()
            await pilot.press("p")
            session.take(sample(2, running=77))
            page.redraw()
            assert "77" not in shown(page, "#detail")
            await pilot.press("p")
            page.redraw()
            assert "77" in shown(page, "#detail")

    asyncio.run(look())


def test_a_server_that_is_no_longer_listed_leaves_the_page(monkeypatch):
    async def look() -> None:
        session = fleet()
        page = page_of(session, monkeypatch)
        async with page.run_test(size=(120, 40)) as pilot:
            await pilot.pause()
            session.remove_server("http://gpu3:8000")
            page.redraw()
            table = page.query_one("#servers", DataTable)
            assert [str(table.get_row_at(row)[1]) for row in range(table.row_count)] == ["gpu1:8000", "gpu2:8000"]

    asyncio.run(look())


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_a_key_leaves(monkeypatch, key):
    async def look() -> None:
        page = page_of(WatchSession(), monkeypatch)
        async with page.run_test() as pilot:
            assert page.return_code is None
            await pilot.press(key)
            assert page.return_code == 0

    asyncio.run(look())


def test_the_page_looks_at_a_real_endpoint():
    async def look(url: str) -> None:
        session = WatchSession()
        from dataclasses import replace

        page = WatchPage(session, replace(simple_config([url]), interval_s=0.1))
        async with page.run_test(size=(120, 40)) as pilot:
            for _ in range(100):
                await pilot.pause(0.05)
                if session.scrapes >= 3:
                    break
            page.redraw()
            assert "serving 8 requests" in shown(page, "#detail")

    with serving(Metrics()) as url:
        asyncio.run(look(url))


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_of_a_panel_is_wider_than_the_page(width):
    session = fleet()
    for server, view in session.views.items():
        panel = detail_panel(view, list(session.history[server]), width)
        assert max(len(_ESCAPE.sub("", line)) for line in panel.splitlines()) <= width
    incidents = incidents_panel(list(session.changes), width)
    assert max(len(_ESCAPE.sub("", line)) for line in incidents.splitlines()) <= width
