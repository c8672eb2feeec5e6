"""Variables and flags of vLLM in lines from which no server was read: templates, env files, values, other tools."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from legroom.deployments.file_kinds import Kind
from legroom.errors import LegroomError
from legroom.facts import read_data
from legroom.facts.flags import env_history, flag_name, flags_ever, flags_of, is_read_by_plugin
from legroom.facts.releases import Release, latest
from legroom.facts.releases import release as known_release
from legroom.vllm.flag_problems import explain_unknown

_SETS_VARIABLE = re.compile(
    r"^(?:ENV|export)?[ \t]*(?:-[ \t]*)?(?:name:[ \t]*)?[\"']?((?:VLLM_)?[A-Z][A-Z_]+)[\"']?[ \t]*(?:[:=]|$)",
    re.MULTILINE,
)
_CLIENTS_OWN = re.compile(r"VLLM_(MODEL|HOST|PORT|API_KEY|URL|CONFIG|ROOT_PATH|TASK|REVISION)")
"""Names that a client of the server, or its script, has for itself."""
_WITHOUT_PREFIX = ("MAX_MODEL_LEN", "GPU_MEMORY_UTILIZATION", "TENSOR_PARALLEL_SIZE", "MAX_NUM_SEQS", "QUANTIZATION")
_OF_ENGINE = re.compile(r"VLLM_((EXTRA_|ADDITIONAL_)?ARGS|(USE|ENABLE|DISABLE)_\w+)")
_FLAG = re.compile(r"(?<![\w-])--[a-z]\w*[-_][a-z][\w-]*+(?!=?\*?\))")
"""A flag of several words: `--device` and `--task` are flags of other programs too."""
_PINNED = re.compile(r"vllm[\w./-]*?(?:==|:)v?(0\.\d+\.\d+)", re.IGNORECASE)

_WHOLE = re.compile(r"\bports:|EXPOSE|\s-p \d|\A#!|\[Install\]|repository:|^\w+=", re.MULTILINE)
"""Marks of a file that starts a server, and is no excerpt of one."""
_TOKEN = re.compile(
    r"(?:\bhf|hub|hugging\w*)[-_. ]?(?:api[-_]?)?(?:token|secret|auth|key)|EnvironmentFile|env_?(?:file|from)",
    re.IGNORECASE,
)

Mistake = tuple[int, Mapping[str, str]]
"""An offset, and the rule, message and suggestion of what stands there."""


def mistaken_names(text: str, kind: Kind | None, around: str, judged: frozenset[str]) -> Iterator[Mistake]:
    """Variables that no release reads and no file uses, flags that are gone, and gated models without a token."""
    if kind in ("yaml", "env", "dockerfile", "shell"):
        yield from _unread_variables(text, around)
    releases = [known for version in set(_PINNED.findall(around)) if (known := _release_or_none(version))]
    for word in _FLAG.finditer(text):
        name = flag_name(word[0])
        if (
            name in flags_ever()
            and name not in judged
            and not any(name in flags_of(each) for each in (latest(), *releases))
        ):
            problem = explain_unknown(name, latest())
            if problem.kind in ("removed", "renamed"):
                suggestion = f"write {problem.instead}" if problem.instead else "leave it out"
                yield word.start(), {"rule": "flag-removed", "message": problem.message, "suggestion": suggestion}
    gated = "|".join(f"(?:{name})" for name in read_data("model_access.json")["gated"])
    model = re.search(rf"(?i)(?<![\w./-])(?:{gated})[\w.-]*", text)
    if model is not None and _WHOLE.search(text) and not _TOKEN.search(around):
        message = f"{model[0]} is gated, and no file here gives a token: the Hub answers 401"
        yield model.start(), {"rule": "model-gated", "message": message, "suggestion": "set HF_TOKEN from a Secret"}


def _unread_variables(text: str, around: str) -> Iterator[Mistake]:
    """Variables called like a setting of vLLM that neither vLLM nor a linted file reads."""
    for found in _SETS_VARIABLE.finditer(text):
        name = found[1]
        flag = flag_name(name.removeprefix("VLLM_").lower())
        is_meant = (name in _WITHOUT_PREFIX and "vllm/vllm-openai" in around) or (
            name.startswith("VLLM_") and (flag in flags_of(latest()) or _OF_ENGINE.fullmatch(name))
        )
        history = env_history(name)
        is_ours = _CLIENTS_OWN.fullmatch(name) or is_read_by_plugin(name)
        used = rf"\$[{{(]?{name}\b|[\[(.]\s*[\"']?{name}\b[\"']?\s*[\]),]|\benv\.{name}\b"
        if is_ours or not (is_meant or history) or re.search(used, around):
            continue
        is_read = history and not latest().after(history[-1][1])
        if history is None:
            message, instead = (
                f"vLLM does not read {name}",
                f"write the flag {flag}" if flag in flags_of(latest()) else "",
            )
        elif is_read or _PINNED.search(around):
            continue
        else:
            message, instead = f"vLLM reads {name} from {history[0][0]} to {history[-1][1]} alone", ""
        row = {"rule": "env-unknown", "message": message, "suggestion": instead or "leave it out"}
        yield found.start(1), row


def _release_or_none(version: str) -> Release | None:
    try:
        return known_release(version)
    except LegroomError:
        return None
