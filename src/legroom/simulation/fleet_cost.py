"""A sized load with its prices: the answer of `legroom size --rate`, as one document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from legroom.planning.plan import ready_command
from legroom.simulation.fleet_size import ServingLoad, SizedFleet

if TYPE_CHECKING:
    from legroom.facts.gpus import GpuPrice
    from legroom.facts.releases import Release

_MILLION, _HOUR_S = 1e6, 3600
Money = tuple[float | None, float | None, float | None]
"""Low, middle and high; None: no number of GPUs is known."""


@dataclass(frozen=True)
class CardFleets:
    """One model on one card: its layouts, the one with the fewest GPUs first."""

    model: str
    fleets: tuple[SizedFleet, ...]


@dataclass(frozen=True)
class FleetReport:
    """Every model on every card, with prices where they are known."""

    load: ServingLoad
    release: Release
    cards: tuple[CardFleets, ...]
    prices: Mapping[str, GpuPrice]
    most_gpus: int
    are_list_prices: bool = True
    """False: they are the user's own."""

    @property
    def holds(self) -> bool:
        """Whether any card holds the load."""
        return any(fleet.holds for card in self.cards for fleet in card.fleets)

    def price_of(self, fleet: SizedFleet) -> GpuPrice | None:
        return self.prices.get(fleet.gpu.name)

    def usd_per_hour(self, fleet: SizedFleet) -> Money | None:
        price = self.price_of(fleet)
        return fleet.replicas.times(fleet.gpus_per_replica * price.usd_per_hour) if price and fleet.holds else None

    def usd_per_million_tokens(self, fleet: SizedFleet) -> Money | None:
        """Of output tokens, at the rate of the load and not at the most that the servers could do."""
        hourly = self.usd_per_hour(fleet)
        if hourly is None:
            return None
        millions = self.load.output_tokens_per_s * _HOUR_S / _MILLION
        low, middle, high = (None if usd is None else usd / millions for usd in hourly)
        return low, middle, high

    def best(self, cards: Sequence[CardFleets]) -> SizedFleet | None:
        """The cheapest; where no price is known, the one with the fewest GPUs."""
        holding = [card.fleets[0] for card in cards if card.fleets and card.fleets[0].holds]
        priced = [(usd[1] or 0.0, fleet) for fleet in holding if (usd := self.usd_per_hour(fleet))]
        if priced:
            return min(priced, key=lambda pair: pair[0])[1]
        return min(holding, key=lambda fleet: fleet.gpus, default=None)

    def as_json(self) -> dict[str, Any]:
        """The document of `legroom size --rate --json`."""
        load = self.load
        return {
            "vllm": self.release.version,
            "load": {
                "requests_per_s": round(load.requests_per_s, 4),
                "requests": len(load.trace),
                "mean_prompt_tokens": round(load.prompt_tokens, 1),
                "mean_output_tokens": round(load.output_tokens, 1),
                "output_tokens_per_s": round(load.output_tokens_per_s, 2),
            },
            "goal": {
                "first_token_p99_s": load.goal.first_token_p99,
                "time_per_token_p99_s": load.goal.time_per_token_p99,
            },
            "max_gpus": self.most_gpus,
            "rows": [self._row(card.model, fleet) for card in self.cards for fleet in card.fleets],
        }

    def _row(self, model: str, fleet: SizedFleet) -> dict[str, Any]:
        plan, band, outcome, price = fleet.plan, fleet.band, fleet.outcome, self.price_of(fleet)
        return {
            "model": model,
            "gpu": fleet.gpu.name,
            "tensor_parallel_size": fleet.tensor_parallel_size,
            "holds": fleet.holds,
            "reason": fleet.reason or None,
            "replicas": fleet.replicas.as_json(),
            "gpus": fleet.replicas.as_json(fleet.gpus_per_replica),
            "basis": band.basis if band else None,
            "step_time_band": {"low": band.low, "high": band.high} if band else None,
            "first_token_p99_s": round(outcome.first_token_p99, 4) if outcome else None,
            "time_per_token_p99_s": round(outcome.time_per_token_p99, 5) if outcome else None,
            "price": {"usd_per_hour": price.usd_per_hour, "date": price.date or None, "source": price.source}
            if price
            else None,
            "usd_per_hour": _money_json(self.usd_per_hour(fleet)),
            "usd_per_million_tokens": _money_json(self.usd_per_million_tokens(fleet)),
            "command": ready_command(plan) if plan and fleet.holds else None,
        }


def _money_json(money: Money | None) -> dict[str, float | None] | None:
    if money is None:
        return None
    return {
        name: None if usd is None else round(usd, 4) for name, usd in zip(("low", "middle", "high"), money, strict=True)
    }
