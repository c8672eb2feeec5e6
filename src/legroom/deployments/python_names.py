"""Python about vLLM: the names of series in its strings, and the servers it starts. It is looked at, never run."""

from __future__ import annotations

import re
from collections.abc import Iterator

from legroom.deployments.python import servers_in
from legroom.deployments.subjects import Expression, Found
from legroom.deployments.text import Shifted, Text

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


def read_python(source: Text) -> Found:
    """Servers, and string literals that are series names in code that is about metrics."""
    servers = tuple(servers_in(source))
    series = tuple(_series(source)) if _READS_METRICS.search(source.text) else ()
    # What a program shows itself is there, whoever asks for it.
    own = {found[1].removesuffix("_total") for found in _DECLARED.finditer(source.text)}
    records = {name + ending: "" for name in own for ending in _ENDINGS}
    nothing = "" if servers or series else "it starts no vLLM and names none of its series"
    return Found((*servers, *series), records, nothing)


def _series(source: Text) -> Iterator[Expression]:
    found = list(_NAME.finditer(source.text))
    beside = frozenset(match[2] for match in found)
    owner = "family" if _FAMILIES.search(source.text) else "text"
    for match in found:
        yield Expression(match[2], Shifted(source, match.start(2)), owner, beside=beside)  # type: ignore[arg-type]
