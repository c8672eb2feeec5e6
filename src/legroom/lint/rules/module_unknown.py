"""`python -m vllM.entrypoints...`: a module that Python does not find."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any

from legroom.deployments.server_words import API_SERVERS
from legroom.deployments.subjects import Invoked
from legroom.lint.rule import Context, LintFinding, Rule, Severity, finding, has_same_words

RULE = Rule(
    "module-unknown",
    "error",
    "A module of vLLM that does not exist",
    "Python's names are case-sensitive: the command ends with 'No module named ...'.",
)
RULES = (RULE,)
_SLIP = 0.92
"""How much of a module's name is right when a letter or two are not."""
_VLLM = re.compile(r"v+l+m+\.", re.IGNORECASE)
"""vLLM, however it is spelled; a plugin such as vllm_gaudi has modules of its own."""


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """`-m` with something that is nearly a module of vLLM's servers."""
    if not isinstance(subject, Invoked):
        return
    for i, word in enumerate(subject.words[1:], 1):
        if subject.words[i - 1].text != "-m" or not _VLLM.match(word.text):
            continue
        if "entrypoints" in word.text.lower() and "api_server" in word.text.lower() and word.text not in API_SERVERS:
            near = difflib.get_close_matches(word.text.lower(), API_SERVERS, n=1, cutoff=0.6)
            suggestion = f"write {near[0]}" if near else ""
            message = f"there is no module {word.text}"
            # Another word in it may be a module of a fork: Habana's has multi_model_api_server.
            is_slip = bool(near) and has_same_words(word.text.lower(), near[0], ".") and _is_alike(word.text, near[0])
            severity: Severity | None = None if is_slip else "warning"
            yield finding(RULE, subject.locate(word.offset), message, suggestion, len(word.text), severity)


def _is_alike(module: str, meant: str) -> bool:
    return difflib.SequenceMatcher(None, module.lower(), meant, autojunk=False).ratio() >= _SLIP
