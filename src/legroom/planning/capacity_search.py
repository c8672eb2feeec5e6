"""Search for flags that meet a capacity goal, by trying combinations on the memory model; the least loss wins.
Utilization changes only the budget, so memory is computed once per combination of the other flags."""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field, replace
from typing import Any

from legroom.errors import LegroomError
from legroom.memory.weights.loaded import weights
from legroom.planning.checkpoints import FULL_BITS, lost_bits, unpacks_fp8, unpacks_weights
from legroom.planning.plan import BAND_KEPT, Plan, Target, plan
from legroom.planning.search_space import (
    NODE_GPUS,
    SEQUENCES,
    CapacityGoal,
    FlagCombination,
    Flags,
    axes_by_loss,
    flag_axes,
    flag_combination,
    parallel_sizes,
)
from legroom.records import dataclass
from legroom.units import human_bytes
from legroom.vllm.args import EngineSettings, ServeArgs
from legroom.vllm.resolve import resolve
from legroom.vllm.traits import traits

Combiner = Callable[[Iterable[Flags]], FlagCombination | None]
Combinations = dict[tuple[object, ...], FlagCombination | None]
"""By the number of the checkpoint and the flags; None is refused."""

UTILIZATIONS = tuple(hundredths / 100 for hundredths in range(30, 99))
USUAL_UTILIZATION = 0.94
"""From 0.95 on little is left for what vLLM does not count, and capture or serving fails: diagnosis warns of it."""
_LOWER_CAP = "a lower cap on running requests"
_ROOMY_SHARE = 0.025  # Share of the card that is free at the peak of a roomy candidate.


@dataclass(frozen=True, slots=True)
class SearchCandidate:
    """A combination of flags that meets the goal, before its full plan is made."""

    flags: tuple[tuple[str, Any], ...]
    gpus: int
    losses: tuple[str, ...]
    """What it gives up, in words, the most severe first."""
    cost: tuple[float, ...]
    """Sort key: the smallest gives up least."""
    target: Target
    keeps_answers: bool
    """Weights and KV precision are as given, so the outputs do not change."""
    roomy: bool
    """Memory stays free at the peak beyond what the policy holds back."""


@dataclass(frozen=True, slots=True)
class SearchAnswer:
    """The plans that meet a goal, or why none does."""

    goal: CapacityGoal
    best: Plan | None
    losses: tuple[str, ...]
    alternatives: tuple[tuple[Plan, tuple[str, ...]], ...]
    considered: int
    """How many combinations were tried."""
    short_by: str = ""
    """What was missing, where no combination meets the goal."""
    short_bytes: int = 0
    """Bytes that each card lacks with the closest combination; 0 where every combination was refused."""
    next_step: str = ""
    """What to ask next, where no combination meets the goal."""
    kept: str = ""
    """The given flags that the search would else have chosen, as words of a command."""
    one_gpu_lacks: str = ""
    """Why one GPU is not enough, where no number was given and the best plan has more."""


def search_flags(
    targets: Sequence[Target],
    args: ServeArgs,
    goal: CapacityGoal,
    max_answers: int = 4,
    combinations: Combinations | None = None,
) -> SearchAnswer:
    """The plans that meet a goal, least loss first; `targets`: the model, then quantized ones; flags of `args` stay as
    they are. `combinations`: those that an earlier search of the same question has computed."""
    combinations = {} if combinations is None else combinations
    found = _search(targets, args, goal, max_answers, combinations)
    if max_answers == 1 and not found.short_bytes and not is_sure(found.best, args):
        more = search_flags(targets, args, goal, combinations=combinations)  # one that costs more may be sure to fit
        found = more if more.best is not None and (is_sure(more.best, args) or not found.best) else found
    answers = [each for each in (found.best, *(other for other, _ in found.alternatives)) if each]
    full = next((each for each in answers if _is_full(each, args)), None)
    if full is None or (found.best is not full and _costly_settings(answers[0]) == _costly_settings(full)):
        return found
    # A setting that gives up no more than batches and graphs is better than one that needs more of the card.
    limits = [each for each in UTILIZATIONS if USUAL_UTILIZATION <= each < (full.args.gpu_memory_utilization or 0.0)]
    lower = (_search(targets, args, replace(goal, most_utilization=most), max_answers, combinations) for most in limits)
    alike = (each for each in lower if each.best and _costly_settings(each.best) == _costly_settings(full))
    return next((each for each in alike if found.best is full or is_sure(each.best, args)), found)


def _is_full(found: Plan, args: ServeArgs) -> bool:
    """Whether the plan's utilization is above USUAL_UTILIZATION although `args` did not ask for that."""
    share = found.args.gpu_memory_utilization or 0.0
    return share > USUAL_UTILIZATION and share != args.gpu_memory_utilization


def is_sure(found: Plan | None, args: ServeArgs) -> bool:
    """Whether the plan fits and leaves the usual share of the card to what vLLM does not count."""
    return found is not None and found.verdict == "fits" and not _is_full(found, args)


def _costly_settings(found: Plan) -> tuple[Any, ...]:
    """(checkpoint, KV dtype, enforce_eager, GPUs, stages) of a plan: equal for plans that give up the same."""
    model, args = found.target.model.name, found.args
    return model, args.kv_cache_dtype, args.enforce_eager, args.gpus_needed, args.pipeline_parallel_size


def _search(
    targets: Sequence[Target], args: ServeArgs, goal: CapacityGoal, max_answers: int, combinations: Combinations
) -> SearchAnswer:
    """The plans that meet a goal, least loss first, with utilizations up to the goal's highest."""
    # More of the offered GPUs are preferred to changes of the outputs (another checkpoint, an 8-bit KV cache).
    base_args = replace(args, max_model_len=args.max_model_len or goal.context)
    state = _SearchState()
    gpus_enough = math.inf
    for number, target in enumerate(targets):
        if goal.quantized_only and not number:
            continue
        fewest = gpus_for_weights(target, base_args, max(goal.gpus))
        for parallel in parallel_sizes(args, goal, traits(target.model).moe):
            gpus = math.prod(size for name, size in parallel.items() if name != "enable_expert_parallel")
            if gpus >= gpus_enough:
                break  # fewer GPUs meet the goal with unchanged outputs
            if gpus < fewest:
                continue
            base = _resolve_split(target, base_args, parallel)
            if base is None:
                continue
            only_best = max_answers == 1
            weighed = _combinations(target, base_args, parallel, base, goal, number, only_best, combinations)
            for combination in weighed:
                tried, options = _best_utilization(combination, base_args, goal, number, base.max_num_seqs)
                state.add(combination, goal, tried, options)
                if max_answers == 1 and any(_gives_up_nothing(option) for option in options):
                    gpus_enough = gpus  # the release's defaults meet the goal with these parallel sizes
                    break
            gpus_enough = min([gpus_enough, *(option.gpus + 1 for option in state.options if option.keeps_answers)])
        # Another checkpoint is tried only where it saves GPUs, has more room, or keeps the graphs.
        enough = (option for option in state.options if not number or (option.roomy and not _is_eager(option)))
        gpus_enough = min([gpus_enough, *(option.gpus for option in enough)])
    roomy = {_apart_from_split(option) for option in state.options if option.roomy}
    # Memory is left free where some split of the checkpoint over as many GPUs leaves some.
    state.options.sort(
        key=lambda each: (each.cost[0], each.cost[0] and _apart_from_split(each) not in roomy, *each.cost[2:])
    )
    plans = list(_starting_plans(state.options, base_args, goal, max_answers))
    plans = [(found, _with_full_card(found, _with_values(found, losses), base_args)) for found, losses in plans]
    if plans:  # a sure fit on no more GPUs goes before the others
        most = plans[0][0].args.gpus_needed
        sure = [each for each in plans if is_sure(each[0], base_args) and each[0].args.gpus_needed <= most]
        plans = sure + [each for each in plans if each not in sure]
    if not plans:
        if state.options:  # memory was not what stopped them
            # Why a candidate with enough memory does not start: a check that is not part of the search.
            failure = plan(state.options[0].target, replace(base_args, **dict(state.options[0].flags))).memory.failure
            refusal_of = failure.message if failure else "it does not start"
            return SearchAnswer(goal, None, (), (), state.considered, refusal_of)
        if state.closest is None:
            return SearchAnswer(goal, None, (), (), state.considered, _refusal_reason(targets[0], base_args, goal))
        band = BAND_KEPT[goal.policy]
        lacking = state.closest.lacking_bytes(goal, _utilizations(state.closest, base_args, goal), band)
        return SearchAnswer(goal, None, (), (), state.considered, state.closest.why_short(goal, lacking, band), lacking)
    return SearchAnswer(goal, plans[0][0], plans[0][1], tuple(plans[1:]), state.considered)


def _with_values(found: Plan, losses: tuple[str, ...]) -> tuple[str, ...]:
    """The losses in words; a lower max_num_seqs or max_num_batched_tokens with its value, to tell plans apart."""
    values = {
        _LOWER_CAP: f" ({found.settings.max_num_seqs:,})",
        "smaller prefill steps": f" ({found.settings.max_num_batched_tokens:,} tokens)",
    }
    return tuple(loss + values.get(loss, "") for loss in losses)


def gpus_for_weights(target: Target, args: ServeArgs, most: int) -> int:
    """The fewest GPUs (`most` at most) whose memory together exceeds the weights; 1 where flags split or offload the
    weights or vLLM refuses the settings."""
    is_one = most == 1 or args.gpus_needed > 1 or args.cpu_offload_gb
    one_card = None if is_one else _resolve_split(target, args, {})
    if one_card is None:
        return 1
    return min(most, math.ceil(weights(target.model, one_card, target.gpu).bytes / target.gpu.total_bytes))


def _refusal_reason(target: Target, base_args: ServeArgs, goal: CapacityGoal) -> str:
    """Why vLLM's release refuses every combination of flags, as a sentence."""
    for parallel in ({}, *parallel_sizes(base_args, goal, traits(target.model).moe)):
        try:
            resolve(replace(base_args, **parallel), target.model, target.gpu, target.release)
        except LegroomError as error:
            return error.message
    seqs = base_args.max_num_seqs or math.ceil(goal.concurrency)
    return f"vLLM {target.release.version} takes no combination of these flags with --max-num-seqs {seqs:,}"


def _resolve_split(target: Target, args: ServeArgs, parallel: Flags) -> EngineSettings | None:
    """The settings that vLLM resolves with these parallel sizes; None where it cannot split the model so."""
    try:
        return resolve(replace(args, **parallel), target.model, target.gpu, target.release)
    except LegroomError:
        return None


def _gives_up_nothing(option: SearchCandidate) -> bool:
    """Whether a candidate has no loss but another checkpoint's, so that other batches or dtypes need not be tried."""
    own_losses = option.losses[0 if option.keeps_answers else 1 :]
    return not own_losses and "kv_cache_dtype" not in dict(option.flags) and "block_size" not in dict(option.flags)


@dataclass(slots=True)
class _SearchState:
    """Candidates and counts of a search so far."""

    options: list[SearchCandidate] = field(default_factory=list)
    considered: int = 0
    closest: FlagCombination | None = None

    def add(self, combination: FlagCombination, goal: CapacityGoal, tried: int, options: list[SearchCandidate]) -> None:
        """Counts the `tried` plans of a combination, adds its candidates, and keeps the one nearest to the goal."""
        self.considered += tried
        self.options += options
        band = BAND_KEPT[goal.policy]
        if self.closest is None or combination.shortfall_bytes(goal, band) < self.closest.shortfall_bytes(goal, band):
            self.closest = combination


def _is_eager(option: SearchCandidate) -> bool:
    """Whether a candidate gives up all CUDA graphs."""
    return "enforce_eager" in dict(option.flags)


def _apart_from_split(option: SearchCandidate) -> tuple[Any, ...]:
    """(checkpoint, GPUs, KV cache dtype, eager mode): equal for candidates that differ in split or batches alone."""
    return option.target.model.name, option.gpus, dict(option.flags).get("kv_cache_dtype"), _is_eager(option)


def _starting_plans(
    options: Iterable[SearchCandidate], base_args: ServeArgs, goal: CapacityGoal, max_answers: int
) -> Iterator[tuple[Plan, tuple[str, ...]]]:
    """Up to `max_answers` plans that start, with their losses. One that loses no less than an earlier one is skipped,
    unless it surely fits, the earlier is tight, and they split the model differently."""
    paid: list[tuple[SearchCandidate, bool]] = []
    answers = 0
    for option in options:
        worse = [(each, sure) for each, sure in paid if each.gpus <= option.gpus and {*each.losses} <= {*option.losses}]
        if any(sure or _stages(each) == _stages(option) for each, sure in worse):
            continue
        laid_out = plan(option.target, replace(base_args, **dict(option.flags)))
        if not laid_out.starts:
            continue  # a check that the search leaves out, such as the state blocks of a hybrid model
        laid_out = _fitting_or_same(laid_out, base_args, goal)
        paid.append((option, laid_out.verdict == "fits"))
        if worse and laid_out.verdict != "fits":
            continue
        answers += 1
        capped = laid_out.args.max_num_seqs != dict(option.flags).get("max_num_seqs", base_args.max_num_seqs)
        yield laid_out, tuple(dict.fromkeys((*option.losses, *[_LOWER_CAP] * capped)))
        if answers == max_answers:
            return


def _stages(option: SearchCandidate) -> int:
    """The pipeline stages that a candidate's flags ask for."""
    return int(dict(option.flags).get("pipeline_parallel_size", 1))


def _fitting_or_same(laid_out: Plan, base_args: ServeArgs, goal: CapacityGoal) -> Plan:
    """A tight plan with the next lower utilization, else max_num_seqs, with which it fits and still meets the goal; the
    plan itself where none does. Given flags are not changed."""
    now, lower = laid_out.settings, dict[str, list[Any]]()
    if base_args.gpu_memory_utilization is None and base_args.kv_cache_memory_bytes is None:
        lower["gpu_memory_utilization"] = [each for each in reversed(UTILIZATIONS) if each < now.gpu_memory_utilization]
    if base_args.max_num_seqs is None:
        lower["max_num_seqs"] = [seqs for seqs in SEQUENCES if goal.concurrency <= seqs < now.max_num_seqs]
    for name, values in lower.items() if laid_out.verdict == "tight" else ():
        for value in values:
            flag: Flags = {name: value}
            changed = plan(laid_out.target, replace(laid_out.args, **flag))
            if changed.holds < goal.concurrency:
                break
            if changed.verdict == "fits":
                flag = {name: None}
                default = plan(laid_out.target, replace(laid_out.args, **flag))
                return default if getattr(default.settings, name) == value else changed
    return laid_out


def _with_full_card(found: Plan, losses: tuple[str, ...], base_args: ServeArgs) -> tuple[str, ...]:
    """The losses, with a raised utilization that leaves hardly any memory free as one more."""
    share, free = found.args.gpu_memory_utilization, max(found.layout.headroom_bytes, 0)
    is_full, is_given = _is_full(found, base_args), share in (None, base_args.gpu_memory_utilization)
    if is_given or not (is_full or free < _ROOMY_SHARE * found.target.gpu.total_bytes):
        return losses
    says = f"at {share:g} of the card only {human_bytes(free)} stays free"
    return (*losses, f"{says} for what vLLM does not count" if is_full else says)


def _combinations(
    target: Target,
    args: ServeArgs,
    parallel: Flags,
    base: EngineSettings,
    goal: CapacityGoal,
    variant: int,
    only_best: bool,
    known: Combinations,
) -> Iterator[FlagCombination]:
    """Every combination of flags (without utilization) that meets the goal with these parallel sizes; the smallest if
    none does. `only_best`: only the least costly, and for a quantized checkpoint (`variant` above 0) one that leaves
    memory free. `known`: a cache, added to."""

    def candidates(combination: FlagCombination) -> list[SearchCandidate]:
        """A list of one, the combination at the utilization nearest the default that meets the goal, or empty."""
        return _best_utilization(combination, args, goal, variant, base.max_num_seqs)[1]

    def meets_goal(combination: FlagCombination) -> bool:
        """Whether memory suffices, and at some utilization the start-up checks pass beside other processes."""
        return combination.shortfall_bytes(goal) <= 0 and bool(candidates(combination))

    def leaves_room(combination: FlagCombination) -> bool:
        """Whether the combination meets the goal and leaves a share of the card free at the peak (`roomy`)."""
        return any(candidate.roomy for candidate in candidates(combination))

    def combined(choice: Iterable[Flags]) -> FlagCombination | None:
        """The combination of these values, one of each flag axis; None where vLLM refuses it."""
        flags: Flags = dict(parallel)
        for part in choice:
            flags |= part
        key = variant, repr(sorted(flags.items()))
        if key not in known:
            known[key] = flag_combination(room, args, flags)
        return known[key]

    room, axes = replace(target, gpus=max(target.gpus, base.gpus_used)), flag_axes(target, args, base, goal)
    if only_best and not variant:
        unchanged = combined([axis[0] for axis in axes.values()])
        if unchanged is not None and meets_goal(unchanged):
            yield unchanged
            return
    minimum = combined([axis[-1] for axis in axes.values()])
    if minimum is not None and minimum.shortfall_bytes(goal) > 0:
        yield minimum  # what it lacks is the answer
        return
    answers = 0
    for sufficient in (meets_goal, leaves_room) if variant and only_best else (meets_goal,):
        orders = axes_by_loss(axes) if only_best else [list(axes.values())]
        branches = itertools.chain.from_iterable(
            _sufficient_combinations((), ordered, combined, sufficient) for ordered in orders
        )
        for best in itertools.islice(filter(meets_goal, branches), 1 if only_best else None):
            answers += 1
            yield best
    if not answers and minimum is not None:
        yield minimum


def _sufficient_combinations(
    chosen: tuple[Flags, ...],
    axes: Sequence[Sequence[Flags]],
    combined: Combiner,
    sufficient: Callable[[FlagCombination], bool],
) -> Iterator[FlagCombination]:
    """Combinations of `chosen` and one value per axis, in axis order, of branches whose smallest is `sufficient`."""
    if not axes:
        combination = combined(chosen)
        if combination is not None:
            yield combination
        return
    for choice in axes[0]:
        minimum = combined([*chosen, choice, *(axis[-1] for axis in axes[1:])])
        if minimum is None or sufficient(minimum):
            yield from _sufficient_combinations((*chosen, choice), axes[1:], combined, sufficient)


def _utilizations(combination: FlagCombination, args: ServeArgs, goal: CapacityGoal) -> Sequence[float]:
    """The utilizations to try, up to the goal's limit; only the current one if it or the KV cache's bytes are given."""
    if args.gpu_memory_utilization is not None or args.kv_cache_memory_bytes is not None:
        return (combination.settings.gpu_memory_utilization,)
    return [share for share in UTILIZATIONS if share <= goal.most_utilization]


def _best_utilization(
    combination: FlagCombination, args: ServeArgs, goal: CapacityGoal, variant: int, default_seqs: int
) -> tuple[int, list[SearchCandidate]]:
    """(how many utilizations were tried, [the candidate at the one nearest the default that meets the goal] or [])."""
    utilizations, band = _utilizations(combination, args, goal), BAND_KEPT[goal.policy]
    default = combination.settings.gpu_memory_utilization
    # The pool grows with utilization and the headroom shrinks, so those that meet the goal are one slice of the list.
    first = bisect_left(utilizations, goal.concurrency, key=lambda share: combination.concurrency(share, band))
    last = bisect_left(utilizations, True, key=lambda share: combination.runs_over(share, band))
    meeting = utilizations[first:last]
    if not meeting:
        return len(utilizations), []
    utilization = min(meeting, key=lambda share: abs(share - default))
    return len(utilizations), [_candidate(combination, utilization, band, variant, default_seqs)]


def _candidate(
    combination: FlagCombination, utilization: float, band: float, variant: int, default_seqs: int
) -> SearchCandidate:
    """A combination as a candidate, with its losses and cost; `variant`: the checkpoint's number (0: the model itself),
    `default_seqs`: max_num_seqs without flags, `band`: share (0 to 1) of the error band held back."""
    distance = abs(utilization - combination.settings.gpu_memory_utilization)
    flags = dict(combination.flags)
    if distance > 1e-9:
        flags["gpu_memory_utilization"] = utilization
    roomy = combination.headroom_bytes(utilization, band) >= _ROOMY_SHARE * combination.target.gpu.total_bytes
    losses: list[str] = []
    lost = lost_bits(combination.target.model) if variant else 0
    if variant:
        unpacked = (
            ", which this card turns into 16 bits to compute with"
            if unpacks_weights(combination.target.model, combination.target)
            else ""
        )
        losses.append(f"another checkpoint, its weights in {FULL_BITS - lost} bits{unpacked}")
    cache, given = combination.settings.kv_cache_dtype, combination.settings.given.kv_cache_dtype
    if "kv_cache_dtype" in flags or (variant and given is None and cache.startswith("fp8")):  # the checkpoint's own
        unpacked = ", which this card turns into 16 bits to compute with" if unpacks_fp8(combination.target) else ""
        losses.append(f"keys and values in 8 bits{unpacked}")
    if flags.get("enforce_eager"):
        losses.append("no CUDA graphs: slower decoding")
    elif "max_cudagraph_capture_size" in flags:
        losses.append("fewer CUDA graphs")
    if "max_num_batched_tokens" in flags:
        losses.append("smaller prefill steps")
    settings = combination.settings
    if settings.max_num_seqs < default_seqs:
        losses.append(_LOWER_CAP)
    if "pipeline_parallel_size" in flags and settings.gpus_used <= NODE_GPUS:
        losses.append("pipeline stages: slower for each user")
    gpus = settings.gpus_used
    cost = (
        variant > 0,
        variant > 0 and not roomy,
        variant > 0 and bool(flags.get("enforce_eager")),
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
    keeps_answers, changed = not variant and "kv_cache_dtype" not in flags, tuple(sorted(flags.items()))
    return SearchCandidate(changed, gpus, tuple(losses), cost, combination.target, keeps_answers, roomy)
