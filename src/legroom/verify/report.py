"""What a verification found, as plain records."""

from __future__ import annotations

from typing import Any

from legroom.records import dataclass
from legroom.verify.load import KvPool
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
        return verification_json(self)


def verification_json(verification: Verification) -> dict[str, Any]:
    return {
        "verified": verification.ok,
        "server": verification.server,
        "model": verification.served.model if verification.served else None,
        "max_model_len": verification.served.max_model_len if verification.served else None,
        "pool": {"num_blocks": verification.pool.num_blocks, "block_size": verification.pool.block_size}
        if verification.pool
        else None,
        "checks": [{"name": check.name, "ok": check.ok, "text": check.text} for check in verification.checks],
        "load": _load_json(verification.load) if verification.load else None,
        "memory_measured": verification.memory_what or None,
        "notes": list(verification.notes),
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
            {"first_token_s": outcome.first_token_s, "total_s": outcome.total_s, "prompt_tokens": outcome.prompt_tokens,
             "output_tokens": outcome.output_tokens} for outcome in good
        ],
        "samples": [
            {"at_s": point.at_s, "kv_use": point.kv_use, "running": point.running, "waiting": point.waiting,
             "preemptions": point.preemptions, "memory_bytes": point.memory_bytes} for point in run.points
        ],
    }  # fmt: skip
