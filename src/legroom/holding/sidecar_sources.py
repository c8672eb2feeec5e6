"""Where looks come from: the servers themselves, pods that Kubernetes knows, or a Prometheus that scrapes them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from legroom.errors import LegroomError
from legroom.holding.sidecar_config import KubernetesConfig, PrometheusConfig, SidecarConfig
from legroom.live.kubernetes_source import KubernetesPods, discovered
from legroom.live.prometheus_source import PrometheusSource
from legroom.live.sample import Look
from legroom.live.scrape import open_session, scrape_fleet

Take = Callable[[Look], None]
Say = Callable[[str], None]
Gone = Callable[[str], None]
_DISCOVER_S = 60.0


def _no_matter(_: str) -> None:
    pass


class Source(Protocol):
    """Hands over looks for ever."""

    def __call__(self, take: Take, gone: Gone = _no_matter, /) -> Coroutine[Any, Any, None]:
        """`gone` hears of servers that are no longer to be found where they were found."""
        ...


def source_of(config: SidecarConfig, say: Say) -> Source:
    """Every source that a configuration names, side by side. Raises where one is named wrongly."""
    prometheus = prometheus_source(config.prometheus) if config.prometheus is not None else None

    async def all_of_them(take: Take, gone: Gone = _no_matter, /) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                if config.servers:
                    places = [server.endpoint for server in config.servers]
                    group.create_task(scrape_fleet(places, config.interval_s, take))
                if prometheus is not None:
                    group.create_task(_prometheus(prometheus, config.interval_s, take, gone, say))
                if config.kubernetes is not None:
                    group.create_task(_kubernetes(config.kubernetes, config.interval_s, take, gone, say))
        except ExceptionGroup as group_error:
            # What ends one source ends all, and is what is told.
            raise (_leaf(group_error.subgroup(LegroomError)) or group_error) from None

    return all_of_them


def _leaf(error: Exception | None) -> Exception | None:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def prometheus_source(config: PrometheusConfig) -> PrometheusSource:
    """What reads the Prometheus that a configuration names."""
    return PrometheusSource(
        config.url, config.matchers, config.token, verify_tls=config.verify_tls, ca_file=config.ca_file
    )


async def _prometheus(source: PrometheusSource, interval_s: float, take: Take, gone: Gone, say: Say) -> None:
    trouble = ""
    listed: frozenset[str] = frozenset()
    async with open_session() as session:
        while True:
            next_s = asyncio.get_running_loop().time() + interval_s
            try:
                for seen in await source.looks(session, time.time()):
                    take(seen)
                listed = _told_of(source.servers, listed, gone)
                trouble = _once(trouble, "", say)
            except LegroomError as error:
                trouble = _once(trouble, error.message, say)
            await asyncio.sleep(max(0.0, next_s - asyncio.get_running_loop().time()))


async def _kubernetes(config: KubernetesConfig, interval_s: float, take: Take, gone: Gone, say: Say) -> None:
    pods, trouble = KubernetesPods(config.context), ""
    listed: frozenset[str] = frozenset()
    while True:
        try:
            found = await asyncio.to_thread(discovered, pods, config.selector, config.namespace)
            listed = _told_of(frozenset(place.server for place in found.values()), listed, gone)
            trouble = _once(trouble, "" if found else f"no pod has the labels {config.selector}", say)
        except LegroomError as error:
            found, trouble = {}, _once(trouble, error.message, say)
        if found:
            rounds = max(1, round(_DISCOVER_S / interval_s))
            await scrape_fleet(list(found.values()), interval_s, take, rounds=rounds)
        else:
            await asyncio.sleep(min(_DISCOVER_S, interval_s))


def _told_of(now: frozenset[str], before: frozenset[str], gone: Gone) -> frozenset[str]:
    for server in sorted(before - now):
        gone(server)
    return now


def _once(before: str, now: str, say: Say) -> str:
    """Says a trouble when it comes and when it goes, not at every look."""
    if now != before:
        say(now or "it answers again")
    return now
