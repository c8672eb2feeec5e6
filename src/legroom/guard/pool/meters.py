"""The guard's own figures, in Prometheus' text format. Plain numbers: counting must cost nothing on the hot path."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

from legroom.guard.request.refusals import REASONS

Type = Literal["counter", "gauge", "histogram"]

WAIT_EDGES_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

_OWN_LINE = re.compile(rb"^(?:# (?:HELP|TYPE) )?legroom_guard_(?!stopped_engines).*\n?", re.MULTILINE)
"""What only a guard inside of vLLM can see stays on the page of one before it."""

CAPPED = ("output", "default_output", "logprobs", "prompt_logprobs")


class Meters:
    """What is counted; gauges are handed in when the page is written."""

    def __init__(self) -> None:
        self.admitted = 0
        self.passed = 0
        self.rejected: Counter[str] = Counter()
        self.capped: Counter[str] = Counter()
        self.left_queue = 0
        self.wait_sum_s = 0.0
        self.wait_count = 0
        self._waits = [0] * (len(WAIT_EDGES_S) + 1)

    def waited(self, seconds: float) -> None:
        """How long an admitted request waited."""
        self.wait_sum_s += seconds
        self.wait_count += 1
        for number, edge in enumerate(WAIT_EDGES_S):
            if seconds <= edge:
                self._waits[number] += 1
                return
        self._waits[-1] += 1

    def page(self, gauges: Mapping[str, tuple[str, float]], label: str = "", open_metrics: bool = False) -> str:
        """Every series; `label` is one more label, like `api_server="3"`."""
        page = _Page(label, open_metrics)
        page.add("admitted", "counter", "Requests admitted.", [("", self.admitted)])
        page.add(
            "passed",
            "counter",
            "Requests on paths that are not guarded, or without the key that vLLM asks for.",
            [("", self.passed)],
        )
        page.add(
            "rejected",
            "counter",
            "Requests refused, by reason.",
            [(f'reason="{reason}"', self.rejected[reason]) for reason in REASONS],
        )
        page.add(
            "capped",
            "counter",
            "Values written into requests, by what was capped.",
            [(f'what="{what}"', self.capped[what]) for what in CAPPED],
        )
        page.add("left_queue", "counter", "Clients that went away while they waited.", [("", self.left_queue)])
        for name, (about, value) in gauges.items():
            page.add(
                name.removesuffix("_total"), "counter" if name.endswith("_total") else "gauge", about, [("", value)]
            )
        page.histogram("wait_seconds", "Time that admitted requests waited.", self._waits, self.wait_sum_s)
        return page.text()


class _Page:
    def __init__(self, label: str, open_metrics: bool) -> None:
        self._label, self._open = label, open_metrics
        self._lines: list[str] = []

    def add(self, name: str, type_: Type, about: str, values: Iterable[tuple[str, float]]) -> None:
        family = f"legroom_guard_{name}"
        sample = f"{family}_total" if type_ == "counter" else family
        head = family if self._open else sample
        self._lines += [f"# HELP {head} {about}", f"# TYPE {head} {type_}"]
        self._lines += [f"{sample}{self._labels(labels)} {_number(value)}" for labels, value in values]

    def histogram(self, name: str, about: str, counts: list[int], total: float) -> None:
        family = f"legroom_guard_{name}"
        self._lines += [f"# HELP {family} {about}", f"# TYPE {family} histogram"]
        reached = 0
        for edge, count in zip((*map(str, WAIT_EDGES_S), "+Inf"), counts, strict=True):
            reached += count
            label = self._labels(f'le="{edge}"')
            self._lines.append(f"{family}_bucket{label} {reached}")
        label = self._labels("")
        self._lines += [f"{family}_sum{label} {_number(total)}", f"{family}_count{label} {reached}"]

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def _labels(self, labels: str) -> str:
        both = ",".join(part for part in (self._label, labels) if part)
        return f"{{{both}}}" if both else ""


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def with_page(body: bytes, more: str) -> bytes:
    """A server's metrics page with ours behind it, before the end mark that OpenMetrics wants last. With a guard
    before a guard, the outer one's figures show: no series may be there twice.
    """
    end = b"# EOF"
    if b"legroom_guard_" in body:
        body = _OWN_LINE.sub(b"", body)
    stripped = body.rstrip()
    if stripped.endswith(end):
        return stripped[: -len(end)] + more.encode() + end + b"\n"
    return body + (b"" if not body or body.endswith(b"\n") else b"\n") + more.encode()
