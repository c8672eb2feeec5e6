"""Files of variables: `.env` of compose, `--env-file` of docker, EnvironmentFile of systemd."""

from __future__ import annotations

import re

from legroom.deployments.shell.scan import Word
from legroom.deployments.subjects import Found, Started
from legroom.deployments.text import Text
from legroom.vllm.secret_words import is_secret

_LINE = re.compile(r"^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=(?:\"([^\"\n]*)\"|'([^'\n]*)'|([^#\n]*))", re.MULTILINE)


def variables_of(text: str) -> dict[str, Word]:
    """Every variable, but those with secrets: such a file is the place for them."""
    every = {
        found[1]: Word((found[2] or found[3] or found[4] or "").strip(), found.start(1))
        for found in _LINE.finditer(text)
    }
    return {name: word for name, word in every.items() if not is_secret(name, word.text)}


def read_env_file(source: Text) -> Found:
    """The variables as those of a server that is started elsewhere."""
    env = variables_of(source.text)
    if not any(name.startswith(("VLLM_", "PYTORCH_")) for name in env):
        return Found(nothing="it sets no variable of vLLM")
    return Found((Started("config", (), env, source.place, source.place(0)),))
