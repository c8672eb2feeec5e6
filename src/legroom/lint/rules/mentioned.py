"""Names of other releases in a place that lint does not understand: a note, and a warning where they are plain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.flags import env_history, flag_history, is_read_by_plugin
from legroom.facts.metrics import nearest
from legroom.facts.releases import Release, known_releases
from legroom.facts.releases import release as known_release
from legroom.lint.mentions import Mention
from legroom.lint.rule import Context, LintFinding, Rule, Severity, finding
from legroom.lint.rules import env_unknown, flags, metric_unknown
from legroom.vllm.flag_problems import explain_unknown

RULES: tuple[Rule, ...] = ()
"""It speaks in the name of the rules that judge the same names where they are understood."""
_OF_MANY_PROGRAMS = frozenset(
    {
        "--device",
        "--image-feature-size",
        "--image-input-shape",
        "--image-input-type",
        "--image-token-id",
        "--model-name",
        "--num-speculative-tokens",
        "--override-attention-dtype",
        "--rope-scaling",
        "--rope-theta",
        "--system-prompt",
        "--task",
        "--url",
        "--version",
    }
)
"""Removed flags whose names other programs have, too."""


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """What the release no longer has, unless the file also has what took its place."""
    if not isinstance(subject, Mention) or context.any_release:
        return
    if not context.is_told_release and subject.releases:
        oldest = _oldest(subject.releases)
        if oldest is None:
            return
        # A file that names several releases may well mean the one that still has the name.
        context = replace(context, asked=oldest)
    if subject.kind == "flag":
        yield from _flag(subject, context)
    elif subject.kind == "series":
        yield from _series(subject, context)
    else:
        yield from _variable(subject, context)


def _oldest(versions: frozenset[str]) -> Release | None:
    """Of the releases that a file names; None where one is older than what is known."""
    try:
        return min(map(known_release, versions), key=lambda release: known_releases().index(release.version))
    except LegroomError:
        return None


def _flag(mention: Mention, context: Context) -> Iterator[LintFinding]:
    history = flag_history(mention.name)
    is_vllms = mention.name not in _OF_MANY_PROGRAMS or (
        mention.name == "--num-speculative-tokens" and "--speculative-model" in mention.beside
    )
    if history is None or not is_vllms or not context.release.after(history.last):
        return
    problem = explain_unknown(mention.name, context.release)
    # A program that has both flags asks for the release first; a document that has both may well mean them together.
    if mention.is_document or problem.instead.partition(" ")[0] not in mention.beside:
        suggestion = f"leave it out, or see {problem.instead}" if problem.instead else "leave it out"
        message = f"{problem.message} (what reads it here was not understood)"
        is_sure = mention.is_plain and not mention.is_told_gone
        yield _finding(flags.REMOVED, mention, message, suggestion, "warning" if is_sure else "note")


def _series(mention: Mention, context: Context) -> Iterator[LintFinding]:
    endings = ("", "_total", "_bucket", "_info")
    if any(mention.name + ending in context.series for ending in endings):
        return
    spans = metric_unknown.spans_of(mention.name, "family")
    instead = nearest(mention.name, context.release) or ""
    if spans and not {instead, instead.removesuffix("_total"), instead.removesuffix("_bucket")} & mention.beside:
        message = f"{mention.name} {metric_unknown.why(spans, context)}"
        suggestion = f"write {instead}" if instead else "leave it out: this release shows nothing like it"
        severity: Severity = "note" if mention.is_told_gone else "warning"
        yield _finding(metric_unknown.RULE, mention, message, suggestion, severity)


def _variable(mention: Mention, context: Context) -> Iterator[LintFinding]:
    history = env_history(mention.name)
    if history is None or not context.release.after(history[-1][1]) or is_read_by_plugin(mention.name):
        return
    instead = env_unknown.FLAG_INSTEAD.get(mention.name, "")
    if mention.is_plain or instead not in mention.beside:
        message = env_unknown.no_longer_read(mention.name, history, context.release)
        is_sure = (mention.is_plain or mention.is_document) and not mention.is_told_gone
        yield _finding(env_unknown.RULE, mention, message, "leave it out", "warning" if is_sure else "note")


def _finding(rule: Rule, mention: Mention, message: str, suggestion: str, severity: Severity) -> LintFinding:
    place = mention.source.place(mention.offset)
    return finding(rule, place, message, suggestion, len(mention.name), severity)
