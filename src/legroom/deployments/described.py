"""A `Deployment` from plain values: words of a command line, JSON of a request, Python arguments."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from legroom.deployments.deployment import Deployment, deployment_from_command, deployment_from_text, thousands_notes
from legroom.errors import LegroomError
from legroom.facts.bundled import find
from legroom.facts.flags import flags_of
from legroom.facts.releases import Release, latest
from legroom.facts.releases import release as known_release
from legroom.isolation import is_local_model
from legroom.masking import is_secret
from legroom.vllm.args import ServeArgs, Usage
from legroom.vllm.command_line import any_release_words
from legroom.vllm.flag_problems import FlagProblem, explain_unknown
from legroom.vllm.flag_values import FIELDS
from legroom.vllm.parse import parse_flags

_SERVER_ENV = re.compile(r"(VLLM|PYTORCH|NCCL)_\w+")
_ARGUMENTS = FIELDS.keys() - {"model"}


def deployment_from_words(
    words: Sequence[str],
    release: Release | None = None,
    *,
    base: Deployment | None = None,
    env: Mapping[str, str] | None = None,
) -> Deployment:
    """The deployment of a command's words and `env`, on top of `base`; LegroomError for a flag that vLLM refuses."""
    used = base.release if base else release or latest()
    parsed = parse_flags(words, used)
    problems = (*(base.problems if base else ()), *parsed.problems)
    refuse_bad_flags(problems, used)
    args = parsed.args
    if base:
        given = {name: value for name in (*_ARGUMENTS, "model") if (value := getattr(args, name)) not in (None, "")}
        args = replace(base.args, others=base.args.others + args.others, **given)
    base = base or Deployment(args, used)
    notes = (*base.notes, *(problem.message for problem in problems), *thousands_notes(words))
    return replace(base, args=replace(args, env={**(env or {}), **args.env}), problems=(), notes=notes)


def refuse_two_models(command: str | None, model: str | None) -> None:
    """Raises LegroomError where a command, which starts one model, is given beside the name of another."""
    served = ""
    with suppress(LegroomError):  # a file, or no command: whoever reads it says so
        served = deployment_from_text(command).args.model if command and model else ""
    if served and model and served.lower() != model.lower() and (find(served) or served) != (find(model) or model):
        raise LegroomError(f"the command serves {served}, and the model is given as {model}", "leave one of them out")


def deployment_from_request(
    model: str | None, command: str | None, flags: Mapping[str, Any] | None, vllm: str | None, *, local_files: bool
) -> Deployment:
    """The server of an HTTP or MCP request: either `model` with `flags`, or `command`; LegroomError for both or
    neither, for flags beside `command`, and for a path unless `local_files`."""
    release = known_release(vllm) if vllm else None
    if (model is None) == (command is None):
        raise LegroomError("say what runs once", "give `model` (with `flags`), or `command`, not both and not neither")
    if model is not None:
        refuse_local_model(model, local_files)
        return deployment_from_words([model, *any_release_words(flags or {})], release)
    if flags:
        raise LegroomError("`flags` belong to `model`", "write them into `command`")
    assert command is not None
    written = deployment_from_words((), base=deployment_from_command(command, release))
    refuse_local_model(written.args.model, local_files)
    return written


def deployment_from_arguments(
    model: str,
    arguments: Mapping[str, Any],
    vllm: str | None = None,
    env: Mapping[str, str] | None = None,
    usage: Usage = "serve",
) -> Deployment:
    """A model with engine arguments by Python name; LegroomError for one that `vllm` lacks. `usage`: for defaults."""
    release = known_release(vllm) if vllm else latest()
    unknown = sorted(set(arguments) - _ARGUMENTS)
    if unknown:
        import difflib

        close = difflib.get_close_matches(unknown[0], _ARGUMENTS, n=3)
        hint = f"did you mean {', '.join(close)}?" if close else "use vLLM's Python names, like max_model_len"
        raise LegroomError(f"{unknown[0]!r} is not an engine argument that memory depends on", hint)
    known = {flag.dest for flag in flags_of(release).values()}
    if "speculative_model" in known:
        known.add("speculative_config")  # separate flags until 0.8.2
    for name in (name for name, value in arguments.items() if value is not None and name not in known):
        problem = explain_unknown(f"--{name.replace('_', '-')}", release)
        raise LegroomError(problem.message, f"instead: {problem.instead}" if problem.instead else "leave it out")
    return Deployment(ServeArgs(model=model, usage=usage, env=dict(env or {}), **arguments), release)


def refuse_local_model(model: str, local_files: bool) -> None:
    """Raise LegroomError where `model` is a path and the caller, on another machine, may not name files here."""
    if not local_files and (is_local_model(model) or model.count("/") > 1):
        raise LegroomError(f"{model!r} is no name of a model", "over HTTP give a Hub id or a bundled name, not a path")


def server_env(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of `env` that a vLLM server reads, without those that hold keys or tokens."""
    return {name: value for name, value in env.items() if _SERVER_ENV.fullmatch(name) and not is_secret(name)}


_LOAD = "size has --rate, --prompt and --answer, simulate --synthetic 'poisson rate=8 prompt=1000 output=300'"
WISHES = {
    "--context": "plan, size and models have --context",
    "--users": "plan, size and models have --users, simulate --synthetic 'users=200 ...'",
    "--concurrency": "plan, size and models have --concurrency",
    **dict.fromkeys(("--rate", "--prompt", "--answer", "--output"), _LOAD),
}
"""legroom's own options for a wish, for those who gave another command's."""


def refuse_bad_flags(problems: Sequence[FlagProblem], release: Release) -> None:
    """Raises LegroomError where one of these problems would keep vLLM from starting; others are ignored."""
    fatal = [problem for problem in problems if problem.stops_vllm]
    if fatal:
        message = "; ".join(problem.message for problem in fatal)
        known = [problem for problem in fatal if problem.instead or problem.flag in WISHES]
        hints = [WISHES.get(each.flag) or f"instead of {each.value or each.flag}: {each.instead}" for each in known]
        raise LegroomError(message, "; ".join(hints) or f"vLLM {release} refuses it: leave it out")
