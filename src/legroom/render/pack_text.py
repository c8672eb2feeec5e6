"""Text of `legroom pack`: the verdict, the servers on each GPU, and the commands."""

from collections.abc import Iterator, Sequence

from legroom.drawing.terminal import PLAIN, Style
from legroom.drawing.text import columns, paragraphs, plural, wrap
from legroom.facts.release_support import ENDPOINTS_SWITCH
from legroom.memory.overhead import desktop_bytes
from legroom.planning.packing.gpu_packing import PackChange, Packed, PackedCard, PackResult
from legroom.planning.packing.pack_changes import proof
from legroom.planning.plan import ready_command
from legroom.render.plan_parts import answer_lines
from legroom.render.plan_text import command_lines
from legroom.units import gib, human_bytes

_MARGIN = "  "


def pack_text(result: PackResult, changes: Sequence[PackChange] = (), style: Style = PLAIN) -> str:
    """The text of `legroom pack`; `changes` are those that would make the servers fit."""
    blocks = [answer_lines(result.verdict, pack_headline(result), style)]
    alike: dict[object, list[PackedCard]] = {}
    for use in result.cards:
        alike.setdefault((use.card.gpu, use.card.others, use.shift, use.awake, use.asleep), []).append(use)
    blocks += [_card_lines(uses, result, style) for uses in alike.values()]
    if result.verdict == "does_not_fit":
        blocks += [_failure_lines(result, style), _change_lines(changes, style)]
    else:
        blocks += [_start_order_lines(result, style), _command_lines(result, style)]
    blocks.append(_note_lines(result, style))
    return paragraphs(*blocks) + "\n"


def pack_headline(result: PackResult) -> str:
    """One sentence: whether the servers fit on the GPUs, in which start order, and what stays free at the peak."""
    servers, cards = plural(len(result.needs), "server"), result.request.cards
    where = cards[0].gpu.name if len(cards) == 1 else plural(len(cards), "slice" if cards[0].is_slice else "GPU")
    if result.verdict == "does_not_fit":
        reasons = "; ".join(proof(result)) if not _failing(result) else f"{_failing(result)[0].name} does not start"
        return f"{servers} {'does' if len(result.needs) == 1 else 'do'} not fit on {where}: {reasons}"
    how = "in any order" if isinstance(result.order, str) else "in the order below"
    left = gib(result.headroom_bytes)
    if result.verdict == "tight":
        why = f"tight, {left} free at the peak is less than the estimates may miss"
        return f"{servers} on {where}, starting {how}: {why}"
    they = "it starts" if len(result.needs) == 1 else f"they start {how}"
    return f"{servers} on {where}: {they}, and after any restart; {left} free at the peak"


def _card_lines(alike: Sequence[PackedCard], result: PackResult, style: Style) -> Iterator[str]:
    """A table of GPUs that hold the same: peak memory, KV cache and capacity of each server, and what stays free."""
    use, *others = alike
    what, numbers = "Slice" if use.card.is_slice else "GPU", ", ".join(str(each.card.number) for each in alike)
    title = f"{what}{'s' if others else ''} {numbers}: {use.card.gpu.name}, {gib(use.card.gpu.total_bytes)}"
    title += " each" if others else ""
    if result.request.shifts:
        title += f", fullest in the shift {use.shift.name}"
    yield _MARGIN + style.paint(title, "bold")
    by_name = {needs.server.name: needs for needs in result.needs}
    pools = {packed.name: packed.pool_bytes for packed in result.packed}
    total = use.card.gpu.total_bytes
    rows = [tuple(style.paint(word, "dim") for word in ("", "peak", "", "KV cache", "holds"))]
    for name, bytes_ in use.awake:
        pool = pools.get(name, by_name[name].least_pool_bytes)
        cache = gib(pool) if by_name[name].block_bytes else "none"
        holds = capacity_text(next((packed for packed in result.packed if packed.name == name), None))
        rows.append((name, gib(bytes_), f"{bytes_ / total:.1%}", cache, style.paint(holds, "dim")))
    stays = style.paint("what stays on the card", "dim")
    rows += [(name, gib(bytes_), f"{bytes_ / total:.1%}", "asleep", stays) for name, bytes_ in use.asleep]
    for other in use.card.others:
        rows.append((other.name, gib(other.bytes), f"{other.bytes / total:.1%}", "", style.paint("as given", "dim")))
    free = use.headroom_bytes
    share = f"{abs(free) / total:.1%}"
    if free < 0:
        rows.append(("missing", gib(-free), share, "", style.paint("even with the least KV caches", "red")))
    else:
        kept = f"the estimates may miss by {human_bytes(use.spread_bytes)}" if use.awake else ""
        kept += (
            f", and a desktop may take {human_bytes(desktop)}"
            if kept and (desktop := desktop_bytes(use.card.gpu))
            else ""
        )
        rows.append(("free", gib(free), share, "", style.paint(kept, "dim")))
    yield from (_MARGIN + line for line in columns(rows, "<>>><"))


def capacity_text(packed: Packed | None) -> str:
    """How many requests of the full context the server holds at once; empty where it does not start."""
    if packed is None or packed.plan.memory.failure:
        return ""
    if packed.plan.memory.kv.shape.is_empty:
        return "keeps no KV cache"
    return f"{packed.plan.holds:.2f} x {packed.plan.settings.max_model_len:,} tokens"


def _failing(result: PackResult) -> list[Packed]:
    """The servers whose plan fails although the GPUs lack no memory."""
    return [packed for packed in result.packed if packed.plan.memory.failure and not result.short_bytes]


def _failure_lines(result: PackResult, style: Style) -> Iterator[str]:
    """vLLM's error message for each server that does not start."""
    for packed in _failing(result):
        if failure := packed.plan.memory.failure:
            yield from wrap(f"{packed.name}: {failure.message}", style.width, _MARGIN, _MARGIN * 2)


def _change_lines(changes: Sequence[PackChange], style: Style) -> Iterator[str]:
    """The flags or GPUs that would make the servers fit, least change first, or that none was found."""
    texts = change_texts(changes)
    if changes:
        yield _MARGIN + style.paint("What would fit, the least change first:", "bold")
    margin = _MARGIN * 2 if changes else _MARGIN
    yield from (line for text in texts for line in wrap(text, style.width, margin, margin + _MARGIN))


def change_texts(changes: Sequence[PackChange]) -> list[str]:
    """Each change that would make the servers fit with what it sets and why, or that none was found."""
    texts = []
    for change in changes:
        who = f"{change.server}: " if change.server else ""
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in change.flags.items())
        if change.gpus:
            flags = " and ".join(filter(None, (flags, f"--gpus {change.gpus}")))
        elif change.result.request.shifts and not flags:
            flags = " ".join(f"--shift {shift.name}={shift.name}" for shift in change.result.request.shifts)
        texts.append(f"{who}{flags} ({change.why})")
    return texts or ["No smaller batch, context or KV precision makes room, nor do more cards."]


def _start_order_lines(result: PackResult, style: Style) -> Iterator[str]:
    """Which servers to start first and which after a sleep; nothing where any order works."""
    if isinstance(result.order, str):
        return
    first = result.request.shifts[0]
    now = [name for name in result.order if name in first.awake]
    later = [name for name in result.order if name not in first.awake]
    rule = "A server has to be awake to start: put those that are not awake in the next shift to sleep"
    order = (
        f"Start {', '.join(now)} first. {rule}, then start {', '.join(later)}. From then on, sleep first, then wake."
    )
    yield from wrap(order, style.width, _MARGIN)


def _command_lines(result: PackResult, style: Style) -> Iterator[str]:
    """The command of each server, with the environment variables that packing sets."""
    for number, packed in enumerate(result.packed):
        if number:
            yield ""
        set_by_pack = ("CUDA_VISIBLE_DEVICES", ENDPOINTS_SWITCH)
        env = {name: value for name, value in sorted(packed.plan.args.env.items()) if name in set_by_pack}
        yield from command_lines(ready_command(packed.plan), style, env)


def split_texts(result: PackResult) -> list[str]:
    """Which servers were split over several GPUs, as none holds them alone."""
    return [
        f"{name}: --tensor-parallel-size {size}, as one card does not hold it" for name, size in result.splits.items()
    ]


def _note_lines(result: PackResult, style: Style) -> Iterator[str]:
    """The notes of all plans, each once, and how a server gets its MIG slice."""
    notes = dict.fromkeys((*split_texts(result), *(note for packed in result.packed for note in packed.plan.notes)))
    if result.request.cards[0].is_slice:
        notes["each server gets its slice by CUDA_VISIBLE_DEVICES=MIG-..., the UUID that `nvidia-smi -L` prints"] = None
    for note in notes:
        yield from wrap(f"note: {note}", style.width, _MARGIN, _MARGIN * 2)
