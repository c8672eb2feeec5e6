"""How long from a moved slider to the redrawn picture on the page of `legroom ui`, in a real Chromium.

    python bench/ui_latency.py [--moves 200] [--static] [--json]

A move counts until the picture has changed and the browser has drawn a frame with it; a visit, in a tab of its own and
the first with nothing kept, until the first plan is drawn. Needs Chromium and Playwright.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench_harness import arguments

SETUPS = {
    "fits": "#/plan?model=llama-3.1-8b&gpu=h100",
    "does not fit": "#/plan?model=llama-3.1-8b&gpu=l4",
    "four GPUs": "#/plan?model=meta-llama/Llama-3.1-70B-Instruct&gpu=a100-80gb&tensor_parallel_size=4",
}
MOVE = """async ({ moves }) => {
    const slider = document.querySelector(".flags input[type=range]");
    const picture = document.querySelector(".card-svg");
    const times = [];
    for (let move = 0; move < moves; move++) {
        const next = (Number(slider.value) + 1) % 60 + 5;
        const started = performance.now();
        await new Promise((resolve) => {
            const seen = new MutationObserver(() => {
                seen.disconnect();
                requestAnimationFrame(() => setTimeout(resolve));
            });
            seen.observe(picture, { attributes: true, childList: true, subtree: true, characterData: true });
            slider.value = next;
            slider.dispatchEvent(new Event("input", { bubbles: true }));
        });
        times.push(performance.now() - started);
        await new Promise((resolve) => setTimeout(resolve, 30));
    }
    return times;
}"""


@contextmanager
def served() -> Iterator[str]:
    command = [sys.executable, "-m", "legroom", "ui", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


@contextmanager
def static() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "legroom", "ui", "--static", folder], check=True, stdout=subprocess.DEVNULL
        )
        command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            try:
                yield process.stdout.readline().split("(")[1].split(")")[0]
            finally:
                process.terminate()


def measure(page: Any, url: str, moves: int) -> list[float]:
    page.goto("about:blank")
    page.goto(url)
    page.wait_for_selector(".card-svg", timeout=120_000)
    page.wait_for_timeout(1_000)
    page.evaluate(MOVE, {"moves": 10})
    return list(page.evaluate(MOVE, {"moves": moves}))


def visits(browser: Any, url: str, count: int = 3) -> list[float]:
    """Seconds until the first plan stands on the page; what a visit leaves in the browser serves the next."""
    context, seconds = browser.new_context(viewport={"width": 1440, "height": 900}), []
    for _ in range(count):
        page = context.new_page()
        page.set_default_timeout(120_000)
        started = time.monotonic()
        page.goto(url + SETUPS["fits"])
        page.wait_for_selector(".legend-row.part-kv")
        seconds.append(round(time.monotonic() - started, 2))
        page.wait_for_timeout(8_000)  # what it keeps for the next visit is written after the first plan
        page.close()
    context.close()
    return seconds


def main() -> None:
    args = arguments(__doc__, moves=200, static=False, json=False)
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or "chromium"
    figures = {}
    with static() if args.static else served() as url, sync_playwright() as driver:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=program, args=options)
        visit_s = visits(browser, url)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(600_000)
        for name, address in SETUPS.items():
            times = sorted(measure(page, url + address, args.moves))
            figures[name] = {
                "p50_ms": round(statistics.median(times), 1),
                "p95_ms": round(times[int(0.95 * len(times))], 1),
                "max_ms": round(times[-1], 1),
            }
        browser.close()
    report = {"edition": "static" if args.static else "served", "moves": args.moves, "load": os.getloadavg()[0]}
    if args.json:
        print(json.dumps(report | {"visits_s": visit_s, "figures": figures}, indent=1))
        return
    print(f"{report['edition']}, visits until a plan is drawn: {', '.join(f'{seconds:.2f} s' for seconds in visit_s)}")
    print(f"{report['edition']}, {args.moves} moves each, load {report['load']:.1f}: slider to redrawn picture")
    for name, row in figures.items():
        print(f"  {name:14} p50 {row['p50_ms']:6.1f} ms   p95 {row['p95_ms']:6.1f} ms   max {row['max_ms']:6.1f} ms")


if __name__ == "__main__":
    main()
