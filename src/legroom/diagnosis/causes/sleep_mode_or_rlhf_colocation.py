"""A trainer and the engine share the card, or sleep and wake-up leave something behind."""

from collections.abc import Iterator
from dataclasses import replace

from legroom.diagnosis.causes import Assessment, Case, Cause, Fix, FixPlanner, known_fix, proof, reason
from legroom.diagnosis.causes.gpu_shared_or_not_free import utilization_within_free_memory
from legroom.diagnosis.finding import Strength
from legroom.diagnosis.fixes.hardware_fixes import budget_for_weights
from legroom.diagnosis.fixes.log_accounting import FULL_OF_WEIGHTS, stated_weights_bytes
from legroom.diagnosis.pasted_command import NUMBERS, prose
from legroom.facts.log_messages import trainer_settings
from legroom.units import GIB, gib

_SERVER_BESIDE = "another process, such as a server awake beside it,"
_START_CHECKS = ("free_below_desired", "free_below_desired_bare")
_KEEPS_PART = 20
"""Weights and pool are most of what an engine holds: sleep that frees a twentieth of what stays keeps both."""
_LEAST_SHARE = 0.3  # Public launch scripts of trainers that share cards with their engine set 0.3 to 0.7.
_USUAL_SHARE = 0.5  # The middle of what those scripts set: at most that, the share itself leaves no block.


def examine(case: Case) -> Assessment | None:
    """Assesses a sleep that freed nothing, a failed wake-up, or a shortage beside a training framework; else None."""
    cumem = case.first("cumem_oom")
    trainer = case.first("training_step") or case.first("trainer")
    if _freed_nothing(case):
        why = "Sleep gave back neither the weights nor the KV cache: it frees only what its own allocator holds."
        return Assessment(Strength.SHOWN, proof(case.first("sleep_freed", "sleep_kept_told"), case.first_failure), why)
    if cumem or (case.is_oom and "frame_wake" in case.frames):
        who = "the trainer or its optimizer" if _has_trainer(case) else _SERVER_BESIDE
        why = f"Waking up maps the engine's memory again, and {who} holds part of it by now."
        if _is_first_mapping(case):
            why = reason("first_mapping")
        proven = proof(case.first("frame_wake"), cumem or case.first("torch_oom", "cuda_oom"))
        return Assessment(Strength.NAMED, proven, why)
    if grew := case.first("sleep_grew"):
        why = "While the engine went to sleep the card's memory in use grew: another process took it in between."
        return Assessment(Strength.NAMED, proof(grew), why)
    oom = case.oom
    if oom and oom.pools_bytes > 4 * GIB and not case.has("captured", "capturing"):
        why = reason("pools_without_graphs", {"size": gib(oom.pools_bytes)})
        return Assessment(Strength.NAMED, proof(case.first("weights_peak"), case.first("torch_oom")), why)
    counts_nothing = any(item.facts.get("weights_bytes") == 0 for item in case.all("weights_loaded"))
    is_short = case.has("profiling_error", "no_cache_blocks", *_START_CHECKS) or case.is_oom
    if trainer and (is_short or counts_nothing):
        why = reason("trainer_on_the_card")
        if trainer.id == "training_step":
            why = "It failed in a training step, which no server has: the trainer ran out of memory."
        # A server of its own, which the trainer only calls, fails as any server does.
        strength = Strength.POSSIBLE if case.has("sampler_warmup_oom") else Strength.NAMED
        return Assessment(strength, proof(trainer, case.first_failure), why)
    if case.has("sleep_on") and case.is_oom:
        why = "Sleep mode is on; its pool cannot give memory back to others."
        return Assessment(Strength.POSSIBLE, proof(case.first("sleep_on")), why)
    return None


def _freed_nothing(case: Case) -> bool:
    """Whether each sleep in the text freed at most a twentieth of what stayed, or the text says that none freed any."""
    sizes = [(item.number("freed_bytes"), item.number("left_bytes") or 0) for item in case.all("sleep_freed")]
    is_shown = all(freed is not None and freed * _KEEPS_PART <= left for freed, left in sizes)
    return case.has("sleep_kept_told") or (bool(sizes) and is_shown)


def _is_first_mapping(case: Case) -> bool:
    """Whether sleep mode's allocator failed between profiling and readiness, with no sleep and no trainer before."""
    asleep = case.has("sleep_freed", "frame_wake") or case.was_ready or _has_trainer(case)
    return case.has("cumem_oom") and case.startup.available_kv_bytes is not None and not asleep


def _has_trainer(case: Case) -> bool:
    """Whether the text shows a training framework, or an engine inside a process that torch.distributed started."""
    if any(item.text.startswith("[rank") for item in case.all("frame_wake")):
        return True
    is_told = case.has("cumem_oom") and case.has("training_told")  # a server alone does not train
    is_told = is_told or case.platform.trainer or case.has("training_step")
    return is_told or any(trainer_settings(item.text) for item in case.evidence)


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes (None: not applicable): a lower utilization, another order of waking up, no sleep mode, another release."""
    is_starved = planner.case.has("no_cache_blocks") and planner.utilization <= _USUAL_SHARE
    told = planner.case.first("sum_told")
    sizes = [told.number(name) or 0 for name in told.facts if name.endswith("_bytes")] if told is not None else []
    if len(sizes) == 2 and sizes[0] > FULL_OF_WEIGHTS * sizes[1]:  # each process has a context beside what it counts
        fix, (needed, total) = known_fix("smaller_model_to_train"), map(gib, sizes)
        yield replace(fix, why=f"By the text {needed} are needed beside the contexts; the card has {total}. {fix.why}")
    lower = _share_beside_trainer(planner, is_starved)
    newer = known_fix("other_release_of_sleep")
    order = known_fix("wake_weights_first" if _has_trainer(planner.case) else "others_sleep_first")
    # Beside a trainer the engine would hold its share through every training step.
    is_asleep = planner.case.has("sleep_on", "frame_wake", "cumem_oom", "weights_peak")
    off = known_fix("no_sleep_mode") if is_asleep and not _has_trainer(planner.case) else None
    if _freed_nothing(planner.case):
        freed = planner.case.number("sleep_freed", "freed_bytes")
        is_off = not (freed or is_asleep or planner.case.has("sleep_enabled"))
        yield from (known_fix("sleep_mode_on"),) if is_off else (newer, off or known_fix("no_sleep_mode"))
    if planner.case.has("training_step") and "frame_wake" not in planner.case.frames:
        smaller = known_fix("smaller_training_step")
        yield replace(smaller, steps=smaller.steps[1:]) if planner.case.tells(prose("smallest_batch")) else smaller
    is_start = planner.case.has("sleep_on") and planner.case.site in ("kv", "graph", "sampler", "warmup")
    if _is_first_mapping(planner.case) or (is_start and not _has_trainer(planner.case)):
        why = "What sleep mode's allocator keeps beside the budget needs room."
        yield from (planner.lower_utilization(planner.case.ledger.shortage_bytes + GIB, why), off, newer)
    elif planner.case.site in ("build", "load") and not planner.case.platform.trainer:
        yield from (off, newer, lower)
    elif planner.case.has("weights_peak") or planner.case.site == "quant":
        yield from (newer, off, lower)
    else:
        if planner.case.has("profiling_error"):
            settings = next((found for item in planner.case.evidence if (found := trainer_settings(item.text))), None)
            steps = (f"in the trainer's own settings: {settings['sleep']}",) if settings else ()
            first = known_fix("trainer_frees_first")
            yield replace(first, steps=(*steps, *first.steps))
        yield _split_engine_fix(planner)
        if planner.case.is_oom and planner.accounting.weights_over_budget_bytes:
            yield from budget_for_weights(planner)
        if planner.case.has("free_below_desired"):
            yield utilization_within_free_memory(planner, _trainer_steps(planner.case, None))
        # Whether the weights fit into a smaller share of a card that is not known, nobody can tell.
        is_least = planner.utilization_known and planner.utilization < _LEAST_SHARE
        is_open = planner.model is not None and planner.total_bytes is None
        is_blind = _has_trainer(planner.case) and (is_least or is_open)
        lower = None if is_least and not is_starved else lower
        if planner.case.has("no_cache_blocks") and not planner.case.is_oom:
            # A smaller budget holds even fewer blocks.
            is_blind, lower = _has_trainer(planner.case) and not is_starved, lower if is_starved else None
        others, oom = planner.case.ledger.other_processes_bytes, planner.case.oom
        if planner.case.has("training_step") and others is not None and oom is not None and others < oom.wanted_bytes:
            lower = None  # what the engine holds is less than what the trainer's step asked for
        moved = tuple(step.removeprefix("and ") for step in _trainer_steps(planner.case, None))
        yield replace(known_fix("trainer_off_the_card"), steps=moved) if is_blind else None
        yield from (lower, order, off) if _has_trainer(planner.case) else (order, lower, off)


def _share_beside_trainer(planner: FixPlanner, is_starved: bool) -> Fix | None:
    """Fix: a larger utilization where the current leaves no KV block (`is_starved`), else a smaller one; or None."""
    freed, total = planner.case.number("sleep_freed", "freed_bytes"), planner.total_bytes
    # Without a printed share the lower half is below most of them.
    share, why = 0.4, "0.7 to 0.3 is what worked for others."
    if is_starved and planner.utilization_known:
        share = max(share, planner.utilization * 1.5)
        why = f"At {planner.utilization:g} no cache block is left: half as much again, or more."
    elif planner.utilization_known:
        share, why = min(planner.utilization * 0.75, 0.6), f"Three quarters of {planner.utilization:g}."
    elif freed and total:
        share = 0.75 * freed / total
        why = f"Waking up maps {gib(freed)} again, {freed / total:.2f} of the card: three quarters of that."
    share, why = round(share, 2), f"Whoever shares the card needs its part beside the engine's. {why}"
    lower = planner.lower_utilization_or_len(share, why)
    if lower is not None:
        trades = "" if is_starved else lower.trades
        lower = replace(lower, steps=(*_trainer_steps(planner.case, share), *lower.steps), trades=trades)
    return lower


def _split_engine_fix(planner: FixPlanner) -> Fix | None:
    """Fix: one engine split over the cards of all trainer processes, where one model fills half a card; else None."""
    told, weights = planner.case.first("own_engines_told"), stated_weights_bytes(planner.case)
    count = int(NUMBERS.get(str(told.facts["what"]).lower(), told.facts["what"])) if told is not None else 1
    is_split = (planner.case.startup.args.tensor_parallel_size or 1) > 1
    if count < 2 or is_split or not (total := planner.total_bytes) or weights < _USUAL_SHARE * total:
        return None
    why = f"Each of the {count} engines holds the whole model, {gib(weights)} of a card's {gib(total)}; split over the "
    why += f"cards each holds {gib(weights // count)}."
    return Fix("more_or_fewer_gpus_tp_pp", why, {"tensor_parallel_size": count}, is_unplanned=True)


def _trainer_steps(case: Case, share: float | None) -> tuple[str, ...]:
    """Steps in the trainer's settings: the utilization `share` to set (None: none), and its own memory off the card."""
    settings = next((found for item in case.evidence if (found := trainer_settings(item.text))), None)
    if settings is None:
        return known_fix("trainer_off_the_card").steps if _has_trainer(case) else ()
    is_asleep = case.has("cumem_oom", "sleep_freed", "frame_wake", "sleep_on")
    is_asleep = is_asleep or any(settings["sleep"].partition("=")[0] in item.text for item in case.evidence)
    ways = settings["offload"] if is_asleep else f"{settings['sleep']}; {settings['offload']}"
    if is_moved := case.tells(prose("offloaded")):
        ways = ways.partition(";")[0]  # sleep alone is left
    own = () if is_moved and is_asleep else (f"and its own part off the card: {ways}",)
    return own if share is None else (f"in the trainer's own settings: {settings['setting']}={share:g}", *own)


CAUSE = Cause(entry="LR407", usual_at=("wake",))
