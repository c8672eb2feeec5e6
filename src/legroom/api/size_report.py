"""`legroom.size`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from legroom.deployments.deployment import Deployment
from legroom.deployments.described import deployment_from_arguments
from legroom.drawing.terminal import PLAIN, Style
from legroom.drawing.text import plural
from legroom.errors import LegroomError
from legroom.facts.gpus import GpuPrice, list_prices
from legroom.facts.releases import Release
from legroom.planning.plan import Policy
from legroom.planning.search_space import CapacityGoal, counts_up_to
from legroom.planning.sizing import Fit, cheapest_first, hourly_usd, named_gpus, row_json, size_models
from legroom.records import dataclass
from legroom.units import parse_length

_GOAL = ("context", "concurrency", "policy")


@dataclass(frozen=True)
class SizeReport:
    """The result of `legroom.size`, as text or JSON."""

    rows: tuple[Fit, ...]
    goal: CapacityGoal
    release: Release
    prices: Mapping[str, GpuPrice]
    """Of one card per hour, by the card's name."""
    budget: float = math.inf

    @property
    def fits(self) -> bool:
        """Whether any of the GPUs, in any count, holds any of the models within the budget."""
        return any(row.count for row in self.affordable)

    @property
    def affordable(self) -> list[Fit]:
        """The rows within the budget and those of GPUs that do not hold the model, the cheapest first."""
        rows = cheapest_first(self.rows, self.prices)
        return [row for row in rows if not row.count or self._usd_per_hour(row) <= self.budget]

    def _usd_per_hour(self, row: Fit) -> float:
        """The price of a row's GPUs in US dollars per hour; infinite where none is known."""
        return hourly_usd(row, self.prices) or math.inf

    def text(self, style: Style | None = None, matrix: bool = False) -> str:
        """The text of `legroom size`: a table of GPUs for each model; with `matrix` one table of models by GPUs."""
        from legroom.render.size_text import matrix_text, size_text

        requests = f"{self.goal.concurrency:g} request{'' if self.goal.concurrency == 1 else 's'}"
        title = f"{requests} of {self.goal.context:,} tokens at once, vLLM {self.release.version}"
        title += f", policy {self.goal.policy}"
        if matrix:
            return matrix_text(self.rows, title, style or PLAIN)
        if self.budget < math.inf:
            left_out = f"{plural(len(self.rows) - len(self.affordable), 'row')} left out"
            costs = [self._usd_per_hour(row) for row in self.rows if row.count]
            if self.budget < (least := min(costs, default=math.inf)) < math.inf:
                left_out += f"; the cheapest costs ${least:.2f}"
            title += f", at most ${self.budget:g} an hour ({left_out})"
        if not self.affordable:
            return f"Nothing holds {title}.\n"
        return size_text(self.affordable, self.prices, title, style or PLAIN)

    def json(self) -> dict[str, Any]:
        """The document that `legroom size --json` prints."""
        from legroom.simulation.card_models import decode_rate

        document = {"vllm": self.release.version, **{name: getattr(self.goal, name) for name in _GOAL}, "rows": []}
        for fit in self.affordable:
            engines = fit.plan.settings.data_parallel_size if fit.plan else 1
            users = {"tokens_per_s": 1, "each_user_tokens_per_s": math.ceil(self.goal.concurrency / engines)}
            rates = {name: fit.plan and decode_rate(fit.plan, self.goal.context, n) for name, n in users.items()}
            row = row_json(fit, self.prices)
            document["rows"].append(row | {name: rate.as_json() if rate else None for name, rate in rates.items()})
        return document

    def __str__(self) -> str:
        return self.text()


def size(
    model: str | Sequence[str],
    *,
    context: int | str = 4096,
    concurrency: float = 1,
    gpus: Sequence[str] | str | None = None,
    max_gpus: int = 32,
    vllm: str | None = None,
    policy: Policy = "balanced",
    env: Mapping[str, str] | None = None,
    **flags: Any,
) -> SizeReport:
    """Which GPUs, and how many, hold `model` with `concurrency` requests of `context` tokens at once.

    `model` is a name or several; `gpus` are the cards to try (`["h100", "l4"]` or `"all"`; None: the usual ones);
    `flags` are vLLM's engine arguments by their Python names.
    """
    tokens = parse_length(context, "context") if isinstance(context, str) else context
    if tokens < 1 or not 1 <= concurrency < math.inf or max_gpus < 1:
        raise LegroomError("context, concurrency and max_gpus are at least 1", "as in context=4096, concurrency=16")
    deployment = deployment_from_arguments("", flags, vllm, env)
    models = [model] if isinstance(model, str) else list(model)
    return size_deployment(deployment, tokens, concurrency, max_gpus, gpus, policy, models)


def size_deployment(
    deployment: Deployment,
    context: int,
    concurrency: float | None,
    max_gpus: int,
    gpus: Sequence[str] | str | None,
    policy: Policy = "balanced",
    models: Sequence[str] = (),
) -> SizeReport:
    """Which GPUs (at most `max_gpus`) hold the deployment's model, or `models` with its flags; with list prices."""
    release, args = deployment.release, deployment.args
    goal = CapacityGoal(context, float(concurrency or 1), counts_up_to(max_gpus), policy)
    rows = size_models(models or [args.model], release, args, goal, named_gpus(gpus))
    return SizeReport(tuple(rows), goal, release, list_prices())
