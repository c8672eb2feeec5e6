"""The second tier of `legroom simulate` beside vLLM's own scheduler and offloading connector, on loads never seen."""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/simulation"))
from tier_oracle import ask_vllm, first_difference, load, replay

_LOADS = 3


def test_every_decision_about_the_tier_is_the_one_of_the_real_vllm(vllm_python: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    rng = random.Random(seed)
    items = [load(rng, kind) for kind in ("plain", "async") for _ in range(_LOADS)]
    answers = ask_vllm(str(vllm_python), items)
    for number, (item, decided) in enumerate(zip(items, answers, strict=True)):
        assert first_difference(replay(item), decided["steps"]) == "", f"load {number} of seed {seed}"
