"""A diagnosis as the JSON document that other programs rely on."""

from collections.abc import Sequence
from typing import Any

from legroom.diagnosis.case import Case
from legroom.diagnosis.finding import Finding, Fix
from legroom.diagnosis.ledger import Ledger
from legroom.diagnosis.log_diagnosis import LogReading, by_failure_time
from legroom.diagnosis.verdict import Diagnosis
from legroom.facts.releases import logged_release
from legroom.planning.plan_document import as_json
from legroom.vllm_logs.log_masking import mask_log_values, masked_log_text

_LONGEST_TEXT = 1000
_RELEASE = ("vllm", "vllm_note", "release", "release_from")
_DEPLOYMENT = ("model", *_RELEASE, "engine", "gpu", "gpu_total_bytes", "host_limit_bytes")


def readings_json(readings: Sequence[LogReading]) -> dict[str, Any]:
    """The document of `legroom diagnose --json`: the most informative run, the other runs, and the sources."""
    diagnoses = [(reading, run) for reading in by_failure_time(readings) for run in reading.runs]
    if not diagnoses:
        document: dict[str, Any] = {
            "verdict": "not understood",
            "phase": None,
            "findings": [],
            "deployment": dict.fromkeys(_DEPLOYMENT) | {"args": {}},
        }
    else:
        document = diagnosis_json(diagnoses[0][1])
        document["runs"] = [{"source": reading.source, **diagnosis_json(run)} for reading, run in diagnoses[1:]]
    document["sources"] = [
        {"source": reading.source, "lines": reading.lines, "bytes": reading.bytes, "runs": len(reading.runs)}
        for reading in readings
    ]
    masked_document: dict[str, Any] = mask_log_values(document)
    return masked_document


def diagnosis_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """One run's verdict, phase, findings, deployment and memory, as `legroom diagnose --json` prints them."""
    document: dict[str, Any] = {
        "verdict": diagnosis.verdict,
        "phase": diagnosis.phase,
        "findings": [finding_json(finding) for finding in diagnosis.findings],
        "deployment": deployment_json(diagnosis),
        "memory": memory_json(diagnosis.case),
    }
    if diagnosis.case.oom is not None:
        document["ledger"] = ledger_json(diagnosis)
    optional = {"needed": list(diagnosis.needed), "notes": list(diagnosis.notes)}
    return document | {name: lines for name, lines in optional.items() if lines}


def finding_json(finding: Finding) -> dict[str, Any]:
    """One cause with its confidence, evidence lines, fixes and dead ends; secrets in log lines are masked."""
    return {
        "cause": finding.cause,
        "entry": finding.entry,
        "confidence": round(finding.confidence, 3),
        "evidence": [
            {
                "line": evidence.line,
                "text": masked_log_text(evidence.text)[:_LONGEST_TEXT],
                "id": evidence.id,
                "facts": dict(evidence.facts),
                **{name: getattr(evidence, name) for name in ("phase", "process", "rank", "pid", "time")},
            }
            for evidence in finding.evidence
        ],
        "why": finding.why,
        "fixes": [fix_json(fix, finding.confidence) for fix in finding.fixes],
        "dead_ends": [{"action": end.action, "why_fails": end.why_fails} for end in finding.dead_ends],
    }


def fix_json(fix: Fix, cause_confidence: float) -> dict[str, Any]:
    """One fix; its confidence is multiplied by that of its cause."""
    from legroom.planning.plan_json import layout_json  # most logs lead to no plan

    return {
        "kind": fix.kind,
        "flags": as_json(fix.flags),
        "env": dict(fix.env),
        "steps": list(fix.steps),
        "command": list(fix.command),
        "comment": fix.comment,
        "why": fix.why,
        "trades": fix.trades,
        "before": layout_json(fix.before) if fix.before else None,
        "layout": layout_json(fix.layout) if fix.layout else None,
        "measured": _measured_json(fix),
        "confidence": round(fix.confidence * cause_confidence, 3),
    }


def _measured_json(fix: Fix) -> dict[str, Any] | None:
    """The sizes in the fix's plan that the log printed and no changed flag invalidates, with the names of those that
    are `derived` from printed ones; None without any."""
    if fix.plan is None or (seen := fix.plan.target.seen) is None:
        return None
    names = ("weights_bytes", "activation_bytes", "non_torch_bytes", "graph_estimate_bytes")
    sizes = {name: size for name in names if (size := getattr(seen, name)) is not None}
    return {**sizes, "derived": [name for name in seen.derived if name in sizes]} if sizes else None


def deployment_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Release, model, flags and card of the run, as far as known, and the release that the plans are for."""
    case, known = diagnosis.case, diagnosis.known
    startup = case.startup
    args = {
        name: as_json(value)
        for name in startup.args.__dataclass_fields__
        if (value := getattr(startup.args, name)) not in (None, {}, (), "") and name not in ("model", "usage", "others")
    }
    return {
        "model": startup.args.model or None,
        "vllm": startup.vllm,
        "vllm_note": logged_release(startup.vllm).note or None if startup.vllm else None,
        "release": known.release.version if known else None,
        "release_from": known.release_source if known else None,
        "engine": case.engine.generation or None,
        "gpu": startup.gpu_name,
        "gpu_total_bytes": startup.gpu_total_bytes,
        "host_limit_bytes": known.host_limit_bytes if known else case.host_limit_bytes,
        "args": args,
    }


def memory_json(case: Case) -> dict[str, Any]:
    """The memory figures that the server itself logged, in bytes, by name."""
    startup = case.startup
    names = ("weights", "activation", "non_torch", "graph_estimate", "graph", "available_kv", "gpu_total")
    sizes = (f"{name}_bytes" for name in (*names, "free_at_start"))
    reported: dict[str, Any] = {name: getattr(startup, name) for name in sizes}
    reported |= {"blocks": startup.blocks, "tokens": startup.tokens, "max_concurrency": startup.max_concurrency}
    return {name: value for name, value in reported.items() if value is not None}


def ledger_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The card's memory as the allocation failed and as planned at each moment, and tensors of the failed size."""
    wanted = [
        {"tensor": each.name, "terms": each.how, "bytes": each.bytes, "setting": each.setting or None}
        for each in diagnosis.wanted
    ]
    expected = {moment: _ledger_entries(ledger) for moment, ledger in diagnosis.expected.items()}
    return {"seen": _ledger_entries(diagnosis.case.ledger), "expected": expected, "wanted": wanted}


def _ledger_entries(ledger: Ledger) -> dict[str, int]:
    """The ledger's known figures: name of the field -> bytes."""
    entries = {name: getattr(ledger, name) for name in ledger.__dataclass_fields__}
    return {name: value for name, value in entries.items() if value is not None}
