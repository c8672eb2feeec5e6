"""What was checked: the records of a run, the judgement over them (pure functions), and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from legroom.drawing.text import count, plural
from legroom.errors import LegroomError
from legroom.planning.plan_document import HOW_TO_WRITE_A_PLAN, read_plan
from legroom.records import dataclass
from legroom.units import MIB, human_bytes
from legroom.verify.load import KvPool, Load, needed_blocks
from legroom.verify.sampling import LoadSample
from legroom.verify.server import RequestOutcome, ServedModel


@dataclass(frozen=True)
class Check:
    """One thing that was checked. `ok` is None where it could not be measured or judged."""

    name: str
    ok: bool | None
    text: str


@dataclass(frozen=True)
class LoadRun:
    name: str
    asked: int
    concurrency: int
    outcomes: tuple[RequestOutcome, ...]
    points: tuple[LoadSample, ...]
    seconds: float
    preemptions: int | None
    interrupted: str = ""
    """Why it ended early: the user, the time; empty where it did not."""

    @property
    def failed(self) -> tuple[RequestOutcome, ...]:
        """Requests that were not answered to the end."""
        return tuple(outcome for outcome in self.outcomes if not outcome.ok)

    @property
    def peak_kv_use(self) -> float | None:
        """The highest share of the pool that was seen."""
        return max((point.kv_use for point in self.points if point.kv_use is not None), default=None)


@dataclass(frozen=True)
class Verification:
    """Everything that was seen, and the verdict."""

    server: str
    """Without credentials."""
    served: ServedModel | None
    pool: KvPool | None
    checks: tuple[Check, ...]
    load: LoadRun | None = None
    memory_what: str = ""
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    """Whether the user ended it early."""

    @property
    def ok(self) -> bool:
        """Verified: nothing that was checked failed, and nothing was cut short."""
        finished = self.load is None or not self.load.interrupted
        return finished and bool(self.checks) and all(check.ok is not False for check in self.checks)

    def json(self) -> dict[str, Any]:
        """The document that `legroom verify --json` prints."""
        return {
            "verified": self.ok,
            "server": self.server,
            "model": self.served.model if self.served else None,
            "max_model_len": self.served.max_model_len if self.served else None,
            "pool": {"num_blocks": self.pool.num_blocks, "block_size": self.pool.block_size} if self.pool else None,
            "checks": [{"name": check.name, "ok": check.ok, "text": check.text} for check in self.checks],
            "load": _load_json(self.load) if self.load else None,
            "memory_measured": self.memory_what or None,
            "notes": list(self.notes),
        }


def _load_json(run: LoadRun) -> dict[str, Any]:
    good = [outcome for outcome in run.outcomes if outcome.ok]
    return {
        "name": run.name,
        "requests": run.asked,
        "concurrency": run.concurrency,
        "answered": len(good),
        "failed": len(run.failed),
        "errors": sorted({outcome.error for outcome in run.failed}),
        "interrupted": run.interrupted or None,
        "seconds_s": run.seconds,
        "prompt_tokens": sum(outcome.prompt_tokens for outcome in good),
        "output_tokens": sum(outcome.output_tokens for outcome in good),
        "preemptions": run.preemptions,
        "peak_kv_use": run.peak_kv_use,
        "peak_running": max((point.running for point in run.points), default=0),
        "peak_waiting": max((point.waiting for point in run.points), default=0),
        "requests_s": [
            {
                "first_token_s": outcome.first_token_s,
                "total_s": outcome.total_s,
                "prompt_tokens": outcome.prompt_tokens,
                "output_tokens": outcome.output_tokens,
            }
            for outcome in good
        ],
        "samples": [
            {
                "at_s": point.at_s,
                "kv_use": point.kv_use,
                "running": point.running,
                "waiting": point.waiting,
                "preemptions": point.preemptions,
                "memory_bytes": point.memory_bytes,
            }
            for point in run.points
        ],
    }


_ROUNDS = 3


@dataclass(frozen=True)
class PassCriteria:
    """What still counts as holding."""

    max_preemptions: int = 0
    growth_share: float = 0.02
    """Of the GPUs' memory (or of the resident memory): PyTorch's allocator rounds and keeps what it was lent, so a
    run moves it a little; a leak moves it with every request."""
    growth_bytes: int = 64 * MIB
    """Below this nothing is a trend: allocators move in steps of up to 20 MiB."""


@dataclass(frozen=True)
class PlannedPool:
    """What a plan says of the KV cache: the blocks, and the band they may lie in."""

    num_blocks: int
    block_size: int
    low_blocks: int
    high_blocks: int
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    model: str = ""


_OF_THE_PLAN = ("kv.num_blocks", "kv.block_size", "layout.kv_cache_bytes", "args.max_num_seqs", "args.max_model_len")


def planned_pool(path: str) -> PlannedPool:
    """The blocks of a saved plan, with the band that its own certainty gives them."""
    plan = read_plan(path, _OF_THE_PLAN)
    kv, args, planned_bytes = plan.kv, plan.args, plan.layout.kv_cache_bytes
    seqs, context = int(args["max_num_seqs"]), int(args["max_model_len"])
    if kv.num_blocks < 0 or min(kv.block_size, context) < 1:
        raise LegroomError(f"{path} is no plan of legroom: it has a pool of nothing", HOW_TO_WRITE_A_PLAN)
    low = high = float(kv.num_blocks)
    band = plan.confidence.get("kv_cache_bytes")
    if band and planned_bytes and args.get("num_gpu_blocks_override") is None:
        blocks_per_byte = kv.num_blocks / planned_bytes
        low, high = ((planned_bytes if end is None else end) * blocks_per_byte for end in (band.low, band.high))
    return PlannedPool(kv.num_blocks, kv.block_size, int(low), int(high), seqs, context, plan.model)


def load_checks(
    run: LoadRun, load: Load, pool: KvPool | None, context: int, limits: PassCriteria, memory: tuple[str, int | None]
) -> list[Check]:
    return [
        answered(run),
        preempted(run, limits),
        kv_use(run, load, pool, context),
        stable_memory(run.points, limits, *memory, settles=_has_gone_round(run, pool)),
    ]


def _has_gone_round(run: LoadRun, pool: KvPool | None) -> bool:
    """Whether every block was used a few times: until then the host's pages of a CPU's pool are touched one by one."""
    if pool is None:
        return True
    tokens = sum(outcome.prompt_tokens + outcome.output_tokens for outcome in run.outcomes)
    return tokens >= _ROUNDS * pool.num_blocks * pool.block_size


def answered(run: LoadRun) -> Check:
    if run.failed:
        reasons = {outcome.error for outcome in run.failed}
        text = f"{len(run.failed)} of {plural(len(run.outcomes), 'request')} failed: {min(reasons)}"
        return Check("load", False, text + (f" (and {len(reasons) - 1} other reasons)" if len(reasons) > 1 else ""))
    text = f"{count(len(run.outcomes))} of {plural(run.asked, 'request')} answered, {run.concurrency} at a time"
    return Check("load", len(run.outcomes) == run.asked, text)


def preempted(run: LoadRun, limits: PassCriteria) -> Check:
    """No preemption, or no more than allowed."""
    if run.preemptions is None:
        return Check("preemptions", None, "the server does not count preemptions")
    if run.preemptions < 0:
        return Check("preemptions", False, "the counters went backwards: the server restarted during the run")
    text = plural(run.preemptions, "preemption") if run.preemptions else "none"
    allowed = f", {limits.max_preemptions} allowed" if limits.max_preemptions else ""
    return Check("preemptions", run.preemptions <= limits.max_preemptions, text + allowed)


def kv_use(run: LoadRun, load: Load, pool: KvPool | None, context: int) -> Check:
    """The pool was never fuller than these requests can make it."""
    peak = run.peak_kv_use
    if peak is None or pool is None:
        return Check("kv use", None, "not measured: the server shows neither the use nor the size of its pool")
    used = round(peak * pool.usable_blocks)
    seen = f"at most {peak:.0%} of the pool ({count(used)} of {count(pool.usable_blocks)} blocks)"
    if not pool.is_plain(context):
        return Check("kv use", None, f"{seen}; layers share this pool in groups, so lengths alone do not tell the need")
    ours = max((point.ours for point in run.points), default=0)
    others = max((point.running + point.waiting - point.ours for point in run.points), default=0)
    if others > max(2, ours):
        return Check("kv use", None, f"{seen}; other clients were served too, so their need is in it")
    need = needed_blocks(load, pool, run.concurrency)
    more = ", more than it has" if need > pool.usable_blocks else ""
    # A block more for each: a step ahead is allocated before it is known to be needed.
    most = need + run.concurrency if more else min(need + run.concurrency, pool.usable_blocks)
    return Check("kv use", used <= most, f"{seen}; {run.concurrency} of these requests can take {count(most)}{more}")


def pool_as_planned(pool: KvPool | None, planned: PlannedPool | None) -> Check | None:
    """The pool has the blocks that the plan says; nothing to check without a plan."""
    if planned is None:
        return None
    if pool is None:
        return Check("pool", None, "the server does not show the size of its pool")
    same = planned.block_size == pool.block_size
    text = f"{count(pool.num_blocks)} blocks of {pool.block_size}"
    if same and pool.num_blocks == planned.num_blocks:
        return Check("pool", True, f"{text}, exactly as planned")
    if same and planned.low_blocks <= pool.num_blocks <= planned.high_blocks:
        off = pool.num_blocks / planned.num_blocks - 1 if planned.num_blocks else 0.0
        return Check("pool", True, f"{text}, {off:+.1%} of the plan and within its band")
    wanted = f"{count(planned.num_blocks)} blocks of {planned.block_size}"
    band = (
        f" ({count(planned.low_blocks)} to {count(planned.high_blocks)})"
        if planned.low_blocks != planned.high_blocks
        else ""
    )
    return Check("pool", False, f"{text}; the plan says {wanted}{band}")


def context_as_planned(max_model_len: int | None, planned: PlannedPool | None) -> Check | None:
    """A request may be as long as the plan says; nothing to check without a plan."""
    if planned is None or planned.max_model_len is None:
        return None
    wanted = f"the plan says {count(planned.max_model_len)} tokens"
    if max_model_len is None:
        return Check("context", None, f"{wanted}, the server does not say its context")
    return Check("context", max_model_len >= planned.max_model_len, f"{count(max_model_len)} tokens; {wanted}")


def stable_memory(
    points: Sequence[LoadSample], limits: PassCriteria, what: str, total_bytes: int | None, settles: bool = True
) -> Check:
    """After the first third (the ramp, in which buffers are made) memory grows no more.

    `total_bytes` is known of GPUs. Without it this is the host's memory, which may still settle.
    """
    readings = [(point.at_s, point.memory_bytes) for point in points if point.memory_bytes is not None]
    if not what:
        return Check("memory", None, "not measured: the server's processes cannot be seen from here")
    if not points:
        return Check("memory", None, "not measured: it is read beside the metrics, which the server does not show")
    if len(readings) < 4:
        return Check("memory", None, f"{what}: the run was too short to tell ({len(readings)} readings)")
    settled = readings[len(readings) // 3 :]
    before, after = settled[0][1], min(value for _, value in settled[-2:])
    growth = after - before
    most = max(limits.growth_bytes, int(limits.growth_share * (total_bytes or before)))
    text = f"{what}: {human_bytes(before)} after the ramp, {human_bytes(after)} at the end"
    if growth <= most:
        return Check("memory", True, text)
    text += f": it grew by {human_bytes(growth)}"
    if total_bytes is None and not settles:
        return Check(
            "memory", None, f"{text}, but not every block of the pool was used yet, and a first use takes memory"
        )
    return Check("memory", False, text)
