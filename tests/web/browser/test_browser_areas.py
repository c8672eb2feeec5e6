"""Simulations, live servers and the catalog, as a person uses them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from metrics_server import Metrics, serving
from ui_server import serving_ui
from waiting import wait_until

import legroom

EVERYWHERE = [(size, language) for size in ("desktop", "phone") for language in ("en", "zh")]
SMALL = "model=qwen3-8b&gpu=l4&max_model_len=8192&s.requests=80&s.spread=yes"


def replay(page: Any) -> None:
    page.locator(".load .button.primary").click()
    page.wait_for_selector(".chart canvas")


@pytest.mark.parametrize(("size", "language"), EVERYWHERE)
def test_a_mix_is_replayed_and_drawn_over_time(served, open_page, keep_screenshot, size, language):
    page = open_page(f"{served.url}#/simulate?{SMALL}", size=size, language=language, dark=language == "zh")
    replay(page)
    assert page.locator(".chart canvas").count() == 3
    assert {"en": "79 of 80 requests served", "zh": "80 个请求中完成 79 个"}[language] in page.inner_text(".headline")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    keep_screenshot(page)


def test_a_moment_is_read_with_the_pointer_and_the_arrow_keys(served, open_page):
    page = open_page(f"{served.url}#/simulate?{SMALL}")
    replay(page)
    page.locator(".chart .u-over").first.hover()
    page.wait_for_selector("output.moment")
    before = page.inner_text(".moment")
    page.locator(".charts").focus()
    page.keyboard.press("Home")
    wait_until(page, "before => document.querySelector('.moment').innerText !== before", arg=before)


def test_two_runs_are_laid_over_each_other(served, open_page, keep_screenshot):
    page = open_page(f"{served.url}#/simulate?{SMALL}")
    replay(page)
    page.get_by_label("--max-num-seqs").fill("4")
    page.get_by_role("button", name="Replay over the first").click()
    wait_until(page, "document.querySelectorAll('.totals thead th').length === 2")
    assert page.locator(".verdict").count() == 2
    keep_screenshot(page)


def test_what_a_plan_brings_along_is_shown_and_can_be_left_out(served, open_page):
    page = open_page(f"{served.url}#/simulate?{SMALL}&kv_cache_dtype=fp8&gpu_used=1GiB&max_num_seqs=7")
    carried = page.locator(".load .note")
    carried.wait_for()
    assert all(
        words in carried.inner_text() for words in ("--kv-cache-dtype fp8", "“In use”: 1GiB", "--max-num-seqs 7")
    )
    page.get_by_role("button", name="Leave these out").click()
    wait_until(page, "!location.hash.includes('kv_cache_dtype') && location.hash.includes('max_model_len=8192')")
    assert carried.count() == 0


def test_a_replay_that_is_refused_leaves_no_older_one_beside_it(served, open_page):
    page = open_page(f"{served.url}#/simulate?{SMALL}", errors_are_fine=True)
    replay(page)
    page.get_by_role("combobox", name="GPU").fill("h1000x")
    page.keyboard.press("Enter")
    page.wait_for_selector(".simulation .note.fair")
    page.locator(".load .button.primary").click()
    page.wait_for_selector(".simulation [role=alert]")
    assert page.locator(".simulation .verdict").count() == 0


@pytest.mark.parametrize(("size", "language"), [("desktop", "en"), ("phone", "zh")])
def test_a_load_has_its_number_of_gpus_and_their_price(served, open_page, keep_screenshot, size, language):
    page = open_page(f"{served.url}#/simulate?{SMALL}&s.rate_per_s=5", size=size, language=language)
    page.locator(".simulation summary").click()
    page.locator(".simulation details input").last.fill("h100, l40s")
    page.locator(".simulation details > button").click()
    page.wait_for_selector(".simulation tbody tr:nth-child(2)")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert "H100" in page.inner_text(".simulation tbody")
    keep_screenshot(page)


def test_a_load_that_is_not_held_is_said_first(served, open_page):
    page = open_page(f"{served.url}#/simulate?{SMALL}&s.rate_per_s=400&s.max_num_seqs=2")
    replay(page)
    assert page.inner_text(".verdict .badge") == "Falls behind"
    assert "arrive a second" in page.inner_text(".verdict .headline")


def test_an_empty_page_offers_loads_to_begin_with(served, open_page):
    page = open_page(f"{served.url}#/simulate?model=qwen3-8b&gpu=h100&max_model_len=8192")
    page.get_by_role("button", name="Chat 8 requests a second").click()
    page.wait_for_selector(".chart canvas")
    wait_until(page, "location.hash.includes('s.prompt_tokens=1020')")
    assert page.locator(".chart canvas").count() == 2  # nothing was preempted, so there is no empty chart of it


def test_a_pasted_trace_is_replayed_through_blocks(served, open_page):
    rows = "\n".join(json.dumps({"arrival": index * 0.1, "prompt_len": 400, "output_len": 50}) for index in range(20))
    page = open_page(f"{served.url}#/simulate?s.pool=blocks&s.blocks=400")
    page.get_by_role("button", name="A trace").click()
    page.locator(".drop textarea").fill(rows)
    replay(page)
    assert "20 of 20 requests served" in page.inner_text(".verdict .headline")


def test_a_trace_that_cannot_be_read_is_told(served, open_page):
    page = open_page(f"{served.url}#/simulate?s.pool=blocks&s.blocks=400", errors_are_fine=True)
    page.get_by_role("button", name="A trace").click()
    page.locator(".drop textarea").fill("no trace at all")
    page.locator(".load .button.primary").click()
    page.wait_for_selector("[role=alert]")
    assert page.locator(".drop textarea").input_value() == "no trace at all"


@pytest.mark.parametrize(("size", "language"), EVERYWHERE)
def test_the_catalog_is_read_in_both_languages(served, open_page, keep_screenshot, size, language):
    page = open_page(f"{served.url}#/catalog/LR203", size=size, language=language)
    page.wait_for_selector("article.entry h2")
    title = {
        "en": "One request of max_model_len does not fit the KV cache",
        "zh": "KV 缓存放不下一个 max_model_len 长度的请求",
    }
    assert page.inner_text("article.entry h2") == title[language]
    keep_screenshot(page)


@pytest.mark.parametrize(
    ("language", "words", "entry"),
    [("en", "No available memory for the cache blocks", "LR201"), ("zh", "上下文太长", "LR203")],
)
def test_the_catalog_is_searched(served, open_page, language, words, entry):
    page = open_page(f"{served.url}#/catalog", language=language)
    page.wait_for_selector(".entry-list a")
    page.locator("input[type=search]").fill(words)
    wait_until(page, "entry => document.querySelector('.entry-list a code')?.innerText === entry", entry)


def test_an_entry_that_does_not_exist_is_told(served, open_page):
    page = open_page(f"{served.url}#/catalog/LR000", errors_are_fine=True)
    page.wait_for_selector("[role=alert]")
    assert "LR000" in page.inner_text("[role=alert]")


def test_without_servers_the_live_area_says_how_to_name_them(served, open_page):
    page = open_page(f"{served.url}#/live", errors_are_fine=True)
    page.wait_for_selector("text=No servers are watched")
    assert "--watch" in page.inner_text(".command pre")


@pytest.mark.parametrize(("size", "language"), EVERYWHERE)
def test_a_watched_server_is_shown_as_it_serves(open_page, keep_screenshot, size, language):
    healthy = {"en": "healthy", "zh": "正常"}[language]
    with serving(Metrics()) as vllm, serving_ui("--watch", vllm, "--interval", "0.5") as ui:
        page = open_page(f"{ui.url}#/live", size=size, language=language, errors_are_fine=True)
        wait_until(page, f"document.querySelector('.server .state')?.innerText === '{healthy}'")
        page.locator(".server-row").click()
        wait_until(page, "document.querySelector('.server-details .sparkline polyline')")
        assert "1,001" in page.inner_text(".server-details")
        keep_screenshot(page)


@pytest.mark.parametrize(("size", "language"), [("desktop", "en"), ("phone", "zh")])
def test_a_server_is_shown_beside_its_plan(open_page, keep_screenshot, tmp_path, size, language):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(legroom.plan("qwen3-8b", "l4", max_model_len=4096).json()))
    with serving(Metrics()) as vllm, serving_ui("--watch", vllm, "--interval", "0.5", "--plan", str(plan)) as ui:
        page = open_page(f"{ui.url}#/live", size=size, language=language, errors_are_fine=True)
        page.locator(".server-row").click()
        page.wait_for_selector(".plan-comparison li.off")
        assert "1,001" in page.locator(".plan-comparison li").first.inner_text()
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        keep_screenshot(page)


def test_a_server_that_dies_is_shown_as_unreachable(open_page):
    metrics = Metrics()
    with serving(metrics) as vllm, serving_ui("--watch", vllm, "--interval", "0.5") as ui:
        page = open_page(f"{ui.url}#/live", errors_are_fine=True)
        page.wait_for_selector(".server.healthy")
        metrics.status = 503
        page.wait_for_selector(".server.unreachable")


def test_a_page_whose_server_ended_says_so_and_goes_on_when_it_is_back(open_page):
    with serving(Metrics()) as vllm:
        with serving_ui("--watch", vllm, "--interval", "0.5") as ui:
            page = open_page(f"{ui.url}#/live", errors_are_fine=True)
            page.wait_for_selector(".server.healthy")
            port = int(ui.url.rstrip("/").rsplit(":", 1)[1])
        page.wait_for_selector(".connection.lost, .connection.closed")
        assert page.locator(".server").count() == 1
        with serving_ui("--watch", vllm, "--interval", "0.5", port=port):
            page.wait_for_selector(".connection.open")


def fleet(size: int, looks: int) -> str:
    """A stream of looks at many servers."""
    states = ("healthy", "idle", "warning", "critical", "unreachable")
    views = (
        {
            "server": f"http://gpu{number:03}:8000",
            "time_s": 1000.0 + look,
            "state": states[number % 5],
            "sentence": "serving",
            "models": ["m"],
            "kv_use": (number * 7 + look) % 100 / 100,
            "running": 4,
            "waiting": 0,
            "findings": [],
            "notes": [],
            "forecast": None,
        }
        for look in range(looks)
        for number in range(size)
    )
    return "".join(f"data: {json.dumps(view)}\n\n" for view in views)


def test_200_servers_do_not_freeze_the_page(served, open_page, keep_screenshot):
    body = fleet(200, 60)
    page = open_page(f"{served.url}#/catalog")
    page.route("**/api/live", lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body))
    page.evaluate("""() => {
        window.longest = 0;
        const note = (list) => {
            window.longest = Math.max(window.longest, ...list.getEntries().map((task) => task.duration));
        };
        new PerformanceObserver(note).observe({ type: "longtask" });
    }""")
    page.get_by_role("link", name="Live").click()
    wait_until(page, "document.querySelectorAll('.server').length === 200")
    started = time.monotonic()
    page.get_by_label("Filter by name, model or state").fill("critical")
    wait_until(page, "document.querySelectorAll('.server').length === 40")
    assert time.monotonic() - started < 2
    assert page.evaluate("window.longest") < 1_000
    keep_screenshot(page)


def test_a_snapshot_is_drawn_and_a_later_one_names_the_leak(served, open_page):
    samples = Path(__file__).parents[3] / "docs" / "samples"
    page = open_page(f"{served.url}#/fragments")
    page.get_by_label("Open a file").set_input_files(samples / "leak-before.pickle")
    page.wait_for_selector("img.segments")
    assert page.evaluate("document.querySelector('img.segments').naturalWidth") > 0
    page.get_by_label("Open a later one").set_input_files(samples / "leak-after.pickle")
    page.get_by_role("heading", name="keep_multimodal_input").wait_for()


def test_a_budget_that_is_no_number_is_told_and_the_cheapest_comes_first(served, open_page):
    page = open_page(f"{served.url}#/simulate?model=llama-3.1-8b&gpu=h100&s.requests=60")
    page.get_by_role("button", name="Replay", exact=True).click()
    page.locator("summary", has_text="How many GPUs").click()
    budget = page.get_by_label("At most $ an hour")
    budget.fill("fifteen")
    count = page.get_by_role("button", name="Count the GPUs")
    wait_until(page, "document.querySelector('.fold[open] .problem') !== null")
    assert count.is_disabled()
    budget.fill("15")
    page.get_by_label("GPUs to compare").fill("h100, a100-80gb")
    count.click()
    page.wait_for_selector(".fold[open] tbody tr:nth-child(2)")
    prices = [float(text.split()[0]) for text in page.locator(".fold[open] tbody tr td:nth-child(3)").all_inner_texts()]
    assert prices == sorted(prices)
    assert "server" in page.locator(".fold[open] tbody tr").first.inner_text()
    assert "s.budget=15" in page.url
    page.reload()
    page.wait_for_selector(".fold[open] tbody tr:nth-child(2)")
    assert page.get_by_label("GPUs to compare").input_value() == "h100, a100-80gb"


def test_simulate_refuses_the_flags_that_plan_refuses(served, open_page):
    page = open_page(
        f"{served.url}#/simulate?model=llama-3.1-8b&gpu=h100&max_model_len=8192&s.requests=20", errors_are_fine=True
    )
    replay = page.get_by_role("button", name="Replay")
    for flag in ("--max-num-seqs", "--max-num-batched-tokens"):
        page.get_by_label(flag).fill("-1")
        replay.click()
        page.wait_for_selector(".simulation .note.bad")
        assert f"{flag} -1 is out of range" in page.inner_text(".simulation .note.bad")
        page.get_by_label(flag).fill("")
        wait_until(page, "!document.querySelector('.simulation .note.bad')")
    page.get_by_label("--max-num-batched-tokens").fill("99999999")
    replay.click()
    page.wait_for_selector(".simulation .note.bad")
    assert "does not start" in page.inner_text(".simulation .note.bad")


def test_simulate_names_the_limits_of_a_load_and_sends_nothing_beyond_them(served, open_page):
    page = open_page(f"{served.url}#/simulate?model=llama-3.1-8b&gpu=h100", language="zh")
    replay = page.get_by_role("button", name="重放")
    for label, typed, told in (
        ("请求数", "", "请填 1 到 50,000 的整数。"),
        ("请求数", "2.5", "请填 1 到 50,000 的整数。"),
        ("每秒请求数", "9999999", "请填 0.001 到 100,000 的数字。"),
        ("输出 token", "", "请填 1 到 1,000,000 的 token 长度，如 4096 或 32k（32,768）。"),
    ):
        field = page.get_by_label(label, exact=True)
        before = field.input_value()
        field.fill(typed)
        assert page.inner_text(".load .problem") == told
        assert field.input_value() == typed and replay.is_disabled()
        field.fill(before)
        assert replay.is_enabled()


def test_models_keeps_an_emptied_card_empty_and_names_its_limits(served, open_page):
    page = open_page(f"{served.url}#/models?gpu=abc&users=1000000000&context=999999999999", errors_are_fine=True)
    wait_until(page, "document.querySelectorAll('.models-area .problem').length === 2")
    assert page.locator(".models-area .problem").all_inner_texts() == [
        "A length from 1 to 100,000,000 tokens, like 4096 or 32k (32,768).",
        "A whole number from 1 to 1,000,000.",
    ]
    card = page.get_by_role("combobox", name="GPU")
    card.fill("")
    page.keyboard.press("Tab")
    assert card.input_value() == ""
    assert "Which card?" in page.inner_text(".models-area .note")


def test_a_replay_that_is_under_way_as_the_language_changes_is_told_in_the_new_one(served, open_page):
    page = open_page(f"{served.url}#/simulate?{SMALL}")
    held = []
    page.route("**/api/simulate", lambda route: held.append(route) if not held else route.continue_())
    page.locator(".load .button.primary").click()
    while not held:
        page.wait_for_timeout(50)
    page.get_by_role("button", name="中文").click()
    held[0].continue_()
    wait_until(page, "document.querySelector('.verdict .headline')?.innerText.includes('个请求中完成')")
    assert "抢占" in page.inner_text(".totals")
