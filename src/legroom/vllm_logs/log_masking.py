"""Masks tokens, keys, passwords, prompts and links in printed lines of a log, in linear time."""

import re
from typing import Any

from legroom.masking import TOKENS
from legroom.regex import compiled

MASK = "[masked]"
_SECRETS = (
    r"(?i)((?:api[-_]?key|token|secret|password|passwd|authorization|bearer|access[-_]key)['\"]?\s{0,3}[=:]\s{0,3}['\"]?"
    r"(?:bearer )?)(\[[^\]]{0,200}\]|[^\s'\",;)}\]]{3,})",
    rf"()({TOKENS})",
    r"(--(?:api-key|hf-token)[ =]+)(\S+)",
    r"(\w+://[^\s/:@]{1,80}:)([^\s/@]{1,200})@",
)
_PROMPT = r"(prompt(?:_token_ids)?['\"]?: ?)('(?:[^'\\]|\\.)*'?|\"(?:[^\"\\]|\\.)*\"?|\[[0-9, ]*\]?)"
_LINK = r"https?://[^\s)'\"<>]+"
_SECRET_NAME = re.compile("api_key|hf_token|secret|password", re.IGNORECASE)


def masked_log_text(text: str) -> str:
    """The text of a log with secrets and prompts masked, and links replaced by `[link]`."""
    text = without_surrogates(text)
    for pattern in (*_SECRETS, _PROMPT):
        text = compiled(pattern).sub(r"\1" + MASK, text)
    return str(compiled(_LINK).sub("[link]", text))


def without_surrogates(text: str) -> str:
    """The text with `?` for each lone surrogate (a byte that was no UTF-8), which RE2 and terminals refuse."""
    return text.encode("utf-8", "replace").decode()


def mask_log_values(value: Any) -> Any:
    """A JSON value with every text masked as a log's, and with all values of keys that name a secret masked whole."""
    if isinstance(value, str):
        return masked_log_text(value)
    if isinstance(value, dict):
        secret = {key for key, inner in value.items() if inner and _SECRET_NAME.search(str(key))}
        return {key: MASK if key in secret else mask_log_values(inner) for key, inner in value.items()}
    return [mask_log_values(inner) for inner in value] if isinstance(value, (list, tuple)) else value
