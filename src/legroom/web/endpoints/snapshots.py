"""Files that tell of an allocator's memory."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from legroom.errors import LegroomError

_MOST_MADE_BYTES = 512 << 20
"""Of plain data from a snapshot: a page's worker has less room than a command."""


def fragments(request: dict[str, Any]) -> dict[str, Any]:
    """The document of `legroom fragments --json`, and its picture."""
    from legroom.fragments.read import read_content
    from legroom.fragments.report import fragment_report
    from legroom.render.fragments_svg import fragments_svg
    from legroom.render.fragments_text import advice_of, headline

    later = read_content(_content(request["file"]), "the file", _MOST_MADE_BYTES)[0]
    earlier = None
    if request.get("earlier"):
        earlier = read_content(_content(request["earlier"]), "the earlier file", _MOST_MADE_BYTES)[0]
    report = fragment_report(later, earlier=earlier)
    words = {"headline": headline(report), "advice": advice_of(report)}
    return {**report.to_json(), **words, "svg": fragments_svg(report)}


def _content(encoded: str) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise LegroomError("the file is not in base64") from error
