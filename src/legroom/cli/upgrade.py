"""`legroom upgrade`: what the same command does on another vLLM release."""

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from legroom.cli.output import note, print_answer
from legroom.cli.shared_options import add_machine_options, add_source_options, described_machine, described_server
from legroom.cli.shared_options import parse as parse_words
from legroom.deployments.deployment import Deployment
from legroom.deployments.described import deployment_from_words
from legroom.deployments.source_text import read_text
from legroom.errors import ANSWER_IS_NO, OK, LegroomError
from legroom.exports.prometheus.alerts import silenced_alerts
from legroom.facts.releases import Release, logged_release, release
from legroom.live.metrics.endpoint import is_loopback
from legroom.live.running_server import running_server
from legroom.planning.file_plans import started_servers
from legroom.planning.machine import Machine, make_target
from legroom.planning.upgrades.release_upgrade import Upgrade, upgrade
from legroom.render.upgrade_text import upgrade_text
from legroom.vllm.args import ServeArgs

_RELEASE = re.compile(r"v?\d+(\.\d+)+\S*|latest|nightly|main|stable")
_POOL_OFF = 0.05  # A planned pool that differs by more than 5 % was planned without some flag of the server.
_CALL = "legroom upgrade FROM TO --gpu NAME -- vllm serve ..."

USAGE = "legroom upgrade [FROM] TO --gpu NAME [options] [-- vllm serve ...]"
DESCRIPTION = """\
What the same vLLM command does on another release: how its KV cache changes, byte by byte, and why; its blocks and
tokens, and what vLLM's own log line means by them; flags that are refused, renamed or have another default; metrics and
alerts that vanish; memory bugs that are fixed or introduced; and the command that keeps today's capacity. Needs no GPU.
FROM may be left out where the input names its release: an image's tag, a file, a running server."""

EPILOG = """\
examples:
  legroom upgrade 0.19.1 0.32.0 --gpu h100 -- vllm serve meta-llama/Llama-3.1-8B
  legroom upgrade 0.10.2 0.32.0 --all --gpu a100-80gb -- vllm serve Qwen/Qwen3-32B --max-model-len 32768
  legroom upgrade 0.32.0 --gpu l40s --command 'docker run --gpus all vllm/vllm-openai:v0.11.0 --model Qwen/Qwen3-8B'
  legroom upgrade 0.32.0 --file deploy.yaml
  legroom upgrade 0.32.0 --gpu h100 --url http://127.0.0.1:8000

exit codes: 0 it starts on the other release, 1 it does not, 2 the call is wrong, 3 something needed was unreachable
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_machine_options(parser.add_argument_group("where it runs"))
    add_source_options(parser)
    server = parser.add_argument_group("a server that runs")
    server.add_argument("--url", metavar="URL", help="ask it for its release, model and settings")
    server.add_argument("--api-key", metavar="KEY", help="default for this machine's own servers: $VLLM_API_KEY")
    server.add_argument("--insecure", action="store_true", help="accept any TLS certificate")
    out = parser.add_argument_group("output")
    out.add_argument("--all", action="store_true", help="every release between the two, and where it changed")
    out.add_argument("--json", action="store_true", help="one JSON document on stdout")


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """The namespace of the command's own options, with `releases` and vLLM's words."""
    args = parse_words(parser, words)
    args.releases = []
    while args.vllm_words and len(args.releases) < 2 and _RELEASE.fullmatch(args.vllm_words[0]):
        args.releases.append(args.vllm_words.pop(0))
    return args


def run(args: argparse.Namespace) -> int:
    """Prints what the target release changes for each server; exit status 1 where one does not fit there."""
    sources = (args.command_words, args.line, args.file, args.python, args.url)
    stray = next((word for word in args.vllm_words[:1] if not word.startswith("-")), None)
    if any(sources) and stray is not None:
        raise LegroomError(f"{stray!r} is not a vLLM release", f"write releases like 0.32.0: {_CALL}")
    if not args.releases:
        raise LegroomError("to which release?", _CALL)
    if not any(sources) and not args.vllm_words:
        raise LegroomError("which server? Nothing says what runs", f"{_CALL}, or --command, --file or --url")
    target = _release_or_oldest(args.releases[-1])
    current = _release_or_oldest(args.releases[0]) if len(args.releases) == 2 else None
    made = [_server_upgrade(*server, target, args.all) for server in _servers(args, current)]
    alerts = [silenced_alerts(each.old.target.release, {metric.name for metric in each.metrics}) for each in made]
    documents = [each.to_json() | {"alerts": list(names)} for each, names in zip(made, alerts, strict=True)]
    print_answer(
        args.json,
        documents[0] if len(documents) == 1 else {**documents[0], "servers": documents},
        lambda style: "\n".join(upgrade_text(*each, style) for each in zip(made, alerts, strict=True)),
    )
    return OK if all(each.new.verdict != "does_not_fit" for each in made) else ANSWER_IS_NO


def _release_or_oldest(text: str) -> Release:
    """The vLLM release that the text names; a version older than legroom's facts counts as the oldest known one."""
    return logged_release(text) if text.lstrip("v")[:1].isdigit() else release(text)


def _server_upgrade(
    deployment: Deployment, machine: Machine, pool_slots: int | None, target: Release, every_release: bool
) -> Upgrade:
    """A server's upgrade, `every_release` in between; notes a plan unlike the `pool_slots` KV tokens it reports."""
    for remark in deployment.notes:
        note(f"note: {remark}")
    made = upgrade(deployment.args, deployment.release, target, machine, every_release=every_release)
    kv = made.old.memory.kv
    planned = kv.num_blocks * kv.block_size
    if pool_slots and abs(planned / pool_slots - 1) > _POOL_OFF:
        pools = f"the server's pool has {pool_slots:,} slots, and {planned:,} are planned from what it tells"
        note(f"note: {pools}: give the other flags that it was started with, and --gpu-memory")
    return made


def _servers(args: argparse.Namespace, current: Release | None) -> Iterator[tuple[Deployment, Machine, int | None]]:
    """(deployment, machine, KV cache tokens that a running server reports or None) of every server of the input."""
    args.vllm = current.version if current else None
    if args.url:
        yield _server_of_url(args, current)
        return
    started = started_servers(args.file, read_text(Path(args.file)), current)[0] if args.file else ()
    count = max(1, len(started))
    for number in range(count):
        args.server = number if count > 1 else None
        deployment = described_server(args)
        if current is None and deployment.release_hint is None:
            raise LegroomError("from which release? Nothing that was given names the one that runs today", _CALL)
        machine = described_machine(args, deployment)
        yield replace(deployment, release=current or deployment.release), machine, None


def _server_of_url(args: argparse.Namespace, current: Release | None) -> tuple[Deployment, Machine, int | None]:
    """(deployment, machine, KV cache tokens that it reports or None) of the running server at --url."""
    if args.command_words or args.line or args.file or args.python:
        raise LegroomError("--url says what runs, and so does another option", "give one of them")
    key = args.api_key or (os.environ.get("VLLM_API_KEY") if is_loopback(args.url) else None)
    server = running_server(args.url, key, verify_tls=not args.insecure)
    release = current or logged_release(server.version)
    deployment = Deployment(ServeArgs(server.model), release)
    card = make_target(deployment.args, release, replace(described_machine(args, deployment), gpus=None)).gpu
    shown = replace(deployment, args=server.serve_args(card, release))
    deployment = replace(deployment_from_words(args.vllm_words, base=shown), notes=())
    if not server.tells_all:
        missing = "its parallel sizes, --max-num-seqs and --max-num-batched-tokens"
        hint = f"the server does not tell {missing}: give those that it was started with beside --url"
        deployment = replace(deployment, notes=(hint,))
    return deployment, described_machine(args, deployment), server.pool_slots
