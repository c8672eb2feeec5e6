"""A server's command line with some flags changed, every other word left as it was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from legroom.actions.platform import FlagsFixed
from legroom.deployments.server_words import SHELLS, basename, server_start
from legroom.vllm.command_parts import command_parts, long_name
from legroom.vllm.reading import looks_like_flag


def with_flags(words: Sequence[str], flags: Mapping[str, str | None]) -> list[str]:
    """The words with these flags set ("" for a switch) or taken away (None)."""
    changed = {long_name(name) for name in flags}
    kept = [word for part in command_parts(words) if part.long_name not in changed for word in part.words]
    for name, value in flags.items():
        if value is not None:
            kept += [name] if value == "" else [f"{name}={value}"] if looks_like_flag(value) else [name, value]
    return kept


def doubled(values: Mapping[str, str | None], signs: str) -> dict[str, str | None]:
    """The values with every such sign twice: to whoever reads them, one alone begins a name that is replaced."""
    twice = str.maketrans({sign: sign * 2 for sign in signs})
    return {name: value.translate(twice) if value is not None else None for name, value in values.items()}


def require_server(words: Sequence[str], where: str, *, in_image: bool = False) -> None:
    """Raises where the words do not start vLLM themselves, so that a changed flag would not reach it.

    What an image starts is not known here (`in_image`): it is taken for vLLM, unless it is a shell with a script.
    """
    if server_start(list(words)) is None and not any("vllm" in word for word in words[:1]):
        if in_image and not any(basename(word) in SHELLS for word in words[:1]):
            return
        shown = " ".join(words[:2])
        raise FlagsFixed(
            f"{where} runs `{shown} ...`, and legroom cannot see vLLM's flags in it",
            "start vLLM there directly, or change the flags in that script by hand",
        )


def flags_in(words: Sequence[str]) -> dict[str, str]:
    """The flags of a command line with their values, "" for a switch; several values stand one after the other."""
    return {part.name: part.value for part in command_parts(words) if part.name}


def way_back(now: Sequence[str], before: Sequence[str]) -> dict[str, str | None]:
    """The flags to set and to take away so that one command line becomes an earlier one."""
    held, wanted = flags_in(now), flags_in(before)
    gone: dict[str, str | None] = {name: None for name in held if name not in wanted}
    return gone | {name: value for name, value in wanted.items() if held.get(name) != value}
