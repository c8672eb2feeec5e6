"""More ranks than the container or the environment has GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legroom.exports.lint.context import Context, finding, flag_word
from legroom.exports.lint.finding import Finding, Rule
from legroom.exports.lint.subjects import Started
from legroom.vllm.containers import visible_gpus

RULE = Rule(
    "gpus-too-few",
    "error",
    "More ranks than GPUs",
    "From 0.11.1 on vLLM ends with 'World size is larger than the number of available GPUs' unless it is told of Ray "
    "or of other nodes; before, it looked for a Ray cluster.",
)
RULES = (RULE,)
_ELSEWHERE = ("--distributed-executor-backend", "--nnodes", "-n")
"""Flags that put ranks on other machines."""


def check(subject: Any, context: Context) -> Iterator[Finding]:
    """Tensor times pipeline parallel size against what the file gives."""
    if not isinstance(subject, Started) or context.release_of(subject).before("0.11.1"):
        return
    gpus = subject.gpus
    if gpus is None:
        gpus = visible_gpus({name: word.text for name, word in subject.env.items()})
    args = context.parsed(subject).args
    ranks = (args.tensor_parallel_size or 1) * (args.pipeline_parallel_size or 1)
    if not gpus or ranks <= gpus or flag_word(subject, *_ELSEWHERE):
        return
    word = flag_word(subject, "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp")
    place = subject.place_of(word) if word else subject.place
    message = f"{ranks} ranks are asked for, and {gpus} GPU{'s are' if gpus > 1 else ' is'} given: vLLM does not start"
    yield finding(RULE, place, message, "give it a GPU for each rank, or ask for fewer ranks")
