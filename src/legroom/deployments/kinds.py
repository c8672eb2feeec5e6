"""What kind of file a text is, by its name and its first lines."""

from __future__ import annotations

import json
import re
from pathlib import PurePath
from typing import Literal

Kind = Literal["yaml", "json", "shell", "dockerfile", "unit", "python", "promql", "env", "document"]

_BY_SUFFIX: dict[str, Kind] = {
    ".yaml": "yaml",
    ".yml": "yaml",
    ".rules": "yaml",
    ".json": "json",
    ".sh": "shell",
    ".bash": "shell",
    ".service": "unit",
    ".py": "python",
    ".md": "document",
    ".markdown": "document",
    ".rst": "document",
    ".html": "document",
    ".dockerfile": "dockerfile",
    ".promql": "promql",
    ".env": "env",
}
_BY_LANGUAGE: dict[str, Kind] = {
    "yaml": "yaml",
    "yml": "yaml",
    "json": "json",
    "jsonc": "json",
    "bash": "shell",
    "sh": "shell",
    "shell": "shell",
    "zsh": "shell",
    "console": "shell",
    "shell-session": "shell",
    "dockerfile": "dockerfile",
    "docker": "dockerfile",
    "ini": "unit",
    "systemd": "unit",
    "unit": "unit",
    "python": "python",
    "py": "python",
    "python3": "python",
    "promql": "promql",
    "dotenv": "env",
    "env": "env",
}
_SHEBANG = re.compile(r"#!.*\b(ba|da|z|k|a)?sh\b")
_YAML_START = re.compile(r"(groups|apiVersion|services|kind|spec|version|model)[ \t]*:|---\s*$")
_UNIT_START = re.compile(
    r"\[(Unit|Service|Install|supervisord|supervisorctl|unix_http_server|inet_http_server|program:[^\]]+)\]\s*$"
)
"""Of systemd's units and of supervisord's files, which look alike."""


def kind_of(path: str, text: str) -> Kind:
    name = PurePath(path)
    if name.suffix.lower() in _BY_SUFFIX:
        return _BY_SUFFIX[name.suffix.lower()]
    if name.name.startswith(".env"):
        return "env"
    if name.name.lower().startswith(("dockerfile", "containerfile")):
        return "dockerfile"
    kind = sniffed(text)
    return "document" if kind is None or (kind == "json" and not _is_json(text)) else kind


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def kind_of_language(language: str) -> Kind | None:
    """The kind of a code block that says its language."""
    return _BY_LANGUAGE.get(language.strip().lower())


def sniffed(text: str) -> Kind | None:
    """By the first line that is no comment; None where it could be anything."""
    if _SHEBANG.match(text.lstrip()):
        return "python" if "python" in text.lstrip().partition("\n")[0] else "shell"
    for line in text.splitlines():
        bare = line.strip()
        if not bare or bare.startswith(";") or (bare.startswith("#") and not bare.startswith("#!")):
            continue
        if _UNIT_START.match(bare):
            return "unit"
        if _YAML_START.match(line):
            return "yaml"
        if bare.startswith("{"):
            return "json"
        if re.match(r"(FROM|ARG)\s+\S+", bare):
            return "dockerfile"
        return None
    return None
