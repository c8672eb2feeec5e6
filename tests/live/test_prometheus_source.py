"""Reading a fleet from Prometheus. The HTTP API is a stand-in that answers as Prometheus documents it."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from aiohttp import web
from loopback import listening

from legroom.errors import LegroomError
from legroom.live.metrics.prometheus_source import PrometheusSource
from legroom.live.metrics.sample import Sample, ScrapeFailure, ScrapeResult
from legroom.live.metrics.scrape import ScrapeFailed, open_session

Series = tuple[dict[str, str], float]


class FakePrometheus:
    """Answers instant queries from a list of series, by name and by `timestamp(...)`."""

    def __init__(self) -> None:
        self.series: list[Series] = []
        self.scraped_s: dict[str, float] = {}
        self.queries: list[str] = []
        self.times: list[str | None] = []
        """As of when each was asked."""
        self.answer: web.Response | None = None

    async def query(self, request: web.Request) -> web.Response:
        form = await request.post()
        query = str(form["query"])
        self.queries.append(query)
        self.times.append(str(form["time"]) if "time" in form else None)
        if self.answer is not None:
            return self.answer
        names = re.search(r'__name__=~"([^"]+)"', query)
        wanted = re.compile(names.group(1)) if names else re.compile("up")
        listed = re.search(r'(pod|instance)=~("(?:[^"\\]|\\.)*")', query)
        label, servers = (listed.group(1), re.compile(json.loads(listed.group(2)))) if listed else ("", re.compile(""))
        rows: list[Any] = []
        for labels, value in self.series:
            if wanted.fullmatch(labels["__name__"]) and servers.fullmatch(labels.get(label, "")):
                shown = self.scraped_s[labels["instance"]] if query.startswith("timestamp") else value
                rows.append({"metric": labels, "value": [1.0, str(shown)]})
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": rows}})


def ask(
    fake: FakePrometheus, *times_s: float, between: Any = None, expected: tuple[str, ...] = (), **options: Any
) -> list[list[ScrapeResult]]:
    """What each of several rounds of scrapes brings; `between` changes the fake after the first."""

    async def run() -> list[list[ScrapeResult]]:
        rounds = []
        async with listening(web.post("/prom/api/v1/query", fake.query)) as port, open_session() as session:
            source = PrometheusSource(f"http://u:secret@127.0.0.1:{port}/prom", **options)
            source.expect(expected)
            for number, time_s in enumerate(times_s):
                rounds.append(await source.poll(session, time_s))
                if number == 0 and between:
                    between()
        return rounds

    return asyncio.run(run())


def server(fake: FakePrometheus, instance: str, at_s: float, **values: float) -> None:
    fake.scraped_s[instance] = at_s
    labels = {"instance": instance, "job": "vllm", "model_name": "m", "engine": "0"}
    fake.series += [({"__name__": name.replace("__", ":"), **labels}, value) for name, value in values.items()]


def test_servers_of_different_releases_come_from_three_queries() -> None:
    fake = FakePrometheus()
    server(fake, "a:8000", 100, vllm__num_requests_running=3, vllm__kv_cache_usage_perc=0.5)
    server(fake, "b:8000", 98, vllm__num_requests_running=4, vllm__gpu_cache_usage_perc=0.7)
    ((sample, two),) = ask(fake, 101)
    assert isinstance(sample, Sample) and isinstance(two, Sample)
    assert (sample.server, sample.time_s, sample.running, sample.kv_use) == ("a:8000", 100, 3, 0.5)
    assert (two.server, two.time_s, two.running, two.kv_use) == ("b:8000", 98, 4, 0.7)
    assert len(fake.queries) == 3


def test_what_workers_tell_of_their_memory_comes_along() -> None:
    fake = FakePrometheus()
    server(fake, "a:8000", 100, vllm__num_requests_running=3, legroom_worker_reserved_bytes=50)
    ((sample,),) = ask(fake, 101)
    assert isinstance(sample, Sample)
    assert sample.reserved_bytes == 50


def test_pods_are_named_after_their_pod() -> None:
    fake = FakePrometheus()
    fake.scraped_s = {"10.0.0.1:8000": 5.0}
    labels = {
        "instance": "10.0.0.1:8000",
        "pod": "vllm-0",
        "namespace": "prod",
        "__name__": "vllm:num_requests_running",
    }
    fake.series = [(labels, 1.0)]
    ((sample,),) = ask(fake, 6)
    assert sample.server == "prod/vllm-0"


def test_a_server_that_was_not_scraped_again_gives_no_second_look() -> None:
    fake = FakePrometheus()
    server(fake, "a:8000", 100, vllm__num_requests_running=3)
    first, second = ask(fake, 101, 106)
    assert len(first) == 1 and second == []


def test_a_server_that_vanishes_is_a_failure() -> None:
    fake = FakePrometheus()
    server(fake, "a:8000", 100, vllm__num_requests_running=3)

    def dies() -> None:
        fake.series = [({"__name__": "up", "instance": "a:8000"}, 0.0)]

    _, second = ask(fake, 101, 106, between=dies)
    (seen,) = second
    assert isinstance(seen, ScrapeFailure) and "up is 0" in seen.message


def up(instance: str, value: float) -> Series:
    return {"__name__": "up", "instance": instance}, value


def test_a_target_that_is_taken_away_has_not_failed() -> None:
    fake = FakePrometheus()
    server(fake, "a:8000", 100, vllm__num_requests_running=3)
    fake.series.append(up("a:8000", 1.0))
    _, *later = ask(fake, *(100.0 + 100 * number for number in range(130)), between=fake.series.clear)
    assert later == [[]] * 129


def test_a_server_that_stays_down_is_never_forgotten() -> None:
    fake = FakePrometheus()
    server(fake, "a:8000", 100, vllm__num_requests_running=3)
    fake.series.append(up("a:8000", 1.0))

    def dies() -> None:
        fake.series = [up("a:8000", 0.0)]

    _, *later = ask(fake, *(100.0 + 100 * number for number in range(130)), between=dies)
    assert all(isinstance(seen, ScrapeFailure) for (seen,) in later)


def test_a_server_that_died_unseen_is_a_failure_where_it_was_expected() -> None:
    fake = FakePrometheus()
    fake.series = [up("a:8000", 0.0)]
    ((seen,),) = ask(fake, 101, expected=("a:8000", "b:8000"))
    assert isinstance(seen, ScrapeFailure) and seen.server == "a:8000"


def test_a_pod_whose_other_port_answers_is_still_down() -> None:
    fake = FakePrometheus()
    pod = {"__name__": "up", "namespace": "n", "pod": "p"}
    fake.series = [({**pod, "instance": "1:8000"}, 0.0), ({**pod, "instance": "1:9400"}, 1.0)]
    ((seen,),) = ask(fake, 101, expected=("n/p",))
    assert isinstance(seen, ScrapeFailure) and "up is 0" in seen.message


def test_a_lost_scrape_is_one_failure_however_often_it_is_asked_for() -> None:
    fake = FakePrometheus()
    server(fake, "a:8000", 100, vllm__num_requests_running=3)
    lost: list[Series] = [({"__name__": "up", "instance": "a:8000"}, 0.0)]

    async def run() -> list[ScrapeResult]:
        seen: list[ScrapeResult] = []
        async with listening(web.post("/api/v1/query", fake.query)) as port, open_session() as session:
            source = PrometheusSource(f"http://127.0.0.1:{port}")
            for time_s in range(100, 150, 5):  # scraped every 15 s; from 130 on the scrapes fail
                fake.scraped_s["a:8000"] = 100.0 + (time_s - 100) // 15 * 15
                fake.series = lost if time_s >= 130 else fake.series
                seen += await source.poll(session, float(time_s))
        return seen

    assert [(look.time_s, type(look)) for look in asyncio.run(run())] == [
        (100, Sample),
        (115, Sample),
        (130, ScrapeFailure),
        (145, ScrapeFailure),
    ]


def test_histograms_come_as_count_and_sum() -> None:
    fake = FakePrometheus()
    values = {"vllm__time_to_first_token_seconds_count": 4.0, "vllm__time_to_first_token_seconds_sum": 2.0}
    server(fake, "a:8000", 100, vllm__num_requests_running=3, **values)
    ((sample,),) = ask(fake, 101)
    assert isinstance(sample, Sample)
    ttft = sample.engines[0].ttft
    assert ttft is not None and (ttft.sum / ttft.count, ttft.quantile(0.5)) == (0.5, None)
    assert "_bucket" not in fake.queries[0]


def test_matchers_narrow_every_query() -> None:
    fake = FakePrometheus()
    ask(fake, 1, matchers='{namespace="prod", job=~"vllm.*"}')
    assert all('namespace="prod",job=~"vllm.*"' in query for query in fake.queries)


@pytest.mark.parametrize("bad", ["namespace=prod", 'a="b"} or up{', "x", 'a="b" c="d"'])
def test_what_are_no_matchers_never_gets_into_a_query(bad: str) -> None:
    with pytest.raises(LegroomError, match="label matchers"):
        PrometheusSource("http://prom:9090", bad)


@pytest.mark.parametrize(
    "answer",
    [
        web.Response(text="<html>", content_type="text/html"),
        web.json_response({"status": "error", "error": "bad query"}),
        web.json_response({"status": "success", "data": {"result": [{"metric": {}}]}}),
        web.Response(status=503),
        web.Response(status=401),
    ],
)
def test_an_answer_that_is_none_says_so_without_the_secret(answer: web.Response) -> None:
    fake = FakePrometheus()
    fake.answer = answer
    with pytest.raises(ScrapeFailed) as raised:
        ask(fake, 1)
    assert "secret" not in raised.value.message


def test_no_numbers_are_left_out() -> None:
    fake = FakePrometheus()
    server(fake, "a:8000", 100, vllm__num_requests_running=3, vllm__kv_cache_usage_perc=float("nan"))
    ((sample,),) = ask(fake, 101)
    assert isinstance(sample, Sample) and sample.kv_use is None


def test_the_three_queries_are_under_way_at_once() -> None:
    class WaitsForAll(FakePrometheus):
        async def query(self, request: web.Request) -> web.Response:
            answer = await super().query(request)
            while len(self.queries) < 3:
                await asyncio.sleep(0.001)
            return answer

    fake = WaitsForAll()
    server(fake, "a:8000", 100, vllm__num_requests_running=3)
    assert len(ask(fake, 101)[0]) == 1


def _looks_at(servers: int, times_s: tuple[float, ...]) -> list[int]:
    source = PrometheusSource("http://prometheus:9090")
    labels = [{"__name__": "vllm:num_requests_running", "instance": f"{number}:8000"} for number in range(servers)]

    def seen(time_s: float) -> int:
        return len(
            source._results_of_rows([(each, 1.0) for each in labels], [(each, time_s) for each in labels], [], time_s)
        )

    return [seen(time_s) for time_s in times_s]


def test_every_scrape_of_a_small_fleet_is_taken() -> None:
    assert _looks_at(500, (100.0, 105.0, 110.0)) == [500, 500, 500]


def test_of_a_large_fleet_a_scrape_in_fifteen_seconds_is_taken_a_third_of_the_servers_at_a_time() -> None:
    first, *turns = _looks_at(600, (100.0, 105.0, 110.0, 115.0, 120.0, 125.0, 130.0))
    assert first == sum(turns[:3]) == sum(turns[3:]) == 600
    assert all(150 < turn < 250 for turn in turns)


def test_after_a_pause_a_large_fleet_is_taken_in_turns_again() -> None:
    """All servers are due then; taken at once, they would be due at once from then on."""
    _, after_the_pause, *turns = _looks_at(600, (100.0, 160.0, 165.0, 170.0, 175.0, 180.0, 185.0, 190.0))
    assert after_the_pause == 600
    assert max(turns) < 250 and sum(turns[2:5]) == 600


def test_a_large_fleet_that_is_looked_at_seldom_is_taken_whole() -> None:
    assert _looks_at(600, (100.0, 130.0, 160.0)) == [600, 600, 600]


LARGE = 600


def large_fleet(at_s: float = 100.0) -> FakePrometheus:
    fake = FakePrometheus()
    for number in range(LARGE):
        server(fake, f"10.0.{number // 250}.{number % 250}:8000", at_s, vllm__num_requests_running=float(number))
    return fake


def values_asked_for(fake: FakePrometheus) -> list[str]:
    """The queries for figures after the first scrape."""
    return [query for query in fake.queries[3:] if "kv_cache_usage_perc" in query]


def test_of_a_large_fleet_the_figures_of_those_whose_turn_it_is_are_asked_for() -> None:
    fake = large_fleet()
    first, turn = ask(fake, 100, 105, between=lambda: fake.scraped_s.update(dict.fromkeys(fake.scraped_s, 105.0)))
    (query,) = values_asked_for(fake)
    assert len(first) == LARGE
    assert 150 < len(turn) < 250
    assert query.count("10\\\\.0") == 3 * len(turn)  # once in each of its selectors
    assert all(isinstance(look, Sample) and look.time_s == 105 for look in turn)


def test_the_figures_of_a_large_fleet_are_those_of_the_scrapes_whose_times_came_first() -> None:
    fake = large_fleet()
    ask(fake, 100, 105, between=lambda: fake.scraped_s.update(dict.fromkeys(fake.scraped_s, 105.0)))
    assert fake.times[3:] == [None, None, "1.000"]


def test_no_figures_are_asked_for_while_nobody_of_a_large_fleet_was_scraped_again() -> None:
    fake = large_fleet()
    _, second = ask(fake, 100, 105)
    assert second == [] and values_asked_for(fake) == []


def test_all_servers_of_a_large_fleet_are_asked_for_in_parts() -> None:
    fake = large_fleet()
    _, later = ask(fake, 100, 160, between=lambda: fake.scraped_s.update(dict.fromkeys(fake.scraped_s, 160.0)))
    by_name = {look.server: look.running for look in later if isinstance(look, Sample)}
    assert by_name == {labels["instance"]: value for labels, value in fake.series}
    assert len(values_asked_for(fake)) == 3


def test_one_of_a_large_fleet_that_vanishes_is_a_failure() -> None:
    fake = large_fleet()

    def dies() -> None:
        fake.series = [*fake.series[1:], up("10.0.0.0:8000", 0.0)]

    _, (seen,) = ask(fake, 100, 105, between=dies)
    assert isinstance(seen, ScrapeFailure) and seen.server == "10.0.0.0:8000"
