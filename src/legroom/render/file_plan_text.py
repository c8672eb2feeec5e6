"""Servers of a deployment file: a plan in a few sentences, and the diff of two versions as text or Markdown."""

from collections.abc import Iterator, Sequence

from legroom.drawing.terminal import PLAIN, Style
from legroom.drawing.text import wrap
from legroom.planning.file_plans import FileServer
from legroom.planning.plan import Advice, Plan
from legroom.planning.plan_diff import PlanChange, ServerDiff
from legroom.render.plan_parts import VERDICT_COLOURS, plan_headline, short_model_name
from legroom.units import gib, human_bytes
from legroom.vllm.command_line import any_release_words

MAX_FIXES = 2
"""Changes of flags that the sentences name."""


def verdict_sentences(server: FileServer) -> Iterator[str]:
    """Why this server of a file will not start or was not understood, and the fixes; nothing where it fits."""
    what = server.what
    if server.refused_flags and what is not None:
        for problem in server.refused_flags:
            instead = f" Write {problem.instead} instead." if problem.instead else " Leave it out."
            yield f"vLLM {what.release} will not start: {problem.message}.{instead}"
    elif server.refusal is not None and what is not None:
        yield f"vLLM {what.release} will not start: {server.refusal.message} ({server.refusal.hint})."
    elif server.gpus_short and what is not None:
        needed = what.args.gpus_needed
        yield (
            f"{short_model_name(what.args.model)} will not start: its parallel sizes ask for {needed} GPUs, and its "
            f"container is given {needed - server.gpus_short}. Give it {needed}, or lower the parallel sizes."
        )
    elif server.unknown:
        yield f"Not understood: {server.unknown}{f' ({server.hint})' if server.hint else ''}."
    else:
        yield from _plan_sentences(server)


def _plan_sentences(server: FileServer) -> Iterator[str]:
    """What is wrong with the server's plan, on each GPU that it may be put on; nothing where it fits."""
    shown = server.shown
    if shown is None or server.verdict == "fits":
        return
    if server.verdict == "does_not_fit" or not server.failing_plans:
        yield plan_headline(shown)
        if why := _failure_text(shown):
            yield why
        for number, advice in enumerate(shown.advice[:MAX_FIXES]):
            yield f"{'Fix' if number == 0 else 'Or'}: {_advice_text(advice, shown)}."
        return
    for plan in server.failing_plans:
        yield f"It may be put on a {plan.target.gpu.name}, where it will not start. {_failure_text(plan)}".rstrip()


def _failure_text(plan: Plan) -> str:
    """The error that vLLM stops with, and the memory it needs and has; empty where the plan starts."""
    failure = plan.memory.failure
    if failure is None:
        return ""
    words = failure.message.partition(". ")[0].rstrip(".")
    # vLLM's message with an estimated length has both figures.
    is_short = failure.needed_bytes > failure.available_bytes and failure.estimated_max_len is None
    missing = f" It needs {gib(failure.needed_bytes)} and has {gib(failure.available_bytes)}." if is_short else ""
    return f"vLLM stops with: {words}.{missing}"


def _advice_text(advice: Advice, plan: Plan) -> str:
    """The flags to change, followed by what they cost."""
    longest, failure = advice.flags.get("max_model_len"), plan.memory.failure
    costs = advice.trades
    if longest and failure and failure.estimated_max_len and longest < failure.estimated_max_len:
        # vLLM's own estimate, in the message above it, is of the middle of the range.
        costs += f"; this fits at the low end of the estimated range, {failure.estimated_max_len:,} in its middle"
    return f"{' '.join(any_release_words(advice.flags))}{f' ({costs})' if costs else ''}"


_SHOWN = {"fits": "fits", "tight": "tight", "does_not_fit": "will not start", "unknown": "not understood", None: "none"}


def diff_text(diffs: Sequence[ServerDiff], style: Style = PLAIN) -> str:
    """How each server's verdict, memory and settings differ between two versions of a file, for the terminal."""
    if not diffs:
        return "Neither version starts a vLLM server.\n"
    return "\n".join("\n".join(_diff_lines(diff, style)) + "\n" for diff in diffs)


def _diff_lines(diff: ServerDiff, style: Style) -> Iterator[str]:
    """One server's changed verdict, memory parts and sentences, as terminal lines."""
    yield f"{style.paint(diff.name, 'bold')}: {_verdict_change(diff, style)}"
    width = max((len(change.what) for change in diff.changes), default=0)
    for change in diff.changes:
        yield f"  {change.what:<{width}}  {change.old} -> {change.new}{_byte_change_text(change)}"
    if diff.new is not None and not diff.changes and diff.old is not None:
        yield "  nothing that memory depends on has changed"
    for sentence in _new_version_sentences(diff.new):
        yield from wrap(sentence, style.width, "  ", "  ")


def _verdict_change(diff: ServerDiff, style: Style) -> str:
    """`removed`, `new, VERDICT`, `OLD -> NEW`, or the verdict alone where it stays the same."""
    before, after = diff.verdicts
    if diff.new is None:
        return "removed"
    painted = style.paint(_SHOWN[after], VERDICT_COLOURS[after], "bold") if after in VERDICT_COLOURS else _SHOWN[after]
    if diff.old is None:
        return f"new, {painted}"
    return painted if before == after else f"{_SHOWN[before]} -> {painted}"


def _byte_change_text(change: PlanChange) -> str:
    """The signed difference in bytes, in brackets; empty where the change has none."""
    if change.bytes is None:
        return ""
    return f"  ({'+' if change.bytes > 0 else '-'}{human_bytes(abs(change.bytes))})"


def _new_version_sentences(server: FileServer | None) -> tuple[str, ...]:
    """The verdict sentences of the new version, or its headline where it fits; empty for a removed server."""
    if server is None:
        return ()
    sentences = tuple(verdict_sentences(server))
    return sentences or ((plan_headline(server.shown),) if server.shown is not None else ())


def diff_markdown(path: str, diffs: Sequence[ServerDiff]) -> str:
    """A Markdown section about the file at `path`; all text from the file is escaped."""
    lines = [f"### {_escaped(path)}", ""]
    if not diffs:
        lines += ["Neither version starts a vLLM server.", ""]
    for diff in diffs:
        lines += _markdown_lines(diff)
    return "\n".join(lines)


def _markdown_lines(diff: ServerDiff) -> Iterator[str]:
    """One server's differences in Markdown: its verdict, a before/after table, then sentences."""
    yield f"**{_escaped(diff.name)}: {_verdict_change(diff, PLAIN)}**"
    yield ""
    if diff.changes:
        yield "| | before | after | |"
        yield "|---|---|---|---|"
        for change in diff.changes:
            cells = (change.what, change.old, change.new, _byte_change_text(change).strip())
            yield f"| {' | '.join(map(_escaped, cells))} |"
        yield ""
    for sentence in _new_version_sentences(diff.new):
        yield f"{_escaped(sentence)}"
        yield ""


def _escaped(text: str) -> str:
    """Untrusted text on one line, with Markdown characters and mentions escaped."""
    flat = " ".join(text.split())
    for character in "\\`*_{}[]<>|#@":
        flat = flat.replace(character, f"\\{character}" if character != "@" else "@\u200b")
    return flat
