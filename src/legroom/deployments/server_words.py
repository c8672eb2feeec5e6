"""The words of a command that start vLLM or a launcher of its engine, and the variables in them."""

import re
from collections.abc import Mapping, Sequence

from legroom.deployments.shell.lexer import Word, serve_words
from legroom.facts import pattern
from legroom.facts.flags import flag_name, flags_ever

ASSIGNMENT = pattern("server_words.assignment")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:(:?)-([^{}]*))?\}|\((\w+)\)|(\w+))")
SHELLS = ("sh", "bash", "zsh", "dash", "ash")
CONTAINER_TOOLS = ("docker", "podman", "nerdctl")
_CHOOSES_ENGINE = ("--runtime", "--engine", "--backend")
"""Options of other programs (`ramalama --runtime vllm serve`), whose arguments follow."""
_API_SERVER_FILE = "entrypoints/openai/api_server.py"
_ONLY_VLLMS = pattern("linted_parts.vllm_flag")  # Flags that no other program has.
API_SERVERS = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")

DYNAMO = "dynamo.vllm"
"""Dynamo's worker; its other modules start no engine."""
KSERVE = "KServe's Hugging Face runtime"
"""It contains its own release of vLLM."""


def assignments(env: Mapping[str, str]) -> list[str]:
    """Environment variables as `NAME=value` words."""
    return [f"{name}={value}" for name, value in env.items()]


def server_start(words: Sequence[str]) -> int | None:
    """The index of `vllm serve`, `python -m ...api_server` or `docker run` in a command; None without one."""
    for i, word in enumerate(words):
        following = words[i + 1] if i + 1 < len(words) else ""
        if basename(word) == "vllm" and following == "serve" and not (i and words[i - 1] in _CHOOSES_ENGINE):
            return i
        is_run = i == 0 or any(basename(before).startswith("python") for before in words[:i])
        if word in API_SERVERS or (word.endswith(_API_SERVER_FILE) and is_run):
            at = i - 1 if i and words[i - 1] == "-m" else i
            while 0 < at < i and words[at].startswith("-"):  # back to the Python interpreter
                at -= 1
            return at
        if basename(word) in CONTAINER_TOOLS and following in ("run", "container", "create"):
            return i
    return None


def basename(word: str) -> str:
    """The last part of a path, as of a program."""
    return word.rpartition("/")[2]


def visible_gpus(env: Mapping[str, str]) -> int | None:
    """The number of GPUs that the environment lists as visible; None where it lists none, or all, or by a variable."""
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        value = env.get(name, "").strip()
        if value and value not in ("all", "none", "void", "-1") and "$" not in value:
            return len([part for part in value.split(",") if part.strip()])
    return None


def has_variable(word: str) -> bool:
    """Whether a word contains a variable such as `$(LWS_WORKER_INDEX)`."""
    return _VARIABLE.search(word) is not None


def expand_variables(word: str, env: Mapping[str, str]) -> str:
    """`word` with `$NAME` and `$(NAME)` replaced if `env` has them, `${NAME:-default}` also if it has not."""

    def known_value(variable: re.Match[str]) -> str:
        """What replaces the variable: its value, its default, or itself where it is not known."""
        given = env.get(variable[1] or variable[4] or variable[5])
        if given is None or (variable[2] and not given):
            return str(variable[3] or (variable[0] if given is None else given))
        return given

    return _VARIABLE.sub(known_value, word) if "$" in word else word


def dynamo_as_serve(words: tuple[Word, ...]) -> tuple[Word, ...]:
    """`python -m dynamo.vllm ...` as a `vllm serve` command; empty for other commands."""
    for i, word in enumerate(words[1:], 1):
        if word.text == DYNAMO and words[i - 1].text == "-m":
            return (*serve_words(word.offset), *vllm_flags(words[i + 1 :]))
    return ()


def wrapped_as_serve(words: tuple[Word, ...]) -> tuple[Word, ...]:
    """`PROGRAM --model org/m --max-model-len 8192 ...`, which passes vLLM's flags on, as `vllm serve`; else empty."""
    names = {word.text.partition("=")[0] for word in words}
    if "--model" not in names or words[0].text.startswith("-") or not any(map(_ONLY_VLLMS.fullmatch, names)):
        return ()
    first = next(i for i, word in enumerate(words) if word.text.startswith("--"))
    return (*serve_words(words[0].offset), *vllm_flags(words[first:]))


def vllm_flags(given: tuple[Word, ...]) -> tuple[Word, ...]:
    """The `given` words without flags that no vLLM release has, and without their values."""
    kept: list[Word] = []
    keeps = True
    for word in given:
        if word.text.startswith("-"):
            keeps = _is_vllm_flag(word.text.partition("=")[0])
        if keeps:
            kept.append(word)
    return tuple(kept)


def _is_vllm_flag(name: str) -> bool:
    """Whether any known vLLM release has this flag, also in its --no- form or with a dotted path after it."""
    table = flags_ever()
    if not name.startswith("--"):
        return name in table
    plain = flag_name(name.partition(".")[0])
    return plain in table or (plain.startswith("--no-") and "--" + plain[5:] in table)
