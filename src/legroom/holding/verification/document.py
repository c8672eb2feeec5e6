"""A verification as the JSON document that other programs rely on."""

from __future__ import annotations

from typing import Any

from legroom.holding.verification.report import LoadRun, Verification


def verification_json(found: Verification) -> dict[str, Any]:
    """The whole document."""
    return {
        "verified": found.ok,
        "server": found.server,
        "model": found.served.model if found.served else None,
        "max_model_len": found.served.max_model_len if found.served else None,
        "pool": {"num_blocks": found.pool.num_blocks, "block_size": found.pool.block_size} if found.pool else None,
        "checks": [{"name": check.name, "ok": check.ok, "text": check.text} for check in found.checks],
        "load": _load_json(found.load) if found.load else None,
        "memory_measured": found.memory_what or None,
        "notes": list(found.notes),
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
            {"first_token_s": one.first_token_s, "total_s": one.total_s, "prompt_tokens": one.prompt_tokens,
             "output_tokens": one.output_tokens} for one in good
        ],
        "samples": [
            {"at_s": point.at_s, "kv_use": point.kv_use, "running": point.running, "waiting": point.waiting,
             "preemptions": point.preemptions, "memory_bytes": point.memory_bytes} for point in run.points
        ],
    }  # fmt: skip
