"""Finds the real promtool and Prometheus that `bin/setup-prometheus` brings; without them, tests skip and say so."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tool(name: str) -> str:
    """The path of a tool, or a skip."""
    own = ROOT / ".prometheus/usr/bin" / name
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here: run bin/setup-prometheus")
    return found


@pytest.fixture(scope="session")
def promtool() -> str:
    return tool("promtool")


@pytest.fixture(scope="session")
def prometheus() -> str:
    return tool("prometheus")
