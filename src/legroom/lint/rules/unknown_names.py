"""Modules and variables that this release does not have, and flags in a place that lint does not understand."""

import difflib
import re
from dataclasses import replace

from legroom.deployments.file_kinds import kind_of
from legroom.deployments.server_words import API_SERVERS, expand_variables, server_start
from legroom.deployments.subjects import InvokedCommand, StartedServer
from legroom.drawing.text import plural
from legroom.facts import pattern, read_data
from legroom.facts.flags import env_history, env_names, flags_ever, flags_of, is_read_by_plugin
from legroom.facts.model_sources import is_hub_id
from legroom.lint.linted_parts import DoubtfulLine, UnclaimedFlags
from legroom.lint.rule import Context, Findings, checks, finding, flag_word, has_same_words, similarity
from legroom.vllm.command_line import plain_name

_VLLM = pattern("unknown_names.vllm")


@checks(InvokedCommand, "module-unknown")
def unknown_python_module(command: InvokedCommand, context: Context) -> Findings:
    """A `python -m` of a vLLM API server module that does not exist."""
    for word in command.values_of("-m"):
        module = word.text.lower()
        is_server = "api_server" in module or similarity(module.rpartition(".")[2], "api_server") > 0.8
        if not _VLLM.match(module) or "entrypoint" not in module or not is_server:
            continue
        if word.text == API_SERVERS[1]:
            message = f"{word.text} is vLLM's demonstration: it has neither /v1 nor /metrics"
            place, suggestion = command.locate(word.offset), f"write {API_SERVERS[0]}, or vllm serve"
            yield finding("module-unknown", place, message, suggestion, len(word.text), is_certain=False)
        if word.text not in API_SERVERS:
            near = difflib.get_close_matches(module, API_SERVERS, n=1, cutoff=0.6)
            suggestion, message = f"write {near[0]}" if near else "", f"there is no module {word.text}"
            # With another word it may be a fork's module, like Habana's multi_model_api_server.
            is_typo = bool(near) and has_same_words(module, near[0], ".") and similarity(module, near[0]) >= 0.92
            place, length = command.locate(word.offset), len(word.text)
            yield finding("module-unknown", place, message, suggestion, length, is_certain=is_typo)


_BEFORE_PROGRAM = re.compile(r"(.*/)?(exec|nohup|sudo|env|time|srun|setsid|uv|uvx|poetry|run)|-.*|\w+=.*")
"""Words that may stand before a program which they run."""


@checks(InvokedCommand, "module-unknown")
def unknown_subcommand(command: InvokedCommand, context: Context) -> Findings:
    """`vllm server MODEL`, `vllm MODEL` or `vllm --model MODEL`: the program has no such command."""
    texts = [word.text for word in command.words]
    at = next((i for i, text in enumerate(texts) if not _BEFORE_PROGRAM.fullmatch(text)), len(texts))
    program, given, following = (*texts[at:], "", "", "")[:3]
    is_one = given in read_data("server_image.json")["commands"] or server_start(texts) is not None
    if program.rpartition("/")[2] != "vllm" or is_one:
        return
    has_flags = not flags_ever().keys().isdisjoint(map(plain_name, texts[at + 1 :]))
    is_mistyped = similarity(given, "serve") > 0.6 or given == "run"
    if is_mistyped and (has_flags or is_hub_id(following)):
        message = f"vllm has no command {given}: it ends with a usage error"
    elif is_hub_id(given) or (given.startswith(("-", "/")) and has_flags):
        message = "vllm without serve ends with a usage error"
    else:
        return
    place = command.locate(command.words[at + 1].offset)
    yield finding("module-unknown", place, message, "write vllm serve MODEL", len(given))


_FLAG_INSTEAD = {"VLLM_ATTENTION_BACKEND": "--attention-backend"}


@checks(StartedServer, "env-meaning")
def misunderstood_variables(server: StartedServer, context: Context) -> Findings:
    """Variables in `variable_meanings.json`, of vLLM and its libraries, that cost more than they give or do nothing."""
    for row in read_data("variable_meanings.json")["rows"] if server.runs != "config" else ():
        if (word := server.env.get(row["name"])) is None:
            continue
        value, flag = expand_variables(word.text, {}), row.get("unless_flag", "")
        is_met = (flag and flag_word(server, flag)) or row.get("unless") in server.env
        is_read = not row["name"].startswith("VLLM_") or row["name"] in env_names(context.release_of(server))
        if not re.fullmatch(row.get("value", ".*"), value) or is_met or not is_read:
            continue
        is_built = kind_of(server.place_of(word).path, "") == "dockerfile"
        is_built = is_built or server.runs not in ("docker", "compose", "kubernetes")
        if server.runs in row.get("runs", (server.runs,)) and not (row.get("at_run") and is_built):
            found = finding("env-meaning", server.place_of(word), row["message"], row.get("suggestion", "leave it out"))
            yield replace(found, severity=row.get("severity", "note"), length=len(row["name"]))


@checks(StartedServer, "env-unknown")
def unknown_variables(server: StartedServer, context: Context) -> Findings:
    """VLLM_* variables of another release, and misspelled ones."""
    release = context.release_of(server)
    for name, word in server.env.items():
        if not name.startswith("VLLM_") or is_read_by_plugin(name) or word.text.startswith(("http://", "https://")):
            continue  # an address is a client's, also where a client shares the container
        history = env_history(name)
        if history is None:
            near = difflib.get_close_matches(name, env_names(release), n=1, cutoff=0.88)
            is_typo = bool(near) and _is_typo(name, near[0])
            # Env files set variables of other programs too. vLLM itself warns of every such name (0.18.0).
            # Called like a flag it is a mistake in every build; an image's own entry point may read it.
            flag = "--" + name.removeprefix("VLLM_").lower().replace("_", "-")
            is_flag = flag in flags_of(release) and len({word.offset for word in server.words[:2]}) == 2
            is_used = any(f"${name}" in word.raw.replace("{", "") for word in server.words)
            is_given_to_vllm = bool(server.words) and server.runs != "config" and not is_used
            is_given_to_vllm = is_given_to_vllm and (context.runs_vllms_own(server) or is_flag)
            if is_typo or (is_given_to_vllm and name not in context.used_variables):
                instead = near[0] if is_typo else f"the flag {flag}" if is_flag else ""
                suggestion = f"write {instead}" if instead else "leave it out"
                message = f"no vLLM release reads {name}"
                found = finding("env-unknown", server.place_of(word), message, suggestion, len(name))
                # An image may hold other programs, and beside its flag it changes nothing.
                is_harmless = server.read_as == "a Dockerfile" and not is_typo and not is_flag
                is_harmless = is_harmless or any(plain_name(each.text) == flag for each in server.words)
                yield replace(found, severity="note") if is_harmless else found
            continue
        is_read = any(not release.before(first) and not release.after(last) for first, last in history)
        named = context.may_run(server)
        is_read = is_read or any(each.within(*span) for each in named for span in history)
        if is_read or context.has_unknown_release(server) or (server.is_release_assumed and not server.named_release):
            continue  # an image that is built here may hold any release
        message = f"vLLM reads {name} from {history[0][0]} to {history[-1][1]}, {release} does not"
        message += "" if context.is_release_told(server) else f" (no file names the release, and {release} is assumed)"
        flag = _FLAG_INSTEAD.get(name, "")
        suggestion = f"write {flag} {word.text}" if flag in flags_of(release) else "leave it out"
        found = finding("env-unknown", server.place_of(word), message, suggestion, len(name))
        yield found if context.is_release_certain(server) else replace(found, severity="note")


@checks(StartedServer, "env-meaning")
def variables_not_exported(server: StartedServer, context: Context) -> Findings:
    """Variables of vLLM and its libraries that a script sets for itself alone."""
    for name, word in server.not_exported.items():
        if name not in server.env and name not in context.used_variables and server.runs != "docker":
            message = f"{name} is not exported: vLLM does not get it"
            yield finding("env-meaning", server.locate(word.offset), message, f"write export {name}=...", len(name))


def _is_typo(name: str, candidate: str) -> bool:
    """Whether two variables have the same words, or each pair is 60 % alike: LOG and LOGGING, not PATH and ROOT."""
    words, candidate_words = name.split("_"), candidate.split("_")
    if len(words) != len(candidate_words):
        return "".join(words) == "".join(candidate_words)
    return all(difflib.SequenceMatcher(None, *pair).ratio() >= 0.6 for pair in zip(words, candidate_words, strict=True))


@checks(UnclaimedFlags, "not-understood")
def flags_not_understood(flags: UnclaimedFlags, context: Context) -> Findings:
    """vLLM flags in a file that belong to no server which could be read."""
    message = f"{flags.flag} is vLLM's, and what it is given to was not understood ({plural(flags.lines, 'line')})"
    suggestion = "lint the command itself, or what the tool makes of this file"
    yield finding("not-understood", flags.place, message, suggestion)


_LINE_RULES = dict.fromkeys(row["rule"] for row in read_data("line_mistakes.json")["rows"])


@checks(DoubtfulLine, "flag-removed", "env-unknown", "model-gated", "release-unsafe", *_LINE_RULES)
def lines_that_are_mistakes(line: DoubtfulLine, context: Context) -> Findings:
    """Notes about images, keys and settings outside of any command that starts a server."""
    if line.row["rule"] not in ("image-moving", "release-unsafe") or not context.is_release_given:
        found = finding(line.row["rule"], line.place, line.row["message"], line.row["suggestion"])
        yield replace(found, severity=line.row.get("severity", "note"))
