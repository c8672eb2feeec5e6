"""Options that describe a server and its machine: shared by the commands that take vLLM's flags."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from legroom.errors import LegroomError

if TYPE_CHECKING:
    from legroom.deployments.deployment import Deployment
    from legroom.facts.releases import Release
    from legroom.planning.machine import Machine


def split_words(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
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
    """The sources of a server other than MODEL and flags."""
    what = parser.add_argument_group("other ways to say what runs")
    what.add_argument("--command", metavar="LINE", dest="line", help="a vllm serve, python -m or docker run line")
    what.add_argument("--file", metavar="FILE", help="a script, manifest, compose file, Dockerfile, unit ...")
    what.add_argument("--python", metavar="CALL", help="LLM(...) keyword arguments")


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Own options into a namespace; vLLM's words beside them."""
    own, rest, after = split_words(parser, words)
    args = parser.parse_args(own)
    args.vllm_words, args.command_words = rest, after
    return args


def described_server(args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> Deployment:
    """The server that the words, the line or the file describe; flags beside a line or a file override it. `environ` is
    what the server would inherit (default: this process's environment)."""
    from legroom.deployments.described import deployment_from_words, server_env
    from legroom.facts.releases import release as known_release

    release = known_release(args.vllm) if args.vllm else None
    base = _base(args, release)
    env = server_env(os.environ if environ is None else environ)
    deployment = deployment_from_words(args.vllm_words, release, base=base, env=env)
    if not deployment.args.model:
        raise LegroomError("which model?", f"{args.prog} MODEL --gpu NAME, or -- vllm serve ..., --command or --file")
    return deployment


def described_machine(args: argparse.Namespace, deployment: Deployment) -> Machine:
    """The machine of the options, completed by what a file says of it."""
    from legroom.planning.machine import Machine, completed_machine

    allowed = deployment.gpu_names
    gpu = args.gpu or (allowed[0] if len(allowed) == 1 else None)
    if gpu is None:
        named = f"; the file allows {', '.join(allowed)}" if allowed else ""
        raise LegroomError(
            f"which GPU?{named}",
            "say --gpu h100, a100-80gb, l40s, a10g, l4, rtx4090 ..., or a size such as --gpu 24GiB",
        )
    count, host_memory = gpu_count(args.gpus, "--gpus"), getattr(args, "host_memory", None)
    return completed_machine(Machine(gpu, count, args.gpu_memory, args.gpu_used, host_memory), deployment)


def _base(args: argparse.Namespace, release: Release | None) -> Deployment | None:
    """The server of a line, a file or Python source; None where MODEL and flags are all there is."""
    sources = {"-- ...": args.command_words, "--command": args.line, "--file": args.file, "--python": args.python}
    used = [name for name, value in sources.items() if value]
    if len(used) > 1:
        raise LegroomError(f"{' and '.join(used)} both say what runs", "give one of them")
    config = any(word.partition("=")[0] == "--config" for word in args.vllm_words)
    if not used and not config:
        return None
    import shlex

    from legroom.deployments.deployment import deployment_from_command, deployment_from_file, deployment_from_python

    if args.file:
        return deployment_from_file(args.file, release, getattr(args, "server", None))
    if args.python:
        return deployment_from_python(args.python, release, "--python")
    if used:
        return deployment_from_command(args.line or shlex.join(args.command_words), release)
    words, args.vllm_words = ["vllm", "serve", *args.vllm_words], []
    return deployment_from_command(shlex.join(words), release)


def gpu_count(text: str | None, option: str) -> int | None:
    """The number of GPUs of an option; None where it was not given."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= 4096):
        raise LegroomError(f"{option} {text!r} is not a number of GPUs", f"write it like {option} 2")
    return int(text)
