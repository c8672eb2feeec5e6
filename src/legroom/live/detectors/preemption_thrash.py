"""Requests are preempted and their context is computed again."""

from legroom.live.detectors.base import GOOD, Condition, Detector, counted, engine_label, worst_condition
from legroom.live.metrics.window import EngineStep, Window


class PreemptionThrash(Detector):
    kind = "preemption_thrash"
    title = "Requests are preempted and computed again"
    severity = "critical"
    cause = "kv_preemption_thrash"
    entry = "LR403"
    situation = "burst"

    def measure(self, window: Window, now_s: float) -> Condition | None:
        """Bad where an engine recomputed too large a share of a minute's tokens; None without preemption counters."""
        if not window.is_answering:
            return None
        steps = window.recent(self.levels.preemption_over_s)
        by_engine: dict[tuple[str, str], list[EngineStep]] = {}
        for step in steps:
            for engine in step.engines:
                if engine.preemptions is not None:
                    by_engine.setdefault(engine.key, []).append(engine)
        conditions = [self._engine_condition(engine_steps, window) for engine_steps in by_engine.values()]
        return worst_condition(conditions)

    def _engine_condition(self, steps: list[EngineStep], window: Window) -> Condition:
        """Bad where preemptions recompute too many tokens or, if that is unknown, are many per finished request."""
        levels = self.levels
        preempted = sum(step.preemptions or 0.0 for step in steps)
        if preempted < levels.preemptions_least:
            return GOOD
        seconds = sum(step.seconds for step in steps)
        finished = sum(step.finished or 0.0 for step in steps)
        share, how = _recomputed_share(steps)
        if share is None:
            is_bad = preempted >= levels.preemptions_per_request * max(finished, 1.0)
            work = f"to {counted(finished, 'finished request')}"
        else:
            is_bad = share >= levels.preemption_share_ratio
            work = f"{share:.0%} of the computed tokens {how} computed before"
        if not is_bad:
            return GOOD
        which = engine_label(steps[-1].key, window)
        reason = f"{counted(preempted, 'preemption')}{f' on {which}' if which else ''} in {seconds:.0f} s; {work}"
        numbers = {"preempted": preempted, "preemptions_per_s": preempted / seconds, "finished": finished}
        if share is not None:
            numbers["recomputed_share"] = share
        return Condition(True, reason, numbers, which)


def _recomputed_share(steps: list[EngineStep]) -> tuple[float | None, str]:
    """(Share of computed tokens that preemptions repeated, or None; `were`, or `were, by estimate,` for its text)."""
    computed = ((step.prompt_tokens or 0.0) - (step.cached_tokens or 0.0) for step in steps)
    useful = sum(computed) + sum(step.generation_tokens or 0.0 for step in steps)
    counters = [step.recomputed_tokens for step in steps if step.recomputed_tokens is not None]
    if counters:
        again, how = sum(counters), "were"
    else:
        request_tokens = [step.tokens_per_request for step in steps if step.tokens_per_request is not None]
        if not request_tokens:
            return None, ""
        per_request = sum(request_tokens) / len(request_tokens)
        again, how = sum(step.preemptions or 0.0 for step in steps) * per_request, "were, by estimate,"
    total = again + max(useful, 0.0)
    return (again / total if total > 0 else None), how
