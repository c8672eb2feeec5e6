"""Text of a plan: the verdict, the card's memory, the KV cache and the advice; and of a search (`--want-context`)."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from legroom.drawing.chart import bar, labels, ruler, swatch
from legroom.drawing.terminal import PLAIN, Style
from legroom.drawing.text import columns, command_phrases, count, paragraphs, plural, wrap, wrap_command
from legroom.memory.server_states import ServerState
from legroom.planning.capacity_search import SearchAnswer
from legroom.planning.plan import Plan, cold_start, context_by_user_count, ready_command, sure_longest_len, try_flags
from legroom.render.plan_parts import (
    ROUNDING,
    LayoutPart,
    answer_lines,
    band_basis_text,
    certainty_text,
    first_start_loss,
    holds_text,
    layout_parts,
    note_lines,
    plan_headline,
    pool_text,
    scale_bytes,
    short_model_name,
)
from legroom.units import gib, human_bytes
from legroom.vllm.command_line import change_words
from legroom.vllm.resolve import default_and_longest_len

_MARGIN = "  "
_NO_POOL = "This model keeps no KV cache: it reads a text whole, in one step."


def plan_text(plan: Plan, style: Style = PLAIN, explain_math: bool = False) -> str:
    """The text of `legroom plan`; `explain_math` adds the terms of every part."""
    text = paragraphs(
        answer_lines(plan.verdict, plan_headline(plan), style),
        _failure_lines(plan, style),
        [_body_text(plan, style)],
        _advice_lines(plan, style),
        command_lines(_command_to_run(plan), style),
        _math_lines(plan, style) if explain_math else (),
        note_lines(plan.notes, style),
    )
    return f"{text}\n"


def _body_text(plan: Plan, style: Style, wanted: float | None = None) -> str:
    """GPU, KV cache and pipeline stages; the speed is of `wanted` users together (None: as many as it holds)."""
    return paragraphs(_card_lines(plan, style), _kv_cache_lines(plan, style, wanted), _stage_lines(plan, style))


def _failure_lines(plan: Plan, style: Style) -> Iterator[str]:
    """The error that vLLM stops with, the bytes needed and missing; nothing where the plan starts."""
    failure = plan.memory.failure
    if failure is None:
        return
    edge = style.paint(style.pick("│", "|"), "red")
    then = "then " if plan.verdict == "tight" else ""
    yield f"{_MARGIN}vLLM {then}stops with:"
    for line in wrap(failure.message, style.width - 4):
        yield f"{_MARGIN}{edge} {line}"
    for line in wrap(_shortfall_text(plan), style.width, _MARGIN):
        yield style.paint(line, "red", "bold")
    if plan.memory.refused:
        yield from wrap(f"What helps: {plan.memory.refused.hint}.", style.width, _MARGIN)


def _shortfall_text(plan: Plan) -> str:
    """What the failing start-up check needs, has and lacks; empty where it is not about bytes."""
    failure = plan.memory.failure
    short = failure.needed_bytes - failure.available_bytes if failure else 0
    if failure is None or short <= 0:
        return ""
    lacks = f"needs {gib(failure.needed_bytes)}, has {gib(failure.available_bytes)}: {human_bytes(short)} short"
    whole = plan.missing_bytes
    request = f"one request of {count(plan.settings.max_model_len)} tokens"
    return lacks + f"; with the rest of a start and {request}: {human_bytes(whole)} short" * (whole > short)


def plan_words(plan: Plan) -> dict[str, Any]:
    """The sentences of `legroom plan` by name, for the page; `to_run` is the command to start, empty for none."""
    kv, refused = plan.memory.kv, plan.memory.refused
    return {
        "headline": plan_headline(plan),
        "short": _shortfall_text(plan),
        "helps": f"What helps: {refused.hint}." if refused and plan.memory.failure else "",
        "pool": [{"name": name, "text": text} for name, text in _kv_cache_rows(plan)] if plan.reaches_pool else [],
        "no_pool": _NO_POOL if kv.shape.is_empty else "",
        "basis": band_basis_text(plan),
        "no_advice": _no_advice_text(plan),
        "advice": [
            {
                "text": _holding_text(each.plan),
                "costs": each.trades,
                "is_tight": each.plan.verdict != "fits",
                "length": each.plan.settings.max_model_len,
                "holds": each.plan.holds,
            }
            for each in plan.advice
        ],
        "to_run": ready_command(plan) if plan.starts else _command_to_run(plan),
        "notes": list(dict.fromkeys(plan.notes)),
    }


def _card_lines(plan: Plan, style: Style) -> Iterator[str]:
    """The memory bar of one GPU with the budget marked, and a legend with each part's size."""
    layout = plan.layout
    rows, width = layout_parts(layout), style.width - 2 * len(_MARGIN)
    segments = [part.segment for part in rows]
    stages = plan.settings.pipeline_parallel_size
    each = " each" if plan.target.gpus > 1 else ""
    if each and stages > 1:
        each += f" (stage {layout.rank + 1} of {stages} is the tightest)"
    yield _MARGIN + style.paint(f"{plan.target.gpu.name}, {gib(layout.total_bytes)}{each}", "bold")
    yield _MARGIN + style.paint(labels(segments, width), "dim")
    yield _MARGIN + bar(segments, width, style)
    position = round(layout.budget_bytes / scale_bytes(layout) * width)
    budget = f"budget {gib(layout.budget_bytes)} = {plan.settings.gpu_memory_utilization:g} x total"
    yield _MARGIN + style.paint(ruler(position, width, budget, style), "dim")
    if layout.headroom_bytes < 0:
        edge = round(layout.total_bytes / scale_bytes(layout) * width)
        yield _MARGIN + style.paint(ruler(edge, width, f"the card ends here, {gib(layout.total_bytes)}", style), "red")
    yield ""
    yield from (_MARGIN + line for line in columns(list(_legend_rows(plan, rows, style)), "<<>><"))
    if any(part.figure and part.figure.kind == "estimated" for part in rows):
        yield from (style.paint(line, "dim") for line in wrap(band_basis_text(plan), style.width, _MARGIN))


def _legend_rows(plan: Plan, rows: Sequence[LayoutPart], style: Style) -> Iterator[tuple[str, str, str, str, str]]:
    """(colour mark, name, size, share of the card, certainty) of each part; `none` and why where bytes are missing."""
    layout, is_counted_above = plan.layout, bool(_shortfall_text(plan))
    for part in rows:
        bytes_ = part.figure.bytes if part.figure else layout.headroom_bytes
        mark = swatch(part.segment, style, 2)
        if bytes_ < 0 and part.name != "outside":
            lacks = f"{gib(-bytes_)} missing" if part.figure else f"{gib(-bytes_)} over the card"
            if is_counted_above:
                lacks = "the budget is used up" if part.figure else "the card is full"
            yield (mark, part.name, "none", "", style.paint(lacks, "red"))
            continue
        sure = certainty_text(part.figure) if part.figure else "free at the peak"
        yield (mark, part.name, gib(bytes_), f"{bytes_ / layout.total_bytes:.1%}", style.paint(sure, "dim"))


def _kv_cache_lines(plan: Plan, style: Style, wanted: float | None) -> Iterator[str]:
    """Figures of KV cache and host, speed (of `wanted` users; None: all it holds) and price; or that it has none."""
    kv = plan.memory.kv
    if kv.shape.is_empty:
        yield from wrap(_NO_POOL, style.width, _MARGIN)
        return
    if plan.reaches_pool:
        for name, text in (*_kv_cache_rows(plan), *_speed_rows(plan, wanted)):
            first, *rest = wrap(text, style.width - 15)
            yield f"{_MARGIN}{style.paint(f'{name:<11}', 'bold')}  {first}"
            yield from (" " * 15 + line for line in rest)


def _speed_rows(plan: Plan, wanted: float | None) -> Iterator[tuple[str, str]]:
    """(name, text) of decode speed for one and `wanted` users (None: all it holds), and price; none if it fails."""
    from legroom.simulation.card_models import speed_and_price_json  # plans of a gate or an export need no step times

    known = speed_and_price_json(plan, wanted) if plan.starts else {}
    if one := known.get("one_user_tokens_per_s"):
        text, together = f"{_rate_range(one)} for one user alone", known["all_users_tokens_per_s"]
        if (users := known["users"]) > 1:
            text += f", {_rate_range(together)} for {count(users)} together, {together['estimate'] / users:,.0f} each"
        yield "tokens/s", f"{text}, decoding at full length"
    if (usd := known.get("usd_per_hour")) is not None:
        yield "price", f"${usd:,.2f} an hour, list price of {known['price_date']}"


def _rate_range(rate: Mapping[str, float]) -> str:
    """`1,200 (900 to 1,500)` of a rate in tokens/s with the keys `estimate`, `low` and `high`."""
    return f"{rate['estimate']:,.0f} ({rate['low']:,.0f} to {rate['high']:,.0f})"


def _kv_cache_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """(name, text) of each figure of the KV cache, and of the host memory."""
    engines = f", on each of {plan.settings.data_parallel_size} engines" if plan.settings.data_parallel_size > 1 else ""
    yield "KV cache", pool_text(plan.memory.kv, "block") + engines
    yield "concurrency", holds_text(plan)
    if plan.runs_at_once < plan.holds:
        yield "at once", f"{count(plan.runs_at_once)} of them run: --max-num-seqs allows no more"
    # Tokens per request at higher concurrency than the full length allows.
    shares = context_by_user_count(plan)
    if shares:
        (users, tokens), *others = shares.items()
        words = (f"{users} get {count(tokens)}" for users, tokens in others)
        yield "users", ", ".join((f"{users} at once get {count(tokens)} tokens each", *words))
    yield "longest", _longest_context_text(plan)
    yield from _first_start_rows(plan)
    needs, limit = plan.host, plan.target.host_limit_bytes
    enough = f"{gib(needs.request_bytes, 0)} is enough"
    if limit is not None:
        is_enough = limit >= needs.held_bytes
        enough = f"{gib(limit, 1)} is enough" if is_enough else f"{gib(limit, 1)} is too small, {enough}"
    holds = f"it holds about {gib(needs.held_bytes, 1)}, {gib(needs.shm_bytes, 0)} of it in /dev/shm"
    yield "host", f"a memory limit of {enough}: {holds}"


def _longest_context_text(plan: Plan) -> str:
    """The longest context that fits, and the model's limit where that is lower."""
    fits = plan.memory.kv.longest_len
    longest = default_and_longest_len(plan.args, plan.target.model, plan.target.release)[1]
    limit = max(longest, plan.settings.max_model_len)
    why = ": some layers keep only a part of a long request" if fits > (1 + ROUNDING) * plan.memory.kv.tokens else ""
    sure = sure_longest_len(plan) if plan.layout.kv_cache.kind == "estimated" else 0
    why += f", {count(sure)} for sure" if 0 < sure < min(fits, limit) else ""
    if 0 < limit < fits:
        return f"{count(fits)} tokens would fit{why}; the model's limit is {count(limit)} tokens"
    return f"{count(fits)} tokens is the longest with these flags{why}"


def _first_start_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """(name, text) of the KV blocks of a first start, with a cold compile cache; no row where the plan is of one."""
    first = cold_start(plan)
    if first is plan:
        return
    kv, blocks = first.memory.kv, plan.memory.kv.num_blocks
    lost = 1 - max(kv.num_blocks, 0) / blocks
    words = f"{plural(max(kv.num_blocks, 0), 'block')} with a cold compile cache"
    if first.memory.failure and not first.memory.refused:
        words += ": too few, so the first start fails"
    elif lost > ROUNDING:
        words += f", {lost:.0%} fewer: {count(kv.tokens)} tokens, {first.holds:.2f} requests of full length"
    yield "first start", words


def _stage_lines(plan: Plan, style: Style) -> Iterator[str]:
    """A small memory bar for each pipeline stage, with its weights and KV cache; nothing for a single stage."""
    ranks = plan.memory.ranks
    if len(ranks) < 2:
        return
    yield f"{_MARGIN}{style.paint('pipeline stages', 'bold')}"
    width = max(10, style.width - 44)
    for rank in ranks:
        mini = bar([part.segment for part in layout_parts(rank)], width, style)
        yield f"{_MARGIN}{rank.rank + 1:>2}  {mini}  weights {gib(rank.weights.bytes)}, KV {gib(rank.kv_cache.bytes)}"


def _advice_lines(plan: Plan, style: Style) -> Iterator[str]:
    """The changes of flags that make the server start or hold the load, cheapest first, or that none was found."""
    if not plan.advice:
        yield from wrap(_no_advice_text(plan), style.width, _MARGIN)
        return
    verb = "hold" if plan.starts else "start"
    yield style.paint(f"What would make it {verb}, the cheapest first", "bold")
    for number, advice in enumerate(plan.advice, 1):
        yield ""
        # One advice: its flags, the memory bar after the change, and its cost.
        after = advice.plan
        flags = " ".join(change_words(advice.flags))
        caveat = "" if after.verdict == "fits" else "  (tight)"
        yield f"{number:>2}. {style.paint(flags, 'bold')}{caveat}"
        yield _mini_bar_line(after, style)
        if advice.trades:
            yield from (style.paint(line, "dim") for line in wrap(f"costs: {advice.trades}", style.width, "    "))


def _no_advice_text(plan: Plan) -> str:
    """A sentence that no change of flags was found; empty where one was found, or none was looked for."""
    if plan.advice or plan.verdict != "does_not_fit" or not plan.advised or plan.memory.refused:
        return ""
    gpus = "these GPUs" if plan.target.gpus > 1 else "this GPU"
    ways = "less memory in use" if plan.target.held_by_others_bytes else "a smaller model, or more GPUs,"
    return f"No change of flags that was tried makes it start on {gpus}; {ways} would."


def _mini_bar_line(plan: Plan, style: Style) -> str:
    """A small memory bar, then KV bytes, concurrency and headroom."""
    mini = bar([part.segment for part in layout_parts(plan.layout)], max(10, style.width - 57), style)
    return f"    {mini}  {_holding_text(plan)}"


def _holding_text(plan: Plan) -> str:
    """`KV 40.2 GiB, holds 8.10 x 8,192, 3.1 GiB free`; the last alone for a model without a KV cache."""
    layout, kv = plan.layout, plan.memory.kv
    free = f"{gib(layout.headroom_bytes, 1)} free"
    holds = f"holds {plan.holds:.2f} x {count(plan.settings.max_model_len)}, "
    return free if kv.shape.is_empty else f"KV {gib(layout.kv_cache.bytes)}, {holds}{free}"


def _command_to_run(plan: Plan) -> list[str]:
    """The words of the first advice's command, else of the plan's if it starts or is tight; empty otherwise."""
    if plan.advice:
        return ready_command(plan.advice[0].plan)
    return ready_command(plan) if plan.starts or plan.verdict == "tight" else []


def command_lines(command: Sequence[str], style: Style, env: Mapping[str, str] = {}) -> Iterator[str]:
    """A shell prompt and the command with `env` before it, quoted and wrapped with backslashes."""
    phrases = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
    phrases += command_phrases(map(shlex.quote, command))
    for number, line in enumerate(wrap_command(phrases, style.width - 6)):
        yield f"{_MARGIN}{style.paint('$ ' if number == 0 else '    ', 'dim')}{line}"


def _math_lines(plan: Plan, style: Style) -> Iterator[str]:
    """How each part of the memory was computed, term by term, in bytes."""
    yield style.paint("The working", "bold")
    for part in layout_parts(plan.layout):
        if part.figure is None:
            continue
        yield ""
        yield f"{_MARGIN}{style.paint(part.name, 'bold')}  {gib(part.figure.bytes, 3)}  {certainty_text(part.figure)}"
        rows = [(term.label, human_bytes(term.bytes), style.paint(term.how, "dim")) for term in part.figure.terms]
        yield from (_MARGIN * 2 + line for line in columns(rows, "<><"))
    yield from _kv_token_math(plan, style)


def _kv_token_math(plan: Plan, style: Style) -> Iterator[str]:
    """Lines with the terms of the KV cache bytes per token."""
    kv = plan.memory.kv
    if not kv.token_terms or not kv.bytes_per_token:
        return
    yield ""
    each = " on each GPU" if plan.settings.tensor_parallel_size > 1 else ""
    yield f"{_MARGIN}{style.paint('KV bytes of a token', 'bold')}  {kv.bytes_per_token:,} bytes{each}"
    rows = [(term.label, f"{term.bytes:,} bytes", style.paint(f"each: {term.how}", "dim")) for term in kv.token_terms]
    yield from (_MARGIN * 2 + line for line in columns(rows, "<><"))
    total = sum(term.bytes for term in kv.token_terms)
    if total != kv.bytes_per_token:
        length = count(plan.settings.max_model_len)
        text = f"The layers add up to {total:,} bytes while all of them keep a token; {kv.bytes_per_token:,} is the "
        text += f"mean over a request of {length} tokens, in whole blocks."
        yield from (style.paint(line, "dim") for line in wrap(text, style.width, _MARGIN * 2))


def search_words(result: SearchAnswer) -> dict[str, Any]:
    """The sentences of a search by name: headline, how many settings were tried, what the best gives up, next steps."""
    load_text = f"{plural(round(result.goal.concurrency), 'request')} of {count(result.goal.context)} tokens"
    kept = f"Kept as given: {result.kept}." if result.kept else ""
    if (best := result.best) is None:
        why = f"No setting holds {load_text}: {result.short_by}"
        return {"headline": why, "mark": "does_not_fit", "weighed": kept, "next": result.next_step}
    name, gpu = short_model_name(best.target.model.name), best.target.gpu.name
    first = first_start_loss(best, result.goal.concurrency)
    caveat = f" after the first start; {first[0]}" if first else ""
    caveat = f", but it is tight: {best.reason}" if best.verdict == "tight" else caveat
    lacks, where = result.one_gpu_lacks, f"{best.target.gpus} x {gpu}"
    says = f"1 x {gpu} does not hold {load_text}; {where} do, with {name}" if lacks else ""
    return plan_words(best) | {
        "headline": f"{says or f'{name} on {where} holds {load_text}'}{caveat}.",
        "mark": "tight" if lacks or first else best.verdict,
        "one_gpu": f"One card is not enough: {lacks}." if lacks else "",
        "gives_up": f"It gives up: {_losses_text(best, result.losses)}.",
        "alternatives": [
            {"text": _holding_text(other), "gives_up": _trade_text(other, losses)}
            for other, losses in result.alternatives
        ],
        "weighed": f"{count(result.considered)} settings were tried. {kept}".rstrip(),
    }


def _losses_text(plan: Plan, losses: Sequence[str]) -> str:
    """What a plan gives up as one text, for CUDA graphs in tokens/s; `nothing beyond the defaults` for no `losses`."""
    rates = [_tokens_per_s(each) if each else "" for each in (plan, try_flags(plan, {"enforce_eager": None}))]
    if all(rates) and any(loss.startswith("no CUDA graphs") for loss in losses):
        slower = f"no CUDA graphs: {rates[0]} for one user, {rates[1]} with them"
        losses = [slower if loss.startswith("no CUDA graphs") else loss for loss in losses]
    return "; ".join(losses) or "nothing beyond the defaults"


def _trade_text(plan: Plan, losses: Sequence[str]) -> str:
    """Tokens/s for one user of an alternative plan, and what its settings give up (`losses`)."""
    lost, rate = _losses_text(plan, losses), _tokens_per_s(plan)
    return f"{f'{rate} for one user; ' if rate and 'tok/s' not in lost else ''}gives up: {lost}"


def _tokens_per_s(plan: Plan) -> str:
    """`45 tok/s` of a single user at max_model_len; empty where it is not estimated."""
    from legroom.simulation.card_models import decode_rate  # plans of a gate or an export need no step times

    rate = decode_rate(plan, plan.settings.max_model_len)
    return f"{rate.estimate:,.0f} tok/s" if rate else ""


def search_text(result: SearchAnswer, style: Style = PLAIN) -> str:
    """The setting found for a load, with its command, plan and alternatives, or why no setting holds it."""
    words = search_words(result)
    remarks = [words.get(name, "") for name in ("one_gpu", "gives_up", "weighed", "next")]
    answer = [line for text in remarks for line in wrap(text, style.width, "  ")]
    answer = [*answer_lines(words["mark"], words["headline"], style), *answer]
    if (best := result.best) is None:
        return "\n".join(answer) + "\n"
    body, others = [_body_text(best, style, result.goal.concurrency)], _alternative_lines(result, style)
    parts = (answer, command_lines(ready_command(best), style), body, others, note_lines(best.notes, style))
    return f"{paragraphs(*parts)}\n"


def _alternative_lines(result: SearchAnswer, style: Style) -> Iterator[str]:
    """Command, memory bar and losses of each other setting that holds the load."""
    if not result.alternatives:
        return
    yield style.paint("Other settings that hold it", "bold")
    for plan, losses in result.alternatives:
        yield ""
        yield from command_lines(ready_command(plan), style)
        yield _mini_bar_line(plan, style)
        yield from (style.paint(line, "dim") for line in wrap(_trade_text(plan, losses), style.width, "    "))


_STATE_NAMES = {f"asleep_{level}": f"asleep, level {level}" for level in (1, 2)}
_STATE_NAMES |= {"serving": "serving", "updating_weights": "updating weights"}


def sleep_text(states: Sequence[ServerState], style: Style = PLAIN) -> str:
    """A table of GPU and host memory when serving and asleep, and remarks."""
    rows = [tuple(style.paint(word, "dim") for word in ("", "each card", "host", "to wake"))]
    for state in states:
        wakes = f"{state.wake_s:.1f} s" if state.wake_s is not None else ""
        wakes = "as long as the checkpoint takes to read" if state.name == "asleep_2" else wakes
        rows.append((_STATE_NAMES[state.name], gib(state.device.bytes), gib(state.host.bytes), wakes))
    asleep = next(state for state in states if state.name == "asleep_1")
    stays = ", ".join(f"{term.label} {human_bytes(term.bytes)}" for term in asleep.device.terms)
    host = (
        "Host memory is beside what the processes hold. Level 1 copies the weights to page-locked memory in pieces "
        "that are rounded up to powers of two, and torch keeps that memory after the server wakes."
    )
    remarks = [
        line for text in (f"What stays on the card: {stays}.", host) for line in wrap(text, style.width, _MARGIN)
    ]
    table = [_MARGIN + line for line in (style.paint("By state", "bold"), *columns(rows, "<>><"))]
    return "\n".join([*table, "", *(line for text in remarks for line in wrap(text, style.width, _MARGIN))]) + "\n"
