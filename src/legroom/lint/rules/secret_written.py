"""API keys and tokens written in files."""

import re
from dataclasses import replace

from legroom.deployments.subjects import StartedServer
from legroom.facts import pattern
from legroom.lint.rule import Context, Findings, checks, finding, flag_value, flag_word
from legroom.masking import SECRET_FLAGS

_NAMES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN", "VLLM_API_KEY", "LEGROOM_GUARD_TOKEN")
_PLACEHOLDER = pattern("secret_written.placeholder")

_LEFT_OPEN = re.compile(r"<[^>]+>|your.*|changeme", re.IGNORECASE)
_FROM_STORE = "take it from a secret store"


@checks(StartedServer, "secret-written")
def secret_written_in_file(server: StartedServer, context: Context) -> Findings:
    """An API key or token written as plain text in a command or environment."""
    for name in _NAMES:
        word = server.env.get(name)
        if word is not None and server.runs in ("kubernetes", "compose") and _LEFT_OPEN.fullmatch(word.text):
            message = f"{name} waits for a secret in this file"
            found = finding("secret-written", server.place_of(word), message, _FROM_STORE)
            yield replace(found, severity="note")
        elif word is not None and not _PLACEHOLDER.search(word.text):
            yield finding("secret-written", server.place_of(word), f"{name} is written down here", _FROM_STORE)
    for flag, name in SECRET_FLAGS.items():
        word = flag_word(server, flag)
        value = flag_value(server, word) if word else ""
        is_reference = word is not None and "$" in server.words[server.words.index(word) :][:2][-1].raw
        if word and value and not value.startswith("--") and not is_reference and not _PLACEHOLDER.search(value):
            message = f"the value of {flag} is written down here, and the process list shows it"
            suggestion = f"set {name} from a secret store"
            yield finding("secret-written", server.place_of(word), message, suggestion, len(flag))
