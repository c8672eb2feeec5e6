"""An entry as the JSON that `legroom explain --json` and the tools for agents answer with."""

from __future__ import annotations

import re
from typing import Any

from legroom.explain.entry import Count, Entry, Example, Language
from legroom.units import GIB, KIB, MIB, gib

_PLACEHOLDER = re.compile(r"\{([a-z_0-9.]+)\}")


def entry_json(entry: Entry, language: Language = "en") -> dict[str, Any]:
    """Everything about one cause, in one language."""
    return {
        "id": entry.id,
        "cause": entry.label,
        "also": list(entry.also),
        "phase": entry.phase,
        "title": entry.title.said(language),
        "signatures": [
            {"text": signature.text.said(language), "pattern": signature.pattern} for signature in entry.signatures
        ],
        "root_cause": {"type": entry.cause_type, "text": entry.cause.said(language)},
        "story": _story(entry, language),
        "example": example_text(entry.example, language) if entry.example else None,
        "versions": [
            {"version": v.version, "introduced": v.introduced, "removed": v.removed, "change": v.behavior_change}
            for v in entry.versions
        ],
        "os_specific": dict(entry.os_specific),
        "dead_ends": [
            {"action": d.action.said(language), "why_fails": d.why_fails.said(language),
             "condition": d.condition.said(language), "claimed_fail_rate": d.claimed_rate,
             "counted": count_json(entry.counted(d.kind))}
            for d in entry.dead_ends
        ],
        "workarounds": [
            {"action": w.action.said(language), "how": w.how.said(language), "condition": w.condition.said(language),
             "claimed_success_rate": w.claimed_rate, "counted": count_json(entry.counted(w.kind))}
            for w in entry.workarounds
        ],
        "leads_to": list(entry.leads_to),
        "preceded_by": list(entry.preceded_by),
        "confused_with": list(entry.confused_with),
        "documentation": entry.documentation,
        "evidence": {
            "threads": len(entry.threads), "confirmed": entry.confirmed, "with_fix": entry.with_fix,
            "first_seen": entry.first_seen, "last_confirmed": entry.last_confirmed,
            "tier": entry.verification_tier, "sources": [t.url for t in entry.threads if t.url],
        },
        "resolvable": entry.resolvable,
        "updated": entry.updated,
        "tags": list(entry.tags),
        "aliases": list(entry.aliases),
    }  # fmt: skip


def summary_json(entry: Entry, language: Language = "en") -> dict[str, Any]:
    return {"id": entry.id, "cause": entry.label, "phase": entry.phase, "title": entry.title.said(language)}


def count_json(count: Count) -> dict[str, Any] | None:
    """What was counted of a change; None where no thread tells."""
    if not count.tried:
        return None
    document = {"tried": count.tried, "worked": count.worked, "failed": count.failed,
                "success_rate": count.rate_of(count.worked)}  # fmt: skip
    return {**document, "here": count.here} if count.here else document


def example_text(example: Example, language: Language) -> str:
    """The worked example with its figures filled in: bytes as GiB or MiB, counts with separators."""

    def shown(match: re.Match[str]) -> str:
        value = example.figures[match[1]].value
        return _shown_bytes(value) if "bytes" in match[1] else f"{value:,}"

    return _PLACEHOLDER.sub(shown, example.text.said(language))


def _shown_bytes(value: int) -> str:
    if value >= GIB:
        return gib(value)
    return f"{value / MIB:.1f} MiB" if value >= MIB else f"{value / KIB:g} KiB"


def _story(entry: Entry, language: Language) -> dict[str, str | None] | None:
    story = entry.story
    if story is None:
        return None
    parts = {"what": story.what, "why": story.why, "arithmetic": story.arithmetic, "verify": story.verify,
             "otherwise": story.otherwise}  # fmt: skip
    return {name: part.said(language) if part else None for name, part in parts.items()}
