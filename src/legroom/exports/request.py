"""What an export is made from, and what it gives: one request in, files out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from legroom.records import dataclass, field

if TYPE_CHECKING:
    from legroom.facts.releases import Release
    from legroom.planning.plan_document import PlanDocument

MARK = "Written by legroom"
"""In every file that is written (a dashboard has its uid instead): only such a file is replaced without being asked."""


@dataclass(frozen=True)
class ExportedFile:
    """One file of an export, not written yet."""

    path: str
    """Relative to the folder that the user names, with `/` between its parts."""
    text: str
    executable: bool = False


@dataclass(frozen=True)
class ExportRequest:
    release: Release | None
    """None: any release, in forms that survive a rename (`--vllm any`); only formats that take it see None."""
    plan: PlanDocument | None = None
    """The planned server. Never None for a format that needs one."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The format's own options by their names (`runbook_base`), as argparse read them."""
    secret_names: tuple[str, ...] = ()
    """Variables with a key or a token that the described server is given; a plan holds none of them."""
    from_file: bool = False
    """Whether the plan was read from a file, which cannot tell of such variables."""
