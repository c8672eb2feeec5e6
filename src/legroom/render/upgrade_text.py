"""Text of `legroom upgrade`: what changes for a server on another release."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from legroom.drawing.terminal import PLAIN, Style
from legroom.drawing.text import columns, paragraphs, wrap
from legroom.planning.plan import Plan
from legroom.planning.upgrades.kv_changes import ByteChange
from legroom.planning.upgrades.release_upgrade import PoolChange, ReleaseStep, Upgrade
from legroom.render.plan_parts import VERDICT_COLOURS, plan_headline, short_model_name
from legroom.render.plan_text import command_lines
from legroom.units import GIB, MIB, gib, human_bytes
from legroom.vllm.command_line import change_words

_ALWAYS_SHOWN = ("KV cache", "blocks", "tokens as vLLM prints them", "longest requests at once", "free at the peak")
"""Figures that are shown even if they do not change."""
_REPEATS = {f"{figure}, first start": figure for figure in ("KV cache", "longest requests at once")}
_REPEATS |= {"tokens of full-length requests": "tokens as vLLM prints them"}
"""Figures that are hidden where they equal another row's."""
_SMALL_BYTES = MIB  # Smaller changes are summed up in one line.
_SHOWN_BYTES = MIB / 20  # Less would be shown as 0.0 MiB.
_WORDS = {"tight": "tight", "does_not_fit": "will not start"}


def upgrade_text(made: Upgrade, alerts: Sequence[str] = (), style: Style = PLAIN) -> str:
    """The text of one server's upgrade; `alerts` are exported alerts that no longer fire on the new release."""

    def wrapped(texts: Iterable[str], later: str = "    ") -> list[str]:
        """The lines of all texts, wrapped to the style's width; `later` indents the lines after a text's first."""
        return [line for text in texts for line in wrap(text, style.width, "  ", later)]

    sections = {
        "Why the KV cache is not what it was": _kv_change_lines(made, style),
        "Beside the budget": _byte_lines(made.outside, style),
        "Before you compare two logs": wrapped(made.remarks, "  "),
        "Flags": wrapped(_flag_texts(made)),
        "Metrics and alerts": wrapped(_metric_texts(made, alerts)),
        "Known memory bugs": wrapped(_bug_texts(made)),
    }
    titled = ([style.paint(title, "bold"), *body] for title, lines in sections.items() if (body := list(lines)))
    figures = [f"  {line}" for line in columns(_figure_rows(made), "<>>>")]
    head = (_headline_lines(made, style), figures, _release_table(made.steps, style))
    return paragraphs(*head, *titled, _equivalent_command(made, style)) + "\n"


def _headline_lines(made: Upgrade, style: Style) -> Iterator[str]:
    """Both releases, whether the new one starts with the same command, and notes."""
    old, new = made.old, made.new
    model = short_model_name(old.target.model.name)
    yield style.paint(f"{model}: vLLM {old.target.release} -> {new.target.release}", "bold")
    if old.target.release.version == new.target.release.version:
        yield "Both are the same release to legroom: nothing changes."
    if made.is_downgrade:
        yield f"{new.target.release} is the older release: this is a downgrade."
    yield from wrap(plan_headline(new), style.width)
    yield from (line for text in (_conclusion(made), _range_text(made)) for line in wrap(text, style.width))
    notes = dict.fromkeys(note for made in (old, new) for note in (made.target.release.note, made.target.gpu.note))
    yield from (line for note in notes if note for line in wrap(f"note: {note}", style.width, "", "  "))


def _figure_rows(made: Upgrade) -> list[tuple[str, str, str, str]]:
    """(figure, on the old release, on the new one, difference) of each capacity figure, after a header row."""
    rows = [("", str(made.old.target.release), str(made.new.target.release), "")]
    by_name = {change.what: change for change in made.pool}
    for change in made.pool:
        old, new = _figure_text(change, change.old), _figure_text(change, change.new)
        if change.what in _ALWAYS_SHOWN or (old != new and not _repeats_other_row(change, by_name)):
            percent = f"{change.new / change.old - 1:+.1%}" if change.old else ""
            difference = _signed_bytes(max(change.new, 0) - max(change.old, 0)) if change.is_bytes else percent
            rows.append((change.what, old, new, difference if old != new else ""))
    return rows


def _repeats_other_row(change: PoolChange, by_name: Mapping[str, PoolChange]) -> bool:
    """Whether a row can be left out as it has the figures of the row in `by_name` that it usually repeats."""
    other = by_name[_REPEATS.get(change.what, change.what)]
    rounding = 1 if isinstance(change.old, int) else 0.005
    same = abs(change.old - other.old) <= rounding and abs(change.new - other.new) <= rounding
    return other is not change and same


def _figure_text(change: PoolChange, value: float) -> str:
    """The change's old or new `value` as text: bytes with a unit, counts with separators."""
    if change.is_bytes:
        return human_bytes(value) if value > 0 else "none"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def _signed_bytes(bytes_: float) -> str:
    """Bytes with a unit and a sign: `+1.5 GiB`."""
    return f"{'+' if bytes_ > 0 else '-'}{human_bytes(abs(bytes_))}"


def _kv_change_lines(made: Upgrade, style: Style) -> Iterator[str]:
    """Why the KV cache grows or shrinks, part by part, or that a flag sets its size."""
    yield from _byte_lines(made.changes, style)
    given = made.old.settings.kv_cache_memory_bytes
    if not made.changes and given is not None:
        yield f"  It is: --kv-cache-memory-bytes sets it to {human_bytes(given)}."


def _byte_lines(changes: Sequence[ByteChange], style: Style) -> Iterator[str]:
    """A line with its reason for each large change of a memory part, then the small ones as a sum."""
    large = [change for change in changes if abs(change.bytes) >= _SMALL_BYTES]
    for change in large:
        yield from wrap(f"{_signed_bytes(change.bytes):>10}  {change.what}: {change.why}", style.width, "  ", " " * 14)
    rest = sum(change.bytes for change in changes) - sum(change.bytes for change in large)
    if abs(rest) >= _SHOWN_BYTES and large:
        yield f"  {_signed_bytes(rest):>10}  smaller changes"


def _flag_texts(made: Upgrade) -> Iterator[str]:
    """The command's flags that the new release refuses, renames or treats differently."""
    for flag in made.flags:
        instead = f" Instead: {flag.new}." if flag.kind in ("refused", "renamed") and flag.new else ""
        dot = "" if flag.why.endswith(".") else "."
        name = "" if flag.why.startswith(flag.flag) else f"{flag.flag}: "
        yield f"{name}{flag.why}{dot}{instead}"


def _metric_texts(made: Upgrade, alerts: Sequence[str]) -> Iterator[str]:
    """vLLM metrics that are gone in the new release, and the exported alerts that would fall silent."""
    release = made.new.target.release
    yield from (f"{each.name} is gone in {release}; instead: {each.instead}" for each in made.metrics if each.instead)
    if lost := ", ".join(metric.name for metric in made.metrics if not metric.instead):
        yield f"Gone in {release}, with nothing in their place: {lost}"
    if alerts:
        silent = f"Of the alerts exported for {made.old.target.release} these would fall silent: {', '.join(alerts)}."
        yield f"{silent} Export them anew: legroom export prometheus --vllm {release}"


def _bug_texts(made: Upgrade) -> Iterator[str]:
    """Known memory bugs that end or begin with the upgrade."""
    for title, bugs in (("no longer there", made.bugs_ended), ("new there", made.bugs_begun)):
        for bug in bugs:
            where = "" if bug.memory == "gpu" else " (host memory)"
            yield f"{title}: {bug.title}{where}; {bug.threads}"


def upgrade_words(made: Upgrade, alerts: Sequence[str] = ()) -> dict[str, Any]:
    """The sentences of `legroom upgrade` one by one, for the page; `kept` is empty where the old command does not
    start. `alerts`: names of exported alerts that would fall silent."""
    return {
        "headline": plan_headline(made.new),
        "conclusion": _conclusion(made),
        "range": _range_text(made),
        "caveats": list(_kept_caveats(made)),
        "kept": _kept_capacity_text(made) if made.old.starts else "",
        "figures": _figure_rows(made),
        **{
            name: [{"what": change.what, "why": change.why} for change in changes]
            for name, changes in (("changes", made.changes), ("outside", made.outside))
        },
        "remarks": list(made.remarks),
        "flags": list(_flag_texts(made)),
        "metrics": list(_metric_texts(made, alerts)),
        "bugs": list(_bug_texts(made)),
    }


def _conclusion(made: Upgrade) -> str:
    """The sentence that says whether today's command must change, and to what, to keep its capacity."""
    kept, old, new = made.kept, made.old, made.new
    if old.memory.failure:
        why = f": {old.memory.failure.message}" if new.starts else " either. legroom plan says which flags do."
        return f"With {old.target.release} the same command does not start{why}"
    if not kept.plan.starts:
        return "No command that was tried starts there and keeps today's capacity."
    if not kept.keeps_requests:
        return f"It holds less than today: {_held(kept.plan)} of {_held(old)} requests at once."
    tightly = ", but tightly" if kept.plan.verdict == "tight" else ""
    if not _is_changed(made):
        others = [name for name, changed in (("metrics", made.metrics), ("defaults", made.flags)) if changed]
        but = f" But {' and '.join(others)} do change: see below." if others else ""
        return f"The command need not change: it keeps today's capacity{tightly}.{but}"
    changes = " ".join(change_words(kept.flags)) or "the flags named below"
    lead = f"it holds {_held(new)} requests at once (today {_held(old)})" if new.starts else "it does not start"
    return f"As it is, {lead}; {changes} keeps today's capacity{tightly}."


def _range_text(made: Upgrade) -> str:
    """The ranges of an estimated KV cache before and after; empty where either has none."""
    pools = [plan.layout.kv_cache for plan in (made.old, made.new)]
    if any(pool.kind != "estimated" or pool.low <= 0 for pool in pools):
        return ""
    before, after = (f"{pool.low / GIB:.2f} to {pool.high / GIB:.2f} GiB" for pool in pools)
    overlap = pools[0].high >= pools[1].low and pools[1].high >= pools[0].low
    doubt = "; they overlap, so the difference may be none" if overlap else ""
    return f"The KV cache is estimated: {before} before, {after} after{doubt}."


def _held(plan: Plan) -> str:
    """How many requests of max_model_len the plan's KV pool holds at once, as text."""
    return f"{plan.holds:.2f}"


def _is_changed(made: Upgrade) -> bool:
    """Whether keeping today's capacity takes another command than today's."""
    return bool(made.kept.flags) or any(flag.kind in ("refused", "renamed") for flag in made.flags)


def _equivalent_command(made: Upgrade, style: Style) -> Iterator[str]:
    """The command that keeps today's capacity on the new release; nothing where the old one does not start."""
    if not made.old.starts:
        return
    yield style.paint(f"The command that keeps today's capacity on {made.new.target.release}", "bold")
    yield from (line for text in _kept_caveats(made) for line in wrap(text, style.width, "  "))
    yield from command_lines(made.kept.command, style)
    yield from wrap(_kept_capacity_text(made), style.width, "  ")


def _kept_caveats(made: Upgrade) -> Iterator[str]:
    """What to know before copying that command: it is tight, holds less than today, or gives something up."""
    kept, new = made.kept, made.new
    if kept.plan.verdict == "tight" and new.verdict == "fits" and _is_changed(made):
        yield f"The unchanged command fits and holds {_held(new)} requests at once."
        yield f"This one is tight: {kept.plan.reason}."
    elif kept.plan.verdict == "tight":
        yield f"It is tight: {kept.plan.reason}."
    if not kept.keeps_requests:
        yield "No setting of this release that legroom knows holds as much on this card."
    yield from (f"It gives up: {loss}." for loss in kept.gives_up)


def _kept_capacity_text(made: Upgrade) -> str:
    """How many requests the equivalent command holds, and what it leaves free at the peak, beside today's figures."""
    kept, old = made.kept, made.old
    if not kept.plan.starts:
        return "It does not start."
    free = f"{gib(kept.plan.layout.headroom_bytes)} free at the peak (today {gib(old.layout.headroom_bytes)})"
    if old.memory.kv.shape.is_empty:
        return f"It leaves {free}."
    pool, it = kept.plan.memory.kv, "It" if _is_changed(made) else "The same command: it"
    holds = f"holds {_held(kept.plan)} requests of {pool.max_model_len:,} tokens at once (today {_held(old)})"
    return f"{it} {holds} and leaves {free}."


def _release_table(steps: Sequence[ReleaseStep], style: Style) -> list[str]:
    """A table of the releases that change a figure, and how many change none; empty without steps."""
    if not steps:
        return []
    header = ("vLLM", "KV GiB", "tokens printed", "at once", "free GiB", "what moved")
    rows = [tuple(style.paint(word, "dim") for word in header)]
    rows += [_step_row(step, style) for step in steps if step.differs]
    reasons: dict[str, list[str]] = {}
    for step in steps:
        if step.differs and step.plan and step.plan.verdict == "tight":
            reasons.setdefault(step.plan.reason, []).append(step.release.version)
    texts = [f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} tight: {why}" for why, names in reasons.items()]
    tight = [line for text in texts for line in wrap(text, style.width, "  ", "    ")]
    same = sum(not step.differs for step in steps)
    alike = [style.paint(f"  {same} releases between them change none of these figures", "dim")] if same else []
    return [*(f"  {line}" for line in columns(rows, "<>>>><")), *tight, *alike]


def _step_row(step: ReleaseStep, style: Style) -> tuple[str, ...]:
    """A release's KV GiB, KV tokens, concurrency, free GiB, largest change and verdict, or why it refuses."""
    if (made := step.plan) is None:
        return (step.release.version, "", "", "", "", step.refused)
    large = [change for change in step.changes if abs(change.bytes) >= _SMALL_BYTES]
    moved = [f"{_signed_bytes(change.bytes)} {change.what}" for change in large[:1]]
    moved += [f"{len(large) - 1} more"] if len(large) > 1 else []
    word, colour = _WORDS.get(made.verdict, ""), VERDICT_COLOURS[made.verdict]
    name = f"{step.release.version} {style.paint(word, colour, 'bold')}" if word else step.release.version
    pool, free = (f"{bytes_ / GIB:.2f}" for bytes_ in (made.layout.kv_cache.bytes, made.layout.headroom_bytes))
    return name, pool, f"{max(made.memory.kv.tokens, 0):,}", _held(made), free, ", ".join(moved)
