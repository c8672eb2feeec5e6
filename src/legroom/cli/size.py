"""`legroom size`: which GPUs, and how many, hold a model at a context and a concurrency."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from legroom.cli import shared_options
from legroom.cli.output import note, print_answer, progress_bar
from legroom.deployments.described import deployment_from_words, server_env
from legroom.errors import ANSWER_IS_NO, OK, LegroomError
from legroom.facts.gpus import Gpu
from legroom.facts.releases import Release, release
from legroom.planning.search_space import CapacityGoal, counts_up_to
from legroom.planning.sizing import named_gpus, prices_with_file, size_models
from legroom.units import parse_length, parse_whole
from legroom.vllm.args import ServeArgs

if TYPE_CHECKING:
    from legroom.simulation.fleet_size import ServingLoad
    from legroom.simulation.trace import Trace

_SYNTHETIC_S = 60
"""Duration of a synthetic load: several times the duration of one answer. The replay repeats shorter loads."""
_MIN_REQUESTS, _MAX_REQUESTS = 200, 5000
"""200 requests are enough for a p99; 5,000 replay within a second."""
_EXAMPLE = "as in legroom size MODEL --users 200 --prompt 1000 --answer 300 --ttft 2 --tpot 50"

USAGE = "legroom size MODEL... (--context LEN --concurrency N | --users N --prompt LEN --answer LEN) [any vLLM flag]"
DESCRIPTION = """\
A table of GPUs that hold MODEL so that --concurrency requests of --context tokens run at once: how many it takes, how
fast it answers one user, what it costs, which part needs the most memory and what is given up, quantized checkpoints
included. Every row is a full plan; the cheapest per hour comes first, and the command to run comes last.

With --users, --rate or --trace in place of --concurrency, the load is replayed: how many GPUs, as replicas of one
server, serve it within --ttft and --tpot, what each user gets, and what they cost per hour, each with a range. Every
server can then finish at least 5 % more requests a second than it gets; `legroom simulate` shows fewer."""

EPILOG = """\
examples:
  legroom size llama-3.1-8b --context 4k --concurrency 16
  legroom size Qwen/Qwen3-32B --context 32k --concurrency 8 --gpu h100,l40s --gpus 4
  legroom size llama-3.1-8b llama-3.1-70b --context 8k --concurrency 32 --matrix
  legroom size llama-3.1-70b --context 8k --concurrency 4 --kv-cache-dtype fp8 --budget 10
  legroom size llama-3.1-8b --users 200 --prompt 1000 --answer 300 --ttft 2 --tpot 50
  legroom size llama-3.1-8b --trace requests.jsonl --ttft 2 --tpot 50 --prices prices.toml

prices.toml: one table per card, like [h100] with usd_per_hour = 2.49; other cards keep their dated list prices

exit codes: 0 some GPU holds it, 1 none does, 2 the call is wrong, 3 something needed was unreachable
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("the load")
    load.add_argument("--context", metavar="LEN", help="tokens of a request (default: 4k; of a rate: its longest)")
    load.add_argument("--concurrency", metavar="N", help="requests of that length at once (default: 1)")
    group = parser.add_argument_group("a load over time, in place of --concurrency")
    about = "users who each ask again THINK seconds after an answer (default: 30), as in 200 or 200@60s"
    group.add_argument("--users", metavar="N[@THINK]", help=about)
    group.add_argument("--rate", type=float, metavar="R", help="requests a second, arriving by chance (Poisson)")
    group.add_argument("--prompt", metavar="LEN", help="tokens of a prompt, or a distribution like lognormal(1000,0.8)")
    group.add_argument("--answer", metavar="LEN", help="tokens of an answer, or a distribution")
    group.add_argument("--trace", metavar="FILE", help="a trace of requests with their times, as simulate reads them")
    shared_options.add_latency_goals(group, "seconds")
    shared_options.add_disaggregate_option(group)
    parser.add_argument("--prices", metavar="FILE", help="your prices of GPUs, as TOML (default: dated list prices)")
    where = parser.add_argument_group("where it may run")
    where.add_argument("--gpu", metavar="NAMES", help="GPUs to try: h100,l4 or `all` (default: the usual ones)")
    where.add_argument("--gpus", metavar="N", default="32", help="the most of one GPU to try (default: 32)")
    where.add_argument(
        "--budget", type=shared_options.limit_in("USD"), metavar="USD", default=inf, help="the most to pay an hour"
    )
    where.add_argument("--vllm", metavar="VERSION", help="vLLM release (default: the newest known)")
    shared_options.add_policy_option(where, "balanced")
    computed = parser.add_argument_group("how it is computed")
    shared_options.add_sweep_options(computed, "1; one per core with --rate or --matrix")
    out = parser.add_argument_group("output")
    out.add_argument("--matrix", action="store_true", help="models by GPUs, a count in each cell")
    out.add_argument("--json", action="store_true", help="one JSON document on stdout")


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """The namespace of the command's own options, with `models` and vLLM's flags as `vllm_words`."""
    own, rest, after = shared_options.split_words(parser, words)
    args = parser.parse_args(own)
    args.models = []
    while rest and not rest[0].startswith("-"):
        args.models.append(rest.pop(0))
    args.vllm_words = rest + after
    return args


def run(args: argparse.Namespace) -> int:
    """Prints which GPUs, and how many, hold the models or serve the rate; exit status 1 where none does."""
    over_time = _has_load_over_time(args)
    named = release(args.vllm) if args.vllm else None
    deployment = deployment_from_words(args.vllm_words, named, env=server_env(os.environ))
    used, serve_args = deployment.release, deployment.args
    models = args.models or ([serve_args.model] if serve_args.model else [])
    if not models:
        raise LegroomError("which model?", "legroom size MODEL --context 4k --concurrency 16")
    cards = named_gpus(args.gpu)
    for remark in dict.fromkeys(card.note for card in cards if card.note and args.gpu != "all"):
        note(f"note: {remark}")
    if over_time:
        return _run_rate(args, models, used, serve_args, cards)
    from legroom.api.size_report import SizeReport

    context = parse_length(args.context or "4k", "--context")
    concurrency = parse_whole(args.concurrency or "1", "--concurrency", 1, 10**6)
    most = shared_options.gpu_count(args.gpus, "--gpus") or 32
    goal = CapacityGoal(context, float(concurrency), counts_up_to(most), args.policy)
    with progress_bar("sizing") as bar:
        executor = shared_options.sweep_executor(args, workers=None if args.matrix else 1)
        rows = tuple(size_models(models, used, serve_args, goal, cards, executor, bar))
        report = SizeReport(rows, goal, used, prices_with_file(args.prices), args.budget)
    print_answer(args.json, report.json, lambda style: report.text(style, matrix=args.matrix))
    return OK if report.fits else ANSWER_IS_NO


def _has_load_over_time(args: argparse.Namespace) -> bool:
    """Whether --users, --rate or --trace say what the load is; LegroomError where --concurrency does too."""
    named = ("trace", "rate", "users", "prompt", "answer", "ttft", "tpot", "disaggregate")
    given = [name for name in named if getattr(args, name) is not None]
    if given and given[0] not in named[:3]:
        raise LegroomError(f"--{given[0]} needs --users, --rate or --trace", _EXAMPLE)
    if len(loads := [f"--{name}" for name in given if name in named[:3]]) > 1:
        raise LegroomError(f"both {loads[0]} and {loads[1]} say what the load is", "give one of them")
    for name, is_given in (("--concurrency", args.concurrency is not None), ("--matrix", args.matrix)):
        if given and is_given:
            raise LegroomError(f"{name} has no place beside {loads[0]}", _EXAMPLE)
    if args.users and args.disaggregate:
        raise LegroomError("--users are not replayed on servers of their own for prefill", "give --rate instead")
    return bool(given)


def _run_rate(
    args: argparse.Namespace, models: Sequence[str], release: Release, serve: ServeArgs, cards: Sequence[Gpu]
) -> int:
    """Prints how many GPUs of each card serve the load on the models; exit status 1 where no card does."""
    from legroom.render.size_text import fleet_size_text
    from legroom.simulation.fleet_size import FleetTask, fleet_report

    load, prices = _serving_load(args), prices_with_file(args.prices)
    most = shared_options.gpu_count(args.gpus, "--gpus") or 32
    if args.context is not None and serve.max_model_len is None:
        serve = replace(serve, max_model_len=parse_length(args.context, "--context"))
    with progress_bar("sizing") as bar:
        task = FleetTask.of(models, release, serve, load, most)
        found = fleet_report(task, cards, prices, shared_options.sweep_executor(args), bar)
        report = replace(found, budget=args.budget)
    print_answer(args.json, report.as_json, lambda style: fleet_size_text(report, style))
    return OK if report.holds else ANSWER_IS_NO


def _serving_load(args: argparse.Namespace) -> ServingLoad:
    """The load of --trace, --users or --rate, with its goals; LegroomError for lengths beside --trace."""
    from legroom.simulation.disaggregation import Disaggregation
    from legroom.simulation.fleet_size import ServingLoad
    from legroom.simulation.replay_outcome import Goal

    goal = Goal(args.ttft, None, None, None if args.tpot is None else args.tpot / 1000)
    pools = Disaggregation.parse(args.disaggregate) if args.disaggregate else None
    if args.trace is None:
        load = ServingLoad.of_trace(_synthetic_load(args), goal, pools)
        return replace(load, requests_per_s=args.rate or load.requests_per_s)
    for name in ("prompt", "answer"):
        if getattr(args, name) is not None:
            raise LegroomError(f"both --trace and --{name} say what the load is", "give one of them")
    from legroom.simulation.traces.trace_files import read_trace

    return ServingLoad.of_trace(read_trace(args.trace).checked(), goal, pools)


def _synthetic_load(args: argparse.Namespace) -> Trace:
    """A Poisson trace of --users or --rate with the lengths of --prompt and --answer."""
    from legroom.simulation.traces import synthetic

    if args.users is not None:
        named, _, think = args.users.partition("@")
        users = parse_whole(named, "--users", 1, 10**6)
        arrivals = f"users={users}" + (f" think={think}" if think else "")
        expected = 3.0 * users
    elif 0 < args.rate < 1e6:
        arrivals, expected = f"rate={args.rate!r}", args.rate * _SYNTHETIC_S
    else:
        raise LegroomError(f"--rate {args.rate:g} is not a number of requests a second", _EXAMPLE)
    for missing in (name for name in ("prompt", "answer") if getattr(args, name) is None):
        raise LegroomError(f"how long are the requests? --{missing} is missing", _EXAMPLE)
    requests = round(max(min(_MAX_REQUESTS, max(_MIN_REQUESTS, expected)), expected / 3 if args.users else 0))
    lengths = f"prompt={args.prompt.replace(' ', '')} output={args.answer.replace(' ', '')}"
    return synthetic.read(f"poisson {arrivals} {lengths} requests={requests}").checked()
