"""Which bundled models a card serves: a full plan each, the users that it holds, and how fast they are served."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from legroom.facts.bundled import Bundled, find
from legroom.facts.gpus import Gpu, list_prices
from legroom.facts.releases import Release, latest, release
from legroom.planning.machine import Machine, card_and_used_bytes
from legroom.planning.plan import Plan, Target, cold_start, ready_command, sure_longest_len
from legroom.planning.search_space import CapacityGoal
from legroom.planning.sizing import Fit, fewest_gpus
from legroom.records import dataclass
from legroom.simulation.fast.accounting import step_seconds
from legroom.simulation.from_plan import hardware
from legroom.simulation.step_time import limit_of_data_sheet, roofline, step_band, why_no_step_time
from legroom.sweeps import ProcessExecutor, SweepExecutor, sweep
from legroom.vllm.args import ServeArgs
from legroom.vllm.resolve import default_and_longest_len, served_model
from legroom.vllm.traits import is_pooling

_QUANTIZED_BYTES = 0.5  # Of a weight in the smallest bundled checkpoints: 4 bits (AWQ, GPTQ, NVFP4, MXFP4).


@dataclass(frozen=True)
class CardSearch:
    """What models are searched for: so many cards of one kind, and the users and context that they must hold."""

    gpu: Gpu
    gpus: int
    release: Release
    args: ServeArgs
    goal: CapacityGoal
    used_bytes: int = 0
    """Memory of each card that other processes hold."""

    @classmethod
    def of(cls, machine: Machine, vllm: str | None, context: int, users: float) -> "CardSearch":
        """The search for models that hold `users` at `context` tokens each on a machine; `vllm` None: the newest."""
        gpus, on, args = machine.gpus or 1, release(vllm) if vllm else latest(), ServeArgs()
        goal = CapacityGoal(context, float(users), (gpus,), "balanced")
        card, used_bytes = card_and_used_bytes(machine, on, args)
        return cls(card, gpus, on, args, goal, used_bytes)


@dataclass(frozen=True, slots=True)
class DecodeRate:
    """Tokens a second that each user sees at the full context."""

    low: float
    estimate: float
    high: float

    def as_json(self, users: int = 1) -> dict[str, float]:
        """Low, estimated and high tokens per second, times `users` for all users together."""
        return {"low": users * self.low, "estimate": users * self.estimate, "high": users * self.high}


@dataclass(frozen=True, slots=True)
class CardModel:
    """One bundled model on these cards."""

    bundled: Bundled
    fit: Fit
    longest_len: int = 0
    """The longest request that is sure to fit, as the plan says; less than the wanted length where it is tight."""
    rate: DecodeRate | None = None
    """Of one user, alone on the server."""
    shared_rate: DecodeRate | None = None
    """Of each of the wanted users at once."""
    users: int = 1

    @property
    def family(self) -> str:
        """The base model's name, also for a checkpoint that was quantized from it."""
        return self.bundled.base or self.bundled.name

    @property
    def parameters(self) -> int:
        """The number of parameters of the base model, as a quantized checkpoint's is not listed."""
        root = find(self.family)
        return root.parameters if root else self.bundled.parameters

    def as_json(self) -> dict[str, Any]:
        """An entry of `legroom models --gpu --json`."""
        plan, rate, shared = self.fit.plan, self.rate, self.shared_rate
        return {
            **self.bundled.as_json(),
            "parameters": self.parameters or None,
            "verdict": plan.verdict if plan else "does_not_fit",
            "reason": plan.reason if plan and plan.verdict == "tight" else "",
            "weights_bytes": plan.layout.weights.bytes if plan else None,
            "max_concurrency": self.fit.holds if plan else None,
            "runs_at_once": plan.runs_at_once if plan else None,
            "first_start_concurrency": cold_start(plan).holds if plan else None,
            "longest_len": self.longest_len if plan else None,
            "tokens_per_s": rate.as_json() if rate else None,
            "all_users_tokens_per_s": shared.as_json(self.users) if shared else None,
            "pooling": is_pooling(plan.args, plan.target.model) if plan else None,
            "gives_up": list(self.fit.losses),
            "weights_assumed": plan.target.model.assumed if plan else None,
            "limiting": self.fit.limiting,
            "short_bytes": self.fit.short_bytes,
            "command": ready_command(plan) if plan else None,
        }


@dataclass(frozen=True)
class CardModels:
    """The result: what fits, the largest models first, and what lacks least."""

    search: CardSearch
    fitting: tuple[CardModel, ...]
    too_large: tuple[CardModel, ...]
    """Models that would start with more memory, those that lack the least first."""
    order: str = "size"
    """A name of ORDERS."""
    refused: tuple[CardModel, ...] = ()
    """Models that no memory would start: vLLM does not take them so."""

    @property
    def best_of_each(self) -> list[CardModel]:
        """The best checkpoint of each base model: sure to fit, then the fewest losses, then the largest weights."""
        best: dict[str, CardModel] = {}
        for each in sorted(self.fitting, key=_preference):
            best.setdefault(each.family, each)
        return sorted(best.values(), key=ORDERS[self.order])

    @property
    def nearest_missing(self) -> list[CardModel]:
        """Of each base model without a fitting checkpoint, the checkpoint that lacks the fewest bytes."""
        served = {each.family for each in self.fitting}
        missing: dict[str, CardModel] = {}
        for each in self.too_large:
            if each.family not in served:
                missing.setdefault(each.family, each)
        return list(missing.values())

    def as_json(self) -> dict[str, Any]:
        """The document that `legroom models --gpu --json` prints."""
        asked = self.search
        return {
            "vllm": asked.release.version,
            "gpu": asked.gpu.name,
            "gpus": asked.gpus,
            "context": asked.goal.context,
            "users": asked.goal.concurrency,
            "models": [each.as_json() for each in sorted(self.fitting, key=ORDERS[self.order])],
            "too_large": [each.as_json() for each in self.too_large],
        }


def _preference(each: CardModel) -> tuple[bool, int, float]:
    """Sort key (tight, number of losses, -weights in bytes) of a checkpoint; the smallest is the best."""
    plan = each.fit.plan
    is_tight = plan is not None and plan.verdict == "tight"
    return is_tight, len(each.fit.losses), -plan.layout.weights.bytes if plan else 0


ORDERS: Mapping[str, Callable[[CardModel], Any]] = {
    "size": lambda each: (-each.parameters, each.family),
    "name": lambda each: each.bundled.name,
    "context": lambda each: -each.longest_len,
    "users": lambda each: -each.fit.plan.runs_at_once if each.fit.plan else 0,
    "speed": lambda each: -each.rate.estimate if each.rate else 0,
}
"""How a list of models can be sorted: the largest, longest, most or fastest first."""


def models_on_card(
    models: Sequence[Bundled],
    search: CardSearch,
    executor: SweepExecutor | None = None,
    progress: Callable[[float], None] | None = None,
    order: str = "size",
) -> CardModels:
    """Every model that the cards serve under the wanted load, and those too large, up to 1.5 times their memory."""
    total = search.gpus * search.gpu.total_bytes
    near = [each for each in models if _least_weights_bytes(each) <= 1.5 * total]
    answers = sweep(card_model, search, near, executor or ProcessExecutor(), progress)
    fitting = sorted((each for each in answers if each.fit.plan), key=ORDERS["size"])
    too_large = sorted((each for each in answers if each.fit.short_bytes), key=lambda each: each.fit.short_bytes)
    refused = tuple(each for each in answers if not each.fit.plan and not each.fit.short_bytes)
    return CardModels(search, tuple(fitting), tuple(too_large), order, refused)


def _least_weights_bytes(bundled: Bundled) -> float:
    """A lower bound of the weights in bytes, from the catalog's figures, so that no config need be read."""
    root = find(bundled.base) if bundled.base else bundled
    config = bundled.entry.get("config", {})
    scheme = bundled.entry.get("quantization") or {**config.get("text_config", {}), **config}.get("quantization_config")
    is_quantized = bundled.base is not None or scheme is not None
    return (root.parameters if root else 0) * (_QUANTIZED_BYTES if is_quantized else 2.0)


def card_model(search: CardSearch, bundled: Bundled) -> CardModel:
    """The plan of one bundled model with the wanted users and context on the cards, and its decode speed."""
    args = replace(search.args, model=bundled.ids[0] if bundled.ids else bundled.name)
    where = (search.gpu, search.gpus, search.release)
    target = Target(served_model(args), *where, held_by_others_bytes=search.used_bytes)
    fit = fewest_gpus(target, args, search.goal)
    if fit.plan is None:
        return CardModel(bundled, fit)
    limit = max(default_and_longest_len(args, target.model, target.release)[1], search.goal.context)
    longest = min(sure_longest_len(fit.plan), limit)
    users, engines = math.ceil(search.goal.concurrency), fit.plan.settings.data_parallel_size
    one, each = decode_rates(fit.plan, search.goal.context, (1, math.ceil(users / engines)))
    return CardModel(bundled, fit, longest, one, each, users)


def decode_rate(plan: Plan, context: int, users: int = 1) -> DecodeRate | None:
    """Tokens per second for each of `users` users, all at `context` tokens; None for pooling models or no estimate."""
    return decode_rates(plan, context, (users,))[0]


def decode_rates(plan: Plan, context: int, user_counts: Sequence[int]) -> list[DecodeRate | None]:
    """The decode rate, at `context` tokens per user, for each number of users; None where there is no estimate."""
    work = hardware(plan)
    if is_pooling(plan.args, plan.target.model) or not work.bandwidth_bytes_s or why_no_step_time(work):
        return [None for _ in user_counts]
    usual, best, band = roofline(work), limit_of_data_sheet(work), step_band(plan, work)

    def rate(users: int) -> DecodeRate:
        """The decode rate with this many users, each of whom holds `context` tokens."""
        step = users, users * context, users
        seconds, least = (float(step_seconds(cost, *step)) for cost in (usual, best))
        return DecodeRate(*(1 / max(seconds * factor, least) for factor in (band.high, 1.0, band.low)))

    return [rate(users) for users in user_counts]


def speed_and_price_json(plan: Plan, wanted: float | None = None) -> dict[str, Any]:
    """Tokens a second of one user, and of `wanted` users (None: all that fit), at the full context; price per hour."""
    settings, price = plan.settings, list_prices().get(plan.target.gpu.name)
    engines = settings.data_parallel_size
    users = max(1, min(int(plan.memory.kv.max_concurrency), settings.max_num_seqs))
    users = min(users, math.ceil(wanted / engines)) if wanted else users
    one, each = decode_rates(plan, settings.max_model_len, (1, users))
    everyone = min(users * engines, math.ceil(wanted)) if wanted else users * engines
    return {
        "context": settings.max_model_len,
        "users": everyone,
        "one_user_tokens_per_s": one.as_json() if one else None,
        "all_users_tokens_per_s": each.as_json(everyone) if each else None,
        "usd_per_hour": price.usd_per_hour * plan.target.gpus if price else None,
        "price_date": price.date if price else None,
    }
