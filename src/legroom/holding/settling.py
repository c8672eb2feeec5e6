"""Once a server is up: what it printed against what was expected, what is learnt from it, and a quick proof."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from legroom.holding.expectation import Expectation, Gpus
from legroom.planning.startup_log import Startup, read_startups

_LEARNING_S = 60.0
_READ_BYTES = 8 << 20
CLOSE = 0.02
"""A pool this near to the planned one is as planned: vLLM prints memory in hundredths of a GiB."""


def compared(log: Path, expected: Expectation) -> list[str]:
    """What vLLM says of its pool, beside what was expected."""
    startup = _startup(log)
    if startup is None or startup.tokens is None:
        return []
    times = f", {startup.max_concurrency:.2f} requests at once" if startup.max_concurrency is not None else ""
    said = f"vLLM says: {startup.tokens:,} tokens of KV cache{times}"
    if expected.tokens is None:
        return [said]
    if startup.tokens == expected.tokens:
        return [f"{said}; exactly as planned"]
    off = startup.tokens / expected.tokens - 1 if expected.tokens else 0.0
    judged = "as planned" if abs(off) <= CLOSE else f"the plan said {expected.tokens:,} ({off:+.1%})"
    return [f"{said}; {judged}"]


def learnt(log: Path, gpus: Gpus) -> list[str]:
    """Keep what the start-up measured (`legroom calibrate`), so that the next plan starts from it."""
    if not gpus.name:
        return ["nothing to learn from a start without a GPU"]
    words = [sys.executable, "-m", "legroom", "calibrate", str(log), "--gpu", gpus.name, "--json"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_LEARNING_S, check=False)
    except subprocess.TimeoutExpired:
        return [f"the measured memory could not be kept: that took more than {_LEARNING_S:.0f} s"]
    try:
        lessons = json.loads(done.stdout)["learnt"]
    except (ValueError, KeyError):
        reasons = [line[7:] for line in done.stderr.splitlines() if line.startswith("error: ")]
        return [f"the measured memory could not be kept: {reasons[0] if reasons else 'no answer'}"]
    terms = {name.removesuffix("_bytes") for lesson in lessons for name in lesson["terms"]}
    if not terms:
        return ["the start-up printed no memory that could be kept"]
    return [f"the measured memory is kept for later plans ({', '.join(sorted(terms)).replace('_', ' ')})"]


def proven(url: str, api_key: str | None) -> tuple[bool | None, str]:
    """The short form of `legroom verify`; None where the server has no door that can be tried."""
    from legroom.holding.quick_proof import prove  # noqa: PLC0415 - loads an HTTP client

    return prove(url, api_key)


def _startup(log: Path) -> Startup | None:
    try:
        with log.open("rb") as file:
            text = file.read(_READ_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    startups = read_startups(text)
    return startups[-1] if startups else None
