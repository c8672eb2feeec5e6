"""Here-documents of a script: what a shell is given to run, and the units, manifests and scripts that are written."""

from __future__ import annotations

import re
from collections.abc import Iterator

from legroom.deployments.kinds import Kind, kind_of, sniffed
from legroom.deployments.server_words import basename
from legroom.deployments.shell.scan import HereDocument, here_documents
from legroom.deployments.text import Text

_RUN_IT = ("bash", "sh", "zsh", "dash", "ash", "ssh", "sbatch")
_ESCAPED = re.compile(r"\\([\\$`])")


def embedded_parts(script: Text) -> Iterator[tuple[Kind, Text]]:
    """Every here-document whose kind is plain: from the command that reads it, its file's name, or its first line."""
    for document in here_documents(script.text):
        first, last = script.row_of(document.start), script.row_of(document.end)
        part = script.rows(first, last + 1)
        if not document.is_quoted:
            # The shell takes one backslash off; a space in its place keeps every column.
            part = part.with_text(_ESCAPED.sub(r" \1", part.text))
        kind = _kind(document, part.text)
        if kind is not None:
            yield kind, part


def _kind(document: HereDocument, text: str) -> Kind | None:
    words = [word.text for word in document.words]
    names = [basename(word) for word in words]
    target = next((words[i + 1] for i, word in enumerate(words[:-1]) if word in (">", ">>", "tee")), "")
    if target:
        kind = kind_of(target, text)
        return kind if kind != "document" else None
    if any(name in _RUN_IT for name in names):
        return "shell"
    if any(re.fullmatch(r"python[\d.]*", name) for name in names):
        return "python"
    return sniffed(text)
