"""Server views as terminal text."""

from collections.abc import Sequence
from itertools import zip_longest

from legroom.drawing.terminal import Colour, Style
from legroom.drawing.text import columns, count, plural, wrap
from legroom.live.fleet import UNKNOWN, FleetGroup, FleetView
from legroom.live.server_view import ServerView, State
from legroom.units import human_bytes

_LOOKS: dict[State, tuple[Colour, str, str]] = {
    "healthy": ("green", "●", "*"),
    "idle": ("grey", "○", "o"),
    "warning": ("orange", "▲", "!"),
    "critical": ("red", "■", "X"),
    "unreachable": ("red", "×", "x"),
}
"""Colour, symbol, and symbol without Unicode."""
STATE_COLOURS = {state: colour for state, (colour, _, _) in _LOOKS.items()}


def state_mark(state: State, style: Style) -> str:
    """A symbol and the state, coloured."""
    return style.paint(f"{style.pick(*_LOOKS[state][1:])} {state}", STATE_COLOURS[state])


def servers_text(views: Sequence[ServerView], style: Style) -> str:
    """The text of `legroom watch --once`: every server with its state, sentence and figures."""
    lines: list[str] = []
    for view in views:
        models = f"  {', '.join(view.models)}" if view.models else ""
        lines += [f"{state_mark(view.state, style)}  {style.paint(view.server, 'bold')}{models}"]
        lines += wrap(view.sentence, style.width, "  ")
        lines += [f"  {line}" for line in two_columns(view_figures(view), style)]
        for finding in view.findings:
            more = f"; the long story: legroom\u00a0explain\u00a0{finding.entry}" if finding.entry else ""
            named = wrap(f"{finding.title}{more}", style.width, "  ", "    ")
            # Non-breaking spaces keep the command on one line.
            lines += [style.paint(line.replace("\u00a0", " "), "grey") for line in named]
        lines.append("")
    return "\n".join(lines)


def two_columns(figures: Sequence[tuple[str, str]], style: Style) -> list[str]:
    """(name, figure) pairs as lines with two pairs each: the first half on the left, the rest on the right."""
    pairs = [(style.paint(name, "grey"), figure) for name, figure in figures]
    half = (len(pairs) + 1) // 2
    rows = [
        (*left, *right)
        for left, right in zip_longest(pairs[:half], pairs[half:], fillvalue=(style.paint("", "grey"), ""))
    ]
    return columns(rows, "<<<<")


def view_figures(view: ServerView) -> list[tuple[str, str]]:
    """(name, text) of each figure that the server reports: KV use, running, latencies ..."""
    blocks = f" of {view.num_blocks:,} blocks" if view.num_blocks else ""
    every = [
        ("KV use", _shown(view.kv_use, f"{{:.1%}}{blocks}")),
        ("running", _shown(view.running, "{:,.0f}")),
        ("waiting", _shown(view.waiting, "{:,.0f}")),
        ("preemptions", _shown(view.preemptions_per_s, "{:.2f}/s")),
        ("prefix hits", _shown(view.hit_rate, "{:.1%}")),
        ("prompt", _shown(view.prompt_tokens_per_s, "{:,.0f} tokens/s")),
        ("generation", _shown(view.generation_tokens_per_s, "{:,.0f} tokens/s")),
        ("first token", _latency_text(view.first_token_p50_s, view.first_token_p99_s)),
        ("latency", _latency_text(view.latency_p50_s, view.latency_p99_s)),
        ("GPU memory", None if view.memory_used_bytes is None else human_bytes(view.memory_used_bytes)),
        ("forecast", view.forecast.text if view.forecast and view.forecast.text != view.sentence else None),
    ]
    return [(name, text) for name, text in every if text is not None]


def _shown(figure: float | None, form: str) -> str | None:
    """The figure formatted by the template `form` (`{:.1f} s`); None where it is unknown."""
    return None if figure is None else form.format(figure)


def _latency_text(p50_s: float | None, p99_s: float | None) -> str | None:
    """The p50 and p99 latency as text; None where one is unknown."""
    return None if p50_s is None or p99_s is None else f"p50 {seconds_text(p50_s)}  p99 {seconds_text(p99_s)}"


def seconds_text(value: float) -> str:
    """Seconds as text: `85 ms`, `1.25 s`."""
    return f"{value * 1000:.0f} ms" if value < 0.9995 else f"{value:.2f} s"


_MAX_ADVICE = 20
_BY_KV_ALONE = "could go: counted by KV cache alone. Fewer servers run larger batches, which are slower: "
_BY_KV_ALONE += "`legroom size --rate` says how much"
_FLEET_COLUMNS = ("model", "pool", "release", "servers", "KV mean", "KV peak", "idle KV tokens", "needed", "could go")


def fleet_text(view: FleetView, window: str, style: Style) -> str:
    """A table of servers by model, node pool and release, how many could go over the `window` (`7d`), and advice."""
    servers = sum(group.servers for group in view.groups)
    rows = [_FLEET_COLUMNS, *map(_fleet_row, view.groups)]
    lines = [style.paint(_fleet_headline(view, servers, window), "bold"), "", *columns(rows, "<<<>>>>>>"), ""]
    advice = [(group, each) for group in view.groups for each in group.advice]
    for _, each in advice[:_MAX_ADVICE]:
        change = ", ".join(f"{flag} {value}" for flag, value in each.flags.items())
        lines.append(f"  {each.server}: {each.why}{f' ({change})' if change else ''}")
    if len(advice) > _MAX_ADVICE:
        lines.append(f"  and {count(len(advice) - _MAX_ADVICE)} more; --json lists them all")
    if any(UNKNOWN in {group.key.release, group.key.pool} for group in view.groups):
        lines.append("  unknown: no label of the scraped targets tells the node pool or the release")
    if any(group.spare for group in view.groups):
        lines.append(f"  {_BY_KV_ALONE}")
    return "\n".join(lines).rstrip() + "\n"


def _fleet_headline(view: FleetView, servers: int, window: str) -> str:
    """One sentence: how many servers and GPUs could go, over this window."""
    spare = sum(group.spare for group in view.groups)
    about = f"{plural(servers, 'server')} over {window}"
    if not spare:
        return f"{about}: none could go"
    each = "" if view.gpus_per_server > 1 else ", at one a server (--plan says how many)"
    return f"{about}: {count(spare)} could go, {plural(view.spare_gpus, 'GPU')}{each}"


def _fleet_row(group: FleetGroup) -> tuple[str, ...]:
    """The table cells of one group: servers, mean and peak KV use, unused KV tokens, needed and spare servers."""
    peak = group.peak_demand / group.servers
    return (
        group.key.model,
        group.key.pool,
        group.key.release,
        count(group.servers),
        f"{group.mean_kv_use:.0%}",
        f"{peak:.0%}",
        count(group.wasted_kv_tokens),
        f"{count(group.needed)}{' (queue)' if group.queued else ''}",
        count(group.spare) if group.spare else "-",
    )
