"""Telling legroom's own options from the vLLM flags that stand among them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def split(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """`words` as (legroom's own options, everything else in its order, what follows a lone `--`).

    Only whole names count: vLLM's `--gpu-memory-utilization` is not legroom's `--gpu-memory`.
    """
    before, after = list(words), list[str]()
    if "--" in before:
        cut = before.index("--")
        before, after = before[:cut], before[cut + 1 :]
    own: list[str] = []
    rest: list[str] = []
    position = 0
    while position < len(before):
        word = before[position]
        name, _, value = word.partition("=")
        action = parser._option_string_actions.get(name)
        position += 1
        if action is None:
            rest.append(word)
        elif action.nargs == 0 or value or "=" in word:
            own.append(word)
        else:
            own.append(word)
            own += before[position : position + 1]
            position += 1
    return own, rest, after
