"""Programs that start vLLM's engine inside themselves and mix vLLM's flags with their own."""

from __future__ import annotations

from legroom.deployments.shell.lexer import Word
from legroom.facts.flags import flag_name, flags_ever
from legroom.records import dataclass

DYNAMO = "dynamo.vllm"
"""Dynamo's worker; its other modules start no engine."""
KSERVE = "KServe's Hugging Face runtime"
"""It contains its own release of vLLM."""


@dataclass(frozen=True)
class LauncherCommand:
    launcher: str
    words: tuple[Word, ...]
    """The equivalent `vllm serve` command."""


def launcher_command(words: tuple[Word, ...]) -> LauncherCommand | None:
    """`python -m dynamo.vllm ...` as a `vllm serve` command; None for other commands."""
    for i, word in enumerate(words[1:], 1):
        if word.text == DYNAMO and words[i - 1].text == "-m":
            head = (Word("vllm", word.offset), Word("serve", word.offset))
            return LauncherCommand(DYNAMO, (*head, *vllm_flags(words[i + 1 :])))
    return None


def vllm_flags(given: tuple[Word, ...]) -> tuple[Word, ...]:
    """The words without flags that no release of vLLM has, and without their values."""
    kept: list[Word] = []
    keeps = True
    for word in given:
        if word.text.startswith("-"):
            keeps = _is_vllms(word.text.partition("=")[0])
        if keeps:
            kept.append(word)
    return tuple(kept)


def _is_vllms(name: str) -> bool:
    table = flags_ever()
    if not name.startswith("--"):
        return name in table
    plain = flag_name(name.partition(".")[0])
    return plain in table or (plain.startswith("--no-") and "--" + plain[5:] in table)
