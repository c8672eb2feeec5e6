"""What lint says: findings with a place, and the files it could not read or had nothing to say about."""

from __future__ import annotations

from typing import Literal

from legroom.deployments.text import Place, Unread
from legroom.records import dataclass

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""The gravest first: an error does not do what it says, a warning does harm or nothing, a note is worth knowing."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that lint looks for."""

    id: str
    severity: Severity
    title: str
    help: str
    """Why, in a sentence or two."""


@dataclass(frozen=True, slots=True)
class LintFinding:
    place: Place
    rule: str
    severity: Severity
    message: str
    suggestion: str = ""
    length: int = 0
    """How many characters of the line it is about; 0: not known."""

    @property
    def where(self) -> tuple[int, int, str]:
        """What findings of one file are sorted by."""
        return self.place.line, self.place.column, self.rule


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file with nothing in it to check."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    release: str
    files: tuple[str, ...]
    findings: tuple[LintFinding, ...]
    unread: tuple[Unread, ...]
    skipped: tuple[Skipped, ...]
    ignored: int = 0
    """Findings that a comment or an option silenced."""
