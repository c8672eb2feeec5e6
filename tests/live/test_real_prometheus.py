"""The fleet source against a real Prometheus that scrapes real metrics texts.

It takes six seconds, five of them Prometheus' own: it tells its scraper of targets every five seconds, and no option
changes that.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from aiohttp import web
from free_ports import free_port
from loopback import listening

from legroom.live.metrics.prometheus_source import PrometheusSource
from legroom.live.metrics.sample import Sample, ScrapeFailure, ScrapeResult
from legroom.live.metrics.scrape import ScrapeFailed, open_session

ROOT = Path(__file__).parents[2]
REAL = ROOT / "tests/fixtures/live/metrics_0.32.0.txt"
OLD = 'vllm:num_requests_running{model_name="old"} 2\nvllm:gpu_cache_usage_perc{model_name="old"} 0.25\n'


@pytest.fixture(scope="module")
def prometheus() -> Path:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no real Prometheus here: run bin/setup-tools")
    return Path(program)


def showing(text: str) -> contextlib.AbstractAsyncContextManager[int]:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(text=text)

    return listening(web.get("/metrics", handler))


def config(ports: list[int]) -> str:
    targets = ", ".join(f"'127.0.0.1:{port}'" for port in ports)
    return (
        "global: {scrape_interval: 200ms}\n"
        f"scrape_configs: [{{job_name: vllm, static_configs: [{{targets: [{targets}]}}]}}]\n"
    )


async def until(source: PrometheusSource, wanted: int, kind: type[ScrapeResult]) -> list[ScrapeResult]:
    """Ask until that many servers are seen so, for two minutes at most."""
    seen: dict[str, ScrapeResult] = {}
    async with open_session() as session:
        for _ in range(2400):
            with contextlib.suppress(ScrapeFailed):  # it is still starting
                seen |= {look.server: look for look in await source.poll(session, time.time())}
            looks = [look for look in seen.values() if isinstance(look, kind)]
            if len(looks) >= wanted:
                return looks
            await asyncio.sleep(0.05)
    return []


def test_servers_of_two_releases_are_read_and_one_that_dies_is_seen(prometheus: Path, tmp_path: Path) -> None:
    async def run() -> None:
        stopping, servers = contextlib.AsyncExitStack(), contextlib.AsyncExitStack()
        ports = [await servers.enter_async_context(showing(REAL.read_text()))]
        ports += [await stopping.enter_async_context(showing(OLD))]
        (tmp_path / "prometheus.yml").write_text(config(ports))
        port = free_port()
        process = subprocess.Popen(
            [
                prometheus,
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            source = PrometheusSource(f"http://127.0.0.1:{port}", 'job="vllm"')
            looks = {look.server: look for look in await until(source, 2, Sample)}
            new, old = looks[f"127.0.0.1:{ports[0]}"], looks[f"127.0.0.1:{ports[1]}"]
            assert isinstance(new, Sample) and isinstance(old, Sample)
            assert (new.engines[0].num_blocks, new.total("finished")) == (256, 6)
            assert new.engines[0].ttft is not None and new.engines[0].ttft.count == 6
            assert (old.running, old.kv_use) == (2, 0.25)
            assert (new.api_server_rss_bytes, old.api_server_rss_bytes) == (616_931_328, None)
            assert abs(new.time_s - time.time()) < 10
            await stopping.aclose()
            (gone,) = await until(source, 1, ScrapeFailure)
            assert gone.server == old.server
        finally:
            process.terminate()
            process.wait()
            await stopping.aclose()
            await servers.aclose()

    asyncio.run(run())
