"""Flags back to a command line that a release takes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from legroom.facts.flags import Flag, flags_of
from legroom.facts.releases import Release
from legroom.vllm.args import ServeArgs
from legroom.vllm.reading import FIELDS, SPECULATIVE_FIELDS, as_words, looks_like_flag


def command(args: ServeArgs, release: Release) -> tuple[str, ...]:
    """The words of a command that starts this server; a field the release has no flag for is left out."""
    table = {flag.dest: flag for flag in flags_of(release).values()}
    words = [*_head(args, release)]
    for dest in FIELDS:
        value = _value(args, dest, release)
        if dest == "model" or value is None:
            continue
        if dest == "speculative_config" and dest not in table:
            words += _legacy_speculative(value, table)
        elif dest == "optimization_level" and dest in table:
            words.append(f"-O{value}")
        elif dest in table:
            words += flag_words(table[dest], value)
    return (*words, *args.others)


def setting_words(dest: str, value: Any, release: Release) -> list[str] | None:
    """One setting of a plan as a release's flag, no words for a switch that is off; None where it has no such flag."""
    flag = next((one for one in flags_of(release).values() if one.dest == dest), None)
    return None if flag is None else flag_words(flag, value)


def _head(args: ServeArgs, release: Release) -> tuple[str, ...]:
    # `vllm serve` came with 0.5.2.
    if release.at_least("0.5.2"):
        return ("vllm", "serve", args.model) if args.model else ("vllm", "serve")
    head = ("python", "-m", "vllm.entrypoints.openai.api_server")
    return (*head, "--model", args.model) if args.model else head


def _value(args: ServeArgs, dest: str, release: Release) -> Any:
    """A field's value, with capture sizes inside the compilation config where they have no flag yet."""
    value = getattr(args, dest)
    if release.at_least("0.11.1"):
        return value
    if dest == "cudagraph_capture_sizes":
        return None
    if dest == "compilation_config" and args.cudagraph_capture_sizes is not None:
        return {**(value or {}), "cudagraph_capture_sizes": list(args.cudagraph_capture_sizes)}
    return value


def flag_words(flag: Flag, value: Any) -> list[str]:
    """One flag with its value as a release takes it; no words for a switch that is off."""
    if flag.kind in ("switch", "bool", "optbool"):
        if value:
            return [flag.name]
        return {"bool": ["--no-" + flag.name[2:]], "optbool": [f"{flag.name}=False"]}.get(flag.kind, [])
    if flag.name == "--compilation-config" and "-O" in flag.short_names and set(value) == {"level"}:
        return [f"-O{value['level']}"]
    if flag.kind == "pairs" and isinstance(value, Mapping):
        return [flag.name, ",".join(f"{key}={count}" for key, count in value.items())]
    if flag.kind in ("int", "human") and isinstance(value, float):
        value = round(value)  # --swap-space took whole GiB until 0.5.4
    words = (json.dumps(dict(value)),) if isinstance(value, Mapping) else as_words(value)
    if len(words) == 1 and looks_like_flag(words[0]):
        return [f"{flag.name}={words[0]}"]
    return [flag.name, *words]


def _legacy_speculative(config: Mapping[str, Any], table: Mapping[str, Flag]) -> Iterator[str]:
    """The flags that carried speculative decoding until 0.8.2."""
    for dest, key in SPECULATIVE_FIELDS.items():
        if key in config and dest in table:
            yield from flag_words(table[dest], config[key])
