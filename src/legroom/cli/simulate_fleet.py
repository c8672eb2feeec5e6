"""`legroom simulate --autoscale N`: the policy that `legroom export kubernetes` writes, against a trace."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from legroom.cli.output import ProgressBar, print_json
from legroom.errors import ANSWER_IS_NO, OK, LegroomError

if TYPE_CHECKING:
    from legroom.cli.simulate_pool import PoolChoice
    from legroom.simulation.trace import Trace


def run_fleet(args: argparse.Namespace, trace: Trace, pool: PoolChoice) -> int:
    from legroom.planning.scaling import scaling_policy
    from legroom.simulation.autoscale import autoscaled

    if not 1 <= args.replicas < args.autoscale:
        raise LegroomError(
            f"--autoscale {args.autoscale} with --replicas {args.replicas} leaves nothing to scale",
            "name more servers than the fewest",
        )
    settings = pool.settings
    at_once = settings.usable_blocks * settings.block_size / max(settings.max_model_len, 1)
    policy = scaling_policy(args.replicas, args.autoscale, _start_s(args, pool), at_once)
    bar = ProgressBar("simulating")
    try:
        scaled = autoscaled(trace, settings, pool.cost, policy, bar)
    finally:
        bar.clear()
    if args.json:
        print_json(scaled.as_json())
    else:
        from legroom.drawing.terminal import style_of
        from legroom.render.autoscale_text import scaled_text

        sys.stdout.write(scaled_text(scaled, style_of(sys.stdout)))
    return OK if scaled.is_steady else ANSWER_IS_NO


def _start_s(args: argparse.Namespace, pool: PoolChoice) -> float:
    """What was said, or what the exported manifests give a first start, a download included."""
    from legroom.exports.prometheus.levels import seconds_of

    if args.start is not None:
        return seconds_of(args.start, "--start") or 0.0
    if pool.meant is None:
        raise LegroomError("how long does a new server take to start?", "say --start 200s, or plan it: --model --gpu")
    from legroom.cli.deployment import machine
    from legroom.exports.deploy.server import planned_server
    from legroom.planning.machine import make_plan
    from legroom.planning.plan_json import plan_document

    serve = replace(pool.meant.args, max_model_len=pool.settings.max_model_len)
    plan = plan_document(make_plan(serve, pool.meant.release, machine(args, pool.meant), advice=False))
    times = planned_server(plan).times
    return times.expected_s if times else 0.0
