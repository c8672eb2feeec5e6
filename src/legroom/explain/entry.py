"""An entry of the error catalog as a typed object and as JSON; its rates are counted from public threads. And the
meaning of a plan's words, such as `outside` and `headroom`."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from legroom.facts import read_data
from legroom.records import dataclass
from legroom.units import GIB, KIB, MIB, gib

Language = Literal["en", "zh"]

CATALOG_FOLDER = Path(__file__).parents[1] / "catalog"
_PLACEHOLDER = re.compile(r"\{([a-z_0-9.]+)\}")
MIN_THREADS_FOR_RATE = 3
"""With fewer counted threads the rate is None."""


@dataclass(frozen=True, slots=True)
class Localized:
    """A text in English and Chinese."""

    en: str
    zh: str = ""

    def in_language(self, language: Language) -> str:
        """The text in this language; in English where there is no Chinese."""
        return (self.zh or self.en) if language == "zh" else self.en


@dataclass(frozen=True, slots=True)
class Signature:
    """A log message that identifies the entry."""

    text: Localized
    pattern: str
    """RE2."""
    example: str
    """A line that the pattern matches."""
    messages: tuple[str, ...] = ()
    """Ids of `facts/data/evidence.json` that recognise it."""


@dataclass(frozen=True, slots=True)
class Version:
    version: str
    introduced: str | None = None
    deprecated: str | None = None
    removed: str | None = None
    behavior_change: str | None = None
    status: str = "active"


@dataclass(frozen=True, slots=True)
class Thread:
    """One counted public report: what worked and what failed there, by kind of change."""

    url: str | None
    """None: public, but not one of vLLM's own threads."""
    seen: str
    confirmed: bool
    """The thread itself confirms the cause; otherwise it was inferred from the log."""
    worked: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Count:
    """In how many counted threads a kind of change was tried, and the results."""

    worked: int = 0
    failed: int = 0
    sources: tuple[str, ...] = ()

    @property
    def tried(self) -> int:
        """Attempts with known outcome: those that worked and those that failed."""
        return self.worked + self.failed

    def rate_of(self, attempts: int) -> float | None:
        """`attempts` (those that worked, or failed) as a share of all tried, 0 to 1; None below three tried."""
        return round(attempts / self.tried, 2) if self.tried >= MIN_THREADS_FOR_RATE else None


@dataclass(frozen=True, slots=True)
class EntryDeadEnd:
    """A change that does not help."""

    action: Localized
    why_fails: Localized
    condition: Localized
    kind: str | None = None
    myth: str | None = None
    """A name for a claim that is often read and not true."""
    claimed_rate: float | None = None
    """The rate that an imported record claims."""


@dataclass(frozen=True, slots=True)
class Workaround:
    action: Localized
    how: Localized
    condition: Localized
    kind: str | None = None
    claimed_rate: float | None = None


@dataclass(frozen=True, slots=True)
class ExampleFigure:
    """A number of the worked example and its formula; None: a figure of the plan."""

    value: int
    formula: str | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """A worked example: a plan that legroom can repeat, or plain arithmetic."""

    text: Localized
    figures: Mapping[str, ExampleFigure]
    plan: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Story:
    """The long explanation, in the order it is read."""

    what: Localized
    why: Localized
    arithmetic: Localized | None
    """None where no number decides."""
    verify: Localized
    otherwise: Localized


@dataclass(frozen=True, slots=True)
class Entry:
    id: str
    label: str
    phase: str | None
    title: Localized
    signatures: tuple[Signature, ...]
    domain: str
    category: str
    subcategory: str | None
    cause_type: str
    cause: Localized
    versions: tuple[Version, ...]
    os_specific: Mapping[str, str]
    dead_ends: tuple[EntryDeadEnd, ...]
    workarounds: tuple[Workaround, ...]
    leads_to: tuple[str, ...]
    preceded_by: tuple[str, ...]
    confused_with: tuple[str, ...]
    documentation: str | None
    documentation_section: str | None
    error_code: str | None
    resolvable: str
    threads: tuple[Thread, ...]
    updated: str | None
    tags: tuple[str, ...]
    aliases: tuple[str, ...]
    also: tuple[str, ...] = ()
    """Other labels that this entry also explains."""
    story: Story | None = None
    example: Example | None = None
    record: Mapping[str, Any] | None = None
    """The imported record as it came; None for legroom's own entries."""

    def counted(self, change: str | None) -> Count:
        """The numbers of counted threads in which the change worked, and in which it only failed; 0 for None."""
        if change is None:
            return Count()
        worked = [thread for thread in self.threads if change in thread.worked]
        failed = [thread for thread in self.threads if change in thread.failed and change not in thread.worked]
        urls = dict.fromkeys(thread.url for thread in (*worked, *failed) if thread.url)
        return Count(len(worked), len(failed), tuple(urls))

    @property
    def confirmed(self) -> int:
        """How many counted public threads confirm the cause."""
        return sum(thread.confirmed for thread in self.threads)

    @property
    def with_fix(self) -> int:
        """How many counted public threads state a fix that worked."""
        return sum(bool(thread.worked) for thread in self.threads)

    @property
    def verification_tier(self) -> str:
        """`confirmed_in_threads`, `inferred_from_logs` or `derived_from_source`; an imported record's as it claims."""
        if self.record is not None:
            return str(self.record["verification_tier"])
        if self.confirmed:
            return "confirmed_in_threads"
        return "inferred_from_logs" if self.threads else "derived_from_source"

    @property
    def first_seen(self) -> str | None:
        """The date (YYYY-MM) of the oldest counted public thread; None without one."""
        return min((thread.seen for thread in self.threads), default=None)

    @property
    def last_confirmed(self) -> str | None:
        """The date (YYYY-MM) of the newest public thread that confirms the cause; None without one."""
        return max((thread.seen for thread in self.threads if thread.confirmed), default=None)

    def share_of_threads(self, number: int) -> float | None:
        """`number` as a share of the counted public threads, 0 to 1; None where these are fewer than three."""
        total = len(self.threads)
        return round(number / total, 2) if total >= MIN_THREADS_FOR_RATE else None


def entry_json(entry: Entry, language: Language = "en") -> dict[str, Any]:
    """Everything about one catalog entry as JSON, in one language."""
    return {
        "id": entry.id,
        "cause": entry.label,
        "also": list(entry.also),
        "phase": entry.phase,
        "title": entry.title.in_language(language),
        "signatures": [{"text": each.text.en, "pattern": each.pattern} for each in entry.signatures],
        "root_cause": {"type": entry.cause_type, "text": entry.cause.in_language(language)},
        "story": _texts(entry.story, Story.__dataclass_fields__, language) if entry.story else None,
        "example": example_text(entry.example, language) if entry.example else None,
        "versions": [
            {"version": v.version, "introduced": v.introduced, "removed": v.removed, "change": v.behavior_change}
            for v in entry.versions
        ],
        "os_specific": dict(entry.os_specific),
        "dead_ends": [_change_json(entry, item, "why_fails", "fail", language) for item in entry.dead_ends],
        "workarounds": [_change_json(entry, item, "how", "success", language) for item in entry.workarounds],
        **{name: list(getattr(entry, name)) for name in ("leads_to", "preceded_by", "confused_with")},
        "documentation": entry.documentation,
        "evidence": {
            "threads": len(entry.threads),
            **{name: getattr(entry, name) for name in ("confirmed", "with_fix", "first_seen", "last_confirmed")},
            "tier": entry.verification_tier,
            "sources": [t.url for t in entry.threads if t.url],
        },
        "resolvable": entry.resolvable,
        "updated": entry.updated,
        "tags": list(entry.tags),
        "aliases": list(entry.aliases),
    }


def _change_json(
    entry: Entry, item: EntryDeadEnd | Workaround, reason_field: str, outcome: str, language: Language
) -> dict[str, Any]:
    """A dead end or workaround as JSON; `reason_field` holds its reason, `outcome` is `fail` or `success`."""
    texts = _texts(item, ("action", reason_field, "condition"), language)
    count = entry.counted(item.kind)
    figures = {"tried": count.tried, "worked": count.worked, "failed": count.failed}
    counted = figures | {"success_rate": count.rate_of(count.worked)} if count.tried else None
    return {**texts, f"claimed_{outcome}_rate": item.claimed_rate, "counted": counted}


def summary_json(entry: Entry, language: Language = "en") -> dict[str, Any]:
    """The entry's id, cause, phase and title as JSON, without its texts."""
    return {"id": entry.id, "cause": entry.label, "phase": entry.phase, "title": entry.title.in_language(language)}


def example_text(example: Example, language: Language) -> str:
    """The worked example with its figures filled in: bytes as GiB or MiB, counts with separators."""

    def figure_text(match: re.Match[str]) -> str:
        """The figure that `{name}` refers to: names with `bytes` as GiB, MiB or KiB, others with separators."""
        value = example.figures[match[1]].value
        if "bytes" not in match[1]:
            return f"{value:,}"
        return gib(value) if value >= GIB else f"{value / MIB:.1f} MiB" if value >= MIB else f"{value / KIB:g} KiB"

    return _PLACEHOLDER.sub(figure_text, example.text.in_language(language))


def _texts(item: Any, names: Iterable[str], language: Language) -> dict[str, str | None]:
    """Field name -> the text of the field in this language, of `item`'s fields `names`; None for an empty field."""
    parts = {name: getattr(item, name) for name in names}
    return {name: part.in_language(language) if part else None for name, part in parts.items()}


@cache
def json_schema(name: str) -> Mapping[str, Any]:
    """The JSON schema in the file `name`: `schema.json` (an entry) or `record.schema.json` (an exported record)."""
    schema: Mapping[str, Any] = json.loads((CATALOG_FOLDER / name).read_text(encoding="utf-8"))
    return schema


def document_problems(document: Any, schema_file: str, build: Callable[[Any], Entry]) -> list[str]:
    """How a document violates the schema in `schema_file`; without jsonschema, the error of `build(document)`."""
    try:
        import jsonschema
    except ImportError:
        try:
            build(document)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            return [f"$: no entry can be built from it: {type(error).__name__}: {error}"]
        return []
    errors = jsonschema.Draft202012Validator(json_schema(schema_file)).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in errors]


_MOST_WORDS = 4  # A longer query is a line of a log or a description.


def meaning(term: str, language: Language = "en") -> str:
    """The sentences that say what a term of plan_terms.json means, in this language."""
    return str(read_data("plan_terms.json")[term][language])


def terms_in(query: str, language: Language) -> dict[str, str]:
    """Name as in the query -> meaning, of each term of plan_terms.json in a short query; empty for a long query."""
    words = query.lower().split()
    asked, rows = f" {' '.join(words)} ", read_data("plan_terms.json") if len(words) <= _MOST_WORDS else {}
    written = ((term, name) for term, row in rows.items() for name in row["names"])
    named = {name: term for term, name in written if (f" {name.lower()} " if name.isascii() else name) in asked}
    return {name: meaning(term, language if name.isascii() else "zh") for name, term in named.items()}
