"""What runs and where, from the words of a command: shared by the commands that take vLLM's flags."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from legroom.errors import LegroomError
from legroom.records import dataclass, field

if TYPE_CHECKING:
    from legroom.deployments.deployment import Deployment
    from legroom.facts.releases import Release
    from legroom.planning.machine import Machine
    from legroom.vllm.args import ServeArgs
    from legroom.vllm.flag_problems import FlagProblem
    from legroom.vllm.parse import ParsedArgs


def split(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """`words` as (legroom's own options, everything else in its order, what follows a lone `--`).

    Only whole names count: vLLM's `--gpu-memory-utilization` is not legroom's `--gpu-memory`.
    """
    before, after = list(words), list[str]()
    if "--" in before:
        cut = before.index("--")
        before, after = before[:cut], before[cut + 1 :]
    own: list[str] = []
    rest: list[str] = []
    position = 0
    while position < len(before):
        word = before[position]
        name, _, value = word.partition("=")
        action = parser._option_string_actions.get(name)
        position += 1
        if action is None:
            rest.append(word)
        elif action.nargs == 0 or value or "=" in word:
            own.append(word)
        else:
            values = action.nargs if isinstance(action.nargs, int) else 1
            own.append(word)
            own += before[position : position + values]
            position += values
    return own, rest, after


_SERVER_ENV = re.compile(r"(VLLM|PYTORCH|NCCL)_\w+")


@dataclass(frozen=True)
class RequestedDeployment:
    """The flags that were meant, for one release."""

    args: ServeArgs
    release: Release
    gpu_count: int | None = None
    """What a manifest or a container line says."""
    gpu_names: tuple[str, ...] = ()
    """The GPUs that a manifest allows."""
    memory_limit_bytes: int | None = None
    """The host memory that a manifest or a container line allows."""
    notes: tuple[str, ...] = ()
    secret_names: tuple[str, ...] = ()
    """Variables with a key or a token that a line or a file gives the server."""
    given_env: Mapping[str, str] = field(default_factory=dict)
    """Every other variable that it gives."""
    release_named: bool = False
    """Whether the call, an image or a file names the release, or it is the newest for want of a name."""


def add_machine_options(where: argparse._ArgumentGroup) -> None:
    """The machine that a server runs on."""
    where.add_argument("--gpu", metavar="NAME", help="a GPU (h100, a100-80gb, rtx4090, l4 ...) or a size (24GiB)")
    where.add_argument("--gpus", metavar="N", help="how many (default: what the parallel sizes need)")
    where.add_argument(
        "--gpu-memory", metavar="SIZE", help="total memory of one GPU as your machine reports it (79.10GiB)"
    )
    where.add_argument("--gpu-used", metavar="SIZE", help="memory of that GPU that other processes use (2GiB)")
    where.add_argument("--host-memory", metavar="SIZE", help="host memory it may use: a container's limit (16GiB)")


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """The ways to say what runs other than MODEL and flags."""
    what = parser.add_argument_group("other ways to say what runs")
    what.add_argument("--command", metavar="LINE", dest="line", help="a vllm serve, python -m or docker run line")
    what.add_argument("--file", metavar="FILE", help="a script, manifest, compose file, Dockerfile, unit ...")
    what.add_argument("--python", metavar="CALL", help="LLM(...) keyword arguments")


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Own options into a namespace; vLLM's words beside them."""
    own, rest, after = split(parser, words)
    args = parser.parse_args(own)
    args.vllm_words, args.command_words = rest, after
    return args


def requested(args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> RequestedDeployment:
    """What runs, from whichever way it was said; flags beside a line or a file are added to it and win. `environ` is
    what the server would inherit (this process's own environment unless it is said)."""
    from legroom.facts.releases import latest
    from legroom.facts.releases import release as known_release
    from legroom.vllm.parse import parse_flags

    asked = known_release(args.vllm) if args.vllm else None
    source = _source(args, asked)
    release = source.release if source else asked or latest()
    flags = parse_flags(args.vllm_words, release)
    problems = (*(source.problems if source else ()), *flags.problems)
    refuse(problems, release)
    server_args = _merged(source.args, flags) if source else flags.args
    if not server_args.model:
        raise LegroomError("which model?", f"{args.prog} MODEL --gpu NAME, or -- vllm serve ..., --command or --file")
    env = {**server_env(os.environ if environ is None else environ), **server_args.env}
    notes = (*(source.notes if source else ()), *(problem.message for problem in problems))
    if source is None:
        named = asked is not None
        return RequestedDeployment(replace(server_args, env=env), release, notes=notes, release_named=named)
    return RequestedDeployment(
        replace(server_args, env=env),
        release,
        gpu_count=source.gpu_count,
        gpu_names=source.gpu_names,
        memory_limit_bytes=source.memory_limit_bytes,
        notes=notes,
        secret_names=source.secret_names,
        given_env=source.given_env,
        release_named=asked is not None or source.release_hint is not None,
    )


def machine(args: argparse.Namespace, meant: RequestedDeployment) -> Machine:
    """Where it runs, from the options."""
    from legroom.planning.machine import Machine

    gpu = args.gpu or (meant.gpu_names[0] if len(meant.gpu_names) == 1 else None)
    if gpu is None:
        named = f"; the file allows {', '.join(meant.gpu_names)}" if meant.gpu_names else ""
        raise LegroomError(
            f"which GPU?{named}",
            "say --gpu h100, a100-80gb, l40s, a10g, l4, rtx4090 ..., or a size such as --gpu 24GiB",
        )
    number = count_of(args.gpus, "--gpus")
    host_memory = getattr(args, "host_memory", None) or (str(meant.memory_limit_bytes or "") or None)
    gpus = meant.gpu_count if number is None else number
    return Machine(gpu, gpus, args.gpu_memory, args.gpu_used, host_memory)


def _source(args: argparse.Namespace, asked: Release | None) -> Deployment | None:
    ways = {"-- ...": args.command_words, "--command": args.line, "--file": args.file, "--python": args.python}
    used = [name for name, value in ways.items() if value]
    if len(used) > 1:
        raise LegroomError(f"{' and '.join(used)} both say what runs", "give one of them")
    config = any(word.partition("=")[0] == "--config" for word in args.vllm_words)
    if not used and not config:
        return None
    import shlex

    from legroom.deployments.deployment import deployment_from_command, deployment_from_file, deployment_from_python

    if args.file:
        return deployment_from_file(args.file, asked, getattr(args, "server", None))
    if args.python:
        return deployment_from_python(args.python, asked, "--python")
    if used:
        return deployment_from_command(args.line or shlex.join(args.command_words), asked)
    words, args.vllm_words = ["vllm", "serve", *args.vllm_words], []
    return deployment_from_command(shlex.join(words), asked)


def _merged(base: ServeArgs, flags: ParsedArgs) -> ServeArgs:
    """The flags of a line or a file with those given beside it on top."""
    given = {
        field.name: value
        for field in fields(flags.args)
        if field.name not in ("usage", "env", "others") and (value := getattr(flags.args, field.name)) not in (None, "")
    }
    return replace(base, others=base.others + flags.args.others, **given)


def with_flags_beside(base: ServeArgs, words: Sequence[str], release: Release) -> ServeArgs:
    """What is known of a server with flags that were given beside it on top."""
    from legroom.vllm.parse import parse_flags

    flags = parse_flags(words, release)
    refuse(flags.problems, release)
    return _merged(base, flags)


def refuse(problems: Sequence[FlagProblem], release: Release) -> None:
    """End with what vLLM would not take."""
    fatal = [problem for problem in problems if problem.stops_vllm]
    if fatal:
        message = "; ".join(problem.message for problem in fatal)
        hints = [f"instead of {problem.flag}: {problem.instead}" for problem in fatal if problem.instead]
        raise LegroomError(message, "; ".join(hints) or f"vLLM {release} stops at it: leave it out")


def count_of(text: str | None, option: str) -> int | None:
    """A whole number of GPUs, or None where the option was not given."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= 4096):
        raise LegroomError(f"{option} {text!r} is not a number of GPUs", f"write it like {option} 2")
    return int(text)


def server_env(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of this process that a vLLM server started from it would read, keys and tokens left out."""
    from legroom.masking import is_secret

    return {name: value for name, value in env.items() if _SERVER_ENV.fullmatch(name) and not is_secret(name)}
