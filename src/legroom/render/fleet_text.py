"""A fleet for people: a line a group, then what stands out."""

from __future__ import annotations

from legroom.drawing.terminal import Style
from legroom.drawing.text import columns, count, plural
from legroom.live.fleet import UNKNOWN, FleetGroup, FleetView

_MAX_ADVICE = 20
_BY_KV_ALONE = (
    "could go: counted by KV cache alone. Fewer servers run larger batches, which are slower: `legroom size --rate` "
    "says how much"
)
_HEAD = ("model", "pool", "release", "servers", "KV mean", "KV peak", "idle KV tokens", "needed", "could go")


def fleet_text(view: FleetView, window: str, style: Style) -> str:
    servers = sum(group.servers for group in view.groups)
    rows = [_HEAD, *(_row(group) for group in view.groups)]
    lines = [style.paint(_headline(view, servers, window), "bold"), "", *columns(rows, "<<<>>>>>>"), ""]
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


def _headline(view: FleetView, servers: int, window: str) -> str:
    spare = sum(group.spare for group in view.groups)
    about = f"{plural(servers, 'server')} over {window}"
    if not spare:
        return f"{about}: none could go"
    each = "" if view.gpus_per_server > 1 else ", at one a server (--plan says how many)"
    return f"{about}: {count(spare)} could go, {plural(view.spare_gpus, 'GPU')}{each}"


def _row(group: FleetGroup) -> tuple[str, ...]:
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
