"""Names of series that this release does not show, in queries and in patterns."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise

from legroom.deployments.shell.lexer import Word
from legroom.deployments.subjects import InvokedCommand
from legroom.facts import metrics as facts
from legroom.facts import pattern
from legroom.lint.expressions import NAMES_ONLY, Expression
from legroom.lint.promql_reader import Token, series_names, tokens
from legroom.lint.rule import Context, Findings, checks, finding, has_same_words, similarity

_VLLM_NAME = re.compile(r"vllm[:_][a-zA-Z0-9_:]+")
_KSERVE = "kserve_"
"""KServe's monitors of an LLMInferenceService put it before vLLM's names (config/monitoring/llmisvc)."""
_ENDING = re.compile(r"_(total|bucket|sum|count|info)$")


@checks(Expression, "metric-hidden")
def hidden_metric(expression: Expression, context: Context) -> Findings:
    """A series that the release shows only under --show-hidden-metrics-for-version."""
    if expression.owner in NAMES_ONLY or context.any_release:
        return
    declared = facts.metrics_of(context.release_of_series)
    shown = {name for metric in declared if not metric.hidden for name in metric.exposed}
    names = {name for metric in declared if metric.hidden for name in metric.exposed} - shown - set(context.records)
    for series in series_names(expression.text):
        if series.text in names:
            role = facts.role_of(series.text)
            instead = facts.name_of(role, context.release_of_series) if role else None
            hiding = f"vLLM {context.release_of_series} hides {series.text}"
            message = f"{hiding} unless --show-hidden-metrics-for-version is given"
            suggestion = f"write {instead}" if instead else ""
            yield finding("metric-hidden", expression.locate(series.offset), message, suggestion, len(series.text))


@checks(Expression, "metric-unknown", "metric-foreign")
def unknown_metric(expression: Expression, context: Context) -> Findings:
    """A series that the vLLM release lacks: metric-unknown if another has it or a name is near, else metric-foreign."""
    known = context.series | _metric_families(expression, context)
    is_query = expression.owner not in NAMES_ONLY
    named = list(series_names(expression.text)) if is_query else [Token("name", expression.text, 0)]
    has_or = any(token.text == "or" for token in tokens(expression.text))
    has_alternatives = has_or and any(series.text in known for series in named)
    for series in named:
        prefix = _KSERVE if series.text.startswith(_KSERVE) and is_query else ""
        name = series.text.removeprefix(prefix)
        is_known = name in known or name in context.records or name in context.declared
        if is_known or not _VLLM_NAME.fullmatch(name) or facts.is_shown_by_companion(name):
            continue
        if any(name in facts.exposed_names(release) for release in context.named_releases):
            continue  # a server of these files shows it
        instead = facts.nearest(name, context.release_of_series) or ""
        if "success" in instead and "success" not in name:
            instead = ""  # a series of failures is not one of successes
        if expression.owner == "family":
            instead = instead.removesuffix("_total")
        if facts.releases_of(name) and (has_alternatives or instead in expression.beside):
            continue  # `new or old`, or a program that knows both names
        if not is_query and not instead and name not in facts.all_exposed_names():
            continue  # any string may begin with vllm_
        # The releases that expose a series; a program may name its family.
        endings = ("",) if is_query else ("", "_total", "_bucket")
        spans = next((spans for ending in endings if (spans := facts.releases_of(name + ending))), ())
        rule = "metric-unknown" if instead or spans else "metric-foreign"
        if rule == "metric-foreign" and ":" in name[len("vllm:") :]:
            continue  # level:series:operation is a recorded series of another file
        better = (
            facts.ratio_instead(name, context.release_of_series).replace("vllm:", f"{prefix}vllm:") if is_query else ""
        )
        suggestion = f"write {better or prefix + instead}"
        if not better and not instead:
            reason = ": this release shows nothing like it"
            suggestion = (
                f"leave it out{reason if facts.releases_of(name) else ', unless something beside vLLM shows it'}"
            )
        message = f"{name} {_releases_sentence(spans, context)}"
        # A program may be written for several releases.
        is_certain = is_query and (
            rule == "metric-foreign"
            or _is_certainly_wrong(expression, context, name, instead, bool(spans), has_alternatives)
        )
        found = finding(rule, expression.locate(series.offset), message, suggestion, len(name), is_certain=is_certain)
        is_exporters = name.startswith("vllm_") and (rule == "metric-foreign" or context.has_exporter_series)
        if is_exporters and not _is_typo(name, instead):
            found = replace(found, severity="note")  # a proxy or an exporter may name its own series so
        if not is_query and f"{name}_total" in known:  # the program may add the ending itself
            found = replace(found, severity="note", message=f"{name} is shown as {name}_total")
        yield found


def _metric_families(expression: Expression, context: Context) -> set[str]:
    """The metric names that a program may hold without `_sum`, `_count` or `_total`, as it adds these itself."""
    kinds = {"text": ("histogram",), "family": ("histogram", "counter")}.get(expression.owner, ())
    metrics = (metric for metric in facts.metrics_of(context.release_of_series) if metric.type in kinds)
    return {metric.name.removesuffix("_total") if metric.type == "counter" else metric.name for metric in metrics}


def _is_certainly_wrong(
    expression: Expression, context: Context, name: str, instead: str, is_of_other_release: bool, has_alternatives: bool
) -> bool:
    """Whether a missing series, likely `instead`, is an error; `has_alternatives`: an `or` has an existing one."""
    words = {token.text for token in tokens(expression.text)}
    if instead == f"{name}_bucket" and "le" not in words and any(word.startswith("histogram_") for word in words):
        return False  # it may read a native histogram, which has no buckets
    if is_of_other_release:
        return context.is_release_given
    may_be_exporters = context.has_exporter_series and name.startswith("vllm_")
    return not has_alternatives and not may_be_exporters and _is_typo(name, instead)


def is_series_of_exporter(expression: Expression) -> bool:
    """Whether the expression queries a `vllm_` series of another exporter: no spelling of it is one of vLLM's."""
    names = (series.text for series in series_names(expression.text) if series.text.startswith("vllm_"))
    return expression.owner not in NAMES_ONLY and any(_base_name(name) not in _base_names() for name in names)


@cache
def _base_names() -> frozenset[str]:
    """The series names of all releases, each as `_base_name` shortens it."""
    return frozenset(map(_base_name, facts.all_exposed_names()))


def _base_name(name: str) -> str:
    """The name with `_` for its colon and without an ending such as `_total` or `_bucket`."""
    return _ENDING.sub("", name.replace(":", "_", 1))


def _is_typo(name: str, instead: str) -> bool:
    """Whether the two series names differ only in the colon, the ending, or a letter or two."""
    base, right = _base_name(name), _base_name(instead)
    if base == right or name.replace("vllm_", "vllm:", 1) in facts.all_exposed_names():
        return True
    return name.startswith("vllm:") and has_same_words(base, right, "_") and similarity(base, right) >= 0.94


def _releases_sentence(spans: tuple[tuple[str, str], ...], context: Context) -> str:
    """The part of a message that says which releases show the series; `spans`: (first, last) release of each range."""
    if not spans:
        return "is shown by no vLLM release"
    releases = " and ".join(first if first == last else f"{first} to {last}" for first, last in spans)
    is_told = context.is_release_given or context.named_releases
    release = f"{context.release_of_series}{'' if is_told else ', which is assumed'}"
    return f"is shown by vLLM {releases}, not by {release}"


_GREPPED_NAME = pattern("metric_names.grepped_name")
_RENAMES = re.compile(r"\bsed\b[^|]*\bs([/#,@])[^|]*:|\btr\b[^|]*:")


@checks(InvokedCommand, "metric-grep")
def grep_without_match(command: InvokedCommand, context: Context) -> Findings:
    """A grep, awk or sed over /metrics for a name that no series of vLLM contains."""
    if "/metrics" not in command.line or not command.words:
        return
    if ".metrics.k8s.io" in command.line:
        return  # a metrics adapter exposes series under names without colons
    before = command.line.partition(" ".join(word.raw for word in command.words))[0]
    is_renamed = _RENAMES.search(before)  # the colon was replaced
    if command.words[0].text.rpartition("/")[2] not in ("grep", "egrep", "rg", "awk", "sed") or is_renamed:
        return
    shown = context.series | context.declared
    for word in _grep_patterns(command):
        names = _GREPPED_NAME.findall(word.text)
        unknown = [name for name in names if not any(name in series for series in shown)]
        rights = {name: name.replace("vllm_", "vllm:", 1) for name in unknown}
        # `vllm:a|vllm_a` matches either spelling, and a name that no series of vLLM starts with may be an exporter's.
        is_certain = unknown == names and all(map(context.has_series_with_prefix, rights.values()))
        for name, right in rights.items():
            place = command.locate(word.offset + max(word.raw.find(name), 0))
            message = f"no series of vLLM {context.release_of_series} has {name} in its name"
            suggestion = f"write {right}" if context.has_series_with_prefix(right) else ""
            yield finding("metric-grep", place, message, suggestion, len(name), is_certain=is_certain)


def _grep_patterns(command: InvokedCommand) -> Iterator[Word]:
    """The patterns that a grep command searches for: of -e, or the first argument that is not an option."""
    given = list(command.values_of("-e", "--regexp"))
    plain = ((before, word) for before, word in pairwise(command.words) if not word.text.startswith("-"))
    # -F and -v have a value in awk and none in grep.
    is_awk = command.words[0].text.endswith("awk")
    with_value = ("-F", "-v") if is_awk else ("-A", "-B", "-C", "-m", "--max-count", "--context")
    for word in given or [word for before, word in plain if before.text not in with_value][:1]:
        replacing = re.match(r"s(\W)(.*?)\1", word.text)
        yield word.with_text(replacing[2]) if replacing else word
