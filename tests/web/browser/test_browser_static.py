"""The static edition: the same page with its engine in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import legroom

SAMPLE = Path(__file__).parents[3] / "docs/samples/kv-too-small.log"
EVERYWHERE = [(size, language) for size in ("desktop", "phone") for language in ("en", "zh")]


def open_static(open_page: Any, url: str, **options: Any) -> Any:
    page = open_page(url, **options)
    page.set_default_timeout(120_000)
    return page


@pytest.mark.parametrize(("size", "language"), EVERYWHERE)
def test_a_plan_is_made_in_the_browser(static_url, open_page, keep_screenshot, size, language):
    page = open_static(open_page, f"{static_url}#/plan?model=llama-3.1-8b&gpu=h100", size=size, language=language)
    page.wait_for_selector(".legend-row.part-kv")
    planned = legroom.plan("llama-3.1-8b", "h100").json()
    assert page.inner_text(".legend-row.part-kv .figure") == f"{planned['layout']['kv_cache_bytes'] / 2**30:.2f} GiB"
    keep_screenshot(page)


def test_a_log_is_diagnosed_in_the_browser_and_sent_nowhere(static_url, open_page):
    page = open_static(open_page, f"{static_url}#/diagnose")
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url) if request.method != "GET" else None)
    page.locator(".drop textarea").fill(SAMPLE.read_text())
    page.get_by_role("button", name="Diagnose", exact=True).click()
    page.wait_for_selector(".finding.first")
    assert sent == []
    assert "sent nowhere" in page.inner_text(".private")


def test_a_mix_is_replayed_in_the_browser(static_url, open_page):
    page = open_static(open_page, f"{static_url}#/simulate?model=qwen3-8b&gpu=l4&max_model_len=8192&s.requests=20")
    page.locator(".load .button.primary").click()
    page.wait_for_selector(".chart canvas")


def test_live_says_that_it_needs_a_server(static_url, open_page):
    page = open_static(open_page, f"{static_url}#/live")
    page.wait_for_selector("text=cannot watch servers")


def test_the_catalog_is_there(static_url, open_page):
    page = open_static(open_page, f"{static_url}#/catalog/LR203")
    page.wait_for_selector("article.entry h2")


def test_a_browser_without_webassembly_is_told_so(static_url, open_page):
    page = open_page("about:blank", errors_are_fine=True)
    page.add_init_script("delete window.WebAssembly")
    page.goto(static_url)
    page.wait_for_selector("[role=alert]")
    assert "WebAssembly" in page.locator("[role=alert]").first.inner_text()


def test_after_the_first_visit_it_plans_without_a_network(static_folder, files_served, open_page):
    with files_served(static_folder) as url:
        page = open_static(open_page, f"{url}#/plan?model=llama-3.1-8b&gpu=h100")
        page.wait_for_selector(".legend-row.part-kv")
        page.evaluate("navigator.serviceWorker.ready.then(() => true)")
    page.goto("about:blank")
    page.goto(f"{url}#/plan?model=qwen3-8b&gpu=l4&max_model_len=4096")
    page.wait_for_selector(".legend-row.part-kv")
    planned = legroom.plan("qwen3-8b", "l4", max_model_len=4096).json()
    assert page.inner_text(".legend-row.part-kv .figure") == f"{planned['layout']['kv_cache_bytes'] / 2**30:.2f} GiB"


def test_a_log_too_large_for_a_browser_is_refused_with_a_sentence(static_url, open_page, tmp_path):
    log = tmp_path / "large.log"
    with log.open("wb") as file:
        file.write(SAMPLE.read_bytes() * 100)
        file.truncate(2 << 30)
    page = open_static(open_page, f"{static_url}#/diagnose")
    page.locator("input[type=file]").set_input_files(log)
    page.wait_for_selector("[role=alert]")
    assert "legroom diagnose large.log" in page.inner_text("[role=alert]")


def test_the_page_names_its_version(static_url, open_page):
    page = open_static(open_page, f"{static_url}#/catalog")
    assert f"legroom {legroom.__version__}" in page.inner_text("footer")
