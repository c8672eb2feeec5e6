"""Programs that start vLLM's engine inside themselves: their command line is vLLM's with flags of their own between."""

from __future__ import annotations

from legroom.deployments.shell.scan import Word
from legroom.facts.flags import flag_name, flags_ever
from legroom.records import dataclass

DYNAMO = "dynamo.vllm"
"""Dynamo's worker. `dynamo.frontend` and the other modules beside it start no engine."""

KSERVE = "KServe's Hugging Face runtime"
"""It comes with a release of vLLM of its own, and serves without vLLM what vLLM does not know."""


@dataclass(frozen=True)
class LaunchedEngine:
    """What a launcher gives to vLLM."""

    launcher: str
    words: tuple[Word, ...]
    """As `vllm serve` would be given them."""


def launched_engine(words: tuple[Word, ...]) -> LaunchedEngine | None:
    """`python -m dynamo.vllm ...` as vLLM's own command line; None where nothing of the kind is started."""
    for i, word in enumerate(words[1:], 1):
        if word.text == DYNAMO and words[i - 1].text == "-m":
            head = (Word("vllm", word.offset), Word("serve", word.offset))
            return LaunchedEngine(DYNAMO, (*head, *vllm_flags(words[i + 1 :])))
    return None


def vllm_flags(given: tuple[Word, ...]) -> tuple[Word, ...]:
    """What some release of vLLM knows; flags of the launcher's own are left out with their values."""
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
