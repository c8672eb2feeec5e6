"""vLLM 0.32 refused or out of memory in 64 ways on an H200, and what it then ran with there."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from legroom.diagnosis.fixes.failed_run import Hints
from legroom.diagnosis.log_diagnosis import read_log

FIXTURE = Path(__file__).parents[1] / "fixtures/h200_refused_starts.jsonl.gz"
ROWS: dict[str, dict[str, Any]] = {
    row["case"]: row for row in map(json.loads, gzip.decompress(FIXTURE.read_bytes()).decode().splitlines()[1:])
}


@pytest.mark.parametrize("case", ROWS)
def test_the_cause_is_named_and_the_first_fix_is_what_the_card_started_with(case: str) -> None:
    row = ROWS[case]
    finding = read_log([row["log"].encode()], f"{case}.log", Hints()).runs[0].findings[0]
    assert finding.cause == row["cause"]
    fix = finding.fixes[0]
    if fix.flags:
        assert fix.flags == row["started"]
    else:  # steps: free the card, then this share
        shares = (row["started"] or {}).values()
        assert all(str(share) in " ".join(fix.steps) for share in shares)
