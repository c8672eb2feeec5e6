"""Where samples come from: the servers themselves, pods found through Kubernetes, or a Prometheus."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from legroom.errors import LegroomError
from legroom.live.metrics.endpoint import Endpoint
from legroom.live.metrics.kubernetes_source import discovered_endpoints, pods_api
from legroom.live.metrics.prometheus_source import PrometheusSource
from legroom.live.metrics.sample import ScrapeResult
from legroom.live.metrics.scrape import open_session, scrape_fleet
from legroom.sidecar.watch_config import KubernetesConfig, PrometheusConfig, SidecarConfig

OnScrape = Callable[[ScrapeResult], None]
Log = Callable[[str], None]
OnRemoved = Callable[[str], None]
ExpectedServers = Callable[[], frozenset[str]]
_DISCOVERY_INTERVAL_S = 60.0

Source = Callable[[OnScrape, OnRemoved, ExpectedServers], Coroutine[Any, Any, None]]
"""Passes scrape results to its first argument, for ever. Calls the second with each server that is no longer listed, or
that the third returns, as an earlier process found it, and is not listed."""


class _Discovery:
    """The sources that list servers. An expected server is removed once none of them lists it."""

    def __init__(self, sources: int, removed: OnRemoved, expected: ExpectedServers) -> None:
        self._sources, self._removed, self.expected = sources, removed, expected
        self._not_listed_by: dict[str, set[str]] = {}

    def report_removed(self, source: str, listed: frozenset[str], previously_listed: frozenset[str]) -> frozenset[str]:
        """Reports servers that `source` no longer lists, and expected ones that no source lists; returns `listed`."""
        expected = self.expected()
        for server in sorted((previously_listed | expected) - listed):
            sources = self._not_listed_by.setdefault(server, set())
            sources.add(source)
            if server not in expected or len(sources) == self._sources:
                del self._not_listed_by[server]
                self._removed(server)
        return listed


def combined_source(config: SidecarConfig, log: Log) -> Source:
    """All sources of a configuration, run concurrently. Raises LegroomError for an invalid address."""
    prometheus = prometheus_source(config.prometheus) if config.prometheus is not None else None

    async def run_all(take: OnScrape, removed: OnRemoved, expected: ExpectedServers) -> None:
        """Scrapes the servers, Prometheus and pods at the same time, until one of them fails or is cancelled."""
        discovery = _Discovery((prometheus is not None) + (config.kubernetes is not None), removed, expected)
        try:
            async with asyncio.TaskGroup() as group:
                if config.servers:
                    endpoints = [server.endpoint for server in config.servers]
                    group.create_task(scrape_fleet(endpoints, config.interval_s, take))
                if prometheus is not None:
                    group.create_task(_poll_prometheus(prometheus, config.interval_s, take, discovery, log))
                if config.kubernetes is not None:
                    group.create_task(_scrape_pods(config.kubernetes, config.interval_s, take, discovery, log))
        except BaseExceptionGroup as group_error:
            # The first source that fails ends all. A pipe may close while a result is printed.
            first: BaseException | None = group_error.subgroup((LegroomError, BrokenPipeError))
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise (first or group_error) from None

    return run_all


def prometheus_source(config: PrometheusConfig) -> PrometheusSource:
    """The source with the settings of watch.toml; LegroomError for an invalid address."""
    return PrometheusSource(
        config.url, config.matchers, config.token, verify_tls=config.verify_tls, ca_file=config.ca_file
    )


async def _poll_prometheus(
    source: PrometheusSource, interval_s: float, take: OnScrape, discovery: _Discovery, log: Log
) -> None:
    """Polls at `interval_s` until cancelled; passes results to `take` and reports removed servers."""
    last_problem, listed = "", frozenset[str]()
    async with open_session() as session:
        while True:
            next_s = asyncio.get_running_loop().time() + interval_s
            try:
                source.expect(discovery.expected())
                for result in await source.poll(session, time.time()):
                    take(result)
                listed = discovery.report_removed("prometheus", source.servers, listed)
                last_problem = _log_change(last_problem, "", log)
            except LegroomError as error:
                last_problem = _log_change(last_problem, error.message, log)
            await asyncio.sleep(max(0.0, next_s - asyncio.get_running_loop().time()))


async def _scrape_pods(
    config: KubernetesConfig, interval_s: float, take: OnScrape, discovery: _Discovery, log: Log
) -> None:
    """Discovers pods by label and scrapes them until cancelled; the known ones while discovery fails."""
    api, last_problem, listed = pods_api(config.context), "", frozenset[str]()
    endpoints: dict[str, Endpoint] = {}
    while True:
        try:
            endpoints = await asyncio.to_thread(discovered_endpoints, api, config.selector, config.namespace)
            servers = frozenset(endpoint.server for endpoint in endpoints.values())
            listed = discovery.report_removed("kubernetes", servers, listed)
            problem = "" if endpoints else f"no pod has the labels {config.selector}"
            last_problem = _log_change(last_problem, problem, log)
        except LegroomError as error:
            last_problem = _log_change(last_problem, error.message, log)  # known pods are still scraped
        if endpoints:
            rounds = max(1, round(_DISCOVERY_INTERVAL_S / interval_s))
            await scrape_fleet(list(endpoints.values()), interval_s, take, rounds=rounds)
        else:
            await asyncio.sleep(min(_DISCOVERY_INTERVAL_S, interval_s))


def _log_change(old_problem: str, new_problem: str, log: Log) -> str:
    """Logs a problem when it begins (texts differ) and when it ends (empty); returns `new_problem`."""
    if new_problem != old_problem:
        log(new_problem or "it answers again")
    return new_problem
