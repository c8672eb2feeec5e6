"""A fleet by groups: what could go, what stands out, and the questions that Prometheus is asked."""

from __future__ import annotations

import json

import pytest
from aiohttp import web

from legroom.cli.watch_fleet import fleet_queries
from legroom.live.fleet import FleetView, GroupKey, ServerUse, fleet_view
from legroom.live.metrics.prometheus_source import server_of_labels

KEY = GroupKey("llama", "h100", "0.32.0")


def uses(count: int, **figures: float) -> list[ServerUse]:
    base = {"kv_tokens": 100_000, "mean_kv_use": 0.2, "peak_kv_use": 0.3, "peak_running": 8.0}
    return [ServerUse(f"s{number}", KEY, **{**base, **figures}) for number in range(count)]  # type: ignore[arg-type]


def only(view: FleetView):  # type: ignore[no-untyped-def]
    (group,) = view.groups
    return group


def test_servers_beyond_the_peak_of_the_group_could_go() -> None:
    """Ten servers never used more than three pools at one time: four hold that with room to grow."""
    group = only(fleet_view(uses(10), {KEY: 3.0}, 3600))
    assert (group.needed, group.spare) == (4, 6)
    assert group.wasted_kv_tokens == 700_000


def test_peaks_at_different_times_are_not_added_up_where_the_common_peak_is_known() -> None:
    busy = uses(10, peak_kv_use=0.9)
    assert only(fleet_view(busy, {KEY: 3.0}, 3600)).spare == 6
    assert only(fleet_view(busy, {}, 3600)).spare == 0


def test_a_queue_for_the_pool_keeps_every_server() -> None:
    crowded = [*uses(9), ServerUse("full", KEY, 100_000, 0.9, 1.0, 20.0, 40.0)]
    group = only(fleet_view(crowded, {KEY: 3.0}, 3600))
    assert group.queued and group.spare == 0


def test_a_queue_that_lasts_keeps_every_server_whatever_the_pools_say() -> None:
    """It waits for a place in the batch: what waits needs room that no use shows."""
    capped = [*uses(3), ServerUse("capped", KEY, 100_000, 0.15, 0.15, 16.0, peak_waiting=30.0, mean_waiting=30.0)]
    assert only(fleet_view(capped, {KEY: 0.6}, 3600)).spare == 0
    burst = [*uses(3), ServerUse("burst", KEY, 100_000, 0.15, 0.15, 16.0, peak_waiting=30.0, mean_waiting=0.1)]
    assert only(fleet_view(burst, {KEY: 0.6}, 3600)).spare == 3


@pytest.mark.parametrize(("window_s", "step"), [(60, "1m"), (3600, "1m"), (7 * 86_400, "6m")])
def test_no_peak_lies_between_two_moments_that_are_compared(window_s: float, step: str) -> None:
    demand = fleet_queries("", window_s)["demand"]
    assert f"[{step}]" in demand and demand.endswith(f":{step}])")


def test_pods_of_one_name_in_two_clusters_are_two_servers() -> None:
    pod = {"namespace": "prod", "pod": "vllm-0"}
    assert server_of_labels({**pod, "cluster": "a"}) != server_of_labels({**pod, "cluster": "b"})
    assert server_of_labels(pod) == "prod/vllm-0"


def test_the_last_server_of_a_group_stays() -> None:
    assert only(fleet_view(uses(2, peak_kv_use=0.0), {KEY: 0.0}, 3600)).needed == 1


def test_a_slower_start_keeps_more_servers() -> None:
    quick, slow = (fleet_view(uses(20), {KEY: 8.0}, 3600, start_s=start_s) for start_s in (60, 3600))
    assert only(slow).needed > only(quick).needed


def test_the_gpus_that_could_go_are_those_of_whole_servers() -> None:
    assert fleet_view(uses(10), {KEY: 3.0}, 3600, gpus_per_server=8).spare_gpus == 48


@pytest.mark.parametrize(
    ("figures", "flag"),
    [
        ({"preemptions_per_s": 1.0, "peak_kv_use": 1.0}, "below 8"),
        ({"peak_waiting": 30.0, "peak_kv_use": 0.3}, "above 8"),
    ],
)
def test_a_server_that_thrashes_or_queues_beside_an_empty_pool_should_have_another_batch(
    figures: dict[str, float], flag: str
) -> None:
    (advice,) = only(fleet_view(uses(1, **figures), {}, 3600)).advice
    assert advice.flags == {"--max-num-seqs": flag}


def test_a_pool_of_another_size_than_its_peers_stands_out() -> None:
    odd = [*uses(4), ServerUse("odd", KEY, 60_000)]
    (advice,) = only(fleet_view(odd, {KEY: 1.0}, 3600)).advice
    assert advice.server == "odd"


def answers(query: str) -> list[tuple[dict[str, str], str]]:
    group = {"model_name": "m", "node_pool": "h100", "version": "0.32.0"}
    if query.startswith("max_over_time(sum"):
        return [(group, "1.0")]
    servers = [{"namespace": "n", "pod": f"p{number}"} for number in range(4)]
    if "num_gpu_blocks" in query:
        return [({**labels, "num_gpu_blocks": "1000", "block_size": "16"}, "1") for labels in servers]
    return [({**group, **labels}, "0.25") for labels in servers]


def test_the_command_groups_what_prometheus_answers(capsys: pytest.CaptureFixture[str]) -> None:
    import asyncio
    import threading

    from legroom.cli.main import main

    async def query(request: web.Request) -> web.Response:
        rows = answers(str((await request.post())["query"]))
        result = [{"metric": labels, "value": [1.0, value]} for labels, value in rows]
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": result}})

    started, port = threading.Event(), [0]
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/api/v1/query", query)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port[0] = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        started.set()

    threading.Thread(target=lambda: (loop.run_until_complete(serve()), loop.run_forever()), daemon=True).start()
    assert started.wait(90)
    try:
        url = f"http://127.0.0.1:{port[0]}"
        assert main(["watch", "--prometheus", url, "--fleet", "--json"]) == 0
        (group,) = json.loads(capsys.readouterr().out)["groups"]
        assert (group["model"], group["pool"], group["release"], group["servers"]) == ("m", "h100", "0.32.0", 4)
        assert (group["kv_tokens"], group["needed_servers"], group["spare_servers"]) == (64_000, 2, 2)
        assert main(["watch", "--prometheus", url, "--fleet"]) == 0
        assert "2 could go, 2 GPUs" in capsys.readouterr().out
    finally:
        loop.call_soon_threadsafe(loop.stop)


def test_a_fleet_without_a_prometheus_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from legroom.cli.main import main

    assert main(["watch", "http://127.0.0.1:1", "--fleet"]) == 2
    assert "--prometheus URL" in capsys.readouterr().err
