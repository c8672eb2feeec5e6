"""Text and JSON of memory holders after a crash, and of what was freed."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from legroom.drawing.terminal import Colour, Style
from legroom.drawing.text import columns, plural, wrap
from legroom.recover.free_memory import Freed
from legroom.recover.machine_snapshot import MachineSnapshot
from legroom.recover.orphans import Holder, HolderState
from legroom.units import GIB, human_bytes

_HEADINGS: dict[HolderState, tuple[str, Colour]] = {
    "dead": ("Dead weight of a dead server", "red"),
    "suspect": ("Perhaps dead, not proven: left alone", "orange"),
    "unseen": ("Named by the driver, not to be seen from here", "orange"),
    "zombie": ("Ended, not collected yet: they hold no memory", "grey"),
    "in use": ("In use", "green"),
}
_MAX_ROWS = 12
_DRIVER_BYTES = GIB
"""The driver alone uses less; more on a card without processes belongs to a process that is not visible."""


def snapshot_text(snapshot: MachineSnapshot, holders: Sequence[Holder], style: Style) -> str:
    """GPUs, then the holders of memory under a heading for each state, in their order, then how to reset a GPU."""
    used = ((card, human_bytes(card.used_bytes), human_bytes(card.total_bytes)) for card in snapshot.gpus)
    lines = [f"GPU {card.index} {card.name}: {some} of {total} used" for card, some, total in used]
    lines += snapshot.notes
    for state, group in groupby(holders, key=lambda holder: holder.state):
        title, colour = _HEADINGS[state]
        lines += ["", style.paint(title, colour, "bold"), *_holder_lines(list(group), style)]
    if not any(holder.state == "dead" for holder in holders):
        hidden = hidden_text(snapshot, holders)
        text = f"Nothing here is {f'proven to be dead weight: {hidden}' if hidden else 'dead weight'}."
        colour = "orange" if hidden else "green"
        lines += ["", *(style.paint(line, colour, "bold") for line in wrap(text, style.width))]
    lines += _reset_advice(snapshot, style)
    return "\n".join(lines).lstrip("\n") + "\n"


def hidden_text(snapshot: MachineSnapshot, holders: Sequence[Holder]) -> str:
    """A sentence on other users' processes that this one cannot inspect, and whom to run as; empty without any."""
    hidden = [holder for holder in holders if holder.owner]
    if hidden:
        owners = ", ".join(sorted({holder.owner for holder in hidden}))
        return f"{total_text(hidden)} of {owners} cannot be looked into; run it as that user or as root"
    if snapshot.hides_others:
        return "the processes of other users are hidden from this one; run it as root"
    return ""


def _holder_lines(holders: Sequence[Holder], style: Style) -> Iterable[str]:
    """A row and the reason for each process; segments of one reason share a row; after 12 rows only a sum."""
    groups: dict[tuple[int, str], list[Holder]] = {}
    for holder in holders:
        groups.setdefault((holder.process.pid if holder.process else 0, holder.reason), []).append(holder)
    shown = list(groups.values())[:_MAX_ROWS]
    table = columns([_holder_cells(group) for group in shown], "<>><")
    for group, line in zip(shown, table, strict=True):
        yield "  " + line[: style.width - 2]
        yield from (style.paint(words, "grey") for words in wrap(group[0].reason, style.width, "      "))
    rest = [holder for group in list(groups.values())[_MAX_ROWS:] for holder in group]
    if rest:
        yield f"  and {len(rest)} more: {_sum_text(rest)}"


def _holder_cells(group: Sequence[Holder]) -> tuple[str, str, str, str]:
    """(PID or /dev/shm, GPU bytes, host bytes, description) of what holds memory, as text; a group is summed."""
    first = group[0]
    where = f"PID {first.process.pid}" if first.process else "/dev/shm" if first.segment else ""
    gpu, host = sum(holder.gpu_bytes for holder in group), sum(holder.bytes for holder in group)
    what = first.what if len(group) == 1 else f"{len(group)} segments, {first.what} ..."
    return where, f"GPU {human_bytes(gpu)}" if gpu else "", human_bytes(host) if host else "", what


def _sum_text(holders: Sequence[Holder]) -> str:
    """The GPU memory and the host memory that the holders have together, without those that are zero."""
    gpu, host = sum(holder.gpu_bytes for holder in holders), sum(holder.bytes for holder in holders)
    return ", ".join(part for part in (f"{human_bytes(gpu)} of GPU memory" if gpu else "", human_bytes(host)) if part)


def total_text(holders: Sequence[Holder]) -> str:
    """`2 processes and 14 segments of /dev/shm: 70.1 GiB of GPU memory, 1.2 GiB`."""
    processes = sum(holder.process is not None for holder in holders)
    segments = sum(holder.segment is not None for holder in holders)
    named = [f"{processes} process{'es' if processes != 1 else ''}"] if processes else []
    named += [plural(segments, "segment") + " of /dev/shm"] if segments else []
    return f"{' and '.join(named)}: {_sum_text(holders)}"


def _reset_advice(snapshot: MachineSnapshot, style: Style) -> list[str]:
    """When and how to reset GPUs whose memory no visible process accounts for; empty where all is accounted for."""
    unseen = [card for card in snapshot.gpus if any(pid not in snapshot.processes for pid, _ in card.processes)]
    stuck = [card for card in snapshot.gpus if not card.processes and card.used_bytes > _DRIVER_BYTES]
    if not unseen and not stuck:
        return []
    text = (
        "Memory that no process here accounts for belongs to another container or user, or the driver lost track of "
        "it. Only if `fuser -v /dev/nvidia*` (as root, on the host) names nobody, and the GPU drives no display, is a "
        "reset safe; with NVLink all linked GPUs are reset together. legroom does not run it:"
    )
    resets = [f"  sudo nvidia-smi --gpu-reset -i {card.index}" for card in stuck or unseen]
    return ["", *wrap(text, style.width), *resets]


def freed_text(freed: Sequence[Freed], style: Style) -> str:
    """What happened to each memory holder; removed segments share a line."""
    lines = []
    removed = [end for end in freed if end.holder.segment and end.is_free]
    done, failed = style.paint(style.pick("✓", "ok"), "green"), style.paint(style.pick("×", "x"), "red")
    for end in freed:
        if end in removed:
            continue
        process = end.holder.process
        named = f"PID {process.pid} {end.holder.what}" if process else end.holder.what
        detail = f" ({end.detail})" if end.detail else ""
        lines.append(f"{done if end.is_free else failed} {named}: {end.ending}{detail}")
    if removed:
        total = _sum_text([end.holder for end in removed])
        lines.append(f"{done} {plural(len(removed), 'segment')} of /dev/shm removed: {total}")
    return "\n".join(lines) + "\n"


def holder_json(holder: Holder) -> dict[str, Any]:
    """What holds memory as JSON; the keys of a process are null for a segment, and the path for a process."""
    process, segment = holder.process, holder.segment
    return {
        **{name: getattr(holder, name) for name in ("state", "what", "reason")},
        "pid": process.pid if process else None,
        "created_s": process.created_s if process else None,
        "user": process.user if process else None,
        "path": segment.path if segment else None,
        "gpu_bytes": holder.gpu_bytes,
        "host_bytes": holder.bytes,
    }


def freed_json(freed: Freed) -> dict[str, Any]:
    """The holder as JSON, with how it was ended and whether its memory is free now."""
    return {**holder_json(freed.holder), "ending": freed.ending, "detail": freed.detail, "freed": freed.is_free}
