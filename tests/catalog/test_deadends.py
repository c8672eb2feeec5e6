"""Export writes the record's shape exactly, import takes one in and gives it back unchanged."""

import json
from functools import cache

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.cli.main import main
from legroom.explain.catalog_entries import bundled, entries
from legroom.explain.deadends import entry_of_record, record_problems, records_of, user_catalog_folder
from legroom.explain.entry import json_schema

SHAPE = {
    "id": str,
    "signature": str,
    "signature_zh": str,
    "regex": str,
    "domain": str,
    "category": str,
    "subcategory": (str, type(None)),
    "root_cause": str,
    "root_cause_type": str,
    "root_cause_zh": str,
    "versions": list,
    "os_specific": dict,
    "dead_ends": list,
    "workarounds": list,
    "workarounds_zh": list,
    "transition_graph": dict,
    "official_doc_url": (str, type(None)),
    "official_doc_section": (str, type(None)),
    "error_code": (str, type(None)),
    "verification_tier": str,
    "confidence": (float, type(None)),
    "fix_success_rate": (float, type(None)),
    "resolvable": str,
    "first_seen": (str, type(None)),
    "last_confirmed": (str, type(None)),
    "last_updated": (str, type(None)),
    "evidence_count": int,
    "tags": list,
    "locale": str,
    "aliases": list,
}
PARTS = {
    "versions": ["version", "introduced", "deprecated", "removed", "behavior_change", "status"],
    "dead_ends": ["action", "why_fails", "fail_rate", "condition", "sources"],
    "workarounds": ["action", "success_rate", "how", "condition", "sources"],
}


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path / "home"))


@cache
def exported():
    """Read only: one answer for every test."""
    return {record["error_code"]: record for record in records_of(bundled(), bundled())}


def test_a_record_has_the_documented_keys_in_order_and_their_types():
    for record in exported().values():
        assert list(record) == list(SHAPE)
        for key, kind in SHAPE.items():
            assert isinstance(record[key], kind), (record["id"], key)
        for key, names in PARTS.items():
            assert all(list(item) == names for item in record[key])
        assert list(record["transition_graph"]) == ["leads_to", "preceded_by", "frequently_confused_with"]
        assert len(record["workarounds_zh"]) == len(record["workarounds"])


def test_every_record_fits_the_schema_of_records():
    validator = jsonschema.Draft202012Validator(json_schema("record.schema.json"))
    for record in exported().values():
        assert [error.message for error in validator.iter_errors(record)] == []
        assert record_problems(record) == []


def test_a_rate_stands_beside_its_count_or_is_null():
    for record in exported().values():
        for item in (*record["dead_ends"], *record["workarounds"]):
            rate = item.get("fail_rate", item.get("success_rate"))
            assert rate is None or item["sources"][0].startswith("public issue threads, counted:")


def test_transitions_name_records_that_are_exported_too():
    records = exported().values()
    ids = {record["id"] for record in records}
    for record in records:
        for others in record["transition_graph"].values():
            assert set(others) <= ids


def test_export_writes_all_entries_to_a_file(tmp_path):
    target = tmp_path / "catalog.json"
    assert main(["catalog", "export", "--format", "deadends", "-o", str(target)]) == 0
    assert len(json.loads(target.read_text("utf-8"))) == len(bundled())


def test_export_of_one_entry_is_one_record(capsys):
    assert main(["catalog", "export", "LR203"]) == 0
    assert json.loads(capsys.readouterr().out)["error_code"] == "LR203"


def test_an_imported_record_is_found_and_exported_as_it_came(tmp_path, capsys):
    record = {
        **exported()["LR203"],
        "id": "llm/my-own-story",
        "signature": "the flux capacitor overflowed",
        "regex": "flux capacitor",
        "aliases": ["flux"],
        "confidence": 0.5,
    }
    (tmp_path / "record.json").write_text(json.dumps(record), "utf-8")
    assert main(["catalog", "import", str(tmp_path / "record.json")]) == 0
    assert main(["explain", "--search", "flux"]) == 0
    assert "llm/my-own-story" in capsys.readouterr().out
    assert main(["explain", "llm/my-own-story"]) == 0
    assert "nobody counted" in " ".join(capsys.readouterr().out.split())
    assert main(["catalog", "export", "llm/my-own-story"]) == 0
    assert json.loads(capsys.readouterr().out) == record
    assert main(["catalog", "validate"]) == 0
    (tmp_path / "vllm.log").write_text("RuntimeError: the flux capacitor overflowed\n", "utf-8")
    main(["diagnose", str(tmp_path / "vllm.log")])
    assert "legroom explain llm/my-own-story" in " ".join(capsys.readouterr().out.split())


def test_a_record_cannot_leave_the_folder_of_the_catalog(tmp_path):
    record = {**exported()["LR203"], "id": "a/../../../etc/passwd"}
    (tmp_path / "record.json").write_text(json.dumps(record), "utf-8")
    assert main(["catalog", "import", str(tmp_path / "record.json")]) == 0
    assert [path.parent for path in user_catalog_folder().glob("*.json")] == [user_catalog_folder()]


@pytest.mark.parametrize(
    "change",
    [{"regex": r"(a)\1"}, {"regex": ""}, {"confidence": 2}, {"id": "../x"}, {"dead_ends": [{}]}, {"resolvable": True}],
)
def test_a_record_that_is_wrong_is_refused_and_nothing_is_kept(tmp_path, capsys, change):
    (tmp_path / "record.json").write_text(json.dumps({**exported()["LR203"], **change}), "utf-8")
    assert main(["catalog", "import", str(tmp_path / "record.json")]) == 2
    assert "no record" in capsys.readouterr().err
    assert not user_catalog_folder().exists()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{", b"[]", b"5", b"[" * 100_000])
def test_a_file_that_is_no_record_is_told(tmp_path, capsys, content):
    (tmp_path / "record.json").write_bytes(content)
    assert main(["catalog", "import", str(tmp_path / "record.json")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "hint: " in err


def test_a_missing_file_and_a_directory_are_told(tmp_path, capsys):
    assert main(["catalog", "import", str(tmp_path / "none.json")]) == 2
    assert main(["catalog", "import", str(tmp_path)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_validate_names_a_stored_file_that_is_damaged(capsys):
    user_catalog_folder().mkdir(parents=True)
    (user_catalog_folder() / "broken.json").write_text("{")
    assert main(["catalog", "validate"]) == 1
    assert "broken.json" in capsys.readouterr().out
    assert len(entries()) == len(bundled())


TEXTS = st.text(max_size=20)


@given(
    st.fixed_dictionaries(
        {
            "signature": st.text(min_size=1, max_size=200),
            "root_cause": st.text(min_size=1),
            "tags": st.lists(TEXTS),
            "workarounds": st.lists(
                st.fixed_dictionaries(
                    {
                        "action": TEXTS,
                        "success_rate": st.none() | st.floats(0, 1),
                        "how": TEXTS,
                        "condition": TEXTS,
                        "sources": st.lists(TEXTS),
                    }
                )
            ),
            "workarounds_zh": st.lists(TEXTS),
        }
    )
)
def test_any_record_of_the_shape_becomes_an_entry_and_comes_back(changes):
    record = {**exported()["LR101"], **changes}
    assert record_problems(record) == []
    entry = entry_of_record(record)
    assert len(entry.workarounds) == len(record["workarounds"])
    assert records_of((entry,), (entry,)) == [record]
