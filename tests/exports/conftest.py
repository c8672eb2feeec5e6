"""The programs that exported files are checked with: `bin/setup-tools` brings them; without one, its tests skip."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest


def tool(name: str) -> str:
    """The path of a program, or a skip."""
    program = shutil.which(name) or shutil.which(name, path=Path(sys.executable).parent)
    if program is None:
        pytest.skip(f"no {name} here: run bin/setup-tools")
    return program


@pytest.fixture(scope="session")
def promtool() -> str:
    return tool("promtool")


@pytest.fixture(scope="session")
def shellcheck() -> str:
    return tool("shellcheck")
