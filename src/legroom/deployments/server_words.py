"""The words of a command that start vLLM, and its variables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
"""`NAME=value` before a command."""
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^{}]*))?\}|\((\w+)\)|(\w+))")
SHELLS = ("sh", "bash", "zsh", "dash", "ash")
CONTAINER_TOOLS = ("docker", "podman", "nerdctl")
_CHOOSES_ENGINE = ("--runtime", "--engine", "--backend")
"""Options of other programs (`ramalama --runtime vllm serve`), whose arguments follow."""
_API_SERVER_FILE = "entrypoints/openai/api_server.py"
API_SERVERS = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")


def assignments(env: Mapping[str, str]) -> list[str]:
    """Variables as `NAME=value`."""
    return [f"{name}={value}" for name, value in env.items()]


def server_start(words: Sequence[str]) -> int | None:
    """The index of `vllm serve`, `python -m ...api_server`, or a container run in a command."""
    for i, word in enumerate(words):
        following = words[i + 1] if i + 1 < len(words) else ""
        if basename(word) == "vllm" and following == "serve" and not (i and words[i - 1] in _CHOOSES_ENGINE):
            return i
        if word in API_SERVERS or (word.endswith(_API_SERVER_FILE) and _is_run(words[:i])):
            return _interpreter(words, i - 1) if i and words[i - 1] == "-m" else i
        if basename(word) in CONTAINER_TOOLS and following in ("run", "container", "create"):
            return i
    return None


def _is_run(before: Sequence[str]) -> bool:
    """Whether a Python file is run rather than copied."""
    return not before or any(basename(word).startswith("python") for word in before)


def _interpreter(words: Sequence[str], at: int) -> int:
    """The index of the interpreter whose option is at `at`."""
    while at and words[at].startswith("-"):
        at -= 1
    return at


def basename(word: str) -> str:
    return word.rpartition("/")[2]


def visible_gpus(env: Mapping[str, str]) -> int | None:
    """The number of GPUs that the environment leaves visible; None where it does not limit them."""
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        value = env.get(name, "").strip()
        if value and value not in ("all", "none", "void", "-1") and "$" not in value:
            return len([part for part in value.split(",") if part.strip()])
    return None


def has_variable(word: str) -> bool:
    """Whether a word contains a variable such as `$(LWS_WORKER_INDEX)`."""
    return _VARIABLE.search(word) is not None


def expand(word: str, env: Mapping[str, str]) -> str:
    """A word with `$NAME`, `${NAME:-default}` and `$(NAME)` replaced where the value is known."""

    def value(variable: re.Match[str]) -> str:
        name = variable[1] or variable[3] or variable[4]
        if name in env:
            return env[name]
        return variable[2] or variable[0]

    return _VARIABLE.sub(value, word) if "$" in word else word
