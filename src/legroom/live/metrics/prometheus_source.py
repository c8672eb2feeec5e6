"""Samples of all vLLM servers that a Prometheus scrapes, by a few queries. One query selects every name a metric ever
had (`{__name__=~"a|b"}`), so servers of any release answer. Sample times are those of Prometheus' own scrapes. Of a
large fleet the scrape times are queried first, then the figures of the servers whose turn it is."""

from __future__ import annotations

import asyncio
import json
import math
import re
import statistics
import zlib
from collections.abc import Collection, Coroutine, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from legroom.errors import LegroomError
from legroom.facts import metrics
from legroom.json_records import gc_paused
from legroom.live.metrics.endpoint import Endpoint, endpoint
from legroom.live.metrics.exposition import GUARD_SERIES, LABELLED_ROLES, SERVER_SERIES, VALUE_ROLES, sample_of_series
from legroom.live.metrics.sample import ScrapeFailure, ScrapeResult
from legroom.live.metrics.scrape import ScrapeFailed, fetch

if TYPE_CHECKING:
    import aiohttp

_LATENCIES = ("ttft", "inter_token", "e2e_latency", "queue_time")
_MAX_SERVERS = 10_000  # Bounds memory, at five times the largest fleet of bench/watch_fleet.py.
_FORGET_AFTER_POLLS = 120  # Ten minutes at the default interval: a restarted Prometheus knows no server for a while.
_USUAL_SCRAPE_S = 60.0  # Prometheus' default scrape_interval, used until two scrapes of a server were seen.
_LARGE_FLEET, _LARGE_FLEET_APART_S = 500, 0.9 * 15.0
"""Above this many servers one sample in 15 s is taken: ten minutes of thousands at 5 s would be half a gigabyte."""
_TURNS = 3  # A large fleet is polled in three parts, one per five-second poll, so that polls take equally long.
_SERVERS_A_QUERY = 250
"""Prometheus uses its index for a list of label values, in some releases only for one of up to 256 values."""
_META = re.compile(r"([\\.+*?()|\[\]{}^$])")
"""Characters to escape for Go's regexp. With more escaped, as re.escape does, Prometheus skips its index."""
_MATCHERS = re.compile(r'(?:[a-zA-Z_][a-zA-Z0-9_]*(?:=~|!~|!=|=)"(?:[^"\\]|\\.)*"(?:,|$))*')

_T = TypeVar("_T")
_Rows = list[tuple[dict[str, str], float]]
_Answer = tuple[_Rows, float | None]  # The rows of a query and its evaluation time; None in an empty result.
_SeriesByServer = dict[str, list[tuple[str, dict[str, str], float]]]


class PrometheusSource:
    """Polls one Prometheus and remembers its servers, so that a missing one is reported."""

    def __init__(
        self,
        address: str,
        matchers: str = "",
        token: str | None = None,
        *,
        verify_tls: bool = True,
        ca_file: str | None = None,
    ) -> None:
        base = endpoint(address, token, verify_tls=verify_tls, ca_file=ca_file)
        root = base.url.removesuffix("/metrics").removesuffix("/api")
        self._query_endpoint = Endpoint(f"{root}/api/v1/query", base.headers, verify_tls, ca_file)
        self.server = root
        """The address of Prometheus, without credentials."""
        self._matchers = matchers.strip().removeprefix("{").removesuffix("}").replace(", ", ",").rstrip(",")
        if not _MATCHERS.fullmatch(self._matchers):
            hint = 'write them like namespace="prod",job=~"vllm.*"'
            raise LegroomError(f"{matchers!r} is not a list of label matchers", hint)
        self._last_s: dict[str, float] = {}
        self._due_s: dict[str, float] = {}
        self._polled_s = 0.0
        """The time of the last poll."""
        self._scraped_s: dict[str, float] = {}
        self._scrape_s: dict[str, float] = {}
        """Seconds between the last two scrapes of each server."""
        self._missing: dict[str, int] = {}
        self._failed_s: dict[str, float] = {}
        self._targets: set[str] = set()
        """Servers that appeared in `up`."""

    @property
    def servers(self) -> frozenset[str]:
        """Known servers, including missing ones that are not forgotten yet."""
        return frozenset(self._last_s)

    def expect(self, servers: Iterable[str]) -> None:
        """Adds servers of an earlier process, which are reported as failed if Prometheus cannot scrape them."""
        for server in set(servers) - self._last_s.keys():
            self._last_s[server] = 0.0
            self._targets.add(server)

    def queries(self) -> tuple[str, str, str]:
        """The PromQL queries for all values, for the time of each server's last scrape, and for `up`."""
        return (
            self._values_query(self._matchers),
            f"timestamp({_selector(_timestamped_series(), self._matchers)})",
            f"up{{{self._matchers}}}" if self._matchers else "up",
        )

    def _values_query(self, matchers: str) -> str:
        """PromQL, with these label matchers, of all series that legroom reads, without buckets."""
        names = [name for role in (*VALUE_ROLES, *LABELLED_ROLES) for name in metrics.names_of(role)]
        # Buckets would be a hundred more series per server.
        latencies = [name for role in _LATENCIES for name in metrics.names_of(role)]
        names += [f"{name}_{part}" for name in latencies for part in ("sum", "count")]
        names += [name for name in (*SERVER_SERIES, *GUARD_SERIES) if name.startswith("legroom_")]
        # Every scraped process has this metric; the join keeps those that have vLLM's too.
        memory = _selector("process_resident_memory_bytes", matchers)
        of_vllm = _selector(_timestamped_series(), matchers)
        return f"{_selector('|'.join(names), matchers)} or {memory} and on (job, instance) {of_vllm}"

    async def poll(self, session: aiohttp.ClientSession, time_s: float, *, is_past: bool = False) -> list[ScrapeResult]:
        """Samples of servers scraped since the last call, failures of missing ones; `is_past`: as of `time_s`."""
        form = {"time": f"{time_s:.3f}"} if is_past else {}
        if len(self._scraped_s) > _LARGE_FLEET:
            return await self._poll_in_turns(session, form, time_s)
        (values, _), (times, _), (up, _) = await self._post_queries(session, form, self.queries())
        with gc_paused():
            return self._results_of_rows(values, times, up, time_s)

    async def _poll_in_turns(
        self, session: aiohttp.ClientSession, form: dict[str, str], time_s: float
    ) -> list[ScrapeResult]:
        """For a large fleet: samples of the servers due now alone, and failures of missing ones."""
        (times, evaluated_s), (up, _) = await self._post_queries(session, form, self.queries()[1:])
        scraped = _scrape_times(times)
        due = self._due_servers(scraped, time_s)
        if evaluated_s is not None:
            # At the same evaluation time, or a scrape in between would get the earlier scrape's time.
            form = {"time": f"{evaluated_s:.3f}"}
        series = await self._query_series(due, times, session, form)
        with gc_paused():
            samples = self._take_samples(due, series, len(scraped))
            return samples + self._missing_servers(scraped, _up_by_server(up), time_s)

    async def _post_queries(
        self, session: aiohttp.ClientSession, form: dict[str, str], queries: Iterable[str]
    ) -> list[_Answer]:
        """(Rows, evaluation time) of each PromQL query, posted at the same time; `form`: further POST fields."""
        return await _gather(*(self._post_query(session, form | {"query": query}) for query in queries))

    async def _query_series(
        self, servers: Collection[str], rows: _Rows, session: aiohttp.ClientSession, form: dict[str, str]
    ) -> _SeriesByServer:
        """The series of these servers, selected by their labels in `rows`; `form`: further POST fields."""
        # Prometheus runs 20 queries at once by default (--query.max-concurrency).
        gate = asyncio.Semaphore(4)

        async def query_part(matcher: str) -> _SeriesByServer:
            """The series of the servers that this label matcher selects."""
            matchers = f"{self._matchers},{matcher}" if self._matchers else matcher
            async with gate:
                rows, _ = await self._post_query(session, form | {"query": self._values_query(matchers)})
            with gc_paused():
                return _series_by_server(rows)

        series: _SeriesByServer = {}
        for answered in await _gather(*map(query_part, _server_matchers(servers, rows))):
            series |= answered
        return series

    def _results_of_rows(self, values: _Rows, times: _Rows, up: _Rows, time_s: float) -> list[ScrapeResult]:
        """Samples of due servers and failures of missing ones, from the rows of one poll's three queries."""
        series, scraped = _series_by_server(values), _scrape_times(times)
        due = self._due_servers({server: scraped.get(server, time_s) for server in series}, time_s)
        return self._take_samples(due, series, len(series)) + self._missing_servers(series, _up_by_server(up), time_s)

    def _due_servers(self, scraped: Mapping[str, float], time_s: float) -> dict[str, float]:
        """Those of `scraped` (server -> last scrape's time) of which to take a sample now; their times are remembered.
        Of a large fleet these are the longest due, as many as fit the time since the last poll."""
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
        apart_s, passed_s = _sample_interval_s(len(scraped)), max(time_s - self._polled_s, 0.0)
        self._polled_s = time_s
        if passed_s < apart_s:
            new, waiting = [each for each in due if not each[0]], sorted(each for each in due if each[0])
            due = new + waiting[: math.ceil(len(scraped) * passed_s / apart_s)]
        return {server: at_s for _, server, at_s in due}

    def _take_samples(self, due: Mapping[str, float], series: _SeriesByServer, fleet_size: int) -> list[ScrapeResult]:
        """Samples of the `due` servers (server -> scrape time); remembers when each was taken and is due again."""
        results: list[ScrapeResult] = []
        apart_s = _sample_interval_s(fleet_size)
        for server, at_s in due.items():
            sample = sample_of_series(series.get(server, ()), at_s, server)
            if sample is not None:
                number = zlib.crc32(server.encode()) % _TURNS
                is_known = server in self._last_s
                self._due_s[server] = at_s + (apart_s if is_known else apart_s * (1 + number) / _TURNS)
                self._last_s[server] = at_s
                results.append(sample)
        return results

    def _missing_servers(
        self, present: Mapping[str, Any], is_up: Mapping[str, bool], time_s: float
    ) -> list[ScrapeResult]:
        """A failure, once per scrape interval, of each known server that is not `present`, unless Prometheus has
        removed its target. `is_up`: the value of `up` by server."""
        self._targets |= is_up.keys() & present.keys()
        failures: list[ScrapeResult] = []
        usual_s = statistics.median(self._scrape_s.values()) if self._scrape_s else _USUAL_SCRAPE_S
        for server in [known for known in self._last_s if known not in present]:
            polls = self._missing[server] = 1 if server in is_up else self._missing.get(server, 0) + 1
            if polls > _FORGET_AFTER_POLLS:
                self._targets.discard(server)
                for kept in (self._last_s, self._due_s, self._missing, self._failed_s, self._scraped_s, self._scrape_s):
                    kept.pop(server, None)
                continue
            if server in self._targets and server not in is_up:
                continue
            # Scrapes may come a tenth of the interval early.
            if time_s - self._failed_s.get(server, -math.inf) < 0.9 * self._scrape_s.get(server, usual_s):
                continue
            self._failed_s[server] = time_s
            is_down = not is_up.get(server, True)
            why = "its last scrape failed (up is 0)" if is_down else "Prometheus has no current figures of it"
            failures.append(ScrapeFailure(time_s, server, "unreachable", f"{server}: {why}"))
        return failures

    async def query(self, session: aiohttp.ClientSession, query: str) -> _Rows:
        """The (labels, value) rows of any instant query."""
        return (await self._post_query(session, {"query": query}, timeout_s=60.0))[0]

    async def _post_query(
        self, session: aiohttp.ClientSession, form: dict[str, str], timeout_s: float = 20.0
    ) -> _Answer:
        """(rows of an instant query, its evaluation time in seconds or None without rows); raises ScrapeFailed."""
        body = await fetch(session, self._query_endpoint, timeout_s, form=form)
        try:
            with gc_paused():
                answer = json.loads(body)
                if answer["status"] != "success":
                    raise ScrapeFailed("http_error", f"{self.server}: {answer.get('error', 'the query failed')}")
                entries = answer["data"]["result"]
                rows = [(entry["metric"], float(entry["value"][1])) for entry in entries]
            return rows, float(entries[0]["value"][0]) if entries else None
        except (ValueError, KeyError, TypeError, IndexError) as error:
            hint = "give the address of its HTTP API"
            raise ScrapeFailed("not_metrics", f"{self.server} does not answer like a Prometheus", hint) from error


async def _gather(*answers: Coroutine[Any, Any, _T]) -> list[_T]:
    """asyncio.gather that cancels the rest on the first failure."""
    tasks = [asyncio.ensure_future(answer) for answer in answers]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _sample_interval_s(fleet_size: int) -> float:
    """Least seconds between two samples of one server; 0 unless the fleet is large."""
    return _LARGE_FLEET_APART_S if fleet_size > _LARGE_FLEET else 0.0


def _series_by_server(values: _Rows) -> _SeriesByServer:
    """The (name, labels, value) rows of each server; servers above the limit are left out."""
    by_server: _SeriesByServer = {}
    for labels, value in values:
        server = server_of_labels(labels)
        if server in by_server or len(by_server) < _MAX_SERVERS:
            by_server.setdefault(server, []).append((labels["__name__"], labels, value))
    return by_server


def _scrape_times(times: _Rows) -> dict[str, float]:
    """The time of each server's latest scrape, in Unix seconds; servers above the limit are left out."""
    scraped: dict[str, float] = {}
    for labels, value in times:
        server = server_of_labels(labels)
        if server in scraped or len(scraped) < _MAX_SERVERS:
            scraped[server] = max(value, scraped.get(server, 0.0))
    return scraped


def _up_by_server(up: _Rows) -> dict[str, bool]:
    """Server -> whether `up` is nonzero for all its targets."""
    is_up: dict[str, bool] = {}
    for labels, value in up:  # a pod may be scraped at several ports
        server = server_of_labels(labels)
        is_up[server] = is_up.get(server, True) and value != 0
    return is_up


def _timestamped_series() -> str:
    """The regular expression of a series that every release has once per engine; its timestamp is a scrape's time."""
    return "|".join(metrics.names_of("running"))


def _selector(names: str, matchers: str) -> str:
    """The PromQL selector for series whose name matches `names`, with these label matchers."""
    more = f",{matchers}" if matchers else ""
    return f'{{__name__=~"{names}"{more}}}'


def _server_matchers(servers: Collection[str], rows: _Rows) -> Iterator[str]:
    """PromQL label matchers for all series of these servers, whose labels are in `rows`; some hundred servers each."""
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


_NAMED_BY = ("pod", "kubernetes_pod_name", "instance", "job")  # Labels that name a server, in order of preference.


def server_of_labels(labels: Mapping[str, str]) -> str:
    """`namespace/pod`, else the scraped instance, prefixed with the cluster label where there is one."""
    cluster = f"{labels['cluster']}/" if labels.get("cluster") else ""
    pod = labels.get("pod") or labels.get("kubernetes_pod_name")
    if pod:
        return f"{cluster}{labels.get('namespace', 'default')}/{pod}"
    return cluster + (labels.get("instance") or labels.get("job") or "the only server")
