"""Waiting for what a page shows, under a policy that forbids `eval` in the page."""

from __future__ import annotations

import time
from typing import Any


def wait_until(page: Any, expression: str, arg: Any = None, timeout_s: float = 45.0) -> None:
    """Ask from outside until the expression is true; Playwright's own wait evaluates text inside the page."""
    deadline = time.monotonic() + timeout_s
    while not page.evaluate(expression, arg):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {expression}"
        page.wait_for_timeout(50)
