"""Two versions of a deployment file compared: flags, memory and verdict of each server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from legroom.planning.file_plans import FileServer
from legroom.planning.plan import Plan, ready_command
from legroom.planning.plan_json import plan_json
from legroom.records import dataclass
from legroom.units import gib
from legroom.vllm.command_line import command, flags_in, without_secrets

ABSENT = "not given"
_PARTS = (
    ("weights", "weights"),
    ("activation", "activations"),
    ("cuda_graph", "CUDA graphs"),
    ("non_torch", "non-torch"),
    ("kv_cache", "KV cache"),
    ("outside", "outside the budget"),
)


@dataclass(frozen=True, slots=True)
class PlanChange:
    """A flag, figure or setting that differs."""

    what: str
    old: str
    new: str
    bytes: int | None = None
    """Growth in bytes, for parts of the card's memory."""


@dataclass(frozen=True)
class ServerDiff:
    """One server before and after; None where there is none."""

    name: str
    old: FileServer | None
    new: FileServer | None
    changes: tuple[PlanChange, ...] = ()

    @property
    def verdicts(self) -> tuple[str | None, str | None]:
        """The verdict before and after; None on the side where there is no server."""
        return (self.old.verdict if self.old else None), (self.new.verdict if self.new else None)

    def to_json(self) -> dict[str, Any]:
        before, after = self.verdicts
        return {
            "name": self.name,
            "verdict": {"old": before, "new": after},
            "changes": [asdict(change) for change in self.changes],
            "old": _plan_document(self.old),
            "new": _plan_document(self.new),
        }


def server_diffs(old: Sequence[FileServer], new: Sequence[FileServer]) -> tuple[ServerDiff, ...]:
    """Pair the servers of two files by name, the others in order, and compare each pair."""
    left = list(old)
    pairs: dict[int, FileServer] = {}
    for number, server in enumerate(new):
        same = next((other for other in left if other.name == server.name), None)
        if same is not None:
            left.remove(same)
            pairs[number] = same
    for number in range(len(new)):
        if number not in pairs and left:
            pairs[number] = left.pop(0)
    diffs = [
        ServerDiff(server.name, pairs.get(number), server, _changes(pairs.get(number), server))
        for number, server in enumerate(new)
    ]
    return (*diffs, *(ServerDiff(server.name, server, None) for server in left))


def _plan_document(server: FileServer | None) -> dict[str, Any] | None:
    """The server's plan document; verdict and reason where it has no plan, None where there is no server."""
    if server is None:
        return None
    if server.shown is None:
        return {"verdict": server.verdict, "reason": server.unknown or None}
    return plan_json(server.shown)


def _changes(old: FileServer | None, new: FileServer) -> tuple[PlanChange, ...]:
    """Flags, environment, GPUs, memory and KV cache that differ; empty for a new server."""
    if old is None:
        return ()
    before, after = _given_settings(old), _given_settings(new)
    changes = [
        PlanChange(name, before.get(name, ABSENT), after.get(name, ABSENT))
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name)
    ]
    if old.shown is not None and new.shown is not None:
        changes += [
            *_machine_changes(old.shown, new.shown),
            *_memory_changes(old.shown, new.shown),
            *_kv_changes(old.shown, new.shown),
        ]
    return tuple(changes)


def _given_settings(server: FileServer) -> dict[str, str]:
    """Model, release, flags and environment of a server, by name; empty where it was not understood."""
    what = server.what
    if what is None:
        return {}
    words = ready_command(server.shown) if server.shown else list(without_secrets(command(what.args, what.release)))
    flags: Mapping[str, str] = flags_in(words)
    named = {"model": what.args.model, "vLLM": what.release.version}
    return {**named, **{name: value or "on" for name, value in flags.items()}, **what.args.env}


def _machine_changes(old: Plan, new: Plan) -> Iterator[PlanChange]:
    """The GPUs and the host memory limit, where they differ."""
    before, after = (f"{plan.target.gpus} x {plan.target.gpu.name}" for plan in (old, new))
    if before != after:
        yield PlanChange("GPUs", before, after)
    limits = [plan.target.host_limit_bytes for plan in (old, new)]
    if limits[0] != limits[1]:
        texts = [gib(limit) if limit else "no limit" for limit in limits]
        yield PlanChange("host memory limit", texts[0], texts[1])


def _memory_changes(old: Plan, new: Plan) -> Iterator[PlanChange]:
    """The parts of GPU memory whose bytes differ, and the headroom."""
    for name, title in _PARTS:
        before, after = (getattr(plan.layout, name).bytes for plan in (old, new))
        if before != after:
            yield PlanChange(title, gib(before), gib(after), after - before)
    before, after = old.layout.headroom_bytes, new.layout.headroom_bytes
    if before != after:
        yield PlanChange("free at the peak", gib(before), gib(after), after - before)


def _kv_changes(old: Plan, new: Plan) -> Iterator[PlanChange]:
    """KV cache tokens, max_model_len and full-length requests at once, where they differ."""
    before, after = old.memory.kv, new.memory.kv
    if before.tokens != after.tokens:
        yield PlanChange("KV cache tokens", f"{max(before.tokens, 0):,}", f"{max(after.tokens, 0):,}")
    lengths = old.settings.max_model_len, new.settings.max_model_len
    if lengths[0] != lengths[1]:
        yield PlanChange("longest request", f"{lengths[0]:,} tokens", f"{lengths[1]:,} tokens")
    requests = [f"{kv.max_concurrency:.2f}" for kv in (before, after)]
    if requests[0] != requests[1]:
        yield PlanChange("full-length requests at once", requests[0], requests[1])
