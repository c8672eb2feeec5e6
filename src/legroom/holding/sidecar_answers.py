"""The flags among the answers to a finding, as a change that a restart can make."""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from legroom.actions.platform import FlagChange
from legroom.live.answers import Answer
from legroom.live.window import Window


def change_of(found: Sequence[Answer], plan: Mapping[str, Any] | None) -> FlagChange | None:
    """The first answer's flags, where they were computed from a plan of this very server."""
    if plan is None:
        return None
    best = next((one for one in found if one.flags or one.env), None)
    if best is None:
        return None
    return FlagChange(dict(flag_of(name, value) for name, value in best.flags.items()), dict(best.env))


def flag_of(name: str, value: Any) -> tuple[str, str | None]:
    """A setting of the plan as vLLM's flag: `max_num_seqs`, 32 is --max-num-seqs 32; False is --no-..."""
    flag = "--" + name.replace("_", "-")
    if value is None:
        return flag, None
    if isinstance(value, bool):
        return (flag, "") if value else (f"--no-{flag[2:]}", "")
    return flag, json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def still(window: Window) -> Window:
    """The window as it is now, for a thread to read while the next look comes in."""
    held = copy.copy(window)
    for name in ("steps", "failures", "restarts", "points"):
        mine: deque[Any] = getattr(window, name)
        setattr(held, name, mine.copy())
    return held
