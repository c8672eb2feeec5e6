"""Targets that several planning tests plan for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from legroom.facts.gpus import gpu
from legroom.facts.model_sources import load
from legroom.facts.releases import release
from legroom.planning.plan import Target


@pytest.fixture
def target() -> Callable[..., Target]:
    def make(model: str = "llama-3.1-8b", card: str = "rtx 4090", vllm: str = "0.26.0", gpus: int = 1) -> Target:
        return Target(load(model), gpu(card), gpus, release(vllm))

    return make
