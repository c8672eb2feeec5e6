"""`legroom simulate`: does this setting hold the load?"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from legroom.cli import shared_options
from legroom.cli.output import note, print_answer, progress_bar, step_writer, write_file
from legroom.cli.simulate_pool import PoolChoice, pool_of
from legroom.errors import ANSWER_IS_NO, INTERRUPTED, OK, LegroomError
from legroom.planning.autoscaling_policy import scaling_policy
from legroom.render import simulation_text
from legroom.simulation import flag_search, fleet_size
from legroom.simulation.disaggregation import DisaggregatedTimeline, Disaggregation, replay_disaggregated
from legroom.simulation.replay_outcome import Goal, load_verdict
from legroom.simulation.trace import Trace
from legroom.simulation.trace_replay import simulate
from legroom.simulation.traces import synthetic
from legroom.simulation.traces.trace_files import read_trace
from legroom.units import parse_count, parse_seconds

USAGE = "legroom simulate TRACE (--blocks N | --model MODEL --gpu NAME) [options] [any vLLM flag]"
DESCRIPTION = """\
Replay a trace of requests through the decisions of vLLM's scheduler and block pool, without a model or a GPU:
preemptions, queueing, KV use over time. In steps the replay is exact (V1 engine as of 0.32); in seconds it is an
estimate. The pool is --blocks, or that of the deployment that --model, --gpu and any vLLM flags describe."""

EPILOG = """\
traces: JSONL ("arrival" in seconds or "arrival_step", "prompt_len", "output_len", and optionally "id", "prefix_id",
"prefix_len", "priority"), Mooncake JSONL, the Azure LLM and BurstGPT CSVs, ShareGPT JSON, a vLLM request log

examples:
  legroom simulate trace.jsonl --blocks 4000 --max-num-seqs 64
  legroom simulate azure.csv --model llama-3.1-8b --gpu h100 --svg load.svg
  legroom simulate --synthetic 'poisson rate=8 prompt=lognormal(1200,0.8) output=lognormal(300,0.6)' \\
      --model qwen3-8b --gpu l4 --max-model-len 8192 --choose
  legroom simulate azure.csv --model qwen3-8b --gpu l4 --max-model-len 8192 --autoscale 8
  legroom simulate mooncake.jsonl --model qwen3-8b --gpu h100 --max-model-len 40960 --tier cpu=200GiB@50GB/s
  legroom simulate azure.csv --model qwen3-8b --gpu l4 --choose --ray auto

exit codes: 0 the load is held, 1 it falls behind, turns requests away or misses a limit (or no setting of --choose, no
scaled fleet holds it), 2 the call or the trace is wrong
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("the load")
    mix = (
        "'poisson rate=8 prompt=1000 output=300 requests=500', or uniform, bursts, with long=, prefix=, burst=; "
        "or 'users=200 think=30 prompt=1000 output=300': users who ask again 30 s after an answer"
    )
    load.add_argument("--synthetic", metavar="MIX", help=f"a mix of requests instead of TRACE: {mix}")
    load.add_argument("--seed", type=int, default=0, help="seed of the synthetic mix (default: 0)")
    formats = ("jsonl", "mooncake", "azure", "burstgpt", "sharegpt", "vllm-log")
    load.add_argument("--format", choices=formats, help="format of TRACE (default: detected)")
    load.add_argument("--limit", type=int, metavar="N", help="read only the first N lines of TRACE")
    _add_pool_options(parser)
    _add_scheduler_options(parser)
    _add_choose_options(parser)
    group = parser.add_argument_group("a fleet that is scaled")
    about = "replay over up to N servers, scaled as legroom export kubernetes --autoscale N would have it"
    group.add_argument("--autoscale", type=int, metavar="N", help=about)
    group.add_argument("--replicas", type=int, default=1, metavar="N", help="the fewest servers (default: 1)")
    group.add_argument("--start", metavar="TIME", help="what a new server takes to start (default: as planned)")
    shared_options.add_disaggregate_option(group)
    _add_tier_options(parser)
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="one JSON document on stdout")
    out.add_argument("--timeline", metavar="FILE", help="write every step to a .jsonl or .parquet file")
    out.add_argument("--svg", metavar="FILE", help="write the picture as SVG too")


def _add_pool_options(parser: argparse.ArgumentParser) -> None:
    pool = parser.add_argument_group("the pool")
    pool.add_argument("--blocks", type=int, metavar="N", help="KV blocks, the null block included (num_gpu_blocks)")
    pool.add_argument("--model", metavar="MODEL", help="plan the pool of this model")
    shared_options.add_machine_options(pool)
    pool.add_argument("--vllm", metavar="VERSION", help="vLLM release of the plan (default: the newest known)")
    pool.add_argument("--step-ms", type=float, metavar="MS", help="milliseconds of a step, not the estimate")
    about = "scale the estimate to this time between tokens, of RUNNING requests (default: 1) that hold TOKENS of KV "
    pool.add_argument("--measured-step-ms", metavar="MS[@RUNNING,TOKENS]", help=f"{about}cache (default: 0)")
    shared_options.add_source_options(parser)


def _add_scheduler_options(parser: argparse.ArgumentParser) -> None:
    flags = parser.add_argument_group("the scheduler (vLLM's flags)")
    names = ("max-num-seqs", "max-num-batched-tokens", "block-size", "max-model-len")
    for name in (*names, "long-prefill-token-threshold"):
        about, read = argparse.SUPPRESS if name == "max-model-len" else None, partial(parse_count, what=f"--{name}")
        flags.add_argument(f"--{name}", metavar="N", type=read, help=about)
    switches = ("--enable-prefix-caching", "--enable-chunked-prefill", "--async-scheduling")
    for name in (*switches, "--scheduler-reserve-full-isl"):
        flags.add_argument(name, action=argparse.BooleanOptionalAction, default=None)
    flags.add_argument("--scheduling-policy", choices=("fcfs", "priority"), help="who goes first (default: fcfs)")
    flags.add_argument("--watermark", type=float, metavar="SHARE", help="share of the pool that stays free")
    flags.add_argument("--num-speculative-tokens", type=int, metavar="K", help="draft tokens per step")
    flags.add_argument("--acceptance", type=float, default=0.7, metavar="SHARE", help="of drafts (default: 0.7)")
    flags.add_argument("--sliding-windows", metavar="W,W,...", help="windows of the layer groups, 0: full attention")


def _add_choose_options(parser: argparse.ArgumentParser) -> None:
    """Declares --choose, which replays the trace under many flag combinations, and its latency goals."""
    group = parser.add_argument_group("limits, and searching flags that meet them")
    group.add_argument("--choose", action="store_true", help="try up to 280 settings and show the best")
    shared_options.add_latency_goals(group, "seconds or steps")
    group.add_argument("--slo-latency", type=shared_options.limit_in("s"), metavar="S", help="p99 of the whole answer")
    about = "no more of them (default: any number, counted as what they cost)"
    group.add_argument("--max-preemptions", type=int, metavar="N", help=about)
    shared_options.add_sweep_options(group, "one per core")


def _add_tier_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a second tier of KV cache (vLLM's --kv-offloading-size)")
    about = "host memory for KV cache and the rate of copies each way, as in cpu=200GiB@50GB/s; policy=lru|arc, "
    about += "blocks_per_chunk=N, store_threshold=N, prompt_only=yes|no and disk=RATE (files behind it) may follow "
    group.add_argument("--tier", metavar="cpu=SIZE[@RATE]", help=f"{about}after commas")
    group.add_argument("--tier-curve", action="store_true", help="replay tiers of several sizes too: hits over size")


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """The namespace of the command's own options, with `trace` and vLLM's words."""
    own, rest, after = shared_options.split_words(parser, words)
    args = parser.parse_args(own)
    args.trace = rest.pop(0) if rest and not rest[0].startswith("-") else None
    args.vllm_words, args.command_words = rest, after
    return args


def run(args: argparse.Namespace) -> int:
    """Replays the trace and prints how the server does; the exit status says whether it holds the load."""
    trace = _trace_of_options(args)
    if args.disaggregate and (args.choose or args.tier or args.timeline or args.autoscale is not None):
        raise LegroomError("--disaggregate replays fixed pools", "leave out --choose, --tier, --timeline, --autoscale")
    if trace.users and (args.disaggregate or args.tier or args.autoscale is not None):
        hint = "leave out --disaggregate, --tier, --autoscale, or give rate="
        raise LegroomError("users= is replayed on one server", hint)
    if args.tier and args.autoscale is not None:
        raise LegroomError("--tier is not simulated for a fleet that grows and shrinks", "leave out --autoscale")
    if args.tier_curve and (not args.tier or args.choose):
        raise LegroomError("--tier-curve is of one server with a tier", "add --tier cpu=SIZE@RATE, without --choose")
    pool = pool_of(args, trace)
    trace, goal = pool.trace, _goal_of_options(args, pool.trace)
    if args.autoscale is not None and goal != Goal():
        raise LegroomError("limits are not judged over a fleet that is scaled", "leave out --autoscale, or the limits")
    for remark in pool.notes:
        note(remark)
    words = (*args.vllm_words, *args.command_words)
    if not args.tier and any(word.split("=")[0] == "--kv-offloading-size" for word in words):
        note("--kv-offloading-size is not replayed; --tier cpu=SIZE@RATE replays the tier that it makes")
    if args.choose:
        return _search_flags(args, trace, pool, goal)
    if args.autoscale is not None:
        return _run_autoscaled_fleet(args, trace, pool)
    if args.tier:
        from legroom.cli.simulate_tier import run_tier

        return run_tier(args, trace, pool, goal)
    pools = _replay_disaggregated(args, trace, pool) if args.disaggregate else None
    if pools:
        timeline, load = pools.timeline, load_verdict(pools.timeline, goal)
    else:
        with progress_bar("simulating") as bar, step_writer(args.timeline) as write:
            timeline = simulate(trace, pool.settings, write, cost=pool.cost, progress=bar)
        load = fleet_size.lasting_verdict(timeline, goal, pool.cost, pool.band)
    if args.svg:
        write_file(args.svg, simulation_text.timeline_svg(timeline, load), "picture")
    print_answer(
        args.json,
        lambda: {**timeline.as_json(), **load.as_json(), **({"disaggregation": pools.as_json()} if pools else {})},
        lambda style: (
            simulation_text.timeline_text(timeline, load, style)
            + (simulation_text.disaggregation_text(pools) if pools else "")
        ),
    )
    return INTERRUPTED if timeline.interrupted else OK if load.is_held else ANSWER_IS_NO


def _goal_of_options(args: argparse.Namespace, trace: Trace) -> Goal:
    """The limits of the options; LegroomError for one in milliseconds of a trace in steps."""
    if args.tpot is not None and not trace.in_seconds:
        raise LegroomError("--tpot is in milliseconds, and this trace counts steps", "leave it out")
    per_token = None if args.tpot is None else args.tpot / 1000
    return Goal(args.ttft, args.slo_latency, args.max_preemptions, per_token)


def _trace_of_options(args: argparse.Namespace) -> Trace:
    """The trace file, or the load of --synthetic; LegroomError where both or neither is given."""
    if args.synthetic is not None:
        if args.trace is not None:
            raise LegroomError(f"both {args.trace} and --synthetic say what the load is", "give one of them")
        return synthetic.read(args.synthetic, args.seed).checked()
    if args.trace is None:
        raise LegroomError("which trace?", "legroom simulate TRACE, or --synthetic 'poisson rate=8 ...'")
    return read_trace(args.trace, args.format, args.limit).checked()


def _replay_disaggregated(args: argparse.Namespace, trace: Trace, pool: PoolChoice) -> DisaggregatedTimeline:
    """The replay over the prefill and decode servers of --disaggregate."""
    pools, plan = Disaggregation.parse(args.disaggregate), pool.plan()
    if plan is None:
        raise LegroomError("--blocks does not say how many bytes a token has", "give --model and --gpu")
    return replay_disaggregated(trace, pool.settings, pool.cost, pools.with_plan(plan))


def _search_flags(args: argparse.Namespace, trace: Trace, pool: PoolChoice, goal: Goal) -> int:
    """Prints the flags that serve the trace best; the exit status says whether they meet the goals, or Ctrl-C."""
    from legroom.cli.simulate_tier import with_tier

    candidates = with_tier(args, pool, pool.candidates())
    fleets: list[flag_search.HoldingFleet] = []
    with progress_bar("searching") as bar:
        choice = flag_search.choose(trace, candidates, goal, executor=shared_options.sweep_executor(args), progress=bar)
        if not (choice.holds or choice.interrupted):
            try:
                few = flag_search.promising_candidates(trace, choice, candidates)
                larger = pool.larger_cards([candidate.flags for candidate in few[:2]])
                cards = ((name, with_tier(args, pool, on_card)) for name, on_card in larger)
                replicas = flag_search.replicas_that_hold(trace, choice, pool.gpu, few)
                found = (replicas, flag_search.card_that_holds(trace, choice, cards))
                fleets = [fleet for fleet in found if fleet is not None]
            except KeyboardInterrupt:
                choice = replace(choice, interrupted=True)
    command = pool.command(choice.best.flags)
    with_commands = [(fleet, pool.command(fleet.outcome.flags)) for fleet in fleets]
    would_hold = {"would_hold": [fleet.as_json(words) for fleet, words in with_commands]}
    document = {**choice.as_json(), "command": command, **would_hold}
    shown = (choice, trace, command, with_commands)
    print_answer(args.json, document, lambda style: simulation_text.choice_text(*shown, style) + "\n")
    return INTERRUPTED if choice.interrupted else OK if choice.holds else ANSWER_IS_NO


def _run_autoscaled_fleet(args: argparse.Namespace, trace: Trace, pool: PoolChoice) -> int:
    """Replay the trace over an autoscaled fleet and print it; the exit code says if it is steady."""
    from legroom.simulation.autoscale import replay_autoscaled

    if not 1 <= args.replicas < args.autoscale:
        wrong = f"--autoscale {args.autoscale} with --replicas {args.replicas} leaves nothing to scale"
        raise LegroomError(wrong, "name more servers than the fewest")
    settings = pool.settings
    at_once = settings.usable_blocks * settings.block_size / max(settings.max_model_len, 1)
    policy = scaling_policy(args.replicas, args.autoscale, _server_start_s(args, pool), at_once)
    with progress_bar("simulating") as bar:
        scaled = replay_autoscaled(trace, settings, pool.cost, policy, bar)
    print_answer(args.json, scaled.as_json, lambda style: simulation_text.autoscale_text(scaled, style))
    return OK if scaled.is_steady else ANSWER_IS_NO


def _server_start_s(args: argparse.Namespace, pool: PoolChoice) -> float:
    """Seconds until a new server is ready: --start, else those of the plan with its download; else LegroomError."""
    if args.start is not None:
        return parse_seconds(args.start, "--start") or 0.0
    if pool.deployment is None:
        raise LegroomError("how long does a new server take to start?", "say --start 200s, or plan it: --model --gpu")
    from legroom.exports.deploy.exported_server import planned_server
    from legroom.planning.machine import plan_deployment
    from legroom.planning.plan_json import plan_document

    serve = replace(pool.deployment.args, max_model_len=pool.settings.max_model_len)
    deployment = replace(pool.deployment, args=serve)
    plan = plan_deployment(deployment, shared_options.described_machine(args, deployment), advice=False)
    return planned_server(plan_document(plan)).times.expected_s
