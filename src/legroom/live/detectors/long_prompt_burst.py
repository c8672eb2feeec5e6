"""Many prompts far longer than usual arrive together."""

from legroom.live.detectors.base import GOOD, Condition, Detector, counted
from legroom.live.metrics.sample import sum_known
from legroom.live.metrics.window import Window, WindowStep


class LongPromptBurst(Detector):
    """Mean prompt length: prompt tokens divided by first tokens, both counted at the end of prefill."""

    kind = "long_prompt_burst"
    title = "A burst of long prompts"
    cause = "runtime_activation_burst"
    entry = "LR401"
    situation = "burst"

    def measure(self, window: Window, now_s: float) -> Condition | None:
        """Bad where recent prompts are long for the KV pool and far longer than before; None without earlier ones."""
        levels = self.levels
        if not window.is_answering or not window.steps:
            return None
        recent = window.recent(levels.long_prompt_over_s)
        earlier = [step for step in window.steps if step.time_s < recent[0].time_s]
        tokens, prompts = _prompt_counts(recent)
        if tokens is None or sum(step.seconds for step in earlier) < levels.long_prompt_before_s:
            return None
        mean = tokens / prompts if prompts else 0.0
        # A prompt is served by one engine.
        pool = max((engine.pool_tokens or 0 for engine in window.steps[-1].engines), default=0)
        is_long = pool > 0 and mean >= levels.long_prompt_pool_ratio * pool
        if prompts < levels.long_prompt_least or not is_long:
            return GOOD
        old_tokens, old_prompts = _prompt_counts(earlier)
        # The mean of fewer requests is noise.
        usual = (old_tokens or 0.0) / old_prompts if old_prompts >= 5.0 else None
        if usual is not None and mean < levels.long_prompt_times * usual:
            return GOOD
        of_one = " of an engine" if len(window.steps[-1].engines) > 1 else ""
        than = f", {mean / usual:.1f} times the usual {usual:,.0f}" if usual else ""
        reason = (
            f"{counted(prompts, 'prompt')} of {mean:,.0f} tokens on average in {sum(s.seconds for s in recent):.0f} s"
            f"{than}; {pool / mean:.0f} of them fill the KV pool{of_one}"
        )
        numbers = {"prompts": prompts, "mean_prompt_tokens": mean, "pool_tokens": float(pool)}
        return Condition(True, reason, numbers | ({"usual_prompt_tokens": usual} if usual else {}))


def _prompt_counts(steps: list[WindowStep]) -> tuple[float | None, float]:
    """(prompt tokens, or None where not reported; number of prompts) over these steps."""
    count = sum(engine.ttft.count for step in steps for engine in step.engines if engine.ttft is not None)
    return sum_known([step.total("prompt_tokens") for step in steps]), count
