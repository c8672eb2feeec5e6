"""More ranks than the container or the environment has GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legroom.deployments.subjects import StartedServer
from legroom.lint.rule import Context, LintFinding, Rule, Severity, finding, flag_word

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
_SPREAD = (
    "--data-parallel-size-local",
    "-dpl",
    "--data-parallel-rank",
    "-dpn",
    "--data-parallel-start-rank",
    "-dpr",
    "--data-parallel-address",
    "-dpa",
    "--data-parallel-backend",
    "-dpb",
    "--data-parallel-external-lb",
    "-dpe",
    "--data-parallel-hybrid-lb",
    "-dph",
    "--headless",
)
"""Flags that put data-parallel engines on other machines."""
_SIZES = (
    "--tensor-parallel-size",
    "-tp",
    "--pipeline-parallel-size",
    "-pp",
    "--prefill-context-parallel-size",
    "-pcp",
    "--data-parallel-size",
    "-dp",
)


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """The ranks of an engine, and of all its data-parallel copies on this machine, against what the file gives."""
    if not isinstance(subject, StartedServer) or context.release_of(subject).before("0.11.1"):
        return
    if subject.launcher:
        return  # it spreads ranks over nodes itself
    gpus = subject.gpu_count
    args = context.parsed(subject).args
    ranks = args.engine_ranks if flag_word(subject, *_SPREAD) else args.gpus_needed
    if not gpus or ranks <= gpus or flag_word(subject, *_ELSEWHERE):
        return
    word = flag_word(subject, *_SIZES)
    place = subject.place_of(word) if word else subject.place
    message = f"{ranks} ranks are asked for, and {gpus} GPU{'s are' if gpus > 1 else ' is'} given: vLLM does not start"
    suggestion = (
        "give it a GPU for each rank, or ask for fewer; on a Ray cluster, add --distributed-executor-backend ray"
    )
    # Older releases look for a Ray cluster first, where there may be more.
    # NVIDIA_VISIBLE_DEVICES is overruled where GPUs are asked for as well (`count: all`).
    is_counted = subject.gpus is not None or "CUDA_VISIBLE_DEVICES" in subject.env
    severity: Severity | None = None if context.knows_release(subject) and is_counted else "warning"
    yield finding(RULE, place, message, suggestion, severity=severity)
