"""The prefix cache has few hits while the KV pool is full."""

from legroom.live.detectors.base import GOOD, Condition, Detector
from legroom.live.metrics.window import Window


class PrefixCacheWaste(Detector):
    """Hit rate from the query and hit counters (V0 had a gauge)."""

    kind = "prefix_cache_waste"
    title = "The prefix cache is not worth its look-ups"
    severity = "info"
    cause = "prefix_cache_pressure"
    entry = "LR404"
    situation = "prefix-cache"

    def measure(self, window: Window, now_s: float) -> Condition | None:
        """Bad where the hit rate of five minutes is low and a KV pool is full; None if either is not reported."""
        levels = self.levels
        if not window.is_answering or window.latest is None or not window.steps:
            return None
        if all(engine.prefix_caching is False for engine in window.latest.engines):
            return GOOD
        queried = window.increase("prefix_queries", levels.hit_rate_over_s)
        rate = window.hit_rate(levels.hit_rate_over_s)
        last = window.steps[-1]
        use = max((engine.kv_use for engine in last.engines if engine.kv_use is not None), default=None)
        if queried is None or rate is None or use is None:
            return None
        pool = sum(engine.pool_tokens or 0 for engine in last.engines)
        # Without a known pool, some ten long prompts.
        if queried < max(pool * levels.hit_rate_least_pools, 1.0 if pool else 20_000):
            return GOOD
        has_no_room = any(engine.has_no_room(levels.hit_rate_pool_ratio) for engine in last.engines)
        if rate >= levels.hit_rate_low_ratio or not has_no_room:
            return GOOD
        room = "" if use >= levels.hit_rate_pool_ratio else " and has no room for one more request"
        reason = (
            f"{rate:.1%} of {queried:,.0f} looked-up prompt tokens were found in the prefix cache while the KV pool is "
            f"{use:.0%} full{room}: cached blocks are given up before anybody needs them again"
        )
        return Condition(True, reason, {"hit_rate": rate, "looked_up_tokens": queried, "kv_use": use})
