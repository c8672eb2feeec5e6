"""One gate for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("cryptography")

from running_gate import RunningGate


@pytest.fixture(scope="session")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGate]:
    words = ("--mode", "enforce", "--not-namespace", "sandbox", "--wait-for-flags", "30")
    running = RunningGate(tmp_path_factory.mktemp("gate"), *words)
    yield running
    running.end()
