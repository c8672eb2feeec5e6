"""Where scrapes come from: the servers themselves, pods that Kubernetes knows, or a Prometheus that scrapes them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from legroom.errors import LegroomError
from legroom.live.metrics.endpoint import Endpoint
from legroom.live.metrics.kubernetes_source import KubernetesPods, discovered
from legroom.live.metrics.prometheus_source import PrometheusSource
from legroom.live.metrics.sample import ScrapeResult
from legroom.live.metrics.scrape import open_session, scrape_fleet
from legroom.sidecar.watch_config import KubernetesConfig, PrometheusConfig, SidecarConfig

OnScrape = Callable[[ScrapeResult], None]
Log = Callable[[str], None]
OnRemoved = Callable[[str], None]
ExpectedServers = Callable[[], frozenset[str]]
_DISCOVER_S = 60.0


def ignore(_: str) -> None:
    pass


def no_servers() -> frozenset[str]:
    return frozenset()


class Source(Protocol):
    """Hands over looks for ever."""

    def __call__(
        self, take: OnScrape, server_removed: OnRemoved = ignore, expected: ExpectedServers = no_servers, /
    ) -> Coroutine[Any, Any, None]:
        """`gone` hears of servers that are no longer to be found where they were found; `awaited` says which were
        found by an earlier legroom, so that `gone` hears of those too that are not to be found again."""
        ...


class _DiscoverySources:
    """The sources that find servers. Which of them found an awaited one is not known: it is gone when none has it."""

    def __init__(self, count: int, server_removed: OnRemoved, expected: ExpectedServers) -> None:
        self._count, self._gone, self.expected = count, server_removed, expected
        self._without: dict[str, set[str]] = {}

    def report_removed(self, source_name: str, now: frozenset[str], before: frozenset[str]) -> frozenset[str]:
        """What a finder lists now. The same, to be `before` the next time."""
        expected = self.expected()
        for server in sorted((before | expected) - now):
            without = self._without.setdefault(server, set())
            without.add(source_name)
            if server not in expected or len(without) == self._count:
                del self._without[server]
                self._gone(server)
        return now


def source_of(config: SidecarConfig, log: Log) -> Source:
    """Every source that a configuration names, side by side. Raises where one is named wrongly."""
    prometheus = prometheus_source(config.prometheus) if config.prometheus is not None else None

    async def all_of_them(
        take: OnScrape, server_removed: OnRemoved = ignore, expected: ExpectedServers = no_servers, /
    ) -> None:
        discovery = _DiscoverySources(
            (prometheus is not None) + (config.kubernetes is not None), server_removed, expected
        )
        try:
            async with asyncio.TaskGroup() as group:
                if config.servers:
                    places = [server.endpoint for server in config.servers]
                    group.create_task(scrape_fleet(places, config.interval_s, take))
                if prometheus is not None:
                    group.create_task(_prometheus(prometheus, config.interval_s, take, discovery, log))
                if config.kubernetes is not None:
                    group.create_task(_kubernetes(config.kubernetes, config.interval_s, take, discovery, log))
        except BaseExceptionGroup as group_error:
            # What ends one source ends all, and is what is told. A pipe may close while a scrape is shown.
            raise (_leaf(group_error.subgroup((LegroomError, BrokenPipeError))) or group_error) from None

    return all_of_them


def _leaf(error: BaseException | None) -> BaseException | None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def prometheus_source(config: PrometheusConfig) -> PrometheusSource:
    """What reads the Prometheus that a configuration names."""
    return PrometheusSource(
        config.url, config.matchers, config.token, verify_tls=config.verify_tls, ca_file=config.ca_file
    )


async def _prometheus(
    source: PrometheusSource, interval_s: float, take: OnScrape, discovery: _DiscoverySources, log: Log
) -> None:
    last_problem = ""
    listed: frozenset[str] = frozenset()
    async with open_session() as session:
        while True:
            next_s = asyncio.get_running_loop().time() + interval_s
            try:
                source.expect(discovery.expected())
                for seen in await source.poll(session, time.time()):
                    take(seen)
                listed = discovery.report_removed("prometheus", source.servers, listed)
                last_problem = _once(last_problem, "", log)
            except LegroomError as error:
                last_problem = _once(last_problem, error.message, log)
            await asyncio.sleep(max(0.0, next_s - asyncio.get_running_loop().time()))


async def _kubernetes(
    config: KubernetesConfig, interval_s: float, take: OnScrape, discovery: _DiscoverySources, log: Log
) -> None:
    pods, last_problem = KubernetesPods(config.context), ""
    listed: frozenset[str] = frozenset()
    pods_by_name: dict[str, Endpoint] = {}
    while True:
        try:
            pods_by_name = await asyncio.to_thread(discovered, pods, config.selector, config.namespace)
            listed = discovery.report_removed(
                "kubernetes", frozenset(place.server for place in pods_by_name.values()), listed
            )
            last_problem = _once(last_problem, "" if pods_by_name else f"no pod has the labels {config.selector}", log)
        except LegroomError as error:
            last_problem = _once(last_problem, error.message, log)  # the pods that were found serve on, and are scraped
        if pods_by_name:
            rounds = max(1, round(_DISCOVER_S / interval_s))
            await scrape_fleet(list(pods_by_name.values()), interval_s, take, rounds=rounds)
        else:
            await asyncio.sleep(min(_DISCOVER_S, interval_s))


def _once(before: str, now: str, log: Log) -> str:
    """Says a trouble when it comes and when it goes, not at every scrape."""
    if now != before:
        log(now or "it answers again")
    return now
