"""Secrets out of everything that the journal, a message or a metric shows: credentials in addresses, tokens, keys."""

from __future__ import annotations

import re
from typing import Any

from legroom.vllm.secret_words import CREDENTIALS, is_secret

MASK = "***"
_IN_QUERY = re.compile(r"([?&]([\w.-]+)=)[^&\s#]+")
_SIGNATURES = ("sig", "signature", "x-amz-signature", "x-goog-signature")
_AFTER_NAME = re.compile(
    r"(?i)(?<![A-Za-z0-9])(bearer\s+|(?:api[-_]?key|hf[-_]?token|auth[-_]?token|password|secret)(?:[\s\"']*[=:]\s*|\s+)[\"']?)[^\s\"',;]{3,}"
)
_FLAG = re.compile(r"(--([a-z][\w-]*)(?:=|\s+)[\"']?)(?!-)[^\s\"',;]+", re.IGNORECASE)
# `NAME=value` of a shell. In capitals only: `eos_token=</s>` of a log is none.
_ASSIGNED = re.compile(r"\b(([A-Z][A-Z0-9_]*)=[\"']?)[^\s\"']+")
_KNOWN = re.compile(r"\b(?:hf_|sk-|gh[pousr]_|nvapi-|xox[a-z]-)[A-Za-z0-9_-]{8,}")
# Paths of a webhook that are themselves the secret.
_HOOK_PATH = re.compile(r"(https?://hooks?\.[^\s/]+)/\S+|(https?://[^\s/]+/api/webhooks)/\S+")


def masked(value: Any) -> Any:
    """The same text or JSON value without its secrets."""
    if isinstance(value, str):
        return _masked_text(value)
    if isinstance(value, dict):
        return {key: MASK if _holds_secret(key, inner) else masked(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(inner) for inner in value]
    return value


def _masked_text(text: str) -> str:
    text = CREDENTIALS.sub(rf"\1{MASK}@", text)
    text = _IN_QUERY.sub(_without_value, text)
    text = _HOOK_PATH.sub(lambda match: f"{match.group(1) or match.group(2)}/{MASK}", text)
    text = _ASSIGNED.sub(_without_value, text)
    text = _FLAG.sub(_without_value, text)
    text = _AFTER_NAME.sub(rf"\1{MASK}", text)
    return _KNOWN.sub(MASK, text)


def _without_value(match: re.Match[str]) -> str:
    """`NAME=value` without its value, where the name is a secret's."""
    hidden = is_secret(match[2]) or match[2].lower() in _SIGNATURES
    return f"{match[1]}{MASK}" if hidden else match[0]


def _holds_secret(key: Any, value: Any) -> bool:
    """A key that names a secret. Counts of tokens are numbers, and no secret is."""
    return isinstance(value, str) and value != "" and is_secret(str(key))
