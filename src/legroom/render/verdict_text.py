"""What a file's server will do, in a few sentences: for whoever has a line, not a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from legroom.render.plan_parts import headline, short_name
from legroom.units import gib
from legroom.vllm.command_line import any_release_words

if TYPE_CHECKING:
    from legroom.planning.file_plans import FileServer
    from legroom.planning.plan import Advice, Plan

MOST_FIXES = 2
"""That are said; others need not be looked for."""


def verdict_sentences(server: FileServer) -> tuple[str, ...]:
    """What happens, why, and what would help: each a sentence of its own; empty where it fits."""
    return tuple(_sentences(server))


def _sentences(server: FileServer) -> Iterator[str]:
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
            f"{short_name(what.args.model)} will not start: its parallel sizes ask for {needed} GPUs, and its "
            f"container is given {needed - server.gpus_short}. Give it {needed}, or lower the parallel sizes."
        )
    elif server.unknown:
        yield f"Not understood: {server.unknown}{f' ({server.hint})' if server.hint else ''}."
    else:
        yield from _plan_sentences(server)


def _plan_sentences(server: FileServer) -> Iterator[str]:
    shown = server.shown
    if shown is None or server.verdict == "fits":
        return
    if server.verdict == "does_not_fit" or not server.failing:
        yield from plan_sentences(shown)
        return
    for plan in server.failing:
        yield f"It may be put on a {plan.target.gpu.name}, where it will not start. {_why(plan)}".rstrip()


def plan_sentences(plan: Plan) -> Iterator[str]:
    """A plan that is not simply fine: its verdict, vLLM's own words in short, the first changes that help."""
    yield headline(plan)
    if why := _why(plan):
        yield why
    for number, advice in enumerate(plan.advice[:MOST_FIXES]):
        yield f"{'Fix' if number == 0 else 'Or'}: {_fix(advice)}."


def _why(plan: Plan) -> str:
    failure = plan.memory.failure
    if failure is None:
        return ""
    words = failure.message.partition(". ")[0].rstrip(".")
    # Where vLLM names a length that would do, its sentence has both figures already.
    is_short = failure.needed_bytes > failure.available_bytes and failure.estimated_max_len is None
    missing = f" It needs {gib(failure.needed_bytes)} and has {gib(failure.available_bytes)}." if is_short else ""
    return f"vLLM stops with: {words}.{missing}"


def _fix(advice: Advice) -> str:
    costs = f" ({advice.trades})" if advice.trades else ""
    return f"{' '.join(any_release_words(advice.flags))}{costs}"
