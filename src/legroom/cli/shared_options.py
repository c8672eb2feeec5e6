"""Options that several commands share: the server, its machine, the latency goals and the workers of a sweep."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from legroom.cli.output import note
from legroom.deployments import deployment as deployments
from legroom.deployments.described import WISHES, deployment_from_words, server_env
from legroom.errors import LegroomError
from legroom.facts.flags import advice, all_flag_names
from legroom.facts.releases import Release
from legroom.facts.releases import release as known_release
from legroom.units import parse_whole

if TYPE_CHECKING:
    from legroom.planning.machine import Machine
    from legroom.sweeps import SweepExecutor


def split_words(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """(options of the parser with their values, other words, words after `--`); LegroomError for unknown options."""
    # Abbreviations are not matched: vLLM's `--gpu-memory-utilization` is not legroom's `--gpu-memory`.
    cut = words.index("--") if "--" in words else len(words)
    before, after = list(words[:cut]), list(words[cut + 1 :])
    own: list[str] = []
    rest: list[str] = []
    given: set[str] = set()
    position = 0
    while position < len(before):
        word = before[position]
        name, has_value, _ = word.partition("=")
        action = parser._option_string_actions.get(name)
        position += 1
        if action is None:
            _refuse_misspelt_option(parser, name)
            rest.append(word)
            continue
        if isinstance(action, argparse._StoreAction) and name in given:
            raise LegroomError(f"{name} is given twice", "leave one of them out")
        given.add(name)
        own.append(word)
        if action.nargs != 0 and not has_value:
            values = action.nargs if isinstance(action.nargs, int) else 1
            own += before[position : position + values]
            position += values
    if wishes := [word for word in rest if word in WISHES]:  # options that only another command of legroom has
        hints = dict.fromkeys(WISHES[word] for word in wishes)
        raise LegroomError(f"this command has no {' or '.join(wishes)}", "; ".join(hints))
    return own, rest, after


def _refuse_misspelt_option(parser: argparse.ArgumentParser, name: str) -> None:
    """Raises LegroomError for an option that no vLLM release has, unless its nearest name is a vLLM flag's."""
    flags = tuple(all_flag_names())
    whole = name.partition(".")[0].replace("_", "-").replace("--no-", "--", 1)
    if not name.startswith("--") or advice(name) or name in WISHES or any(flag.startswith(whole) for flag in flags):
        return
    from difflib import get_close_matches  # only a misspelt option needs it

    own = [option[2:] for option in parser._option_string_actions if option.startswith("--")]
    names = [*own, *(flag[2:] for flag in (*flags, *WISHES))]
    alike = [option for option in own if name.endswith(f"-{option}") or option.startswith(name[2:])]
    near = get_close_matches(name[2:], names, 1, 0.75) or alike or get_close_matches(name[2:], names, 1, 0.7)
    if not near or near[0] in own:
        hint = f"instead of {name}: --{near[0]}" if near else f"`{parser.prog} --help` lists the options"
        raise LegroomError(f"neither legroom nor a vLLM release has {name}", hint)


def add_machine_options(where: argparse._ArgumentGroup) -> None:
    """Adds --gpu, --gpus, --gpu-memory, --gpu-used and --host-memory."""
    where.add_argument("--gpu", metavar="NAME", help="a GPU (h100, a100-80gb, rtx4090, l4 ...) or a size (24GiB)")
    where.add_argument("--gpus", metavar="N", help="how many (default: what the parallel sizes need)")
    where.add_argument("--gpu-memory", metavar="SIZE", help="memory of one GPU as your machine reports it (79.10GiB)")
    where.add_argument("--gpu-used", metavar="SIZE", help="memory of that GPU that other processes use (2GiB)")
    where.add_argument("--host-memory", metavar="SIZE", help="host memory it may use: a container's limit (16GiB)")


def add_policy_option(group: argparse._ArgumentGroup, default: str) -> None:
    """Adds --policy, with this default: how much of the error band a search keeps free."""
    about = f"how much of the error bands to keep free: safe keeps all of them (default: {default})"
    group.add_argument("--policy", choices=("safe", "balanced", "tight"), default=default, help=about)


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Adds --command, --file and --python: ways to describe a server other than MODEL and flags."""
    what = parser.add_argument_group("other ways to say what runs")
    what.add_argument("--command", metavar="LINE", dest="line", help="a vllm serve, python -m or docker run line")
    what.add_argument("--file", metavar="FILE", help="a script, manifest, compose file, Dockerfile, unit ...")
    what.add_argument("--python", metavar="CALL", help="LLM(...) keyword arguments")


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """The namespace of the command's own options, with `vllm_words` and `command_words`."""
    own, rest, after = split_words(parser, words)
    args = parser.parse_args(own)
    args.vllm_words, args.command_words = rest, after
    return args


def described_server(args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> deployments.Deployment:
    """The server that the options describe; `environ`: the variables it inherits, by default this process's."""
    release = known_release(args.vllm) if args.vllm else None
    base = _described_base(args, release)
    env = server_env(os.environ if environ is None else environ)
    deployment = deployment_from_words(args.vllm_words, release, base=base, env=env)
    if not deployment.args.model:
        raise LegroomError("which model?", f"{args.prog} MODEL --gpu NAME, or -- vllm serve ..., --command or --file")
    return deployment


def described_machine(args: argparse.Namespace, deployment: deployments.Deployment) -> Machine:
    """The machine that the options describe, completed from the deployment file; LegroomError without a GPU."""
    from legroom.planning.machine import Machine, completed_machine

    deployment.require_gpus()
    allowed = deployment.gpu_names
    gpu = args.gpu or (allowed[0] if len(allowed) == 1 else None)
    if gpu is None:
        named = f"; the file allows {', '.join(allowed)}" if allowed else ""
        hint = "say --gpu h100, a100-80gb, l40s, a10g, l4, rtx4090 ..., or a size such as --gpu 24GiB"
        raise LegroomError(f"which GPU?{named}", hint)
    count, host_memory = gpu_count(args.gpus, "--gpus"), getattr(args, "host_memory", None)
    return completed_machine(Machine(gpu, count, args.gpu_memory, args.gpu_used, host_memory), deployment)


def _described_base(args: argparse.Namespace, release: Release | None) -> deployments.Deployment | None:
    """The server of a command line, a file or Python source; None where only MODEL and flags are given."""
    sources = {"-- ...": args.command_words, "--command": args.line, "--file": args.file, "--python": args.python}
    used = [name for name, value in sources.items() if value]
    if len(used) > 1:
        raise LegroomError(f"{' and '.join(used)} both say what runs", "give one of them")
    config = any(word.partition("=")[0] == "--config" for word in args.vllm_words)
    if not used and not config:
        return None
    if args.file:
        return deployments.deployment_from_file(args.file, release, getattr(args, "server", None))
    if args.python:
        return deployments.deployment_from_python(args.python, release, "--python")
    if used:
        return deployments.deployment_from_text(args.line or shlex.join(args.command_words), release)
    words, args.vllm_words = ["vllm", "serve", *args.vllm_words], []
    return deployments.deployment_from_command(shlex.join(words), release)


def gpu_count(text: str | None, option: str) -> int | None:
    """The parsed number of GPUs; None where the option is not given."""
    return None if text is None else parse_whole(text, option, 1, 4096)


def add_sweep_options(group: Any, default: str) -> None:
    """Adds --workers and --ray; `default` is the default shown in the help."""
    group.add_argument("--workers", type=int, metavar="N", help=f"processes, or tasks on Ray (default: {default})")
    about = "run on this Ray cluster: host:port, ray://host:10001, or auto for the one this machine is a node of"
    group.add_argument("--ray", metavar="ADDRESS", help=about)


def limit_in(unit: str) -> Callable[[str], float]:
    """A function that reads a number above 0, with this unit or without: 3s and 3; else argparse refuses the text."""

    def read_limit(text: str) -> float:
        try:
            limit = float(text.removeprefix("$").removesuffix(unit))
        except ValueError:
            limit = 0.0
        if not limit > 0:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
        return limit

    return read_limit


def add_latency_goals(group: Any, unit: str) -> None:
    """Adds --ttft and --tpot; `unit` of --ttft is named in its help, such as `seconds or steps`."""
    about = f"p99 of the time to the first token, in {unit}"
    group.add_argument("--ttft", type=limit_in("s"), metavar="S", help=about)
    about = "p99 of the time per output token, in milliseconds"
    group.add_argument("--tpot", type=limit_in("ms"), metavar="MS", help=about)


def add_disaggregate_option(group: Any) -> None:
    """Adds --disaggregate, the pools of prefill and decode servers."""
    about = "prefill and decode on servers of their own, and the rate at which each decode server gets KV cache"
    group.add_argument("--disaggregate", metavar="prefill=N,decode=N,link=GB/S", help=about)


def sweep_executor(args: argparse.Namespace, workers: int | None = None) -> SweepExecutor:
    """The executor of a sweep: the Ray cluster of --ray, else processes, --workers or by default `workers`."""
    if args.workers is not None and args.workers < 1:
        raise LegroomError(f"--workers {args.workers} leaves nobody to do the work", "give at least 1, or leave it out")
    if args.ray is not None:
        from legroom.sweeps.ray_cluster import RayExecutor

        return RayExecutor(args.ray, args.workers, announce=note)
    from legroom.sweeps import ProcessExecutor

    return ProcessExecutor(args.workers or workers)
