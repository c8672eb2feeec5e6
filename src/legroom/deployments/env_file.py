"""Files of variables: `.env` of compose, `--env-file` of docker, EnvironmentFile of systemd."""

from __future__ import annotations

import re

from legroom.deployments.shell.scan import Word
from legroom.deployments.subjects import StartedServer
from legroom.deployments.text import Text
from legroom.masking import is_secret

_LINE = re.compile(r"^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=(?:\"([^\"\n]*)\"|'([^'\n]*)'|([^#\n]*))", re.MULTILINE)


def variables_of(text: str) -> dict[str, Word]:
    """Every variable, but those with secrets: such a file is the place for them."""
    every = {
        line[1]: Word((line[2] or line[3] or line[4] or "").strip(), line.start(1)) for line in _LINE.finditer(text)
    }
    return {name: word for name, word in every.items() if not is_secret(name, word.text)}


def env_file_server(source: Text) -> tuple[StartedServer, ...]:
    """The variables as those of a server that is started elsewhere; none where they are not about vLLM."""
    env = variables_of(source.text)
    if not any(name.startswith(("VLLM_", "PYTORCH_")) for name in env):
        return ()
    return (StartedServer("config", (), env, source.place, source.place(0)),)
