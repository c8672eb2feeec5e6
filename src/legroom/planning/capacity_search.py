"""Finding flags for a wish: every combination tried on the memory model, the one that gives up least chosen.

Utilization changes the budget and nothing else, so the parts of the memory are computed once per combination of the
other flags, and utilization is walked by plain arithmetic on them.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from legroom.errors import LegroomError
from legroom.memory.weights.loaded import weights
from legroom.planning.checkpoints import FULL_BITS, lost_bits, unpacks_weights
from legroom.planning.plan import BAND_KEPT, Plan, Target, plan
from legroom.planning.search_space import Flags, Structure, Wish, axes_of, by_loss, gpus_of, parallel_sizes, structure
from legroom.records import dataclass
from legroom.vllm.resolve import resolve
from legroom.vllm.traits import is_moe

if TYPE_CHECKING:
    from legroom.vllm.args import EngineSettings, ServeArgs


Combiner = Callable[[Iterable[Flags]], Structure | None]

UTILIZATIONS = tuple(hundredths / 100 for hundredths in range(30, 99))
_ROOMY_SHARE = 0.025
"""Below this share of the card left at its peak a setting is squeezed in."""


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
    keeps_answers: bool
    """The same weights and the same KV precision as asked: the model answers as it would have."""
    roomy: bool
    """Some of the card stays free at the peak, beyond what the policy holds back."""


@dataclass(frozen=True, slots=True)
class WishResult:
    """The answer to a wish."""

    wish: Wish
    best: Plan | None
    losses: tuple[str, ...]
    alternatives: tuple[tuple[Plan, tuple[str, ...]], ...]
    considered: int
    """How many settings were weighed."""
    short_by: str = ""
    """Where nothing works: what was missing, in words."""
    short_bytes: int = 0
    """Where nothing works: what each card lacks with the closest setting; 0 where no setting was possible at all."""


def find(targets: Sequence[Target], args: ServeArgs, wish: Wish, most: int = 4) -> WishResult:
    """The best settings for a wish. `targets` are the model and its quantized variants, the original first, then in the
    order in which they are preferred (`planning.checkpoints`).

    Flags that `args` gives stay as they are; the others are searched. What changes the model's answers (another
    checkpoint, an 8-bit KV cache) is the last resort: more of the GPUs that were offered come first.
    """
    asked = replace(args, max_model_len=args.max_model_len or wish.context)
    tally = _Tally()
    enough = math.inf
    for number, target in enumerate(targets):
        fewest = min(_fewest_gpus(target, asked), max(wish.gpus))
        for parallel in parallel_sizes(args, wish, is_moe(target.model)):
            gpus = gpus_of(parallel)
            if gpus >= enough:
                break  # fewer GPUs do it with the answers unchanged
            if gpus < fewest:
                continue
            base = _split(target, asked, parallel)
            if base is None:
                continue
            if most == 1:
                shapes = _best_structures(target, asked, parallel, base, wish, number)
            else:
                shapes = _structures(target, asked, parallel, base, wish)
            for shape in shapes:
                weighed, options = _walk_utilization(shape, asked, wish, number, base.max_num_seqs)
                tally.add(shape, wish, weighed, options)
                if most == 1 and any(_nothing_beats(option) for option in options):
                    enough = gpus  # the release's own setting, and the first way to split it that does
                    break
            enough = min([enough, *(option.gpus + 1 for option in tally.options if option.keeps_answers)])
        # Another checkpoint is worth a look only where it saves GPUs over what was found so far, or has more room.
        enough = min([enough, *(option.gpus for option in tally.options if not number or option.roomy)])
    tally.options.sort(key=lambda option: option.cost)
    plans = [(laid_out, option.losses) for option, laid_out in _starting(tally.options, asked, most)]
    if not plans:
        if tally.options:  # memory was not what stopped them
            return WishResult(wish, None, (), (), tally.considered, _why_refused(tally.options[0], asked))
        if tally.closest is None:
            return WishResult(wish, None, (), (), tally.considered, _why_none(targets[0], asked, wish))
        lacking = max(tally.closest.shortfall_bytes(wish), 0)
        return WishResult(wish, None, (), (), tally.considered, tally.closest.why_short(wish), lacking)
    return WishResult(wish, plans[0][0], plans[0][1], tuple(plans[1:]), tally.considered)


def _fewest_gpus(target: Target, asked: ServeArgs) -> int:
    """GPUs below which the weights alone are larger than all cards: no way to split a model makes it smaller."""
    one_card = None if asked.gpus_needed > 1 or asked.cpu_offload_gb else _split(target, asked, {})
    if one_card is None:
        return 1
    return math.ceil(weights(target.model, one_card, target.gpu).bytes / target.gpu.total_bytes)


def _why_refused(option: Option, asked: ServeArgs) -> str:
    """What ends a setting that has the memory: a check that the quick walk leaves out."""
    failure = plan(option.target, replace(asked, **dict(option.flags))).memory.failure
    return failure.message if failure else "it does not start"


def _why_none(target: Target, asked: ServeArgs, wish: Wish) -> str:
    """What the release says to the wish, where it takes no setting at all: as it stands, then split over the GPUs."""
    reasons: list[str] = []
    for parallel in ({}, *parallel_sizes(asked, wish, is_moe(target.model))):
        try:
            resolve(replace(asked, **parallel), target.model, target.gpu, target.release)
        except LegroomError as error:
            reasons.append(error.message)
    if reasons:
        return reasons[0]
    seqs = asked.max_num_seqs or math.ceil(wish.concurrency)
    return f"vLLM {target.release.version} takes no combination of these flags with --max-num-seqs {seqs:,}"


def _split(target: Target, args: ServeArgs, parallel: Flags) -> EngineSettings | None:
    """The release's own settings for one way to split the model; None where it cannot be split that way."""
    try:
        return resolve(replace(args, **parallel), target.model, target.gpu, target.release)
    except LegroomError:
        return None


def _nothing_beats(option: Option) -> bool:
    """Whether, of one way to split a model, no option is better: it gives up nothing beside the checkpoint."""
    own_losses = option.losses[0 if option.keeps_answers else 1 :]
    return not own_losses and "kv_cache_dtype" not in dict(option.flags) and "block_size" not in dict(option.flags)


@dataclass(slots=True)
class _Tally:
    """What a search has seen so far."""

    options: list[Option] = field(default_factory=list)
    considered: int = 0
    closest: Structure | None = None

    def add(self, shape: Structure, wish: Wish, weighed: int, options: list[Option]) -> None:
        self.considered += weighed
        self.options += options
        if self.closest is None or shape.shortfall_bytes(wish) < self.closest.shortfall_bytes(wish):
            self.closest = shape


def _starting(options: Iterable[Option], asked: ServeArgs, most: int) -> Iterator[tuple[Option, Plan]]:
    """The best option for each way of paying, laid out in full; one that adds losses to another is no alternative."""
    paid: list[tuple[int, frozenset[str]]] = []
    for option in options:
        if any(gpus <= option.gpus and losses <= set(option.losses) for gpus, losses in paid):
            continue
        laid_out = plan(option.target, replace(asked, **dict(option.flags)))
        if not laid_out.starts:
            continue  # a check that the quick walk leaves out, such as the state blocks of a hybrid model
        paid.append((option.gpus, frozenset(option.losses)))
        yield option, laid_out
        if len(paid) == most:
            return


def _structures(
    target: Target, args: ServeArgs, parallel: Flags, base: EngineSettings, wish: Wish
) -> Iterator[Structure]:
    """Every valid combination of the flags other than utilization, for one way to split the model."""
    axes = axes_of(target, args, base, wish)
    combined = _combiner(target, args, parallel, base)
    if (frugal := _not_enough(axes, combined, wish)) is not None:
        yield frugal
        return
    for choice in itertools.product(*axes.values()):
        shape = combined(choice)
        if shape is not None:
            yield shape


def _best_structures(
    target: Target, args: ServeArgs, parallel: Flags, base: EngineSettings, wish: Wish, variant: int
) -> Iterator[Structure]:
    """The combination that gives up least, for one way to split the model, without weighing them all: a branch whose
    most frugal end is not enough is passed over. Of another checkpoint, also the best that leaves some room."""

    def grants(shape: Structure) -> bool:
        # The second is the whole question, the first a quick no. Without the second, where a neighbour holds most of
        # the card, every combination would be tried that has the bytes and no share of the card to claim them with.
        return shape.shortfall_bytes(wish) <= 0 and bool(_walk_utilization(shape, args, wish, variant, 0)[1])

    def fits_with_ease(shape: Structure) -> bool:
        return any(option.roomy for option in _walk_utilization(shape, args, wish, variant, base.max_num_seqs)[1])

    axes = axes_of(target, args, base, wish)
    combined = _combiner(target, args, parallel, base)
    if (frugal := _not_enough(axes, combined, wish)) is not None:
        yield frugal
        return
    for sufficient in (grants, fits_with_ease) if variant else (grants,):
        branches = itertools.chain.from_iterable(_branches((), way, combined, sufficient) for way in by_loss(axes))
        best = next((shape for shape in branches if grants(shape)), None)
        if best is not None:
            yield best


def _combiner(target: Target, args: ServeArgs, parallel: Flags, base: EngineSettings) -> Combiner:
    """What a choice of every axis comes to, for one way to split the model; None where the release refuses it."""
    room = replace(target, gpus=max(target.gpus, base.gpus_used))

    def combined(choice: Iterable[Flags]) -> Structure | None:
        flags: Flags = dict(parallel)
        for part in choice:
            flags |= part
        return structure(room, args, flags)

    return combined


def _not_enough(axes: Mapping[str, list[Flags]], combined: Combiner, wish: Wish) -> Structure | None:
    """The most frugal combination, which every axis ends with, where even that is not enough."""
    frugal = combined([axis[-1] for axis in axes.values()])
    return frugal if frugal is not None and frugal.shortfall_bytes(wish) > 0 else None


def _branches(
    chosen: tuple[Flags, ...],
    axes: Sequence[Sequence[Flags]],
    combined: Combiner,
    sufficient: Callable[[Structure], bool],
) -> Iterator[Structure]:
    """Every combination that is sufficient, in the order of the axes."""
    if not axes:
        shape = combined(chosen)
        if shape is not None:
            yield shape
        return
    for choice in axes[0]:
        frugal = combined([*chosen, choice, *(axis[-1] for axis in axes[1:])])
        if frugal is None or sufficient(frugal):
            yield from _branches((*chosen, choice), axes[1:], combined, sufficient)


def _walk_utilization(
    shape: Structure, args: ServeArgs, wish: Wish, variant: int, usual_seqs: int
) -> tuple[int, list[Option]]:
    """Weigh every utilization for one structure; keep the one nearest the release's default that grants the wish."""
    if args.gpu_memory_utilization is not None or args.kv_cache_memory_bytes is not None:
        utilizations: Sequence[float] = (shape.settings.gpu_memory_utilization,)
    else:
        utilizations = UTILIZATIONS
    band = BAND_KEPT[wish.policy]
    default = shape.settings.gpu_memory_utilization
    # The pool grows with utilization and the headroom shrinks, so what grants the wish is one run of the list.
    first = bisect_left(utilizations, wish.concurrency, key=lambda share: shape.concurrency(share, band))
    last = bisect_left(utilizations, True, key=lambda share: shape.runs_over(share, band))
    granting = utilizations[first:last]
    if not granting:
        return len(utilizations), []
    utilization = min(granting, key=lambda share: abs(share - default))
    concurrency, distance = shape.concurrency(utilization, band), abs(utilization - default)
    flags = dict(shape.flags)
    if distance > 1e-9:
        flags["gpu_memory_utilization"] = utilization
    roomy = shape.headroom_bytes(utilization, band) >= _ROOMY_SHARE * shape.target.gpu.total_bytes
    return len(utilizations), [_option(shape, flags, variant, concurrency, distance, usual_seqs, roomy)]


def _option(
    shape: Structure,
    flags: dict[str, Any],
    variant: int,
    concurrency: float,
    distance: float,
    usual_seqs: int,
    roomy: bool,
) -> Option:
    losses: list[str] = []
    lost = lost_bits(shape.target.model) if variant else 0
    if variant:
        unpacked = ", which this card unpacks" if unpacks_weights(shape.target.model, shape.target) else ""
        losses.append(f"another checkpoint, its weights in {FULL_BITS - lost} bits{unpacked}")
    if flags.get("kv_cache_dtype") == "fp8":
        losses.append("keys and values in 8 bits")
    if flags.get("enforce_eager"):
        losses.append("no CUDA graphs: slower decoding")
    elif "max_cudagraph_capture_size" in flags:
        losses.append("fewer CUDA graphs")
    if "max_num_batched_tokens" in flags:
        losses.append("smaller prefill steps")
    settings = shape.settings
    if settings.max_num_seqs < usual_seqs:
        losses.append("a lower cap on running requests")
    gpus = settings.gpus_used
    cost = (
        variant > 0,
        variant > 0 and not roomy,  # of the checkpoints that do, rather one that fits with ease
        lost,
        variant,
        "kv_cache_dtype" in flags,
        gpus,
        bool(flags.get("enforce_eager")),
        settings.pipeline_parallel_size,
        settings.data_parallel_size,
        -min(settings.max_num_batched_tokens, 8192),
        -settings.max_num_seqs,
        "max_cudagraph_capture_size" in flags,
        "block_size" in flags,
        distance,
    )
    return Option(
        tuple(sorted(flags.items())),
        gpus,
        tuple(losses),
        cost,
        concurrency,
        shape.target,
        not variant and "kv_cache_dtype" not in flags,
        roomy,
    )
