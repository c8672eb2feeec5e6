"""The troubleshooting tree as a picture: the questions down the left, the causes and what to do first beside them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from legroom.drawing.svg import Svg
from legroom.drawing.text import wrap
from legroom.explain.entry import Language
from legroom.exports.runbook.tree import Branch, first_remedy

_WIDTH = 1280.0
_LEFT, _QUESTION = 24.0, 236.0
_CAUSES, _REMEDIES, _RIGHT = 300.0, 770.0, 1256.0
_ROW, _GAP = 22.0, 26.0
_TITLE = {"en": "What to do when vLLM runs out of memory", "zh": "vLLM 显存不足时怎么办"}
_COLUMNS = {"en": ("where", "what it is", "what to try first"), "zh": ("位置", "原因", "先试什么")}
_NO = {"en": "no", "zh": "否"}


def runbook_svg(branches: Sequence[Branch], language: Language = "en") -> str:
    page = Svg(_WIDTH, _TITLE[language])
    page.text(_LEFT, 38, _TITLE[language], "sans ink", size=20, bold=True)
    for x, words in zip((_LEFT, _CAUSES + 16, _REMEDIES), _COLUMNS[language], strict=True):
        page.text(x, 66, words, "sans soft", size=12.5)
    y = 80.0
    for number, branch in enumerate(branches):
        height = max(_ROW * len(branch.entries), _question_height(branch, language))
        if number:
            middle = _LEFT + _QUESTION / 2
            page.line(middle, y - _GAP, middle, y)
            page.text(middle + 6, y - _GAP / 2 + 4, _NO[language], "sans soft", size=11)
        _branch(page, branch, y, height, language)
        y += height + _GAP
    return page.render(y)


def _question_height(branch: Branch, language: Language) -> float:
    lines = len(_lines(branch.question.said(language), 24)) * 18 + len(_lines(branch.look.said(language), 33)) * 15
    return lines + 26.0


def _branch(page: Svg, branch: Branch, y: float, height: float, language: Language) -> None:
    page.box(_LEFT, y, _QUESTION, height, css="box", round_=6)
    page.box(_LEFT, y, 5, height, fill=branch.colour)
    row = y + 20
    for line in _lines(branch.question.said(language), 24):
        page.text(_LEFT + 16, row, line, "sans ink", size=14, bold=True)
        row += 18
    row += 2
    for line in _lines(branch.look.said(language), 33):
        page.text(_LEFT + 16, row, line, "sans soft", size=11.5)
        row += 15
    spine, middle = _CAUSES - 14, y + _ROW / 2
    page.line(_LEFT + _QUESTION, middle, spine, middle)
    last = y + _ROW * (len(branch.entries) - 0.5)
    page.line(spine, middle, spine, last)
    for number, entry in enumerate(branch.entries):
        centre = y + _ROW * (number + 0.5)
        page.line(spine, centre, _CAUSES, centre)
        page.box(_CAUSES, centre - 9, 6, 18, fill=branch.colour, tip=entry.cause.said(language))
        page.text(_CAUSES + 16, centre + 4, entry.id, "ink", size=12.5, bold=True)
        page.text(_CAUSES + 66, centre + 4, _cut(entry.title.said(language), 58), "sans ink", size=12.5)
        page.text(_REMEDIES, centre + 4, _cut(first_remedy(entry, language), 68), "sans soft", size=12.5)


def _lines(text: str, width: int) -> list[str]:
    """Wrapped by what it takes on the screen; Chinese has no spaces to wrap at."""
    if not any(_wide(character) for character in text):
        return wrap(text, width)
    lines, line, used = [], "", 0
    for piece in re.findall(r"[!-~]+|.", text):
        size = sum(2 if _wide(character) else 1 for character in piece)
        if line and used + size > width:
            lines.append(line)
            line, used = "", 0
        line, used = line + piece, used + size
    return [*lines, line]


def _cut(text: str, width: int) -> str:
    lines = _lines(text, width)
    return lines[0] if len(lines) < 2 else _lines(text, width - 2)[0] + " …"


def _wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in ("W", "F")
