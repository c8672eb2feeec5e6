"""Tokens and keys in files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from legroom.deployments.subjects import StartedServer
from legroom.lint.rule import Context, LintFinding, Rule, finding, flag_word
from legroom.masking import SECRET_FLAGS

RULE = Rule(
    "secret-written", "warning", "A secret in a file", "Whoever reads the file, its history or the process list has it."
)
RULES = (RULE,)
_NAMES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN", "VLLM_API_KEY", "LEGROOM_GUARD_TOKEN")
_STANDS_FOR = re.compile(
    r"\$|\{\{|<|^$|\.\.\.|…|(?<![a-z0-9])(x{3,}|your(?![a-z])|your(hf|api|token|key|secret)|token-abc"
    r"|((token|key|secret)[-_]here|change[-_]?me|change[-_]this|example|empty|placeholder|dummy|fake|test([-_]?(key|token))?)(?![a-z0-9]))",
    re.IGNORECASE,
)
"""A word that is plainly not the secret; inside a longer word it may well be one."""


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """Variables and flags whose value stands there."""
    if not isinstance(subject, StartedServer):
        return
    for name in _NAMES:
        word = subject.env.get(name)
        if word is not None and not _STANDS_FOR.search(word.text):
            yield finding(RULE, subject.place_of(word), f"{name} is written down here", "take it from a secret store")
    for flag, name in SECRET_FLAGS.items():
        word = flag_word(subject, flag)
        if word is None:
            continue
        i = subject.words.index(word)
        value = word.text.partition("=")[2] or (subject.words[i + 1].text if i + 1 < len(subject.words) else "")
        if value and not value.startswith("--") and not _STANDS_FOR.search(value):
            message = f"the value of {flag} is written down here, and the process list shows it"
            yield finding(RULE, subject.place_of(word), message, f"set {name} from a secret store", len(flag))
