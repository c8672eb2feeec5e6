"""The runs of `legroom simulate`: one replay, a search of flags, or a fleet that is scaled."""

import argparse
from dataclasses import replace

from legroom.cli import shared_options
from legroom.cli.output import note, print_answer, progress_bar, step_writer, write_file
from legroom.cli.simulate_pool import PoolChoice, pool_of
from legroom.cli.simulate_tier import run_tier, with_tier
from legroom.errors import ANSWER_IS_NO, INTERRUPTED, OK, LegroomError
from legroom.exports.deploy.exported_server import planned_server
from legroom.planning.autoscaling_policy import scaling_policy
from legroom.planning.machine import plan_deployment
from legroom.planning.plan_json import plan_document
from legroom.render import simulation_text
from legroom.simulation import flag_search, fleet_size
from legroom.simulation.autoscale import replay_autoscaled
from legroom.simulation.disaggregation import DisaggregatedTimeline, Disaggregation, replay_disaggregated
from legroom.simulation.replay_outcome import Goal, load_verdict
from legroom.simulation.trace import Trace
from legroom.simulation.trace_replay import simulate
from legroom.simulation.traces import synthetic
from legroom.simulation.traces.trace_files import read_trace
from legroom.units import parse_seconds


def replay_and_print(args: argparse.Namespace) -> int:
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
    more = simulation_text.disaggregation_text(pools) if pools else ""
    print_answer(
        args.json,
        lambda: {**timeline.as_json(), **load.as_json(), **({"disaggregation": pools.as_json()} if pools else {})},
        lambda style: simulation_text.timeline_text(timeline, load, style) + more,
    )
    return INTERRUPTED if timeline.interrupted else OK if load.is_held else ANSWER_IS_NO


def _goal_of_options(args: argparse.Namespace, trace: Trace) -> Goal:
    """The latency and preemption limits that options set; LegroomError for milliseconds with a trace in steps."""
    if args.tpot is not None and not trace.in_seconds:
        raise LegroomError("--tpot is in milliseconds, and this trace counts steps", "leave it out")
    return Goal(args.ttft, args.slo_latency, args.max_preemptions, None if args.tpot is None else args.tpot / 1000)


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
    """Prints the flags that serve the trace best; the exit status says if they meet the goals or Ctrl-C ended it."""
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
                fleets = list(filter(None, (replicas, flag_search.card_that_holds(trace, choice, cards))))
            except KeyboardInterrupt:
                choice = replace(choice, interrupted=True)
    command = pool.command(choice.best.flags)
    holding = [(fleet, pool.command(fleet.outcome.flags)) for fleet in fleets]
    document = {
        **choice.as_json(),
        "command": command,
        "would_hold": [fleet.as_json(words) for fleet, words in holding],
    }
    shown = (choice, trace, command, holding)
    print_answer(args.json, document, lambda style: simulation_text.choice_text(*shown, style) + "\n")
    return INTERRUPTED if choice.interrupted else OK if choice.holds else ANSWER_IS_NO


def _run_autoscaled_fleet(args: argparse.Namespace, trace: Trace, pool: PoolChoice) -> int:
    """Replay the trace over an autoscaled fleet and print it; the exit code says if it is steady."""
    if not 1 <= args.replicas < args.autoscale:
        wrong = f"--autoscale {args.autoscale} with --replicas {args.replicas} leaves nothing to scale"
        raise LegroomError(wrong, "name more servers than the fewest")
    at_once = pool.settings.usable_blocks * pool.settings.block_size / max(pool.settings.max_model_len, 1)
    policy = scaling_policy(args.replicas, args.autoscale, _server_start_s(args, pool), at_once)
    for _, text in simulation_text.engines_row(trace):
        note(text)
    with progress_bar("simulating") as bar:
        scaled = replay_autoscaled(trace, pool.settings, pool.cost, policy, bar)
    print_answer(args.json, scaled.as_json, lambda style: simulation_text.autoscale_text(scaled, style))
    return OK if scaled.is_steady else ANSWER_IS_NO


def _server_start_s(args: argparse.Namespace, pool: PoolChoice) -> float:
    """Seconds until a new server is ready: --start, else the plan's with its download; LegroomError without either."""
    if args.start is not None:
        return parse_seconds(args.start, "--start") or 0.0
    if pool.deployment is None:
        raise LegroomError("how long does a new server take to start?", "say --start 200s, or plan it: --model --gpu")
    deployment = replace(pool.deployment, args=replace(pool.deployment.args, max_model_len=pool.settings.max_model_len))
    plan = plan_deployment(deployment, shared_options.described_machine(args, deployment), advice=False)
    return planned_server(plan_document(plan)).times.expected_s
