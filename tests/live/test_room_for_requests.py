"""How many blocks a request holds and how many more requests fit, as `watch --json` says them."""

from __future__ import annotations

import pytest

from legroom.live.detectors import Watcher
from legroom.live.metrics.sample import EngineSample, Sample
from legroom.live.server_view import ServerView, server_view


def seen(*engines: EngineSample) -> ServerView:
    watcher = Watcher("s")
    watcher.take(Sample(1_700_000_000.0, "s", engines))
    return server_view(watcher)


def test_blocks_in_use_are_shared_by_those_that_run() -> None:
    shown = seen(EngineSample("m", "0", kv_use=0.5, running=10, num_blocks=1001))
    assert shown.avg_blocks_per_request == pytest.approx(50)
    assert shown.room_for_requests == 10


def test_a_request_lives_in_one_engine() -> None:
    full = EngineSample("m", "0", kv_use=0.96, running=12, num_blocks=101)
    other = EngineSample("m", "1", kv_use=0.96, running=12, num_blocks=101)
    shown = seen(full, other)
    assert (shown.avg_blocks_per_request, shown.room_for_requests) == (pytest.approx(8), 0)


def test_an_idle_engine_has_room_for_what_the_others_run() -> None:
    busy = EngineSample("m", "0", kv_use=1.0, running=10, num_blocks=101)
    idle = EngineSample("m", "1", kv_use=0.0, running=0, num_blocks=101)
    assert seen(busy, idle).room_for_requests == 10


@pytest.mark.parametrize(
    "engine",
    [
        EngineSample("m", "0", kv_use=0.0, running=0, num_blocks=101),
        EngineSample("m", "0", kv_use=0.5, running=3),
        EngineSample("m", "0", running=3, num_blocks=101),
        EngineSample("m", "0", kv_use=0.5, num_blocks=101),
    ],
)
def test_nothing_is_said_where_nothing_runs_or_a_figure_is_missing(engine: EngineSample) -> None:
    shown = seen(engine).to_json()
    assert (shown["avg_blocks_per_request"], shown["room_for_requests"]) == (None, None)
