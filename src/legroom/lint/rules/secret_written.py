"""API keys and tokens written in files."""

from __future__ import annotations

import re

from legroom.deployments.subjects import StartedServer
from legroom.lint.rule import Context, Findings, checks, finding, flag_value, flag_word
from legroom.masking import SECRET_FLAGS

_NAMES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN", "VLLM_API_KEY", "LEGROOM_GUARD_TOKEN")
_PLACEHOLDER = re.compile(
    r"\$|\{\{|<|^$|\.\.\.|…|(?<![a-z0-9])(x{3,}|your(?![a-z])|your(hf|api|token|key|secret)|token-abc"
    r"|((token|key|secret)[-_]here|change[-_]?me|change[-_]this|example|empty|placeholder|dummy|fake|test([-_]?(key|token))?)(?![a-z0-9]))",
    re.IGNORECASE,
)
"""A value that is clearly no secret."""


@checks(StartedServer, "secret-written")
def secret_written_in_file(server: StartedServer, context: Context) -> Findings:
    """An API key or token written as plain text in a command or environment."""
    for name in _NAMES:
        word = server.env.get(name)
        if word is not None and not _PLACEHOLDER.search(word.text):
            yield finding(
                "secret-written", server.place_of(word), f"{name} is written down here", "take it from a secret store"
            )
    for flag, name in SECRET_FLAGS.items():
        word = flag_word(server, flag)
        value = flag_value(server, word) if word else ""
        if word and value and not value.startswith("--") and not _PLACEHOLDER.search(value):
            message = f"the value of {flag} is written down here, and the process list shows it"
            yield finding(
                "secret-written", server.place_of(word), message, f"set {name} from a secret store", len(flag)
            )
