"""One command on two vLLM releases: memory, blocks, tokens, flags, metrics, bugs, and flags that keep the capacity."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from legroom.errors import ANSWER_IS_NO, LegroomError
from legroom.facts.known_bugs import KnownBug
from legroom.facts.metrics import metrics_of, name_of, nearest, role_of
from legroom.facts.releases import Release, known_releases
from legroom.facts.releases import release as known_release
from legroom.figures import Term
from legroom.memory.kv.kv_plan import KvPlan
from legroom.planning.machine import Machine, make_plan, with_measurements, with_notes
from legroom.planning.plan import Plan, bugs_of, cold_start, plan
from legroom.planning.plan_json import plan_json
from legroom.planning.upgrades.changed_flags import ChangedFlag, args_on_release, changed_flags
from legroom.planning.upgrades.kept_capacity import KeptCapacity, kept_capacity
from legroom.planning.upgrades.kv_changes import ByteChange, kv_changes
from legroom.records import dataclass
from legroom.units import human_bytes
from legroom.vllm.args import ServeArgs
from legroom.vllm.setting_checks import RefusedByVllm

_TOKENS_LINE = {
    "slots": "blocks x block size",
    "slots over groups": "blocks x block size, divided by the number of groups of layers that share the blocks",
    "full-length requests": "full-length requests at once x their length",
}
"""What "GPU KV cache size: N tokens" counts, by how a release computes it (vllm/v1/core/kv_cache_utils.py)."""


@dataclass(frozen=True, slots=True)
class PoolChange:
    """A figure of the KV cache on the two releases."""

    what: str
    old: float
    new: float
    is_bytes: bool = False

    def to_json(self) -> dict[str, Any]:
        """JSON of the figure on the old release (`from`) and on the new one (`to`)."""
        return {"what": self.what, "from": self.old, "to": self.new}


def comparable_tokens(kv: KvPlan) -> int:
    """KV cache tokens, computed alike for every release: full-length requests at once x their length."""
    return round(kv.max_concurrency * kv.max_model_len)


_POOL_BYTES = frozenset({"KV cache", "KV cache, first start", "bytes of a block", "bytes of one longest request"})
_POOL_BYTES |= {"free at the peak"}


def _pool_figures(made: Plan) -> dict[str, float]:
    """The figures of a plan's KV cache, by name; those of `_POOL_BYTES` are bytes."""
    kv, first = made.memory.kv, cold_start(made)
    return {
        "KV cache": made.layout.kv_cache.bytes,
        "KV cache, first start": first.layout.kv_cache.bytes,
        "bytes of a block": kv.bytes_per_block,
        "block size": kv.block_size,
        "blocks": max(kv.num_blocks, 0),
        "groups of layers": len(kv.shape.groups) or 1,
        "tokens as vLLM prints them": max(kv.tokens, 0),
        "tokens of full-length requests": comparable_tokens(kv),
        "longest request": kv.max_model_len,
        "bytes of one longest request": kv.needed_bytes,
        "longest requests at once": kv.max_concurrency,
        "longest requests at once, first start": first.memory.kv.max_concurrency,
        "free at the peak": made.layout.headroom_bytes,
    }


def _pool_remarks(old: Plan, new: Plan) -> Iterator[str]:
    """Sentences on figures of the KV cache that the two releases print differently; empty without a KV cache."""
    before, after, first, last = old.memory.kv, new.memory.kv, old.target.release, new.target.release
    if before.shape.is_empty or after.shape.is_empty:
        return
    lines = before.shape.era.tokens_line, after.shape.era.tokens_line
    alike = all(abs(kv.tokens - comparable_tokens(kv)) <= 1 for kv in (before, after))  # rounded this way or that
    if lines[0] != lines[1] and not alike:
        yield (
            f'The line "GPU KV cache size" does not mean the same: in {first} it is {_TOKENS_LINE[lines[0]]} '
            f"({before.tokens:,} tokens), in {last} {_TOKENS_LINE[lines[1]]} ({after.tokens:,}). "
            f"Counted alike, in full-length requests, the pool goes from {comparable_tokens(before):,} to "
            f"{comparable_tokens(after):,} tokens."
        )
    if before.needed_bytes != after.needed_bytes and before.max_model_len == after.max_model_len:
        yield (
            f"One request of {after.max_model_len:,} tokens is counted as {human_bytes(before.needed_bytes)} by "
            f"{first} and as {human_bytes(after.needed_bytes)} by {last}: a start fails where the KV cache is smaller "
            "than that."
        )
    counts = (len(kv.shape.groups) for kv in (before, after))
    groups = ["one group" if count < 2 else f"{count} groups" for count in counts]
    if groups[0] != groups[1]:
        yield f"The layers share their blocks in {groups[0]} with {first} and in {groups[1]} with {last}."
    elif before.bytes_per_block != after.bytes_per_block:
        yield (
            f"A block takes {human_bytes(before.bytes_per_block)} with {first} and "
            f"{human_bytes(after.bytes_per_block)} with {last}, so the same bytes are not as many blocks."
        )


@dataclass(frozen=True, slots=True)
class VanishedMetric:
    """A metric that the new release does not expose."""

    name: str
    instead: str | None
    """The new release's metric of the same role, else with the nearest name; None where there is none."""


@dataclass(frozen=True)
class ReleaseStep:
    """One release between the two, and its changes against the release before."""

    release: Release
    plan: Plan | None
    """None: it refuses the command."""
    changes: tuple[ByteChange, ...] = ()
    refused: str = ""
    differs: bool = True
    """Whether any of its figures differs from the release before."""


@dataclass(frozen=True)
class Upgrade:
    """One server on two releases."""

    old: Plan
    new: Plan
    changes: tuple[ByteChange, ...]
    """Changes of the KV cache; the bytes add up to the difference."""
    outside: tuple[ByteChange, ...]
    """Changes of the memory outside the budget."""
    pool: tuple[PoolChange, ...]
    remarks: tuple[str, ...]
    """Sentences about printed figures that the releases compute differently."""
    flags: tuple[ChangedFlag, ...]
    metrics: tuple[VanishedMetric, ...]
    bugs_ended: tuple[KnownBug, ...]
    bugs_begun: tuple[KnownBug, ...]
    kept: KeptCapacity
    steps: tuple[ReleaseStep, ...] = ()

    @property
    def is_downgrade(self) -> bool:
        """Whether the new release is older than the old one."""
        return self.new.target.release.before(self.old.target.release.version)

    def to_json(self) -> dict[str, Any]:
        """What `legroom upgrade --json` prints for one server."""
        document: dict[str, Any] = {
            "from": plan_json(self.old),
            "to": plan_json(self.new),
            "changes": [asdict(change) for change in self.changes],
            "command": self.kept.command,
            "kv_cache_bytes": self.new.layout.kv_cache.bytes - self.old.layout.kv_cache.bytes,
            "downgrade": self.is_downgrade,
            "keeps": {
                "requests": self.kept.keeps_requests,
                "headroom": self.kept.keeps_headroom,
                "gives_up": list(self.kept.gives_up),
                "plan": plan_json(self.kept.plan),
            },
            "outside": [asdict(change) for change in self.outside],
            "pool": [change.to_json() for change in self.pool],
            "remarks": list(self.remarks),
            "flags": [flag.to_json() for flag in self.flags],
            "metrics": [asdict(metric) for metric in self.metrics],
            "bugs": {"end": _bugs_json(self.bugs_ended), "begin": _bugs_json(self.bugs_begun)},
        }
        if self.steps:
            document["releases"] = [_step_json(step) for step in self.steps]
        return document


def upgrade(
    args: ServeArgs, old: Release, new: Release, machine: Machine, *, every_release: bool = False, advice: bool = True
) -> Upgrade:
    """A command planned on two releases (`every_release`: also between) and compared; LegroomError if refused."""
    try:
        before = make_plan(args, old, machine, advice=False)
    except RefusedByVllm as error:
        raise _refused_by_old(error, args, (old, new), machine) from None
    after = with_notes(_plan_on_release(before, new))
    if advice and after.verdict == "does_not_fit":
        from legroom.planning.advice import with_advice  # only for what does not start

        after = with_advice(after)
    old_bugs, new_bugs = ({bug.id: bug for bug in bugs_of(made)} for made in (before, after))
    there, here = _pool_figures(before), _pool_figures(after)
    return Upgrade(
        old=before,
        new=after,
        changes=kv_changes(before, after),
        outside=_outside_changes(before, after),
        pool=tuple(PoolChange(what, there[what], here[what], what in _POOL_BYTES) for what in there),
        remarks=tuple(_pool_remarks(before, after)),
        flags=changed_flags(args, before.settings, after.settings, (old, new)),
        metrics=_vanished_metrics(before, after),
        bugs_ended=tuple(bug for name, bug in old_bugs.items() if name not in new_bugs),
        bugs_begun=tuple(bug for name, bug in new_bugs.items() if name not in old_bugs),
        kept=kept_capacity(before, after),
        steps=tuple(_release_steps(before, after)) if every_release else (),
    )


def _refused_by_old(
    error: RefusedByVllm, args: ServeArgs, releases: tuple[Release, Release], machine: Machine
) -> LegroomError:
    """The error for a command that the old release refuses, which also says whether the new one accepts it."""
    old, new = releases
    own = args_on_release(args, new)
    try:
        make_plan(own, new, machine, advice=False)
    except LegroomError as other:
        then = f"nor does {new}: {other.message}"
    else:
        then = f"{new} takes it" + ("" if own == args else " with the flags that it has")
    return LegroomError(f"vLLM {old} does not take this command: {error.message}; {then}", error.hint, ANSWER_IS_NO)


def _plan_on_release(before: Plan, release: Release) -> Plan:
    """The plan of the same server and card on another release; LegroomError where that release refuses it."""
    args = args_on_release(before.args, release)
    try:
        return plan(with_measurements(replace(before.target, release=release, seen=None), args), args)
    except LegroomError as error:
        message = f"vLLM {release} does not take this command: {error.message}"
        raise LegroomError(message, error.hint, ANSWER_IS_NO) from None


def _outside_changes(old: Plan, new: Plan) -> tuple[ByteChange, ...]:
    """The changes in bytes of the memory outside the budget of gpu_memory_utilization, by part."""
    before, after = ({term.label: term for term in made.layout.outside.terms} for made in (old, new))
    changes = []
    for label in dict.fromkeys((*before, *after)):
        there, here = (terms.get(label, Term(label, 0)) for terms in (before, after))
        if here.bytes != there.bytes:
            changes.append(ByteChange(label, after.get(label, there).how, here.bytes - there.bytes))
    return tuple(sorted(changes, key=lambda change: -abs(change.bytes)))


def _vanished_metrics(old: Plan, new: Plan) -> tuple[VanishedMetric, ...]:
    """Metrics that the old release exposes and the new one does not."""
    before, after = (
        {metric.series for metric in metrics_of(made.target.release, made.settings.engine.lower()) if not metric.hidden}
        for made in (old, new)
    )
    of_new = new.target.release, new.settings.engine.lower()
    vanished = []
    for name in sorted(before - after):
        role, close = role_of(name), nearest(name, *of_new)
        by_role = name_of(role, *of_new) if role else None
        vanished.append(VanishedMetric(name, by_role or (close if close and not close.startswith(name) else None)))
    return tuple(vanished)


def _release_steps(old: Plan, new: Plan) -> Iterator[ReleaseStep]:
    """The plan on every known release from the old one to the new one, with what it changes."""
    releases = known_releases()
    first, last = (releases.index(made.target.release.version) for made in (old, new))
    between = releases[first : last + 1] if first <= last else releases[last : first + 1][::-1]
    previous = old
    yield ReleaseStep(old.target.release, old)
    for version in between[1:]:
        try:
            made = _plan_on_release(old, known_release(version))
        except LegroomError as error:
            yield ReleaseStep(known_release(version), None, refused=error.message)
            continue
        differs = _compared(made) != _compared(previous)
        yield ReleaseStep(made.target.release, made, kv_changes(previous, made), differs=differs)
        previous = made


def _compared(made: Plan) -> tuple[Any, ...]:
    """(KV bytes, headroom, blocks, tokens, concurrency, verdict): plans with equal ones are told as unchanged."""
    layout, kv = made.layout, made.memory.kv
    return layout.kv_cache.bytes, layout.headroom_bytes, kv.num_blocks, kv.tokens, kv.max_concurrency, made.verdict


def _step_json(step: ReleaseStep) -> dict[str, Any]:
    """JSON of the plan on one of the releases between, or of the reason why that release refuses the command."""
    made = step.plan
    if made is None:
        return {"vllm": step.release.version, "verdict": "does_not_fit", "refused": step.refused}
    kv, first = made.memory.kv, cold_start(made)
    return {
        "vllm": step.release.version,
        "verdict": made.verdict,
        "kv_cache_bytes": made.layout.kv_cache.bytes,
        "headroom_bytes": made.layout.headroom_bytes,
        "num_blocks": max(kv.num_blocks, 0),
        "tokens": max(kv.tokens, 0),
        "max_concurrency": kv.max_concurrency,
        "first_start_kv_cache_bytes": first.layout.kv_cache.bytes,
        "differs": step.differs,
        "changes": [asdict(change) for change in step.changes],
    }


def _bugs_json(bugs: tuple[KnownBug, ...]) -> list[dict[str, Any]]:
    """JSON of the known bugs that an upgrade leaves behind or meets."""
    names = ("id", "title", "memory", "fixed_in", "source")
    return [{name: getattr(bug, name) for name in names} for bug in bugs]
