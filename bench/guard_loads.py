"""Loads for a card, each sent at once, as the guard's benchmarks send them (`guard_real.py --gpu`) or simulate them
(`guard_goodput.py`).

They are made for a pool of 20,480 tokens and a model of 8 billion parameters on an H200: a pool that a few dozen to two
hundred requests fill, two to six times over, in about five seconds. vLLM alone preempts in all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

CARD_POOL = (1280, 16)
"""Blocks, and tokens in each."""


@dataclass(frozen=True)
class LoadRequest:
    """A request of a load: the tokens it will have, and what the server is told of them."""

    prompt: int
    output: int
    copies: int = 1
    prefix: int = 0
    """Of its prompt, the tokens that it has in common with others."""
    is_open: bool = False
    """It names no max_tokens."""


def _mixed(rnd: random.Random) -> LoadRequest:
    return LoadRequest(rnd.choice([60, 300]), rnd.choice([20, 100, 400]))


def _open_ended(rnd: random.Random) -> LoadRequest:
    return LoadRequest(rnd.choice([40, 200]), min(480, 1 + int(rnd.expovariate(1 / 120))), is_open=True)


def _prefixed(rnd: random.Random) -> LoadRequest:
    prefix = rnd.choice([256, 384])
    return LoadRequest(prefix + 40, rnd.choice([80, 160]), prefix=prefix)


CARD_LOADS: dict[str, tuple[int, Callable[[random.Random], LoadRequest]]] = {
    "short": (500, lambda rnd: LoadRequest(200, 40)),
    "long": (320, lambda rnd: LoadRequest(40, 240)),
    "mixed": (180, _mixed),
    "open-ended": (300, _open_ended),
    "prefix": (500, _prefixed),
    "several": (160, lambda rnd: LoadRequest(50, 150, copies=4)),
}
"""How many are sent at once, and what each is."""
