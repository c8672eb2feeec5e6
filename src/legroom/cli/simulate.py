"""`legroom simulate`: does this setting hold the load?"""

import argparse
from collections.abc import Sequence
from functools import partial

from legroom.cli import shared_options
from legroom.units import parse_count

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
    """Declares --blocks, --model, the machine and the length of a step."""
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
    """Declares those of vLLM's flags that set the simulated scheduler."""
    flags = parser.add_argument_group("the scheduler (vLLM's flags)")
    names = ("max-num-seqs", "max-num-batched-tokens", "block-size", "max-model-len")
    for name in (*names, "long-prefill-token-threshold"):
        about, read = argparse.SUPPRESS if name == "max-model-len" else None, partial(parse_count, what=f"--{name}")
        flags.add_argument(f"--{name}", metavar="N", type=read, help=about)
    for name in ("enable-prefix-caching", "enable-chunked-prefill", "async-scheduling", "scheduler-reserve-full-isl"):
        flags.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=None)
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
    """Declares --tier and --tier-curve, for KV cache offloaded to host memory."""
    group = parser.add_argument_group("a second tier of KV cache (vLLM's --kv-offloading-size)")
    about = "host memory for KV cache and the rate of copies each way, as in cpu=200GiB@50GB/s; policy=lru|arc, "
    about += "blocks_per_chunk=N, store_threshold=N, prompt_only=yes|no and disk=RATE (files behind it) may follow "
    group.add_argument("--tier", metavar="cpu=SIZE[@RATE]", help=f"{about}after commas")
    group.add_argument("--tier-curve", action="store_true", help="replay tiers of several sizes too: hits over size")


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """The namespace of the command's own options, with `trace` and vLLM's flags as `vllm_words`."""
    own, rest, after = shared_options.split_words(parser, words)
    args = parser.parse_args(own)
    args.trace = rest.pop(0) if rest and not rest[0].startswith("-") else None
    args.vllm_words, args.command_words = rest, after
    return args


def run(args: argparse.Namespace) -> int:
    """Replays the trace and prints how the server does; the exit status says whether it holds the load."""
    from legroom.cli.simulate_run import replay_and_print  # slow to import, and not needed for --help

    return replay_and_print(args)
