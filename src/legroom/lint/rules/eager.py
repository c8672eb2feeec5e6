"""`--enforce-eager` left in production."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legroom.deployments.subjects import StartedServer
from legroom.lint.rule import Context, LintFinding, Rule, finding, flag_word
from legroom.units import human_bytes

RULE = Rule(
    "eager",
    "note",
    "--enforce-eager",
    "Without CUDA graphs every decoding step is slower. It saves the graphs' memory alone, and before 0.20 not one KV "
    "block comes of it, because graphs were not counted in the budget (LR201).",
)
RULES = (RULE,)


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """A server without graphs."""
    if not isinstance(subject, StartedServer) or not context.parsed(subject).args.enforce_eager:
        return
    word = flag_word(subject, "--enforce-eager")
    place = subject.place_of(word) if word else subject.place
    plan = context.plan_of(subject)
    graphs = plan.layout.cuda_graph_bytes if plan else 0
    saved = f" ({human_bytes(graphs)} in the plan)" if graphs else ""
    message = f"--enforce-eager saves the memory of CUDA graphs{saved} and slows every decoding step"
    if context.release_of(subject).before("0.20.0"):
        message += "; before 0.20 it adds no KV block"
    yield finding(RULE, place, message, "leave it out unless graph capture is what runs out (LR302)")
