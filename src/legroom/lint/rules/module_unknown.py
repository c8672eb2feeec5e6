"""`python -m vllM.entrypoints...`: a module that Python does not find."""

from __future__ import annotations

import difflib
import re

from legroom.deployments.server_words import API_SERVERS
from legroom.deployments.subjects import InvokedCommand
from legroom.lint.rule import Context, Findings, Rule, checks, finding, has_same_words, similarity

_WHY = "Python's names are case-sensitive: the command ends with 'No module named ...'."
RULE = Rule("module-unknown", "error", "A module of vLLM that does not exist", _WHY)
_VLLM = re.compile(r"v+l+m+\.", re.IGNORECASE)
"""vLLM in any spelling; a plugin such as vllm_gaudi has its own modules."""


@checks(InvokedCommand, RULE)
def unknown_python_module(command: InvokedCommand, context: Context) -> Findings:
    """A `python -m` of a vLLM API server module that does not exist."""
    for word in command.values_of("-m"):
        module = word.text.lower()
        if not _VLLM.match(module) or "entrypoints" not in module or "api_server" not in module:
            continue
        if word.text not in API_SERVERS:
            near = difflib.get_close_matches(module, API_SERVERS, n=1, cutoff=0.6)
            suggestion = f"write {near[0]}" if near else ""
            message = f"there is no module {word.text}"
            # With another word it may be a fork's module, like Habana's multi_model_api_server.
            is_typo = bool(near) and has_same_words(module, near[0], ".") and similarity(module, near[0]) >= 0.92
            place, length = command.locate(word.offset), len(word.text)
            yield finding(RULE, place, message, suggestion, length, is_certain=is_typo)
