from __future__ import annotations

from fake_server import FakeServer

from legroom.live.detectors.prefix_cache_waste import PrefixCacheWaste

MISSES = {"kv_use": 0.97, "running": 30.0, "add_prefix_queries": 4000.0}


def test_a_cache_that_finds_nothing_in_a_full_pool_is_said() -> None:
    findings = FakeServer(PrefixCacheWaste).scrapes(7, **MISSES)
    assert findings[-1] is not None
    assert "0.0% of" in findings[-1].reason and findings[-1].situation == "prefix-cache"
    assert findings[-1].restart_helps is False


def test_while_the_pool_has_room_a_useless_cache_costs_nothing() -> None:
    assert FakeServer(PrefixCacheWaste).scrapes(30, **(MISSES | {"kv_use": 0.4})) == [None] * 30


def test_a_cache_that_is_hit_is_worth_it() -> None:
    assert FakeServer(PrefixCacheWaste).scrapes(30, **MISSES, add_prefix_hits=1000) == [None] * 30


def test_before_enough_was_looked_up_there_is_no_rate() -> None:
    assert FakeServer(PrefixCacheWaste).scrapes(10, **(MISSES | {"add_prefix_queries": 100.0})) == [None] * 10


def test_a_cache_that_is_off_is_not_judged() -> None:
    assert FakeServer(PrefixCacheWaste).scrapes(30, **MISSES, prefix_caching=False) == [None] * 30
