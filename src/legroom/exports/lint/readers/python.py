"""Python that reads vLLM's metrics: the names in its strings. It is looked at, never run."""

from __future__ import annotations

import re

from legroom.exports.lint.subjects import Expression, Found
from legroom.exports.lint.text import Shifted, Text

_NAME = re.compile(r"""(['"])(vllm[:_][a-z][a-z0-9_:]*)\1""")
_READS_METRICS = re.compile(r"/metrics|prometheus|metrics", re.IGNORECASE)


def read_python(source: Text) -> Found:
    """String literals that are series names, in code that is about metrics."""
    if not _READS_METRICS.search(source.text):
        return Found(nothing="it reads no metrics")
    found = [Expression(match[2], Shifted(source, match.start(2)), "text") for match in _NAME.finditer(source.text)]
    return Found(tuple(found), nothing="" if found else "it names no vLLM metric")
