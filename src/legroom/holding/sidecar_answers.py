"""The flags among the answers to a finding, as a change that a restart can make."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from legroom.actions.platform import FlagChange
from legroom.errors import LegroomError
from legroom.facts.releases import Release, latest, release
from legroom.live.answers import Answer
from legroom.live.window import Window
from legroom.vllm.command import setting_words

_BY_PEOPLE = frozenset({"model", "tensor_parallel_size", "pipeline_parallel_size"})
"""Another model, or more GPUs than the server has, is a decision of people."""


def change_of(found: Sequence[Answer], plan: Mapping[str, Any] | None) -> FlagChange | None:
    """The first answer's flags that the server's release takes, where they were computed from a plan of this server."""
    if plan is None:
        return None
    version = plan.get("vllm")
    try:
        used = release(version) if isinstance(version, str) else latest()
    except LegroomError:
        return None  # which flags it takes is not known
    changes = (_change(one, used) for one in found if (one.flags or one.env) and not one.flags.keys() & _BY_PEOPLE)
    return next((one for one in changes if one is not None), None)


def _change(answer: Answer, used: Release) -> FlagChange | None:
    flags: dict[str, str | None] = {}
    for dest, value in answer.flags.items():
        words = setting_words(dest, value, used)
        if words is None or len(words) > 2:
            return None
        name, _, joined = words[0].partition("=") if words else ("--" + dest.replace("_", "-"), "", None)
        flags[name] = words[1] if len(words) == 2 else joined
    return FlagChange(flags, dict(answer.env))


def still(window: Window) -> Window:
    """The window as it is now, for a thread to read while the next look comes in."""
    held = copy.copy(window)
    for name in ("steps", "failures", "restarts", "points"):
        mine: deque[Any] = getattr(window, name)
        setattr(held, name, mine.copy())
    return held
