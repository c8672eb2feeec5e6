"""Block sizes that FlashAttention does not support."""

from __future__ import annotations

from legroom.deployments.subjects import StartedServer
from legroom.lint.rule import Context, Findings, Rule, checks, finding, flag_word

_WHY = (
    "At most block_size - 1 slots of a sequence stay empty, 15 tokens with 16. FlashAttention takes multiples of 16: a "
    "smaller block costs the fast kernels or the start (LR403)."
)
RULE = Rule("block-size", "warning", "A block size that FlashAttention does not take", _WHY)


@checks(StartedServer, RULE)
def unsupported_block_size(server: StartedServer, context: Context) -> Findings:
    """A --block-size that is not a multiple of 16."""
    size = context.parsed_args(server).args.block_size
    word = flag_word(server, "--block-size")
    is_rocm = "rocm" in server.image or any(name.startswith("VLLM_ROCM_") for name in server.env)
    if size is not None and word is not None and size % 16 and not is_rocm:  # AITER's kernels take blocks of 1
        message = (
            f"--block-size {size}: FlashAttention takes multiples of 16, and 16 wastes at most 15 tokens a sequence"
        )
        yield finding(RULE, server.place_of(word), message, "leave it out", len(word.text))
