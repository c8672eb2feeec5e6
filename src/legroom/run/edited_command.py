"""A user's own command line with some flags changed, and everything else left exactly as it was written."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.flags import Flag, flags_ever, flags_of
from legroom.facts.releases import Release
from legroom.vllm.command import flag_words
from legroom.vllm.command_parts import command_parts


def with_flags(words: Sequence[str], flags_at: int, changes: Mapping[str, Any], release: Release) -> tuple[str, ...]:
    """The words with every flag of `changes` (by vLLM's Python names) set, or taken away where the value is None."""
    by_dest = {flag.dest: flag for flag in flags_of(release).values()}
    kept = list(words[:flags_at])
    for part in command_parts(words[flags_at:], release):
        if not part.name or part.dest not in changes:
            kept += part.words
    for dest, value in changes.items():
        if value is not None:
            unknown = Flag(_name(dest), dest, "switch" if value is True else "str")
            kept += flag_words(by_dest.get(dest, unknown), value)
    return tuple(kept)


def value_of(words: Sequence[str], flags_at: int, dest: str, release: Release) -> str | None:
    """What a command says for one flag, as it was written; "" for a switch, None where it does not stand there."""
    found = [part.value for part in command_parts(words[flags_at:], release) if part.name and part.dest == dest]
    return found[-1] if found else None


def kept_name(said: str) -> str:
    """What `--keep` means: vLLM's Python name of a flag in any spelling, or a variable of the environment."""
    name = "--" + said.lower() if not said.startswith("-") else said.lower() if said.startswith("--") else said
    part = next(iter(command_parts([name])))
    if part.flag is not None and ("-" in said or not said.isupper() or part.flag.name == _name(said.lower())):
        return part.flag.dest
    if re.fullmatch(r"[A-Z_][A-Z0-9_]*", said):
        return said
    near = difflib.get_close_matches(name.replace("_", "-"), flags_ever(), n=1)
    hint = f"did you mean {near[0]}?" if near else "write a flag of vLLM's as vLLM does, a variable in capitals"
    raise LegroomError(f"--keep {said}: vLLM has no such flag", hint)


def _name(dest: str) -> str:
    return dest if dest.startswith("-") else "--" + dest.replace("_", "-")
