"""Modules and variables that this release does not have, and flags in a place that lint does not understand."""

from __future__ import annotations

import difflib
import re
from dataclasses import replace

from legroom.deployments.server_words import API_SERVERS
from legroom.deployments.subjects import InvokedCommand, StartedServer
from legroom.drawing.text import plural
from legroom.facts.flags import env_history, env_names, flags_of, is_read_by_plugin
from legroom.lint.linted_parts import UnclaimedFlags
from legroom.lint.rule import Context, Findings, Rule, checks, finding, has_same_words, similarity
from legroom.vllm.args import ServeArgs, other_values, served_port

_WHY_MODULE = "Python's names are case-sensitive: the command ends with 'No module named ...'."
MODULE = Rule("module-unknown", "error", "A module of vLLM that does not exist", _WHY_MODULE)
_VLLM = re.compile(r"v+l+m+\.", re.IGNORECASE)
"""vLLM in any spelling; a plugin such as vllm_gaudi has its own modules."""


@checks(InvokedCommand, MODULE)
def unknown_python_module(command: InvokedCommand, context: Context) -> Findings:
    """A `python -m` of a vLLM API server module that does not exist."""
    for word in command.values_of("-m"):
        module = word.text.lower()
        if not _VLLM.match(module) or "entrypoints" not in module or "api_server" not in module:
            continue
        if word.text == API_SERVERS[1]:
            message = f"{word.text} is vLLM's demonstration: it has neither /v1 nor /metrics"
            place, suggestion = command.locate(word.offset), f"write {API_SERVERS[0]}, or vllm serve"
            yield finding(MODULE, place, message, suggestion, len(word.text), is_certain=False)
        if word.text not in API_SERVERS:
            near = difflib.get_close_matches(module, API_SERVERS, n=1, cutoff=0.6)
            suggestion = f"write {near[0]}" if near else ""
            message = f"there is no module {word.text}"
            # With another word it may be a fork's module, like Habana's multi_model_api_server.
            is_typo = bool(near) and has_same_words(module, near[0], ".") and similarity(module, near[0]) >= 0.92
            place, length = command.locate(word.offset), len(word.text)
            yield finding(MODULE, place, message, suggestion, length, is_certain=is_typo)


_WHY_VARIABLE = "vLLM starts as if it were not set: what it was meant to do does not happen (LR907)."
VARIABLE = Rule("env-unknown", "warning", "A variable that this release does not read", _WHY_VARIABLE)
_FLAG_INSTEAD = {"VLLM_ATTENTION_BACKEND": "--attention-backend"}


_WHY_MEANT = "vLLM reads it for something else than its name suggests, or does not get it at all."
MEANT = Rule("env-meaning", "warning", "A variable that does not do what it is set for", _WHY_MEANT)


def _meant_otherwise(name: str, value: str, args: ServeArgs) -> str:
    """What vLLM does with a variable that was meant for something else; empty for other variables."""
    if name == "VLLM_PORT" and value == served_port(args):
        return f"VLLM_PORT={value} is the first port of vLLM's own processes, and the API listens there already"
    if name == "VLLM_ALLOW_LONG_MAX_MODEL_LEN" and value in ("1", "true", "True"):
        return "it lifts the check of --max-model-len: past the model's own length answers are wrong, or CUDA fails"
    if name == "VLLM_SERVER_DEV_MODE" and value == "1" and other_values(args, "--api-key") is None:
        return "it opens /sleep, /collective_rpc and the like to whoever reaches the port"
    return ""


@checks(StartedServer, VARIABLE, MEANT)
def unknown_variables(server: StartedServer, context: Context) -> Findings:
    """VLLM_* variables of another release, and misspelled ones."""
    release = context.release_of(server)
    for name, word in server.env.items():
        if not name.startswith("VLLM_") or is_read_by_plugin(name):
            continue
        if server.runs != "config" and (meant := _meant_otherwise(name, word.text, context.parsed_args(server).args)):
            found = finding(MEANT, server.place_of(word), meant, "leave it out", len(name))
            yield found if name == "VLLM_PORT" else replace(found, severity="note")
        history = env_history(name)
        if history is None:
            near = difflib.get_close_matches(name, env_names(release), n=1, cutoff=0.88)
            is_typo = bool(near) and _is_typo(name, near[0])
            # Env files set variables of other programs too. vLLM itself warns of every such name (0.18.0).
            # Called like a flag it is a mistake in every build; an image's own entry point may read it.
            flag = "--" + name.removeprefix("VLLM_").lower().replace("_", "-")
            is_flag = flag in flags_of(release) and len({word.offset for word in server.words[:2]}) == 2
            is_given_to_vllm = bool(server.words) and server.runs != "config"
            is_given_to_vllm = is_given_to_vllm and (context.runs_vllms_own(server) or is_flag)
            if is_typo or (is_given_to_vllm and name not in context.used_variables):
                instead = near[0] if is_typo else f"the flag {flag}" if is_flag else ""
                suggestion = f"write {instead}" if instead else "leave it out"
                yield finding(VARIABLE, server.place_of(word), f"no vLLM release reads {name}", suggestion, len(name))
            continue
        is_read = any(not release.before(first) and not release.after(last) for first, last in history)
        if is_read or (server.is_release_assumed and not server.named_release):
            continue  # an image that is built here may hold any release
        message = f"vLLM reads {name} from {history[0][0]} to {history[-1][1]}, {release} does not"
        flag = _FLAG_INSTEAD.get(name, "")
        suggestion = f"write {flag} {word.text}" if flag in flags_of(release) else "leave it out"
        yield finding(VARIABLE, server.place_of(word), message, suggestion, len(name))


@checks(StartedServer, MEANT)
def variables_not_exported(server: StartedServer, context: Context) -> Findings:
    """Variables of vLLM and its libraries that a script sets for itself alone."""
    for name, word in server.not_exported.items():
        if name not in server.env and name not in context.used_variables and server.runs != "docker":
            message = f"{name} is not exported: vLLM does not get it"
            yield finding(MEANT, server.locate(word.offset), message, f"write export {name}=...", len(name))


def _is_typo(name: str, candidate: str) -> bool:
    """Whether every word of a name is at least 60 % right: LOG for LOGGING, but not PATH for ROOT."""
    words, candidate_words = name.split("_"), candidate.split("_")
    if len(words) != len(candidate_words):
        return "".join(words) == "".join(candidate_words)
    return all(difflib.SequenceMatcher(None, *pair).ratio() >= 0.6 for pair in zip(words, candidate_words, strict=True))


_WHY_NOT_UNDERSTOOD = (
    "They stand in a form that lint does not read, so nothing is said of them: neither that they are right nor that "
    "they are wrong."
)
NOT_UNDERSTOOD = Rule("not-understood", "note", "Flags of vLLM that were not judged", _WHY_NOT_UNDERSTOOD)


@checks(UnclaimedFlags, NOT_UNDERSTOOD)
def flags_not_understood(flags: UnclaimedFlags, context: Context) -> Findings:
    """vLLM flags in a file that belong to no server which could be read."""
    message = f"{flags.flag} is vLLM's, and what it is given to was not understood ({plural(flags.lines, 'line')})"
    yield finding(NOT_UNDERSTOOD, flags.place, message, "lint the command itself, or what the tool makes of this file")
