"""The request of an export, and the files that it returns."""

from collections.abc import Mapping
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.releases import Release
from legroom.planning.plan_document import PlanDocument
from legroom.records import dataclass, field

MARK = "Written by legroom"
"""In every written file (a dashboard has its uid instead): only such a file is replaced without --force."""


@dataclass(frozen=True)
class ExportedFile:
    """One file of an export, not written yet."""

    path: str
    """Relative to the folder that the user names, with `/` between its parts."""
    text: str
    executable: bool = False
    beside: bool = False
    """Read by another program than the main file (a Dockerfile): a comment on stdout, so that the rest can be piped."""


@dataclass(frozen=True)
class ExportRequest:
    release: Release | None
    """None: any release (`--vllm any`), with expressions that work across renamed metrics."""
    plan: PlanDocument | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """The format's own options by their argparse names (`runbook_base`)."""
    secret_names: tuple[str, ...] = ()
    """Variables with a key or a token of the described server; a plan contains none of them."""
    from_file: bool = False
    """Whether the plan was read from a file, which does not name such variables."""

    @property
    def required_plan(self) -> PlanDocument:
        """The plan; LegroomError where the export was called without one."""
        if self.plan is None:
            raise LegroomError("which server? it is made from a plan", "give --plan FILE, or MODEL --gpu NAME")
        return self.plan
