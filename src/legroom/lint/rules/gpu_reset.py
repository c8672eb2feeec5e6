"""`nvidia-smi --gpu-reset` as a way to free memory."""

from __future__ import annotations

from legroom.deployments.subjects import InvokedCommand
from legroom.lint.rule import Context, Findings, Rule, checks, finding

_WHY = (
    "It needs every process off the card, fails on cards with a display or NVLink peers in use, and takes neighbours "
    "down. Ending the orphan is enough (LR104)."
)
RULE = Rule("gpu-reset", "warning", "A GPU is reset", _WHY)


@checks(InvokedCommand, RULE)
def gpu_reset_to_free_memory(command: InvokedCommand, context: Context) -> Findings:
    """An `nvidia-smi --gpu-reset`, which does not free the memory of a living process."""
    if context.configures_mig:
        return  # a GPU changes its MIG mode only with a reset
    texts = [text.rpartition("/")[2] for text in command.texts()]
    if "nvidia-smi" not in texts:
        return
    for word in command.words:
        if word.text.partition("=")[0] in ("--gpu-reset", "-r"):
            message = "a reset ends every process on the card and frees no more than ending the orphan does"
            yield finding(RULE, command.locate(word.offset), message, "leave it out; legroom recover finds the orphan")
