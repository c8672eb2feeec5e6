"""Block counts of many architectures against answers recorded from vLLM's own planner (record_blocks.py)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import recorded_blocks as blocks

CASES: dict[str, list[dict[str, Any]]] = defaultdict(list)
for _row in blocks.rows([blocks.FIXTURE]):
    CASES[_row["facts"]["architecture"]].append(_row)


@pytest.mark.parametrize("architecture", sorted(CASES))
def test_every_recorded_case_of_the_architecture_is_identical(architecture: str) -> None:
    wrong = {
        f"{row['model']} tp{row['tp']} pp{row['pp']} {row['flags']}": blocks.differences(row)
        for row in CASES[architecture]
    }
    assert {case: found for case, found in wrong.items() if found} == {}


def test_the_recording_is_wide() -> None:
    rows = [row for cases in CASES.values() for row in cases]
    assert len(CASES) >= 40
    assert {row["tp"] for row in rows} == {1, 2, 4, 8}
    assert {row["pp"] for row in rows} >= {1, 2}
