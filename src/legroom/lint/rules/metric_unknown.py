"""Series that no vLLM release, or not this one, shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from legroom.facts.metrics import (
    Metric,
    all_exposed_names,
    is_shown_by_companion,
    metrics_of,
    nearest,
    ratio_instead,
    releases_of,
)
from legroom.lint.expressions import NAMES_ONLY, Expression, Owner
from legroom.lint.promql import Series, series_names, tokens
from legroom.lint.rule import Context, LintFinding, Rule, Severity, finding, has_same_words

_OWN = re.compile(r"vllm[:_][a-zA-Z0-9_:]+")
RULE = Rule(
    "metric-unknown",
    "error",
    "A series that this vLLM release does not show",
    "An alert or a panel over a series that is not there never fires and stays empty. vLLM's names have a colon, and "
    "several were renamed between releases.",
)
FOREIGN = Rule(
    "metric-foreign",
    "warning",
    "A series that is not one of vLLM's, under its prefix",
    "Nothing of vLLM has a name like it. A router or an exporter beside vLLM may show it; otherwise it is never there.",
)
RULES = (RULE, FOREIGN)
_KSERVE = "kserve_"
"""What KServe's monitors of an LLMInferenceService put before vLLM's names (config/monitoring/llmisvc)."""
_ENDING = re.compile(r"_(total|bucket|sum|count|info)$")
_SLIP = 0.94
"""How much of a name is right when one or two letters are not."""
_IN_CODE = ("text", "family", "prose")
"""Where a family's name (a counter without `_total`, a histogram without `_bucket`) is as good as a series'."""


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """Every series of an expression that is vLLM's by its name."""
    if not isinstance(subject, Expression):
        return
    known = context.series
    plain = subject.owner in NAMES_ONLY
    if subject.owner in _IN_CODE:
        # Code often names a histogram and adds `_sum` and `_count` itself; a counter has only one ending to leave out.
        kinds = ("histogram",) if subject.owner == "text" else ("histogram", "counter")
        known |= {_family(metric) for metric in metrics_of(context.release) if metric.type in kinds}
    named = [Series(subject.text, 0)] if plain else list(series_names(subject.text))
    alternatives = any(token.text == "or" for token in tokens(subject.text)) and any(
        series.name in known for series in named
    )
    for series in named:
        prefix = _KSERVE if series.name.startswith(_KSERVE) and not plain else ""
        name = series.name.removeprefix(prefix)
        if (
            not _OWN.fullmatch(name)
            or name in known
            or name in context.records
            or name in context.declared
            or is_shown_by_companion(name)
        ):
            continue
        if alternatives and releases_of(name):
            continue  # `new or old`: an alternative for other releases
        instead = nearest(name, context.release) or ""
        if subject.owner == "family":
            instead = instead.removesuffix("_total")
        if instead in subject.beside and releases_of(name):
            continue  # code that knows both names
        if subject.owner in _IN_CODE and not instead and name not in all_exposed_names():
            continue  # any string may begin with vllm_
        spans = spans_of(name, subject.owner)
        if spans and subject.owner == "prose":
            continue  # a mention: what the sentence around it says decides
        rule = RULE if instead or spans else FOREIGN
        if rule is FOREIGN and ":" in name[len("vllm:") :]:
            continue  # level:series:operation is how recorded series are called: another file records it
        better = "" if plain else ratio_instead(name, context.release)
        if prefix:
            better = better.replace("vllm:", f"{prefix}vllm:")
        suggestion = f"write {better or prefix + instead}" if better or instead else _without(name)
        message = f"{name} {why(spans, context)}"
        # Code and samples may well be for several releases, or only quote a name: only a query must find its series.
        severity: Severity | None = "note" if subject.owner == "prose" else "warning" if plain else None
        if plain and f"{name}_total" in known:
            severity, message = "note", f"{name} is shown as {name}_total"  # unless the code adds the ending itself
        is_sure = context.is_told_release if spans else _is_surely_slip(name, instead, context) and not alternatives
        if instead == f"{name}_bucket" and _reads_native(subject.text):
            is_sure = False
        if rule is RULE and severity is None and not is_sure:
            severity = "warning"
        yield finding(rule, subject.locate(series.offset), message, suggestion, len(name), severity)


def _is_surely_slip(name: str, instead: str, context: Context) -> bool:
    may_be_exporters = context.is_of_exporter and name.startswith("vllm_")
    return not may_be_exporters and is_slip(name, instead)


def _reads_native(expression: str) -> bool:
    """Whether it may mean a native histogram, which Prometheus can be told to make of every histogram."""
    words = {token.text for token in tokens(expression)}
    return "le" not in words and any(word.startswith("histogram_") for word in words)


def names_exporter(expression: Expression) -> bool:
    """Whether it asks for a series with an underscore after vllm that vLLM has under no spelling."""
    names = (series.name for series in series_names(expression.text) if series.name.startswith("vllm_"))
    return expression.owner not in NAMES_ONLY and any(_plain(name) not in _plain_names() for name in names)


@cache
def _plain_names() -> frozenset[str]:
    return frozenset(_plain(name) for name in all_exposed_names())


def _plain(name: str) -> str:
    return _ENDING.sub("", name.replace(":", "_", 1))


def is_slip(name: str, instead: str) -> bool:
    """Whether a name that no release has can only be a slip for another: the colon, the ending, a letter or two.

    What merely resembles a series may well be shown by a router or an exporter beside vLLM.
    """
    if name.replace("vllm_", "vllm:", 1) in all_exposed_names():
        return True

    import difflib  # only where a name was wrong

    plain, right = _plain(name), _plain(instead)
    if plain != right and not has_same_words(plain, right, "_"):
        return False
    alike = difflib.SequenceMatcher(None, plain, right, autojunk=False).ratio()
    return plain == right or (name.startswith("vllm:") and alike >= _SLIP)


def _family(metric: Metric) -> str:
    return metric.name.removesuffix("_total") if metric.type == "counter" else metric.name


def _without(name: str) -> str:
    is_vllms = bool(releases_of(name))
    return (
        "leave it out: this release shows nothing like it"
        if is_vllms
        else "leave it out, unless something beside vLLM shows it"
    )


def spans_of(name: str, owner: Owner) -> tuple[tuple[str, str], ...]:
    """The releases that show a series, or in code a family of series."""
    endings = ("", "_total", "_bucket") if owner in _IN_CODE else ("",)
    return next((spans for ending in endings if (spans := releases_of(name + ending))), ())


def why(spans: tuple[tuple[str, str], ...], context: Context) -> str:
    """What to say of a series that a release does not show."""
    if not spans:
        return "is shown by no vLLM release"
    releases = " and ".join(first if first == last else f"{first} to {last}" for first, last in spans)
    assumed = "" if context.is_told_release else ", which is assumed"
    return f"is shown by vLLM {releases}, not by {context.release}{assumed}"
