"""The checks of a verification, as pure functions of the recorded run, and the result."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from legroom.drawing.text import count, plural
from legroom.errors import LegroomError
from legroom.planning.plan_document import HOW_TO_WRITE_A_PLAN, read_plan
from legroom.records import dataclass
from legroom.units import MIB, human_bytes
from legroom.verify.load_run import KvPool, Load, LoadRun, LoadSample, needed_blocks
from legroom.verify.openai_client import ServedModel


@dataclass(frozen=True)
class Check:
    """The result of one check; `ok` is None where it could not be measured."""

    name: str
    ok: bool | None
    text: str


@dataclass(frozen=True)
class Verification:
    server: str
    """The address, without credentials."""
    served: ServedModel | None
    pool: KvPool | None
    checks: tuple[Check, ...]
    load: LoadRun | None = None
    memory_source: str = ""
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    """Whether the user ended it early."""

    @property
    def ok(self) -> bool:
        """Whether no check failed and the load was not cut short."""
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
            "memory_measured": self.memory_source or None,
            "notes": list(self.notes),
        }


def _load_json(run: LoadRun) -> dict[str, Any]:
    """JSON of the load: totals, peaks, each answered request and each sample."""
    good, samples = [outcome for outcome in run.outcomes if outcome.ok], [asdict(sample) for sample in run.samples]
    shown = ("first_token_s", "total_s", "prompt_tokens", "output_tokens")
    return {
        **{name: getattr(run, name) for name in ("name", "requests", "concurrency")},
        "answered": len(good),
        "failed": len(run.failed),
        "errors": sorted({outcome.error for outcome in run.failed}),
        "interrupted": run.interrupted or None,
        "seconds_s": run.seconds,
        "prompt_tokens": sum(outcome.prompt_tokens for outcome in good),
        "output_tokens": sum(outcome.output_tokens for outcome in good),
        "preemptions": run.preemptions,
        "peak_kv_use": run.peak_kv_use,
        "peak_running": max((sample.running for sample in run.samples), default=0),
        "peak_waiting": max((sample.waiting for sample in run.samples), default=0),
        "requests_s": [{name: getattr(outcome, name) for name in shown} for outcome in good],
        "samples": [{name: sample[name] for name in sample if name != "own_requests"} for sample in samples],
    }


@dataclass(frozen=True)
class PassCriteria:
    """Limits within which a server passes."""

    max_preemptions: int = 0
    growth_share: float = 0.02
    """Allowed growth as a share of the GPUs' memory or the resident memory; PyTorch's allocator caches a little more
    during a run, a leak grows with every request."""
    growth_bytes: int = 64 * MIB
    """Allowed growth in any case: PyTorch allocates segments of up to 20 MiB."""


@dataclass(frozen=True)
class PlannedPool:
    """The KV cache of a plan, with the error band of its number of blocks."""

    num_blocks: int
    block_size: int
    low_blocks: int
    high_blocks: int
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    model: str = ""


_PLAN_FIELDS = ("kv.num_blocks", "kv.block_size", "layout.kv_cache_bytes", "args.max_num_seqs", "args.max_model_len")


def planned_pool(path: str) -> PlannedPool:
    """The planned KV blocks, with error band, sequences and context; LegroomError where the file is no plan."""
    plan = read_plan(path, _PLAN_FIELDS)
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
    """The checks of a load run; `memory`: (what was measured, total bytes of the GPUs, None for resident memory)."""
    tokens = sum(outcome.prompt_tokens + outcome.output_tokens for outcome in run.outcomes)
    # Tokens that fill the pool three times have surely used each block, whose first use on a CPU allocates memory.
    was_cycled = pool is None or tokens >= 3 * pool.num_blocks * pool.block_size
    return [
        all_answered_check(run),
        preemption_check(run, limits),
        kv_use_check(run, load, pool, context),
        memory_check(run.samples, limits, *memory, pool_was_cycled=was_cycled),
    ]


def all_answered_check(run: LoadRun) -> Check:
    """Passes where every request was sent and answered."""
    if run.failed:
        reasons = {outcome.error for outcome in run.failed}
        text = f"{len(run.failed)} of {plural(len(run.outcomes), 'request')} failed: {min(reasons)}"
        return Check("load", False, text + (f" (and {len(reasons) - 1} other reasons)" if len(reasons) > 1 else ""))
    text = f"{count(len(run.outcomes))} of {plural(run.requests, 'request')} answered, {run.concurrency} at a time"
    return Check("load", len(run.outcomes) == run.requests, text)


def preemption_check(run: LoadRun, limits: PassCriteria) -> Check:
    """Passes with no more preemptions than `limits` allow; fails if the server restarted; unknown without a counter."""
    if run.preemptions is None:
        return Check("preemptions", None, "the server does not count preemptions")
    if run.preemptions < 0:
        return Check("preemptions", False, "the counters went backwards: the server restarted during the run")
    text = plural(run.preemptions, "preemption") if run.preemptions else "none"
    allowed = f", {limits.max_preemptions} allowed" if limits.max_preemptions else ""
    return Check("preemptions", run.preemptions <= limits.max_preemptions, text + allowed)


def kv_use_check(run: LoadRun, load: Load, pool: KvPool | None, context: int) -> Check:
    """Passes where the blocks in use never exceeded what these requests need; unknown if one cannot be told."""
    peak = run.peak_kv_use
    if peak is None or pool is None:
        return Check("kv use", None, "not measured: the server shows neither the use nor the size of its pool")
    used = round(peak * pool.usable_blocks)
    seen = f"at most {peak:.0%} of the pool ({count(used)} of {count(pool.usable_blocks)} blocks)"
    if not pool.has_one_group(context):
        return Check("kv use", None, f"{seen}; layers share this pool in groups, so lengths alone do not tell the need")
    own = max((sample.own_requests for sample in run.samples), default=0)
    others = max((sample.running + sample.waiting - sample.own_requests for sample in run.samples), default=0)
    if others > max(2, own):
        return Check("kv use", None, f"{seen}; other clients were served too, so their need is in it")
    need = needed_blocks(load, pool, run.concurrency)
    more = ", more than it has" if need > pool.usable_blocks else ""
    # One more block each: vLLM allocates one step ahead.
    most = need + run.concurrency if more else min(need + run.concurrency, pool.usable_blocks)
    return Check("kv use", used <= most, f"{seen}; {run.concurrency} of these requests can take {count(most)}{more}")


def pool_check(pool: KvPool | None, planned: PlannedPool | None) -> Check | None:
    """Passes where the pool's blocks equal the plan's or lie in its error band; None without a plan."""
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
    low, high = planned.low_blocks, planned.high_blocks
    band = f" ({count(low)} to {count(high)})" if low != high else ""
    return Check("pool", False, f"{text}; the plan says {wanted}{band}")


def context_check(max_model_len: int | None, planned: PlannedPool | None) -> Check | None:
    """Passes where the server's max_model_len is at least the planned one; None if none was planned."""
    if planned is None or planned.max_model_len is None:
        return None
    wanted = f"the plan says {count(planned.max_model_len)} tokens"
    if max_model_len is None:
        return Check("context", None, f"{wanted}, the server does not say its context")
    return Check("context", max_model_len >= planned.max_model_len, f"{count(max_model_len)} tokens; {wanted}")


def memory_check(
    samples: Sequence[LoadSample],
    limits: PassCriteria,
    source: str,
    total_bytes: int | None,
    pool_was_cycled: bool = True,
) -> Check:
    """Passes where memory grows little after the first third of the load. `source`: what was measured, empty if
    nothing; `total_bytes`: of the GPUs, None for resident memory."""
    readings = [(sample.at_s, sample.memory_bytes) for sample in samples if sample.memory_bytes is not None]
    if not source:
        return Check("memory", None, "not measured: the server's processes cannot be seen from here")
    if not samples:
        return Check("memory", None, "not measured: it is read beside the metrics, which the server does not show")
    if len(readings) < 4:
        return Check("memory", None, f"{source}: the run was too short to tell ({len(readings)} readings)")
    settled = readings[len(readings) // 3 :]
    before, after = settled[0][1], min(value for _, value in settled[-2:])
    growth = after - before
    most = max(limits.growth_bytes, int(limits.growth_share * (total_bytes or before)))
    text = f"{source}: {human_bytes(before)} after the ramp, {human_bytes(after)} at the end"
    if growth <= most:
        return Check("memory", True, text)
    text += f": it grew by {human_bytes(growth)}"
    if total_bytes is None and not pool_was_cycled:
        more = "not every block of the pool was used yet, and a first use takes memory"
        return Check("memory", None, f"{text}, but {more}")
    return Check("memory", False, text)
