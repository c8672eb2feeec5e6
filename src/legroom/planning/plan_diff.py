"""Two versions of a deployment file compared: flags, memory and verdict of each server."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from legroom.planning.file_plans import FileServer
from legroom.planning.plan import Plan, ready_command
from legroom.planning.plan_json import plan_json
from legroom.records import dataclass
from legroom.units import gib
from legroom.vllm.command_line import command, flags_in, without_secrets

ABSENT = "not given"
_PARTS = {
    "weights": "weights",
    "activation": "activations",
    "cuda_graph": "CUDA graphs",
    "non_torch": "non-torch",
    "kv_cache": "KV cache",
    "outside": "outside the budget",
}


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
        """JSON of the server's verdicts, changes and plan documents."""
        before, after = self.verdicts
        return {
            "name": self.name,
            "verdict": {"old": before, "new": after},
            "changes": [asdict(change) for change in self.changes],
            "old": _plan_document(self.old),
            "new": _plan_document(self.new),
        }


def server_diffs(old: Sequence[FileServer], new: Sequence[FileServer]) -> tuple[ServerDiff, ...]:
    """Pairs the servers of two files by name, those left over in order, and compares each pair."""
    left, before = list(old), list[FileServer | None]()
    for server in new:
        same = next((other for other in left if other.name == server.name), None)
        before.append(same)
        if same is not None:
            left.remove(same)
    before = [left.pop(0) if same is None and left else same for same in before]
    diffs = [ServerDiff(each.name, same, each, _changes(same, each)) for same, each in zip(before, new, strict=True)]
    return (*diffs, *(ServerDiff(server.name, server, None) for server in left))


def _plan_document(server: FileServer | None) -> dict[str, Any] | None:
    """The server's plan as JSON; only verdict and reason if it has no plan; None without a server."""
    if server is None:
        return None
    if server.shown is None:
        return {"verdict": server.verdict, "reason": server.unknown or None}
    return plan_json(server.shown)


def _changes(old: FileServer | None, new: FileServer) -> tuple[PlanChange, ...]:
    """The flags, variables, GPUs, memory and KV figures that differ between two servers; empty if `old` is None."""
    if old is None:
        return ()
    before, after = _given_settings(old), _given_settings(new)
    changes = [
        PlanChange(name, before.get(name, ABSENT), after.get(name, ABSENT))
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name)
    ]
    if old.shown is not None and new.shown is not None:
        sizes, new_figures = (*_PARTS.values(), "free at the peak"), _figures(new.shown)
        for what, (value, text) in _figures(old.shown).items():
            new_value, new_text = new_figures[what]
            if value != new_value:
                changes.append(PlanChange(what, text, new_text, new_value - value if what in sizes else None))
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


def _figures(plan: Plan) -> dict[str, tuple[Any, str]]:
    """The figures of a plan that are compared, by name: (value, text)."""
    target, layout, kv, length = plan.target, plan.layout, plan.memory.kv, plan.settings.max_model_len
    limit, requests, gpus = target.host_limit_bytes, f"{kv.max_concurrency:.2f}", f"{target.gpus} x {target.gpu.name}"
    parts = {title: getattr(layout, name).bytes for name, title in _PARTS.items()}
    parts["free at the peak"] = layout.headroom_bytes
    return {
        "GPUs": (gpus, gpus),
        "host memory limit": (limit, gib(limit) if limit else "no limit"),
        **{title: (size, gib(size)) for title, size in parts.items()},
        "KV cache tokens": (kv.tokens, f"{max(kv.tokens, 0):,}"),
        "longest request": (length, f"{length:,} tokens"),
        "full-length requests at once": (requests, requests),
    }
