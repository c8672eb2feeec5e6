"""Secrets out of what a diagnosis prints of a log: tokens, keys, passwords, prompts, and links, which are nobody's
advice. In bounded time, whatever the log holds."""

from __future__ import annotations

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


def masked(text: str) -> str:
    """The text with every secret, prompt and link replaced, and what is no text."""
    text = plain(text)
    for pattern in (*_SECRETS, _PROMPT):
        text = compiled(pattern).sub(r"\1" + MASK, text)
    return str(compiled(_LINK).sub("[link]", text))


def plain(text: str) -> str:
    """Text alone: names and command lines of processes may hold any bytes, which neither RE2 nor a terminal takes."""
    return text.encode("utf-8", "replace").decode()


def masked_all(value: Any) -> Any:
    """The same for everything inside a JSON value."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, dict):
        return {key: MASK if _names_secret(str(key)) and inner else masked_all(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked_all(inner) for inner in value]
    return value


def _names_secret(key: str) -> bool:
    lowered = key.lower()
    return any(word in lowered for word in ("api_key", "hf_token", "secret", "password"))
