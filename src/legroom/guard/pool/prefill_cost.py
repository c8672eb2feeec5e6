"""What a prompt token costs on this server, in steps: the price of a preemption, which computes its prompt again.

It depends on the model and the hardware: a tiny model on a CPU computes 200 prompt tokens in the time of one step, a
large one only ten. The engine counts its steps and its prompt tokens, so the time between looks at it tells both apart.
"""

from __future__ import annotations

import math

from legroom.guard.pool.engine_usage import EngineUsage

FEWEST_STEPS = 8
"""Between two looks that are compared: with fewer, whether the last one had just ended decides."""
LONGEST_S = 3.0
"""Between two looks: over a longer time the engine may have been idle."""
FEWEST_LOOKS = 10
"""Until the fit is believed."""
KEPT = 0.98
"""Of what earlier looks weigh, at each: some fifty of them count."""
LEAST_SPREAD = 0.1
"""Of the looks: where each step had the same prompt tokens, nobody can say which took the time."""


class PrefillCost:
    """A least-squares fit of seconds = steps x a + prompt tokens x b, over the looks at a busy engine."""

    __slots__ = ("_at_s", "_looked_s", "_looks", "_prompt_tokens", "_squares", "_steps", "steps_a_token")

    def __init__(self) -> None:
        self.steps_a_token: float | None = None
        """None until enough was seen."""
        self._at_s = self._steps = self._prompt_tokens = 0.0
        self._looked_s = -math.inf
        self._looks = 0
        self._squares = [0.0] * 5

    def learn(self, use: EngineUsage, now_s: float) -> None:
        """Another look at an engine that had work since the last one."""
        steps, tokens, seconds = use.steps - self._steps, use.prompt_tokens - self._prompt_tokens, now_s - self._at_s
        was_busy = steps >= 0 and 0 <= now_s - self._looked_s <= LONGEST_S
        self._looked_s = now_s
        if was_busy and steps < FEWEST_STEPS:
            return
        self._steps, self._prompt_tokens, self._at_s = use.steps, use.prompt_tokens, now_s
        if not was_busy:  # the first look, a restart, or nobody looked for a while
            return
        news = (steps * steps, steps * tokens, tokens * tokens, steps * seconds, tokens * seconds)
        self._squares = [KEPT * total + new for total, new in zip(self._squares, news, strict=True)]
        self._looks += 1
        if self._looks >= FEWEST_LOOKS:
            self._fit()

    def _fit(self) -> None:
        steps2, both, tokens2, steps_s, tokens_s = self._squares
        spread = steps2 * tokens2 - both * both
        if spread <= LEAST_SPREAD * steps2 * tokens2:
            return
        step_s = (steps_s * tokens2 - tokens_s * both) / spread
        token_s = (tokens_s * steps2 - steps_s * both) / spread
        if step_s > 0:
            self.steps_a_token = max(0.0, token_s / step_s)
