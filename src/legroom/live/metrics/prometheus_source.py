"""All vLLM servers of a Prometheus that already scrapes them, by a few queries.

Every name that a role ever had is asked for at once (`{__name__=~"a|b"}`), so servers of any release answer. Times are
those of Prometheus' own scrapes: a server it has not scraped again gives no second look, however often it is asked.
Of a large fleet the times come first, and then the figures of the servers whose turn it is: a look's wait is what
Prometheus takes to find and write series.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import re
import statistics
import zlib
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from legroom.facts import metrics
from legroom.live.metrics.address import Endpoint, endpoint
from legroom.live.metrics.exposition import sample_of_series
from legroom.live.metrics.names import API_SERVER_RSS, STOPPED_ENGINES, WORKER
from legroom.live.metrics.sample import Look, ScrapeFailure
from legroom.live.metrics.scrape import ScrapeFailed, fetch

if TYPE_CHECKING:
    import aiohttp

_VALUES = (
    "kv_use",
    "running",
    "waiting",
    "waiting_by_reason",
    "swapped",
    "preemptions",
    "prefix_queries",
    "prefix_hits",
    "prefix_hit_rate",
    "prompt_tokens",
    "generation_tokens",
    "prompt_tokens_cached",
    "prompt_tokens_recomputed",
    "request_success",
    "cache_config",
    "sleep_state",
    "admission_rejections",
)
_LATENCIES = ("ttft", "inter_token", "e2e_latency", "queue_time")
_TIMED_BY = "running"
"""Every release shows it, one series an engine: its times stand for the server's."""
_MOST_SERVERS = 10_000
_FORGET_AFTER_LOOKS = 120
"""A server that Prometheus neither scrapes nor has figures of is gone for good after ten minutes of looks. Not before:
a Prometheus that starts over knows nobody for a while."""
_USUAL_SCRAPE_S = 60.0
"""Prometheus' own default, until two scrapes of any server have been seen."""
_JITTER = 0.9
_LARGE_FLEET, _LARGE_FLEET_APART_S = 500, 0.9 * 15.0
"""Of more servers than this, only one scrape in fifteen seconds is taken, however often Prometheus scrapes: the last
ten minutes of each server are kept, which for thousands at five seconds would be half a gigabyte."""
_TURNS = 3
"""The servers of a large fleet are taken in so many turns within that time, or every third look would be a long one."""
_SERVERS_A_QUERY = 250
"""Prometheus looks a list of label values up in its index, in some releases only one of up to 256 values."""
_QUERIES_AT_ONCE = 4
"""It answers 20 at once by default, and others ask too."""
_META = re.compile(r"([\\.+*?()|\[\]{}^$])")
"""What Go's regular expressions escape. If more is escaped, as Python does, Prometheus sees no list of values."""
_MATCHERS = re.compile(r'(?:[a-zA-Z_][a-zA-Z0-9_]*(?:=~|!~|!=|=)"(?:[^"\\]|\\.)*"(?:,|$))*')


_T = TypeVar("_T")
_Rows = list[tuple[dict[str, str], float]]
_SeriesByServer = dict[str, list[tuple[str, dict[str, str], float]]]


class _Answer(NamedTuple):
    """What Prometheus says to one query."""

    rows: _Rows
    time_s: float | None
    """What it took for now; None in an empty answer."""


@contextmanager
def _uncollected() -> Iterator[None]:
    """An answer of thousands of servers is a hundred thousand objects that all live until it is read: the garbage
    collector would walk through them, and through everything that is known of the servers, again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class PrometheusSource:
    """Reads every vLLM server of one Prometheus. Remembers which there were, so that one that vanishes is seen."""

    def __init__(
        self,
        address: str,
        matchers: str = "",
        token: str | None = None,
        *,
        verify_tls: bool = True,
        ca_file: str | None = None,
        buckets: bool = False,
    ) -> None:
        base = endpoint(address, token, verify_tls=verify_tls, ca_file=ca_file)
        root = base.url.removesuffix("/metrics").removesuffix("/api")
        self._query = Endpoint(f"{root}/api/v1/query", base.headers, verify_tls, ca_file)
        self.server = root
        """Prometheus' own address, without credentials."""
        self._matchers = _checked(matchers)
        self._buckets = buckets
        """Whether to ask for latency buckets too: a hundred series more a server."""
        self._last_s: dict[str, float] = {}
        self._due_s: dict[str, float] = {}
        self._looked_s = 0.0
        """Scrapes before this are not taken."""
        self._scraped_s: dict[str, float] = {}
        self._scrape_s: dict[str, float] = {}
        """Between the last two scrapes of a server."""
        self._missing: dict[str, int] = {}
        self._failed_s: dict[str, float] = {}
        self._targets: set[str] = set()
        """Servers that `up` has shown."""

    @property
    def servers(self) -> frozenset[str]:
        """Those it has seen, or was told of, and not forgotten yet."""
        return frozenset(self._last_s)

    def expect(self, servers: Iterable[str]) -> None:
        """Servers that were there before this was made: if Prometheus scrapes them in vain, they are down."""
        for server in servers:
            if server not in self._last_s:
                self._last_s[server] = 0.0
                self._targets.add(server)

    def queries(self) -> tuple[str, str, str]:
        """What is asked: values, scrape times, and which targets are up."""
        return (
            self._values_of(self._matchers),
            f"timestamp({_selector(_timed(), self._matchers)})",
            f"up{{{self._matchers}}}" if self._matchers else "up",
        )

    def _values_of(self, matchers: str) -> str:
        names = [name for role in _VALUES for name in metrics.names_of(role)]
        parts = ("bucket", "sum", "count") if self._buckets else ("sum", "count")
        names += [f"{name}_{part}" for role in _LATENCIES for name in metrics.names_of(role) for part in parts]
        names += [*WORKER, STOPPED_ENGINES]
        # Every process that Prometheus scrapes has this one; those that show vLLM's figures beside it are wanted.
        process = f"{_selector(API_SERVER_RSS, matchers)} and on (job, instance) {_selector(_timed(), matchers)}"
        return f"{_selector('|'.join(names), matchers)} or {process}"

    async def looks(
        self, session: aiohttp.ClientSession, time_s: float, timeout_s: float = 20.0, *, is_past: bool = False
    ) -> list[Look]:
        """One look at every server that has been scraped since the last call; a failure for each that has vanished.

        With `is_past` it is what Prometheus would have answered at `time_s`. Ask for the past before the present.
        """
        asked = {"time": f"{time_s:.3f}"} if is_past else {}
        if len(self._scraped_s) > _LARGE_FLEET:
            return await self._looks_in_turns(session, asked, time_s, timeout_s)
        values, times, up = await self._answers(session, asked, self.queries(), timeout_s)
        with _uncollected():
            return self._read(values.rows, times.rows, up.rows, time_s)

    async def _looks_in_turns(
        self, session: aiohttp.ClientSession, asked: dict[str, str], time_s: float, timeout_s: float
    ) -> list[Look]:
        times, up = await self._answers(session, asked, self.queries()[1:], timeout_s)
        scraped = _scraped(times.rows)
        turn = self._turn(scraped, time_s)
        if times.time_s is not None:
            # Of the same moment: the figures of a scrape in between would get the time of the one before.
            asked = {"time": f"{times.time_s:.3f}"}
        series = await self._series_of(turn, times.rows, session, asked, timeout_s)
        with _uncollected():
            return self._looks_at(turn, series, len(scraped)) + self._vanished(scraped, _is_up(up.rows), time_s)

    async def _answers(
        self, session: aiohttp.ClientSession, asked: dict[str, str], queries: Iterable[str], timeout_s: float
    ) -> list[_Answer]:
        # Prometheus works on one while another is read here.
        return await _all_of(*(self._ask(session, asked | {"query": query}, timeout_s) for query in queries))

    async def _series_of(
        self,
        servers: Mapping[str, float],
        rows: _Rows,
        session: aiohttp.ClientSession,
        asked: dict[str, str],
        timeout_s: float,
    ) -> _SeriesByServer:
        """The figures of some servers, whose labels are known from other series."""
        gate = asyncio.Semaphore(_QUERIES_AT_ONCE)

        async def part(matcher: str) -> _SeriesByServer:
            matchers = f"{self._matchers},{matcher}" if self._matchers else matcher
            async with gate:
                answer = await self._ask(session, asked | {"query": self._values_of(matchers)}, timeout_s)
            with _uncollected():
                return _by_server(answer.rows)

        series: _SeriesByServer = {}
        for answered in await _all_of(*map(part, _matchers_of(servers, rows))):
            series |= answered
        return series

    def _read(self, values: _Rows, times: _Rows, up: _Rows, time_s: float) -> list[Look]:
        series, scraped = _by_server(values), _scraped(times)
        turn = self._turn({server: scraped.get(server, time_s) for server in series}, time_s)
        return self._looks_at(turn, series, len(series)) + self._vanished(series, _is_up(up), time_s)

    def _turn(self, scraped: Mapping[str, float], time_s: float) -> dict[str, float]:
        """The servers that are taken now, with the times of their scrapes."""
        due: list[tuple[float, str, float]] = []
        for server, at_s in scraped.items():
            was_missing = self._missing.pop(server, None)
            self._failed_s.pop(server, None)
            before_s, scraped_before_s = self._last_s.get(server, 0.0), self._scraped_s.get(server, 0.0)
            if scraped_before_s and at_s > scraped_before_s and not was_missing:
                self._scrape_s[server] = at_s - scraped_before_s
            self._scraped_s[server] = at_s
            if at_s > before_s and at_s >= self._due_s.get(server, 0.0):
                due.append((self._due_s.get(server, 0.0), server, at_s))
        taken = self._taken_now(due, len(scraped), _apart_s(len(scraped)), time_s)
        return {server: at_s for _, server, at_s in taken}

    def _looks_at(self, turn: Mapping[str, float], series: _SeriesByServer, servers: int) -> list[Look]:
        looks: list[Look] = []
        apart_s = _apart_s(servers)
        for server, at_s in turn.items():
            sample = sample_of_series(series.get(server, ()), at_s, server)
            if sample is not None:
                number = zlib.crc32(server.encode()) % _TURNS
                is_known = server in self._last_s
                self._due_s[server] = at_s + (apart_s if is_known else apart_s * (1 + number) / _TURNS)
                self._last_s[server] = at_s
                looks.append(sample)
        return looks

    def _taken_now(
        self, due: list[tuple[float, str, float]], servers: int, apart_s: float, time_s: float
    ) -> list[tuple[float, str, float]]:
        """Those of a large fleet whose turn it is: no more than the time since the last look has room for, the longest
        due first. After a pause all are due at once, and would be from then on."""
        passed_s, self._looked_s = max(time_s - self._looked_s, 0.0), time_s
        if not apart_s or passed_s >= apart_s:
            return due
        new = [each for each in due if not each[0]]
        waiting = sorted(each for each in due if each[0])
        return new + waiting[: math.ceil(servers * passed_s / apart_s)]

    def _vanished(self, present: Mapping[str, Any], is_up: Mapping[str, bool], time_s: float) -> list[Look]:
        """One failure a scrape that failed, not one a question: a single lost scrape is a single lost look.

        A target that Prometheus has dropped was taken away, by a rolling update perhaps: it has not failed.
        """
        self._targets |= is_up.keys() & present.keys()
        failures: list[Look] = []
        usual_s = statistics.median(self._scrape_s.values()) if self._scrape_s else _USUAL_SCRAPE_S
        for server in [known for known in self._last_s if known not in present]:
            looks = self._missing[server] = 1 if server in is_up else self._missing.get(server, 0) + 1
            if looks > _FORGET_AFTER_LOOKS:
                self._forget(server)
                continue
            if server in self._targets and server not in is_up:
                continue
            if time_s - self._failed_s.get(server, -math.inf) < _JITTER * self._scrape_s.get(server, usual_s):
                continue
            self._failed_s[server] = time_s
            is_down = not is_up.get(server, True)
            why = "its last scrape failed (up is 0)" if is_down else "Prometheus has no current figures of it"
            failures.append(ScrapeFailure(time_s, server, "unreachable", f"{server}: {why}"))
        return failures

    def _forget(self, server: str) -> None:
        self._targets.discard(server)
        for kept in (self._last_s, self._due_s, self._missing, self._failed_s, self._scraped_s, self._scrape_s):
            kept.pop(server, None)

    async def ask(self, session: aiohttp.ClientSession, query: str, timeout_s: float = 60.0) -> _Rows:
        """The answer to one question of somebody else's: label sets and values."""
        return (await self._ask(session, {"query": query}, timeout_s)).rows

    async def _ask(self, session: aiohttp.ClientSession, form: dict[str, str], timeout_s: float) -> _Answer:
        body = await fetch(session, self._query, timeout_s, form=form)
        try:
            with _uncollected():
                answer = json.loads(body)
            if answer["status"] != "success":
                raise ScrapeFailed("http_error", f"{self.server}: {answer.get('error', 'the query failed')}")
            entries = answer["data"]["result"]
            with _uncollected():
                rows = [(entry["metric"], float(entry["value"][1])) for entry in entries]
            return _Answer(rows, float(entries[0]["value"][0]) if entries else None)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ScrapeFailed(
                "not_metrics", f"{self.server} does not answer like a Prometheus", "give the address of its HTTP API"
            ) from error


async def _all_of(*answers: Coroutine[Any, Any, _T]) -> list[_T]:
    """All of them side by side; the first failure ends the others."""
    tasks = [asyncio.ensure_future(answer) for answer in answers]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _apart_s(servers: int) -> float:
    return _LARGE_FLEET_APART_S if servers > _LARGE_FLEET else 0.0


def _by_server(values: _Rows) -> _SeriesByServer:
    by_server: _SeriesByServer = {}
    for labels, value in values:
        server = server_of_labels(labels)
        series = by_server.get(server)
        if series is not None:
            series.append((labels["__name__"], labels, value))
        elif len(by_server) < _MOST_SERVERS:
            by_server[server] = [(labels["__name__"], labels, value)]
    return by_server


def _scraped(times: _Rows) -> dict[str, float]:
    scraped: dict[str, float] = {}
    for labels, value in times:
        server = server_of_labels(labels)
        if server in scraped or len(scraped) < _MOST_SERVERS:
            scraped[server] = max(value, scraped.get(server, 0.0))
    return scraped


def _is_up(up: _Rows) -> dict[str, bool]:
    is_up: dict[str, bool] = {}
    for labels, value in up:  # a pod may be scraped at several ports
        server = server_of_labels(labels)
        is_up[server] = is_up.get(server, True) and value != 0
    return is_up


def _timed() -> str:
    return "|".join(metrics.names_of(_TIMED_BY))


def _selector(names: str, matchers: str) -> str:
    more = f",{matchers}" if matchers else ""
    return f'{{__name__=~"{names}"{more}}}'


def _matchers_of(servers: Mapping[str, float], rows: _Rows) -> Iterator[str]:
    """Label matchers that pick all series of these servers, a few hundred servers each."""
    values_by_label: dict[str, dict[str, None]] = {}
    for labels, _ in rows:
        if server_of_labels(labels) in servers:
            name = next((name for name in _NAMED_BY if labels.get(name)), _NAMED_BY[-1])
            values_by_label.setdefault(name, {})[labels.get(name, "")] = None
    for name, values in values_by_label.items():
        escaped = [_META.sub(r"\\\1", value) for value in values]
        for start in range(0, len(escaped), _SERVERS_A_QUERY):
            listed = "|".join(escaped[start : start + _SERVERS_A_QUERY])
            yield f"{name}=~{json.dumps(listed, ensure_ascii=False)}"


def _checked(matchers: str) -> str:
    """Label matchers as PromQL writes them, or what is wrong: they go into a query."""
    from legroom.errors import LegroomError  # only for the mistake

    text = matchers.strip().removeprefix("{").removesuffix("}").replace(", ", ",").rstrip(",")
    if not _MATCHERS.fullmatch(text):
        raise LegroomError(
            f"{matchers!r} is not a list of label matchers", 'write them like namespace="prod",job=~"vllm.*"'
        )
    return text


_NAMED_BY = ("pod", "kubernetes_pod_name", "instance", "job")
"""The label that names a server: the first that it has."""


def server_of_labels(labels: Mapping[str, str]) -> str:
    """The name of the server that a series is of: its pod where there is one, else what Prometheus scraped. The pods of
    a LeaderWorkerSet have the same names in every cluster, so one that the labels tell comes first."""
    cluster = f"{labels['cluster']}/" if labels.get("cluster") else ""
    pod = labels.get("pod") or labels.get("kubernetes_pod_name")
    if pod:
        return f"{cluster}{labels.get('namespace', 'default')}/{pod}"
    return cluster + (labels.get("instance") or labels.get("job") or "the only server")
