"""A real Chromium on the page of `legroom ui`, served and static. Screenshots of it are kept in .screenshots/."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ui_server import UiServer, serving_ui

ROOT = Path(__file__).parents[3]
SCREENSHOTS = ROOT / ".screenshots"
SIZES = {"desktop": (1440, 900), "phone": (390, 844)}
LANGUAGES = {"en": "en-US", "zh": "zh-CN"}


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    # Its event loop runs as long as it does, so it must end before tests of other folders begin.
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install 'legroom[dev]'")
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("no Chromium: bin/setup-tools chromium")
    with playwright.sync_playwright() as driver:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = driver.chromium.launch(executable_path=program, args=options)
        yield chromium
        chromium.close()


@pytest.fixture(scope="package")
def served() -> Iterator[UiServer]:
    """One server for every test that does not end it."""
    pytest.importorskip("uvicorn", reason="no server: pip install 'legroom[ui]'")
    with serving_ui() as server:
        yield server


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def file_server(folder: Path) -> Iterator[str]:
    """The address of a plain file server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Silent, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="package")
def static_folder(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The static edition, written once; not at all where there is no browser for it."""
    from legroom.errors import LegroomError
    from legroom.web.static_edition import write_static

    folder = tmp_path_factory.mktemp("static")
    try:
        write_static(folder)
    except LegroomError as error:
        pytest.skip(f"the static edition cannot be written here: {error.message}")
    return folder


@pytest.fixture(scope="package")
def static_url(static_folder: Path) -> Iterator[str]:
    """The static edition on a plain file server."""
    with file_server(static_folder) as url:
        yield url


@pytest.fixture
def files_served() -> Callable[[Path], AbstractContextManager[str]]:
    """A file server that a test may end."""
    return file_server


OpenPage = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """`open_page(url, size="phone", language="zh")`: a page in a browser of its own that must not report an error."""
    contexts: list[Any] = []
    errors: list[str] = []

    def open_at(
        url: str, *, size: str = "desktop", language: str = "en", dark: bool = False, errors_are_fine: bool = False
    ) -> Any:
        width, height = SIZES[size]
        context = browser.new_context(
            viewport={"width": width, "height": height},
            locale=LANGUAGES[language],
            color_scheme="dark" if dark else "light",
            accept_downloads=True,
        )
        context.set_default_timeout(45_000)
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        contexts.append(context)
        page = context.new_page()
        if not errors_are_fine:
            page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
            page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert errors == []


@pytest.fixture
def keep_screenshot(request: pytest.FixtureRequest) -> Callable[[Any], None]:
    """For a person to look at."""

    def keep(page: Any) -> None:
        SCREENSHOTS.mkdir(exist_ok=True)
        name = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in request.node.name)
        page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)

    return keep


@pytest.fixture
def axe() -> str:
    """The accessibility rules, as a script."""
    script = ROOT / ".tools/axe.min.js"
    if not script.is_file():
        pytest.skip("no axe-core: bin/setup-tools chromium")
    return script.read_text()


@pytest.fixture
def fresh_build(tmp_path: Path) -> Path:
    """The page, built from its sources now."""
    if shutil.which("npm") is None:
        pytest.skip("no npm to build the page with")
    built = subprocess.run([ROOT / "bin/build-page", tmp_path / "page"], capture_output=True, text=True, check=False)
    if built.returncode and not (ROOT / "page/node_modules").is_dir():
        pytest.skip(f"npm could not fetch what the build needs: {built.stderr[-200:]}")
    assert built.returncode == 0, built.stderr
    return tmp_path / "page"
