"""Block sizes by taste."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legroom.deployments.subjects import StartedServer
from legroom.lint.rule import Context, LintFinding, Rule, finding, flag_word

RULE = Rule(
    "block-size",
    "warning",
    "A block size that FlashAttention does not take",
    "At most block_size - 1 slots of a sequence stay empty, 15 tokens with 16. FlashAttention takes multiples of 16: a "
    "smaller block costs the fast kernels or the start (LR403).",
)
RULES = (RULE,)


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """Anything that is no multiple of 16."""
    if not isinstance(subject, StartedServer):
        return
    size = context.parsed(subject).args.block_size
    word = flag_word(subject, "--block-size")
    if size is not None and word is not None and size % 16:
        message = (
            f"--block-size {size}: FlashAttention takes multiples of 16, and 16 wastes at most 15 tokens a sequence"
        )
        yield finding(RULE, subject.place_of(word), message, "leave it out", len(word.text))
