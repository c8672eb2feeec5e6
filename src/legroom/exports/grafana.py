"""`legroom export grafana`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.errors import LegroomError

if TYPE_CHECKING:
    from legroom.exports.request import ExportedFile, ExportRequest

NAME = "grafana"
HELP = "being written"
TAKES_ANY = True


def files(request: ExportRequest) -> tuple[ExportedFile, ...]:
    """Everything the format writes."""
    raise LegroomError("this format is not finished yet")
