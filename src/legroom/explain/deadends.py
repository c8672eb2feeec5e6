"""Records in the format that error knowledge bases exchange: export of entries and import as entries. An imported
record is a file under `catalog/` in legroom's home."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError
from legroom.explain.entry import Entry, EntryDeadEnd, Workaround, document_problems
from legroom.files import home, read_text, replace_file
from legroom.json_records import record_from_json


def record_id(entry: Entry) -> str:
    """An entry's id in exported records: `llm/vllm-lr203-kv-too-small-for-max-len`; imported entries keep theirs."""
    if entry.record is not None:
        return entry.id
    return f"{entry.domain}/vllm-{entry.id.lower()}-{entry.label.replace('_', '-')}"


def _record_of(entry: Entry, record_ids: Mapping[str, str]) -> dict[str, Any]:
    """The entry as an exchange record (an imported one as it came); `record_ids`: entry id -> record id."""
    if entry.record is not None:
        return dict(entry.record)
    patterns = [signature.pattern for signature in entry.signatures]
    return {
        "id": record_id(entry),
        "signature": entry.signatures[0].text.en,
        "signature_zh": entry.signatures[0].text.zh,
        "regex": patterns[0] if len(patterns) == 1 else "|".join(f"(?:{pattern})" for pattern in patterns),
        "domain": entry.domain,
        "category": entry.category,
        "subcategory": entry.subcategory,
        "root_cause": entry.cause.en,
        "root_cause_type": entry.cause_type,
        "root_cause_zh": entry.cause.zh,
        "versions": [asdict(version) for version in entry.versions],
        "os_specific": dict(entry.os_specific),
        "dead_ends": [_change_record(entry, item) for item in entry.dead_ends],
        "workarounds": [_change_record(entry, item) for item in entry.workarounds],
        "workarounds_zh": ["：".join(filter(None, (item.action.zh, item.how.zh))) for item in entry.workarounds],
        "transition_graph": {
            "leads_to": [record_ids[other] for other in entry.leads_to],
            "preceded_by": [record_ids[other] for other in entry.preceded_by],
            "frequently_confused_with": [record_ids[other] for other in entry.confused_with],
        },
        "official_doc_url": entry.documentation,
        "official_doc_section": entry.documentation_section,
        "error_code": entry.error_code or entry.id,
        "verification_tier": entry.verification_tier,
        "confidence": entry.share_of_threads(entry.confirmed),
        "fix_success_rate": entry.share_of_threads(entry.with_fix),
        "resolvable": entry.resolvable,
        "first_seen": entry.first_seen,
        "last_confirmed": entry.last_confirmed,
        "last_updated": entry.updated,
        "evidence_count": len(entry.threads),
        "tags": [entry.label, *entry.tags],
        "locale": "en",
        "aliases": [*entry.aliases, *(signature.text.en for signature in entry.signatures[1:])],
    }


def records_of(chosen: Iterable[Entry], all_entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """The chosen entries as exchange records; references to others of `all_entries` become their record ids."""
    record_ids = {entry.id: record_id(entry) for entry in all_entries}
    return [_record_of(entry, record_ids) for entry in chosen]


def entry_of_record(record: Mapping[str, Any]) -> Entry:
    """The entry of a valid exchange record; its rates are the record's claims, not counted from threads."""
    chinese = [*record["workarounds_zh"], *[""] * len(record["workarounds"])]
    graph, text = record["transition_graph"], {"en": record["signature"], "zh": record["signature_zh"]}
    renamed = {
        **graph,
        "label": record["subcategory"] or record["category"],
        "phase": None,
        "title": {language: words if len(words) <= 80 else f"{words[:77]}..." for language, words in text.items()},
        "signatures": [{"text": text, "pattern": record["regex"], "example": record["signature"]}],
        "cause_type": record["root_cause_type"],
        "cause": {"en": record["root_cause"], "zh": record["root_cause_zh"]},
        "dead_ends": [_claimed_change(item, "fail_rate") for item in record["dead_ends"]],
        "workarounds": [
            _claimed_change(item, "success_rate", zh) for item, zh in zip(record["workarounds"], chinese, strict=False)
        ],
        "confused_with": graph["frequently_confused_with"],
        "documentation": record["official_doc_url"],
        "documentation_section": record["official_doc_section"],
        "threads": (),
        "updated": record["last_updated"],
        "record": record,
    }
    return record_from_json(Entry, {**record, **renamed})


def _claimed_change(item: Mapping[str, Any], rate_key: str, action_zh: str = "") -> dict[str, Any]:
    """A record's dead end or workaround as an entry's JSON; `rate_key`: where its claimed rate stands."""
    texts = {name: {"en": item[name]} for name in ("action", "why_fails", "how", "condition") if name in item}
    return {**texts, "action": {"en": item["action"], "zh": action_zh}, "claimed_rate": item[rate_key]}


def _change_record(entry: Entry, item: EntryDeadEnd | Workaround) -> dict[str, Any]:
    """A dead end or workaround as an English record, with the share of counted attempts that failed or worked."""
    count = entry.counted(item.kind)
    if isinstance(item, Workaround):
        own = {"success_rate": count.rate_of(count.worked), "how": item.how.en}
    else:
        own = {"why_fails": item.why_fails.en, "fail_rate": count.rate_of(count.failed)}
    words = f"public issue threads, counted: tried in {count.tried}, worked in {count.worked}, failed in {count.failed}"
    sources = [words, *count.sources] if count.tried else []
    return {"action": item.action.en, **own, "condition": item.condition.en, "sources": sources}


_LARGEST_RECORD_BYTES = 1 << 20
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def user_catalog_folder() -> Path:
    """Folder of the imported records, in legroom's data folder."""
    return home() / "catalog"


def imported_entries() -> tuple[Entry, ...]:
    """Imported records as entries, by file name; invalid files are skipped (`catalog validate` lists them)."""
    return tuple(entry_of_record(record) for _, record, wrong in stored_records() if record is not None and not wrong)


def stored_records() -> list[tuple[Path, Mapping[str, Any] | None, list[str]]]:
    """(Path, record, problems) of every file in the user's catalog; the record is None where it is unreadable."""
    records: list[tuple[Path, Mapping[str, Any] | None, list[str]]] = []
    try:
        paths = sorted(user_catalog_folder().glob("*.json"))
    except OSError:
        return []
    for path in paths:
        try:
            record = _read_record(path)
        except LegroomError as error:
            records.append((path, None, [error.message]))
            continue
        records.append((path, record, record_problems(record)))
    return records


def import_record(path: str) -> Path:
    """Stores the record in the file `path` in the user's catalog; returns its path there. LegroomError if invalid."""
    record = _read_record(Path(path))
    if wrong := record_problems(record):
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        hint = "legroom catalog export --format deadends shows the shape"
        raise LegroomError(f"{path} is no record of the dead-ends shape: {wrong[0]}{more}", hint)
    target = user_catalog_folder() / f"{_UNSAFE.sub('__', record['id']).strip('.')}.json"
    try:
        replace_file(target, json.dumps(record, ensure_ascii=False, indent=1) + "\n")
    except OSError as error:
        hint = "set LEGROOM_HOME to a folder you can write to"
        raise LegroomError(f"could not write {target}: {error.strerror or error}", hint) from None
    return target


def record_problems(record: Any) -> list[str]:
    """What is wrong with an exchange record, a sentence each; empty where it is valid."""
    from legroom.regex import pattern_error

    problems = document_problems(record, "record.schema.json", entry_of_record)
    if not problems and (error := pattern_error(record["regex"])):
        problems.append(f"$.regex: not a pattern that matches in linear time (RE2): {error}")
    return problems


def _read_record(path: Path) -> Any:
    """The parsed JSON of a record's file; LegroomError where it is missing, too large or not JSON."""
    hint = "give one record as `legroom catalog export` writes it"
    try:
        return json.loads(read_text(path, hint, _LARGEST_RECORD_BYTES))
    except (ValueError, RecursionError) as error:
        raise LegroomError(f"{path} is not JSON: {error}", hint) from None
