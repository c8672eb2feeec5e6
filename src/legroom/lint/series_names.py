"""Python about vLLM's metrics: the names of series in its strings. It is looked at, never run."""

from __future__ import annotations

import re
from collections.abc import Iterator

from legroom.deployments.text import Shifted, Text
from legroom.lint.expressions import Expression

_NAME = re.compile(r"""(['"])(vllm[:_][a-z][a-z0-9_:]*)\1""")
_READS_METRICS = re.compile(r"/metrics|prometheus|metrics", re.IGNORECASE)
_FAMILIES = re.compile(
    r"\.get_metrics\(|vllm\.v1\.metrics\.reader|text_string_to_metric_families|text_fd_to_metric_families"
)
"""What gives families rather than series: a counter has no `_total` there, a histogram no `_bucket`."""
_DECLARED = re.compile(
    r"""\b(?:Counter|Gauge|Histogram|Summary|Info)(?:MetricFamily)?\(\s*(?:name\s*=\s*)?['"](vllm[:_][a-z0-9_:]+)"""
)
_ENDINGS = ("", "_total", "_bucket", "_sum", "_count", "_info")


def read_series(source: Text) -> tuple[list[Expression], dict[str, str]]:
    """String literals that are series names in code that is about metrics, and the series that it shows itself."""
    series = list(_series(source)) if _READS_METRICS.search(source.text) else []
    # What a program shows itself is there, whoever asks for it.
    own = {declared[1].removesuffix("_total") for declared in _DECLARED.finditer(source.text)}
    return series, {name + ending: "" for name in own for ending in _ENDINGS}


def _series(source: Text) -> Iterator[Expression]:
    names = list(_NAME.finditer(source.text))
    beside = frozenset(name[2] for name in names)
    owner = "family" if _FAMILIES.search(source.text) else "text"
    for name in names:
        yield Expression(name[2], Shifted(source, name.start(2)), owner, beside=beside)  # type: ignore[arg-type]
