"""What holds for the whole page: what it weighs, who can use it, what it is allowed to do, and where it comes from."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from metrics_server import Metrics, serving
from ui_server import serving_ui
from waiting import wait_until

import legroom
from legroom.web.page_files import PAGE_FOLDER

ROOT = Path(__file__).parents[3]
AREAS = {
    "plan": ("#/plan?model=llama-3.1-8b&gpu=l4", ".fix"),
    "compare": ("#/plan?model=llama-3.1-8b&gpu=h100&b.model=llama-3.1-8b&b.gpu=l4", ".differences"),
    "models": ("#/models?q=qwen3-coder", ".panel"),
    "diagnose": ("#/diagnose", ".log-input"),
    "fragments": ("#/fragments", ".drop"),
    "simulate": ("#/simulate", ".load"),
    "live": ("#/live", ".panel, .live-head"),
    "catalog": ("#/catalog/LR203", "article.entry"),
}
MOST_BYTES = 300_000


def violations(page: Any, axe: str) -> list[str]:
    page.evaluate(axe)
    results = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [f"{rule['id']}: {node['html'][:160]}" for rule in results["violations"] for node in rule["nodes"][:3]]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("area", AREAS)
def test_axe_finds_nothing(served, open_page, axe, area, dark):
    address, ready = AREAS[area]
    page = open_page(f"{served.url}{address}", dark=dark, errors_are_fine=area == "live")
    page.wait_for_selector(ready)
    assert violations(page, axe) == []


def test_axe_finds_nothing_in_a_diagnosis(served, open_page, axe):
    page = open_page(f"{served.url}#/diagnose")
    page.locator(".examples button").first.click()
    page.wait_for_selector(".before-after .card-svg")
    assert violations(page, axe) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_in_a_server_beside_its_plan(open_page, axe, tmp_path, dark):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(legroom.plan("qwen3-8b", "l4", max_model_len=4096).json()))
    with serving(Metrics()) as vllm, serving_ui("--watch", vllm, "--interval", "0.5", "--plan", str(plan)) as ui:
        page = open_page(f"{ui.url}#/live", dark=dark, errors_are_fine=True)
        page.locator(".server-row").click()
        page.wait_for_selector(".plan-comparison li.off")
        assert violations(page, axe) == []


def test_the_first_load_is_small(served, open_page):
    page = open_page(served.url)
    page.wait_for_selector(".verdict p")
    sizes = page.evaluate(
        "performance.getEntries().filter(e => e.transferSize !== undefined).map(e => e.encodedBodySize + 300)"
    )
    assert 0 < sum(sizes) <= MOST_BYTES


def test_nothing_is_loaded_from_another_host(served, open_page):
    page = open_page("about:blank")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(served.url)
    page.wait_for_selector(".verdict p")
    assert asked
    assert [url for url in asked if not url.startswith((served.url, "data:", "blob:"))] == []


def test_the_whole_plan_can_be_made_with_the_keyboard(served, open_page):
    page = open_page(served.url)
    page.wait_for_selector(".verdict p")
    name = "(node => node.getAttribute('aria-label') || node.innerText || node.id)(document.activeElement)"
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate(name))
    assert any("weights" in words for words in reached)
    assert (
        page.evaluate('document.querySelectorAll(\'[tabindex]:not([tabindex="0"]):not([tabindex="-1"])\').length') == 0
    )


def test_the_colours_follow_the_system_and_the_switch(served, open_page):
    page = open_page(served.url, dark=True)
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    page.get_by_role("button", name=re.compile("Colours: .*Auto")).click()
    wait_until(page, "document.documentElement.dataset.theme === 'light'")
    assert page.evaluate(paper) != dark
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"


def test_the_language_is_switched_and_kept(served, open_page):
    page = open_page(served.url)
    page.get_by_role("button", name="中文").click()
    page.wait_for_selector("nav >> text=规划")
    assert page.evaluate("document.documentElement.lang") == "zh"
    page.reload()
    page.wait_for_selector("nav >> text=规划")


def test_both_languages_say_everything():
    if shutil.which("node") is None:
        pytest.skip("no node to read the texts with")
    script = "import {en} from './en.js'; import {zh} from './zh.js'; console.log(JSON.stringify([en, zh]))"
    command = ["node", "--input-type=module", "-e", script]
    read = subprocess.run(command, cwd=ROOT / "page/src/text", capture_output=True, text=True, check=True)
    english, chinese = json.loads(read.stdout)
    assert english.keys() == chinese.keys()
    holes = {key for key in english if set(_holes(english[key])) != set(_holes(chinese[key]))}
    assert holes == set()


def _holes(text: str) -> list[str]:
    return [piece.split("}")[0] for piece in text.split("{")[1:]]


def test_a_rebuild_gives_the_same_bytes(fresh_build):
    built = {file.name: file.read_bytes() for file in fresh_build.iterdir()}
    committed = {file.name: file.read_bytes() for file in PAGE_FOLDER.iterdir()}
    assert built.keys() == committed.keys()
    assert [name for name in built if built[name] != committed[name]] == []


def test_the_lock_file_names_no_registry():
    assert "resolved" not in (ROOT / "page/package-lock.json").read_text()


def test_the_licences_of_what_is_bundled_lie_beside_it():
    text = (PAGE_FOLDER / "LICENSES.txt").read_text()
    bundled = json.loads((ROOT / "page/package.json").read_text())["dependencies"]
    assert all(f"{name} {version}" in text for name, version in bundled.items())


def test_a_file_dropped_beside_its_place_does_not_leave_the_page(served, open_page):
    page = open_page(f"{served.url}#/catalog")
    page.wait_for_selector(".entry-list a")
    prevented = page.evaluate("""() => {
        const event = new DragEvent("drop", { bubbles: true, cancelable: true });
        document.body.dispatchEvent(event);
        return event.defaultPrevented;
    }""")
    assert prevented
