"""Masking of secrets in everything that legroom prints or stores. `vllm.command_line.without_secrets` masks command
lines by their flags; `vllm_logs.log_masking` masks logs in linear time."""

import re
from typing import Any

SECRET_FLAGS = {"--api-key": "VLLM_API_KEY", "--hf-token": "HF_TOKEN"}
"""Flags whose value is a secret, and the equivalent environment variable."""
CREDENTIALS = re.compile(r"(\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/@]+@")
"""User and password in an address."""
TOKENS = (
    r"\b(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|gh[pousr]_[A-Za-z0-9]{8,}|AKIA[0-9A-Z]{12,}|nvapi-[A-Za-z0-9_-]{8,}"
    r"|xox[a-z]-[A-Za-z0-9_-]{8,}|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_.-]{10,}|AIza[0-9A-Za-z_-]{20,})"
)
"""Keys with a known prefix."""

PLACEHOLDER, HIDDEN = "YOUR_SECRET", "***"
"""The replacement of a secret inside a flag's JSON, and in a text or an address."""
_SECRET_NAME = re.compile(
    r"(?i)(?:KEYS?|TOKEN|[_-]PASS)$|SECRET|PASSW|AUTHORIZATION|COOKIE|(?:^|[_-])(?:KEY|TOKEN)[_-](?!THRESHOLD)"
)
"""Matches neither TOKENS nor TOKENIZER."""
_INNER_KEY = re.compile(r"(?i)(?:api|access|auth|private|account|hf).?(?:key|token)|secret|passw|authori|^key$|^token$")
"""Keys inside a flag's JSON: stricter than variables, since an `eos_token` there is text."""
_INNER = re.compile(r'("([^"\\]+)"\s*:\s*")(?:[^"\\]|\\.)+"')
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=.+", re.DOTALL)
# Compiled on first use (`re` caches them), so that a plan does not wait for them.
_IN_QUERY = r"([?&]([\w.-]+)=)[^&\s#]+"
_SIGNATURES = ("sig", "signature", "x-amz-signature", "x-goog-signature")
_AFTER_NAME = (
    r"(?i)(?<![A-Za-z0-9])(bearer\s+|(?:api[-_]?key|hf[-_]?token|auth[-_]?token|password|secret)"
    r"(?:[\s\"']*[=:]\s*|\s+)[\"']?)[^\s\"',;]{3,}"
)
_FLAG = r"(?i)(--([a-z][\w-]*)(?:=|\s+)[\"']?)(?!-)[^\s\"',;]+"
# Shell assignments, in capitals only: `eos_token=</s>` in a log is no secret.
_ASSIGNED = r"\b(([A-Z][A-Z0-9_]*)=[\"']?)[^\s\"']+"
# Webhook URLs, whose path is the secret.
_HOOK_PATH = r"(https?://hooks?\.[^\s/]+)/\S+|(https?://[^\s/]+/api/webhooks)/\S+"


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable, flag or JSON key may hold a secret, by its name or by credentials in a URL in `value`."""
    return bool(_SECRET_NAME.search(name) or CREDENTIALS.search(value))


def masked(value: Any) -> Any:
    """The text or JSON value with all its secrets replaced by a placeholder."""
    if isinstance(value, str):
        text = CREDENTIALS.sub(rf"\1{HIDDEN}@", value)
        text = re.sub(_IN_QUERY, _without_value, text)
        text = re.sub(_HOOK_PATH, lambda match: f"{match.group(1) or match.group(2)}/{HIDDEN}", text)
        text = re.sub(_ASSIGNED, _without_value, text)
        text = re.sub(_FLAG, _without_value, text)
        text = re.sub(_AFTER_NAME, rf"\1{HIDDEN}", text)
        return re.sub(TOKENS, HIDDEN, text)
    if isinstance(value, dict):
        return {
            key: HIDDEN if isinstance(inner, str) and inner and is_secret(str(key)) else masked(inner)
            for key, inner in value.items()
        }
    return [masked(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _without_value(match: re.Match[str]) -> str:
    """A matched `name=value`, with the value masked if the name is that of a secret."""
    return f"{match[1]}{HIDDEN}" if is_secret(match[2]) or match[2].lower() in _SIGNATURES else match[0]


def is_secret_json_key(name: str) -> bool:
    """Whether a key with this name inside a flag's JSON holds a secret."""
    return bool(_INNER_KEY.search(name))


def shown_word(word: str) -> str:
    """A command-line word with secrets masked: `NAME=value`, credentials in a URL, and keys in JSON."""
    assignment = _ASSIGNMENT.fullmatch(word)
    if assignment and is_secret(assignment[1]):
        return f"{assignment[1]}=YOUR_{assignment[1]}"
    shown = CREDENTIALS.sub(rf"\1{HIDDEN}@", word)
    return _INNER.sub(lambda at: f'{at[1]}{PLACEHOLDER}"' if is_secret_json_key(at[2]) else at[0], shown)
