"""The command that is pasted with a log: a shell line, `LLM(...)`, a YAML list, or settings in a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, replace

from legroom.deployments.deployment import deployment_from_command
from legroom.errors import LegroomError
from legroom.facts.flags import flag_name, flags_ever
from legroom.facts.log_messages import size_bytes
from legroom.facts.releases import Release, latest
from legroom.vllm.args import ServeArgs
from legroom.vllm.parse import parse_flags

_SETTINGS = {item.name for item in fields(ServeArgs)} - {"usage", "env", "others", "model"}
_LOGGED = re.compile(
    r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) {1,3}\d\d-\d\d \d\d:|^\s*File \"|^\S*Error: |Namespace\("
)
"""Lines that vLLM or Python writes; vLLM's advice names flags that were not given."""
_START = re.compile(r"\b(?:vllm serve|python3? (?:-u )?-m vllm\.entrypoints\S*|(?:docker|podman) run .*vllm)(?=[\s\\])")
_SETTING = re.compile(
    r"""(?:(?P<dashes>--)(?:vllm[_-])?(?P<flag>[a-z][\w-]*)|(?<![\w-])["']?(?:vllm_|[\w.+]+\.)?(?P<name>[a-z]\w*)["']?(?=\s*[=:]))"""
    r"""(?:\s*[=:]\s*|["']?,?\s+(?:-\s+)?)?["']?(?P<value>-?\d[\d_]*(?:\.\d+)?(?:\x20?[KMGT]i?B?\b)?|[Tt]rue|[Ff]alse|[\w./{][^\s"',)]*)?"""
)
_MODEL = re.compile(
    r"""(?:\bLLM\(\s*|\bmodel\s*[=:]\s*|--model(?:[ =]|["']?,?\s+(?:-\s+)?)|\bpretrained=)["']?"""
    r"""(?P<model>[\w.~/-]+/[\w./-]+)"""
)
_SIZED = re.compile(r"\d[\d.]* ?[KMGT]i?B")
_ELIDED = re.compile(r"(?<!\S)(?:\.{2,}|…|<\w[\w -]*>)(?!\S)")


def pasted_command(text: str, failure_line: int | None, release: Release | None) -> tuple[str | None, ServeArgs]:
    """The last command line above the failure, else the first below, and its settings; else (None, named settings)."""
    lines = text.split("\n")
    commands = [(number, line) for number, line in _command_lines(lines) if not _ELIDED.search(line)]
    above = [pair for pair in commands if failure_line is None or pair[0] <= failure_line]
    for _, line in (*reversed(above), *(pair for pair in commands if pair not in above)):
        try:
            args = deployment_from_command(line, release).args
        except LegroomError:
            continue
        if args.model and "--config" not in line and "$" not in args.model:
            return line, args
    return None, _settings_outside_commands(lines, release or latest())


def _command_lines(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Each command that starts a server, with its continued lines and the number of its first line."""
    for number, line in enumerate(lines, 1):
        start = None if _LOGGED.search(line) else _START.search(line)
        if start is None:
            continue
        command, end = line[start.start() :], number
        while command.rstrip().endswith("\\") and end < len(lines):
            command, end = f"{command.rstrip()[:-1]} {lines[end]}", end + 1
        # In prose a command ends at its closing backquote.
        yield number, re.sub(r"\\(?=\s|$)", " ", command).partition("`")[0].strip()


def _settings_outside_commands(lines: list[str], release: Release) -> ServeArgs:
    """Settings named outside log lines and commands; a sentence counts only where it names one value."""
    typed: dict[str, str] = {}
    said: dict[str, set[str]] = {}
    plain = "\n".join(line for line in lines if not _LOGGED.search(line))
    for match in _SETTING.finditer(plain):
        name, value = (match["flag"] or match["name"]).replace("-", "_"), match["value"] or ""
        if name not in _SETTINGS or (not match["dashes"] and not re.fullmatch(r"[\d._]+|[Tt]rue|fp8\w*|auto", value)):
            continue
        start = plain.rfind("\n", 0, match.start()) + 1
        if re.match(r"[$#>]|\s*(?:-\s+)?[\"']?--|.*\bLLM\(|.*\bvllm\b", plain[start : match.start() + 2]):
            typed[name] = value
        said.setdefault(name, set()).add(value)
    for name, values in said.items():
        if len(values) == 1:
            typed.setdefault(name, *values)
    args, model = ServeArgs(), _MODEL.search(plain)
    for name, value in typed.items():
        args = _with_setting(args, name, value, release)
    return replace(args, model=model["model"]) if model else args


def _with_setting(args: ServeArgs, name: str, value: str, release: Release) -> ServeArgs:
    """The arguments with one pasted value; unchanged where no release takes it."""
    flag = flags_ever().get(flag_name(name))
    if flag is None or value in ("False", "false"):
        return args
    if _SIZED.fullmatch(value):
        value = str(size_bytes(value))
    is_switch = value in ("True", "true", "") or flag.kind in ("switch", "bool", "optbool")
    words = [flag.name] if is_switch else [flag.name, value.rstrip(".").replace("_", "")]
    return replace(args, **{name: getattr(parse_flags(words, release).args, name)})
