"""The kind of a file, by its name and first lines."""

import json
import re
from pathlib import PurePath
from typing import Literal

from legroom.facts import pattern, read_data

Kind = Literal["yaml", "json", "shell", "dockerfile", "unit", "python", "promql", "env", "text", "document"]
"""`text`: a file of another tool, in which only single lines are judged."""


def _kind_by(table: str) -> dict[str, Kind]:
    """{suffix, or language of a Markdown fence: kind of file}, from the `table` so called in `file_formats.json`."""
    return {name: kind for kind, listed in read_data("file_formats.json")[table].items() for name in listed}


_BY_SUFFIX, KINDS_BY_LANGUAGE = _kind_by("suffixes"), _kind_by("languages")
_SHEBANG = re.compile(r"#!.*\b(ba|da|z|k|a)?sh\b")
_YAML_START = re.compile(r"(groups|apiVersion|services|kind|spec|version|model)[ \t]*:|---\s*$")
_UNIT_START = pattern("file_kinds.unit_start")


def kind_of(path: str, text: str) -> Kind:
    """The kind of a file (shell, yaml, python ...) by suffix or name, else first line; `document` if unclear."""
    name = PurePath(plain_path(path))
    if name.suffix.lower() in _BY_SUFFIX:
        return _BY_SUFFIX[name.suffix.lower()]
    if re.search(r"(^|[._-])env$|^\.env", name.name):
        return "env"
    if "compose" in name.name:
        return "yaml"
    if name.name.lower().startswith(("dockerfile", "containerfile")):
        return "dockerfile"
    if is_makefile(path):
        return "shell"
    if re.match(r"requirements.*\.txt$|[\w.-]*nginx[\w.-]*\.conf$|_helpers$", name.name):  # the last are of a chart
        return "text"
    kind = kind_by_first_line(text)
    if kind == "json":
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return "document"
    return kind or "document"


def plain_path(path: str) -> str:
    """A path without the ending that marks a template or an example of the file."""
    return re.sub(r"(?i)\.(template|tmpl|tpl|j2|example|sample|dist)$", "", path)


def is_makefile(path: str) -> bool:
    """Whether a path is named `Makefile`, `makefile` or `GNUmakefile`, also with an ending, or `*.mk`."""
    return re.search(r"(^|/)(GNUm|[Mm])akefile(\.[\w-]+)?$|\.mk$", path) is not None


def as_shell(path: str, text: str) -> str:
    """A Makefile or a PowerShell script written as a shell script, line by line; any other text unchanged."""
    if not is_makefile(path):  # PowerShell marks continued lines with a backtick
        return re.sub(r"`(?=\r?\n)", r"\\", text) if path.endswith(".ps1") else text
    text = re.sub(r"\$\$|\$\((\w+)\)", lambda name: f"${{{name[1]}}}" if name[1] else "$", text)
    text = re.sub(r"(?m)^(\w+)[ \t]*[:?]*=[ \t]*([^\"#\n]*?)[ \t]*(#.*)?$", r'\1="\2"', text)
    return re.sub(r"(?m)(?<!\\\n)^\t[@+-]*", " ", text)  # marks of make before a command, not of a continued line


def kind_by_first_line(text: str) -> Kind | None:
    """The kind of a text by its first line that is not a comment; None where it is not clear."""
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
        return "dockerfile" if re.match(r"(FROM|ARG)\s+\S+", bare) else None
    return None
