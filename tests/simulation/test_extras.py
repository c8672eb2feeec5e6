"""What works only with packages beside legroom's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from legroom.cli.main import main


def _write_trace(folder: Path) -> str:
    path = folder / "trace.jsonl"
    rows = [{"id": f"q{i}", "arrival_step": i, "prompt_len": 40, "output_len": 30} for i in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_parquet_timeline_holds_the_same_steps_as_json_lines(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="a Parquet timeline needs pyarrow")
    trace = _write_trace(tmp_path)
    for ending in ("jsonl", "parquet"):
        main(["simulate", trace, "--blocks", "14", "--timeline", str(tmp_path / f"steps.{ending}"), "--json"])
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = parquet.read_table(tmp_path / "steps.parquet").to_pylist()
    assert [{**row, "scheduled": dict(row["scheduled"])} for row in rows] == lines
