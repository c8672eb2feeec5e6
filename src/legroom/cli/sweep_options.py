"""Options of sweeps: where they run, and the latencies they must meet."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from legroom.cli.output import note
from legroom.errors import LegroomError

if TYPE_CHECKING:
    from legroom.sweeps.executors import SweepExecutor


def add_sweep_options(group: Any, one_process: str) -> None:
    """`--workers` and `--ray`; `one_process` says what `--workers` is unless given."""
    group.add_argument(
        "--workers", type=int, metavar="N", help=f"worker processes, or tasks at once on Ray (default: {one_process})"
    )
    group.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run on this Ray cluster: host:port, ray://host:10001, or auto for the one this machine is a node of",
    )


def add_latency_goals(group: Any, unit: str) -> None:
    """`--ttft`, in `unit`, and `--tpot`."""
    group.add_argument("--ttft", type=float, metavar="S", help=f"p99 of the time to the first token, in {unit}")
    group.add_argument("--tpot", type=float, metavar="MS", help="p99 of the time per output token, in milliseconds")


def executor_of(args: argparse.Namespace, workers: int | None = None) -> SweepExecutor:
    """Runs a sweep on the Ray cluster of `--ray`, else in `workers` processes."""
    if args.workers is not None and args.workers < 1:
        raise LegroomError(f"--workers {args.workers} leaves nobody to do the work", "give at least 1, or leave it out")
    if args.ray is not None:
        from legroom.sweeps.ray_cluster import RayExecutor

        return RayExecutor(args.ray, args.workers, announce=note)
    from legroom.sweeps.executors import ProcessExecutor

    return ProcessExecutor(args.workers or workers)
