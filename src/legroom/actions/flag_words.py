"""A server's command line with some flags changed, every other word left as it was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from legroom.actions.platform import ActionFailed
from legroom.facts.flags import flag_kind_ever
from legroom.vllm.reading import looks_like_flag
from legroom.vllm.shell import server_start

_SWITCHES = ("switch", "bool")


def with_flags(words: Sequence[str], flags: Mapping[str, str | None]) -> list[str]:
    """The words with these flags set ("" for a switch) or taken away (None)."""
    wanted = {_canonical(name): value for name, value in flags.items()}
    changed = {_positive(name) for name in wanted}
    kept: list[str] = []
    at = 0
    while at < len(words):
        name, _, inline = words[at].partition("=")
        flag = _canonical(name)
        if not looks_like_flag(words[at]) or _positive(flag) not in changed:
            kept.append(words[at])
            at += 1
            continue
        at += 1
        if not inline:
            at += _values_after(words, at, _positive(flag))
    for name, value in wanted.items():
        if value is not None:
            kept += [name] if value == "" else [f"{name}={value}"] if looks_like_flag(value) else [name, value]
    return kept


def require_server(words: Sequence[str], where: str) -> None:
    """Raises where the words do not start vLLM themselves, so that a changed flag would not reach it."""
    if server_start(list(words)) is None and not any("vllm" in word for word in words[:1]):
        shown = " ".join(words[:3])
        raise ActionFailed(
            f"{where} runs `{shown} ...`, and legroom cannot see vLLM's flags in it",
            "start vLLM there directly, or change the flags in that script by hand",
        )


def flags_in(words: Sequence[str]) -> dict[str, str]:
    """The flags of a command line with their values, "" for a switch; several values stand one after the other."""
    found: dict[str, str] = {}
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not looks_like_flag(word):
            continue
        name, _, value = word.partition("=")
        if not value:
            count = _values_after(words, at, _positive(_canonical(name)))
            value = " ".join(words[at : at + count])
            at += count
        found[_canonical(name)] = value
    return found


def way_back(now: Sequence[str], before: Sequence[str]) -> dict[str, str | None]:
    """The flags to set and to take away so that one command line becomes an earlier one."""
    held, wanted = flags_in(now), flags_in(before)
    gone: dict[str, str | None] = {name: None for name in held if name not in wanted}
    return gone | {name: value for name, value in wanted.items() if held.get(name) != value}


def _values_after(words: Sequence[str], at: int, flag: str) -> int:
    """How many of the next words are the flag's own: none for a switch, all up to the next flag for a list."""
    kind = flag_kind_ever(flag) or "str"
    if kind in _SWITCHES:
        return 0
    if kind.startswith("list"):
        return next((n for n, word in enumerate(words[at:]) if looks_like_flag(word)), len(words) - at)
    if kind == "optbool":
        return int(at < len(words) and words[at].lower() in ("true", "false"))
    return int(at < len(words) and not looks_like_flag(words[at]))


def _canonical(name: str) -> str:
    """vLLM takes `--max_model_len` for `--max-model-len`."""
    return name.replace("_", "-") if name.startswith("--") else name


def _positive(name: str) -> str:
    return "--" + name[5:] if name.startswith("--no-") else name
