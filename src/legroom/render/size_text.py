"""Text of `legroom size` (a table per model, or a matrix of models and GPUs) and of `legroom models --gpu`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from legroom.drawing.terminal import PLAIN, Style
from legroom.drawing.text import columns, plural, wrap
from legroom.facts.bundled import checkpoint_role, find
from legroom.facts.gpus import GpuPrice, list_prices
from legroom.planning.checkpoints import FULL_BITS, lost_bits, quantized_checkpoints
from legroom.planning.plan import Plan, cold_start, ready_command
from legroom.planning.search_space import NODE_GPUS
from legroom.planning.sizing import SEVERAL_NODES, Fit, hourly_usd
from legroom.render.plan_parts import first_start_loss, short_model_name
from legroom.render.plan_text import command_lines
from legroom.simulation.card_models import CardModel, CardModels, CardSearch, DecodeRate, decode_rate
from legroom.simulation.fleet_size import NO_COUNT, CardFleets, FleetReport, Money, SizedFleet
from legroom.simulation.replay_outcome import OVERLOAD_RATIO
from legroom.units import gib, human_bytes

_ONE_USER = "one user, tok/s"
_ONE_USER_NOTE = f"{_ONE_USER}: decoding at this length, alone on the server"
_SIZE_ALONE = "tokens/s and an 8-bit KV cache need a card by its name (rtx4090, l4), not by its size alone"
_TOGETHER_NOTE = "all decoding at this length at once; prompts between make it slower: size --users replays them"
_EACH_NOTE = (
    "tok/s each and answer s: p50, with the prompts of others between, which the tok/s of --concurrency leaves out"
)
_MEMORY_ALONE = "size --concurrency asks for the memory of so many at full length, and for no speed"
_HOLDS_NOTE = (
    "holds: the memory for so many of them at once; of users who pause, fewer ask at once: size --users counts"
)


def size_text(rows: Sequence[Fit], prices: Mapping[str, GpuPrice], title: str, style: Style = PLAIN) -> str:
    """The text of `legroom size`: one table per model, headed by its name and `title`; `prices`: by GPU name."""
    blocks = []
    for model in dict.fromkeys(fit.model for fit in rows):
        fits = [fit for fit in rows if fit.model == model]
        head = style.paint(f"{short_model_name(model)}: {title}", "bold")
        blocks.append("\n".join([head, "", *_gpu_table(fits, prices, style)]))
    return "\n\n".join(blocks) + "\n"


def _gpu_table(fits: Sequence[Fit], prices: Mapping[str, GpuPrice], style: Style) -> list[str]:
    """A row for each GPU type: how many it takes, how they are split, capacity, speed and price; then remarks."""
    each = [f"each of {fit.wanted:g}" for fit in fits[:1] if fit.wanted > 1]
    header = ("GPUs", "split", "holds", _ONE_USER, *each, "$/h", "held/$", "largest part")
    rows = [tuple(style.paint(word, "dim") for word in header)]
    rows += [_gpu_row(fit, fit.plan, hourly_usd(fit, prices), style) for fit in fits if fit.plan]
    lines = [f"  {line}" for line in columns(rows, f"<<{'>' * (len(header) - 3)}<")] if len(rows) > 1 else []
    footers = list(_footer_lines(fits, style))
    notes = (
        [_ONE_USER_NOTE, *(f"{name}: {_TOGETHER_NOTE}" for name in each), *[_HOLDS_NOTE] * len(each)] if lines else []
    )
    footers += [style.paint(line, "dim") for text in notes for line in wrap(text, style.width, "  ", "    ")]
    footers += (
        [style.paint("  the command of another row: add --gpu NAME", "dim")]
        if len(rows) > 2 and not _is_one_kind(fits)
        else []
    )
    if source := _price_source([price for fit in fits if fit.plan and (price := prices.get(fit.gpu.name))]):
        footers.append(style.paint(f"  $/h: {source}; held/$: requests at once for a dollar an hour", "dim"))
    return [*lines, *([""] if lines and footers else []), *footers, *_first_commands(fits, style)]


def _price_source(prices: Sequence[GpuPrice]) -> str:
    """Where the prices of a table come from; empty where it has none."""
    dates = sorted({price.date for price in prices if price in list_prices().values()})
    own = list(dict.fromkeys(price.gpu for price in prices if price not in list_prices().values()))
    if not dates:
        return "at the prices that you gave" if own else ""
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"list prices of {when}" + (f"; yours for {', '.join(own)}" if own else "; --prices FILE takes yours")


def _first_commands(fits: Sequence[Fit], style: Style) -> Iterator[str]:
    """The command of every row if all rows are of one GPU type; else of the first row that surely fits and, where that
    gives something up, also of the first row with the model's own checkpoint."""
    rows = [(fit, fit.plan) for fit in fits if fit.plan]
    held = [(fit, plan) for fit, plan in rows if fit.is_sure] or rows[:1]
    own = [(fit, plan) for fit, plan in held if plan.target.model.name == fit.model and not fit.losses]
    own = own or [(fit, plan) for fit, plan in held if plan.target.model.name == fit.model]
    some = held[:1] + [each for each in own[:1] if held[0][0].losses and each != held[0]]
    for fit, plan in rows if _is_one_kind(fits) else some:
        yield from ("", _marked_tight(f"  {_row_name(fit)}{'*' if fit.losses else ''}", plan, style))
        yield from command_lines(ready_command(plan), style)


def _row_name(fit: Fit) -> str:
    """The GPUs of a row, with the bits of its weights where these are another checkpoint's."""
    other = fit.plan.target.model if fit.plan and fit.plan.target.model.name != fit.model else None
    return f"{fit.count} x {fit.gpu.name}{f' in {FULL_BITS - lost_bits(other)} bits' if other else ''}"


def _is_one_kind(fits: Sequence[Fit]) -> bool:
    """Whether all rows are of one kind of GPU."""
    return len({fit.gpu.name for fit in fits}) == 1


def _footer_lines(fits: Sequence[Fit], style: Style) -> Iterator[str]:
    """What the settings give up, which GPUs are too small, and why others cannot run the model."""
    rows: dict[str, list[str]] = {}
    for fit in fits:
        if fit.plan and fit.losses:
            other = fit.plan.target.model.name
            given_up = f"{'; '.join(fit.losses)}{f' ({other})' if other != fit.model else ''}"
            rows.setdefault(given_up, []).append(_row_name(fit))
    for given_up, cards in rows.items():
        yield from wrap(f"* {', '.join(cards)}: {given_up}", style.width, "  ", "    ")
    for fit, plan in ((fit, fit.plan) for fit in fits if fit.plan):
        tight = [f"tight: {plan.reason}"] if plan.verdict != "fits" else []
        for remark in (*first_start_loss(plan, fit.wanted), *tight):
            yield from wrap(f"{_row_name(fit)}: {remark}", style.width, "  ", "    ")
    if any(fit.count > NODE_GPUS for fit in fits):
        yield style.paint(f"  {SEVERAL_NODES}", "dim")
    without, holding = [fit for fit in fits if fit.plan is None], {fit.gpu.name for fit in fits if fit.plan}
    for fit in without:
        if fit.short_bytes:
            # Where a row holds it, that is with another checkpoint.
            itself = f", {short_model_name(fit.model)} itself" if fit.gpu.name in holding else ""
            lacks = f"{fit.tried[-1]} x {fit.gpu.name}{itself}: {human_bytes(fit.short_bytes)} short on each"
            yield from wrap(f"{lacks}; --gpus tries more", style.width, "  ", "    ")
    for reason in dict.fromkeys(fit.limiting for fit in without if not fit.short_bytes):
        named = _reason_with_gpus(reason, [(fit.gpu.name, fit.limiting if fit in without else "") for fit in fits])
        yield from wrap(named, style.width, "  ", "    ")


def _reason_with_gpus(reason: str, gpu_reasons: Sequence[tuple[str, str]]) -> str:
    """`A, B: reason` with the GPUs of the (GPU, reason) pairs that have this reason; `any GPU` where all have it."""
    names = [gpu for gpu, reason_of_gpu in gpu_reasons if reason_of_gpu == reason]
    return f"{'any GPU' if len(names) == len(gpu_reasons) > 1 else ', '.join(names)}: {reason}"


def _gpu_row(fit: Fit, plan: Plan, usd: float | None, style: Style) -> tuple[str, ...]:
    """The table cells of one GPU type; `usd` is the price an hour, None where it is unknown."""
    settings, nothing = plan.settings, style.pick("·", "-")
    parallel = {"TP": "tensor", "PP": "pipeline", "DP": "data"}
    sizes = {name: getattr(settings, f"{kind}_parallel_size") for name, kind in parallel.items()}
    split = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    split += ["EP"] if settings.enable_expert_parallel else []
    mark = style.paint("*", "orange") if fit.losses else ""
    shared = (1, math.ceil(fit.wanted / settings.data_parallel_size)) if fit.wanted > 1 else (1,)
    return (
        _marked_tight(f"{_row_name(fit)}{mark}", plan, style),
        " ".join(split) or nothing,
        nothing if plan.memory.kv.shape.is_empty else f"{fit.holds:.2f}",
        *(_rate_text(decode_rate(plan, settings.max_model_len, users), 1, style) for users in shared),
        *((nothing, nothing) if usd is None else (f"{usd:,.2f}", f"{fit.holds / usd:,.1f}")),
        f"{fit.limiting} {human_bytes(fit.limiting_bytes)}",
    )


def _rate_text(rate: DecodeRate | None, users: int, style: Style) -> str:
    """Tokens a second of `users` together at `rate` each, and the range of the estimate; a dot for a rate of None."""
    if rate is None:
        return style.pick("·", "-")
    low, estimate, high = (users * each for each in (rate.low, rate.estimate, rate.high))
    return f"{estimate:,.0f} ({low:,.0f}{style.pick('–', '-')}{high:,.0f})"


def matrix_text(rows: Sequence[Fit], title: str, style: Style = PLAIN) -> str:
    """A table of the GPUs needed for `title`, a row per GPU type, a column per model; a dot where none are enough."""
    models = list(dict.fromkeys(fit.model for fit in rows))
    gpus = list(dict.fromkeys(fit.gpu.name for fit in rows))
    counts = {(fit.model, fit.gpu.name): fit for fit in reversed(rows)}
    nothing = style.pick("·", "-")
    table = [("GPU", *(short_model_name(model) for model in models))]
    for gpu in gpus:
        cells = (counts[model, gpu] for model in models)
        table.append((gpu, *(f"{fit.count}{'*' if fit.losses else ''}" if fit.plan else nothing for fit in cells)))
    lines = columns([tuple(row) for row in table], "<" + ">" * len(models))
    head = style.paint(f"GPUs needed for {title}", "bold")
    legend = style.paint(f"  {nothing} not with that many   * gives something up", "dim")
    return "\n".join([head, "", *(f"  {line}" for line in lines), "", legend, ""])


def fleet_size_text(report: FleetReport, style: Style) -> str:
    """The text of `legroom size --rate`: one table per model."""
    blocks = []
    for model in dict.fromkeys(card.model for card in report.cards):
        cards = [card for card in report.cards if card.model == model]
        title = wrap(f"{short_model_name(model)}: {_fleet_title(report)}", style.width)
        head = [style.paint(line, "bold") for line in title]
        blocks.append("\n".join([*head, "", *_fleet_table(report, cards, style)]))
    return "\n\n".join(blocks) + "\n"


def _fleet_title(report: FleetReport) -> str:
    """The load (requests/s, or users and their think time; tokens), latency limits, budget, vLLM release: one line."""
    load, goal = report.load, report.load.goal
    limits = []
    if goal.first_token_p99 is not None:
        limits.append(f"the first token within {goal.first_token_p99:g} s")
    if goal.time_per_token_p99 is not None:
        limits.append(f"{goal.time_per_token_p99 * 1000:g} ms a token")
    within = f", {' and '.join(limits)} (p99)" if limits else ", so that no queue grows"
    within += f", at most ${report.budget:g} an hour" if report.budget < math.inf else ""
    who = f"{load.requests_per_s:.3g} requests/s of"
    if users := load.trace.users:
        who = f"{users.count:,.0f} users who ask again {users.think_s:g} s after an answer,"
    tokens = f"{load.mean_prompt_tokens:,.0f} + {load.mean_output_tokens:,.0f} tokens"
    return f"{who} {tokens}{within}, vLLM {report.release.version}"


def _fleet_table(report: FleetReport, cards: Sequence[CardFleets], style: Style) -> list[str]:
    """The smallest fleet of each GPU type that holds the load, the best one marked; then remarks."""
    holding = report.by_cost(cards)
    best = holding[0] if holding else None
    has_prices = any(map(report.usd_per_hour, holding))
    users = report.load.trace.users
    each, per_usd = (["tok/s each", "answer s"], ["users/$"]) if users else ([], [])
    figures = ["p99 TTFT s", "p99 TPOT ms", *each, *(["$/hour", "$/M tok", *per_usd] if has_prices else [])]
    header = ["", "GPU", "GPUs", "split", *figures]
    rows = [[style.paint(word, "dim") for word in header]]
    rows += [_fleet_row(report, fleet, fleet is best, has_prices, style) for fleet in holding]
    lines = columns(rows, "<<><" + ">" * len(figures)) if holding else []
    first = [card.fleets[0] for card in cards if card.fleets]
    misfits = [
        fleet if not fleet.holds else replace(fleet, reason=why, replicas=NO_COUNT)
        for fleet in first
        if (why := report.over_budget(fleet)) or not fleet.holds
    ]
    footers = list(_fleet_footer_lines(report, [*holding, *misfits], style))
    if best and best.plan and not report.load.pools:
        servers = plural(best.replicas.high or best.replicas.middle or 0, "server")
        footers += ["", _marked_tight(f"  {servers} of {best.gpus_per_replica} x {best.gpu.name}", best.plan, style)]
        footers += command_lines(ready_command(best.plan), style)
    return [*lines, *([""] if lines and footers else []), *footers]


def _fleet_row(report: FleetReport, fleet: SizedFleet, is_best: bool, has_prices: bool, style: Style) -> list[str]:
    """The table cells of a fleet, the first a mark if `is_best`: GPUs, split, p99 TTFT in s and TPOT in ms, prices."""
    outcome, band = fleet.outcome, fleet.band
    assert outcome is not None and band is not None and fleet.plan is not None
    split = f"TP {fleet.tensor_parallel_size}" if fleet.tensor_parallel_size > 1 else ""
    mark = "~" if band.basis == "data_sheet" else ""
    money = [report.usd_per_hour(fleet), report.usd_per_million_tokens(fleet)] if has_prices else []
    per_usd = [report.users_per_usd(fleet)] if has_prices and report.load.trace.users else []
    return [
        style.pick("▶", ">") if is_best else "",
        _marked_tight(fleet.gpu.name + mark, fleet.plan, style),
        _range_text(fleet.replicas.times(fleet.gpus_per_replica), "g", style),
        split or style.pick("·", "-"),
        f"{outcome.first_token_p99:.2f}",
        f"{outcome.time_per_token_p99 * 1000:.0f}",
        *([f"{1 / outcome.time_per_token_p50:.0f}", f"{outcome.latency_p50:.0f}"] if report.load.trace.users else []),
        *(_range_text(usd, ".2f", style) if usd else style.pick("·", "-") for usd in money),
        *(f"{users:.1f}" if users else style.pick("·", "-") for users in per_usd),
    ]


def _range_text(values: Money, form: str, style: Style) -> str:
    """The high end of (low, middle, high), then the range: `6 (4-6)`, or `≥5 (4-?)`; `form`: how to format a number."""
    low, middle, high = (None if value is None else format(value, form) for value in values)
    most = high or f"{style.pick('≥', '>=')}{middle}"
    return f"{high}" if low == high else f"{most} ({low or middle}{style.pick('–', '-')}{high or '?'})"


def _fleet_footer_lines(report: FleetReport, fleets: Sequence[SizedFleet], style: Style) -> Iterator[str]:
    """How uncertain the step times are, the source of the prices, and why GPU types do not hold the load."""
    holding = [fleet for fleet in fleets if fleet.holds]
    remarks, arrow = [], style.pick("▶", ">")
    rates = [report.requests_per_s(fleet) for fleet in holding if fleet.outcome]
    if (users := report.load.trace.users) and rates:
        at_once = [each for fleet in holding if (each := report.requests_at_once(fleet)) is not None]
        waits = f"each waits for the answer, then {users.think_s:g} s, so {_span(at_once)} requests run at once"
        remarks.append(f"{users.count:,.0f} users send {_span(rates)} requests a second: {waits}; {_MEMORY_ALONE}")
        remarks.append(_EACH_NOTE)
    if holding:
        spare = f"counted so that a server could finish {OVERLOAD_RATIO:.0%} more requests a second than it gets"
        remarks.append(f"{spare}; with fewer GPUs users wait longer: legroom simulate shows how long")
    if any(fleet.replicas.low != fleet.replicas.high for fleet in holding):
        enough = "GPUs and $: enough for the slowest steps, with the range"
        remarks.append(f"{enough}; times: of that many, with steps as estimated")
    if len(holding) > 1 and any(fleet.replicas.high is not None and not fleet.is_tight for fleet in holding):
        remarks.append(f"{arrow} the cheapest that holds the load even with the slowest steps")
    elif len(holding) > 1:
        remarks.append(f"{arrow} the cheapest; no card is sure to start and hold the load with the slowest steps")
    for band in dict.fromkeys(fleet.band for fleet in holding if fleet.band):
        names = ", ".join(fleet.gpu.name for fleet in holding if fleet.band == band)
        source = f"~ {names}, not measured" if band.basis == "data_sheet" else names
        why = f": {'; '.join(band.why_wide)}" if band.why_wide else ""
        remarks.append(f"{source}: steps may take {band.low:g} to {band.high:g} times as long{why}")
    if holding and (pools := report.load.pools):
        remarks.append(f"GPUs are in sets of {pools.prefill} prefill and {pools.decode} decode servers")
    if any(fleet.replicas.high is None for fleet in holding):
        most = f"? more than {report.most_gpus} GPUs (--gpus tries more)"
        remarks.append(f"{most}, or no number of them, if steps are that long")
    if source := _price_source([price for fleet in holding if (price := report.price_of(fleet))]):
        remarks.append(f"$: {source}. A million tokens are output tokens")
    if unpriced := [fleet.gpu.name for fleet in holding if not report.price_of(fleet)]:
        remarks.append(f"no price is known for: {', '.join(unpriced)}")
    for reason in dict.fromkeys(fleet.reason for fleet in fleets if fleet.reason):
        remarks.append(_reason_with_gpus(reason, [(fleet.gpu.name, fleet.reason) for fleet in fleets]))
    remarks += filter(None, [smaller_weights_text(report, fleets)])
    for remark in remarks:
        yield from wrap(remark, style.width, "  ", "    ")


def _span(figures: Sequence[float]) -> str:
    """The smallest and the largest figure as `4.7 to 6.1`; the largest alone where they differ by at most 5 %."""
    low, high = (f"{figure:,.2g}" if figure < 10 else f"{figure:,.0f}" for figure in (min(figures), max(figures)))
    return f"{low} to {high}" if max(figures) > 1.05 * min(figures) else high


def smaller_weights_text(report: FleetReport, fleets: Sequence[SizedFleet]) -> str:
    """A sentence that a quantized checkpoint of the same role was not tried; empty where none exists or could help."""
    planned = next((fleet.plan for fleet in fleets if fleet.plan), None)
    if planned is None or any(fleet.gpus == 1 for fleet in fleets):
        return ""
    role, names = checkpoint_role(planned.target.model.name), quantized_checkpoints(planned.target, planned.args)
    smaller = [each.name for each in names if checkpoint_role(each.name) == role]
    if not smaller or {card.model for card in report.cards}.intersection(smaller):
        return ""
    return f"not tried: smaller weights, which may take fewer GPUs; name them like {smaller[0]}"


_MOST_ROWS = 20  # A screen of models; a word, or --json, shows the others.
_NEAREST = 5


def card_models_text(answer: CardModels, style: Style) -> str:
    """The models that fit the GPU, the largest first, one checkpoint each; then those that lack the least memory."""
    asked = answer.search
    users = f"{asked.goal.concurrency:g} user{'' if asked.goal.concurrency == 1 else 's'}"
    used = f", {gib(asked.used_bytes, 1)} of it in use" if asked.used_bytes else ""
    where = f"{asked.gpus} x {asked.gpu.name} ({gib(asked.gpu.total_bytes, 1)}{used}) with vLLM {asked.release.version}"
    title = wrap(f"{where}: {users} of {asked.goal.context:,} tokens", style.width)
    lines = [style.paint(line, "bold") for line in title]
    best = answer.best_of_each
    lines += ["", *_fitting_table(best[:_MOST_ROWS], asked, style)] if best else ["", "No bundled model fits."]
    lines += _models_footer(answer, len(best) - _MOST_ROWS, style)
    if missing := answer.nearest_missing[:_NEAREST]:
        rows = [(_card_name(each), f"lacks {human_bytes(each.fit.short_bytes)} a card") for each in missing]
        lines += ["", style.paint("The next that would fit", "bold"), *(f"  {line}" for line in columns(rows, "<<"))]
    if 0 < len(answer.refused) <= _NEAREST:
        reasons = [f"{each.bundled.name}: {each.fit.limiting}" for each in answer.refused]
        lines += ["", style.paint("Not for any size of card", "bold")]
        lines += [line for reason in reasons for line in wrap(reason, style.width, "  ", "    ")]
    for first in (each.fit.plan for each in best[:1] if each.fit.plan):
        lines += ["", f"  the command of {_card_name(best[0])}; of another row: add its name"]
        lines += command_lines(ready_command(first), style)
    return "\n".join(lines) + "\n"


def _card_name(each: CardModel) -> str:
    """The model's bundled name; the checkpoint's own where the user's words chose another than the usual one."""
    usual, bundled = find(each.bundled.name), each.bundled
    return bundled.name if usual is None or usual.ids == bundled.ids else bundled.ids[0].rpartition("/")[2]


def _fitting_table(models: list[CardModel], asked: CardSearch, style: Style) -> Iterator[str]:
    """A row for each model that fits: weights, users at once, longest request, tokens/s; below, what they give up."""
    wanted, nothing = asked.goal.concurrency, style.pick("·", "-")
    weights = "weights" if asked.gpus == 1 else "weights a card"
    head = ("model", "params", weights, "users", "longest", _ONE_USER, *([f"all {wanted:g}"] if wanted > 1 else []))
    rows = [tuple(style.paint(word, "dim") for word in head)]
    remarks: dict[str, list[str]] = {}
    for each in models:
        if (plan := each.fit.plan) is None:
            continue
        has_cache = not plan.memory.kv.shape.is_empty
        rates = [_rate_text(each.rate, 1, style), _rate_text(each.shared_rate, each.users, style)]
        given_up = "; ".join(loss.partition(":")[0] for loss in each.fit.losses)
        tight = [f"tight: {plan.reason}"] if plan.verdict != "fits" else []
        for remark in (*([f"* gives up {given_up}"] if given_up else []), *first_start_loss(plan, wanted), *tight):
            remarks.setdefault(remark, []).append(_card_name(each))
        users = f"{plan.holds:.2f}" if plan.runs_at_once == plan.holds else f"{plan.runs_at_once:,}"
        first = cold_start(plan).holds
        users += f" ({first:.2f})" if plan.runs_at_once == plan.holds > 1.01 * first else ""
        pool = (users, f"{each.longest_len:,}") if has_cache else (nothing, nothing)
        mark = style.paint("*", "orange") if given_up else ""
        weights = f"{'~' * plan.target.model.assumed}{gib(plan.layout.weights.bytes, 1)}"
        name = style.paint(_card_name(each), "bold") + mark
        figures = f"{each.parameters / 1e9:.1f}B", weights, *pool, *rates[: len(head) - 5]
        rows.append((_marked_tight(name, plan, style), *figures))
    yield from (f"  {line}" for line in columns(rows, f"<{'>' * (len(head) - 1)}"))
    yield from [""] if remarks else []
    for remark, names in sorted(remarks.items()):
        yield from wrap(f"{remark}: {', '.join(names)}", style.width, "  ", "    ")


def _marked_tight(name: str, plan: Plan, style: Style) -> str:
    """The name, followed by `tight` where the plan does not surely fit."""
    return name if plan.verdict == "fits" else f"{name} {style.paint('tight', 'orange')}"


def _models_footer(answer: CardModels, more: int, style: Style) -> Iterator[str]:
    """How many more models fit, and what the table's columns mean."""
    if more > 0:
        yield style.paint(f"  and {more} more: add a word like `qwen3`, --sort speed, or --json", "dim")
    if answer.fitting:
        yield ""
        speed = _ONE_USER_NOTE if any(each.rate for each in answer.fitting) else _SIZE_ALONE
        order = "the most parameters first, which is no measure of quality; " if answer.order == "size" else ""
        users = "users: requests of that length at once (on the first start)"
        meaning = f"{order}{users}; longest: of one request, for sure; {speed}."
        meaning += " all: the tokens/s of all wanted users together." if answer.search.goal.concurrency > 1 else ""
        if any(each.fit.plan and each.fit.plan.target.model.assumed for each in answer.fitting):
            meaning += " ~: estimated, as the config of the checkpoint was not read."
        yield from wrap(meaning, style.width, "  ")
    elif answer.search.gpu.source == "given by size":
        yield from ("", *wrap(f"{_SIZE_ALONE}.", style.width, "  "))
