"""Finding flags for a wish: every combination tried on the memory model, the one that gives up least chosen.

Utilization changes the budget and nothing else, so the parts of the memory are computed once per combination of the
other flags, and utilization is walked by plain arithmetic on them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from legroom.errors import LegroomError
from legroom.facts.flags import choices
from legroom.planning.plan import Plan, Target, plan
from legroom.planning.structure import Structure, structure
from legroom.planning.verdict import BAND_KEPT
from legroom.planning.wish import Wish
from legroom.vllm.resolve import resolve

if TYPE_CHECKING:
    from legroom.vllm.args import EngineSettings, ServeArgs

UTILIZATIONS = tuple(hundredths / 100 for hundredths in range(30, 99))
TOKEN_BUDGETS = (16384, 8192, 4096, 2048, 1024)
SEQUENCES = (1024, 512, 256, 128, 64, 32, 16, 8)
CAPTURE_LIMITS = (256, 64)


@dataclass(frozen=True, slots=True)
class Option:
    """One setting that grants the wish, before it is laid out in full."""

    flags: tuple[tuple[str, Any], ...]
    gpus: int
    losses: tuple[str, ...]
    """What it gives up, in words, the gravest first."""
    cost: tuple[float, ...]
    """Orders options: the smallest gives up least."""
    concurrency: float
    target: Target


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to a wish."""

    wish: Wish
    best: Plan | None
    losses: tuple[str, ...]
    alternatives: tuple[tuple[Plan, tuple[str, ...]], ...]
    considered: int
    """How many settings were weighed."""
    short_by: str = ""
    """Where nothing works: what was missing, in words."""


def find(targets: Sequence[Target], args: ServeArgs, wish: Wish, most: int = 4) -> Found:
    """The best settings for a wish. `targets` are the model and its quantized variants, the original first.

    Flags that `args` gives stay as they are; the others are searched.
    """
    asked = replace(args, max_model_len=args.max_model_len or wish.context)
    options: list[Option] = []
    considered = 0
    closest: Structure | None = None
    for number, target in enumerate(targets):
        for shape in _structures(target, asked, wish):
            weighed, found = _walk_utilization(shape, asked, wish, variant=number)
            considered += weighed
            options += found
            if closest is None or shape.shortfall_bytes(wish) < closest.shortfall_bytes(wish):
                closest = shape
    options.sort(key=lambda option: option.cost)
    plans = [(laid_out, option.losses) for option, laid_out in _starting(options, asked, most)]
    if not plans:
        return Found(wish, None, (), (), considered, closest.why_short(wish) if closest else "no setting is valid")
    return Found(wish, plans[0][0], plans[0][1], tuple(plans[1:]), considered)


def _starting(options: Iterable[Option], asked: ServeArgs, most: int) -> Iterator[tuple[Option, Plan]]:
    """The best option for each way of paying, laid out in full; one that adds losses to another is no alternative."""
    paid: list[tuple[int, frozenset[str]]] = []
    for option in options:
        if any(gpus <= option.gpus and losses <= set(option.losses) for gpus, losses in paid):
            continue
        laid_out = plan(option.target, replace(asked, **dict(option.flags)))
        if laid_out.verdict == "does_not_fit":
            continue  # a check that the quick walk leaves out, such as the state blocks of a hybrid model
        paid.append((option.gpus, frozenset(option.losses)))
        yield option, laid_out
        if len(paid) == most:
            return


def _structures(target: Target, args: ServeArgs, wish: Wish) -> Iterator[Structure]:
    """Every valid combination of the flags other than utilization."""
    for parallel in _parallel_sizes(args, wish):
        try:
            base = resolve(replace(args, **parallel), target.model, target.gpu, target.release)
        except LegroomError:
            continue  # this model cannot be split that way
        room = replace(target, gpus=max(target.gpus, *parallel.values(), math.prod(parallel.values())))
        axes = _axes(target, args, base, wish)
        for values in itertools.product(*(axis for _, axis in axes)):
            flags = parallel | {name: value for (name, _), value in zip(axes, values, strict=True) if value is not None}
            shape = structure(room, args, flags)
            if shape is not None:
                yield shape


def _parallel_sizes(args: ServeArgs, wish: Wish) -> Iterator[dict[str, Any]]:
    given = args.tensor_parallel_size, args.pipeline_parallel_size
    if given != (None, None):
        yield {"tensor_parallel_size": given[0] or 1, "pipeline_parallel_size": given[1] or 1}
        return
    for count in wish.gpus:
        for pipeline in (1, 2, 3, 4, 8):
            if count % pipeline == 0 and (pipeline == 1 or count > 1):
                yield {"tensor_parallel_size": count // pipeline, "pipeline_parallel_size": pipeline}


def _axes(target: Target, args: ServeArgs, base: EngineSettings, wish: Wish) -> list[tuple[str, tuple[Any, ...]]]:
    """The values to try for each flag that was not given; None leaves the release's default."""
    budgets = [None, *(tokens for tokens in TOKEN_BUDGETS if tokens < base.max_num_batched_tokens)]
    sequences = [None, *(seqs for seqs in SEQUENCES if wish.concurrency <= seqs < base.max_num_seqs)]
    if base.max_num_seqs < wish.concurrency:
        sequences = [int(-(-wish.concurrency // 1))]
    graphs: list[tuple[str, tuple[Any, ...]]] = []
    if args.enforce_eager is None:
        graphs.append(("enforce_eager", (None, True)))
    if args.max_cudagraph_capture_size is None and target.release.at_least("0.11.1"):
        graphs.append(("max_cudagraph_capture_size", (None, *CAPTURE_LIMITS)))
    kv_dtypes = (None, "fp8") if target.gpu.compute_capability >= (8, 9) and base.kv_cache_dtype == "auto" else (None,)
    axes: list[tuple[str, tuple[Any, ...]]] = [
        ("max_num_batched_tokens", (None,) if args.max_num_batched_tokens else tuple(budgets)),
        ("max_num_seqs", (None,) if args.max_num_seqs else tuple(sequences)),
        ("kv_cache_dtype", (None,) if args.kv_cache_dtype else kv_dtypes),
        ("block_size", (None,) if args.block_size else _block_sizes(target)),
    ]
    return axes + graphs


def _block_sizes(target: Target) -> tuple[int | None, ...]:
    allowed = choices("--block-size", target.release)
    return (None, 32) if allowed is None or 32 in allowed else (None,)


def _walk_utilization(shape: Structure, args: ServeArgs, wish: Wish, variant: int) -> tuple[int, list[Option]]:
    """Weigh every utilization for one structure; keep the one nearest the release's default that grants the wish."""
    if args.gpu_memory_utilization is not None or args.kv_cache_memory_bytes is not None:
        utilizations: Sequence[float] = (shape.settings.gpu_memory_utilization,)
    else:
        utilizations = UTILIZATIONS
    band = BAND_KEPT[wish.policy]
    default = shape.settings.gpu_memory_utilization
    best: tuple[float, float, float] | None = None
    for utilization in utilizations:
        concurrency = shape.concurrency(utilization, band)
        if concurrency < wish.concurrency or shape.headroom_bytes(utilization, band) < 0:
            continue
        distance = abs(utilization - default)
        if best is None or distance < best[0]:
            best = distance, utilization, concurrency
    if best is None:
        return len(utilizations), []
    distance, utilization, concurrency = best
    flags = dict(shape.flags)
    if distance > 1e-9:
        flags["gpu_memory_utilization"] = utilization
    return len(utilizations), [_option(shape, flags, variant, concurrency, distance)]


def _option(shape: Structure, flags: dict[str, Any], variant: int, concurrency: float, distance: float) -> Option:
    losses: list[str] = []
    if variant:
        losses.append(f"quantized weights ({shape.target.model.name})")
    if flags.get("kv_cache_dtype") == "fp8":
        losses.append("keys and values in 8 bits")
    if flags.get("enforce_eager"):
        losses.append("no CUDA graphs: slower decoding")
    elif "max_cudagraph_capture_size" in flags:
        losses.append("fewer CUDA graphs")
    if "max_num_batched_tokens" in flags:
        losses.append("smaller prefill steps")
    if "max_num_seqs" in flags:
        losses.append("a lower cap on running requests")
    settings = shape.settings
    gpus = settings.tensor_parallel_size * settings.pipeline_parallel_size
    cost = (
        gpus,
        variant,
        "kv_cache_dtype" in flags,
        bool(flags.get("enforce_eager")),
        settings.pipeline_parallel_size,
        -min(settings.max_num_batched_tokens, 8192),
        -settings.max_num_seqs,
        "max_cudagraph_capture_size" in flags,
        "block_size" in flags,
        distance,
    )
    return Option(tuple(sorted(flags.items())), gpus, tuple(losses), cost, concurrency, shape.target)
