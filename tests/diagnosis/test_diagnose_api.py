from __future__ import annotations

from pathlib import Path

from diagnosis_logs import CAUSES

import legroom

SHORT_KV = CAUSES["a context longer than the pool"][1]


def test_a_text_is_diagnosed_and_shows_itself() -> None:
    answer = legroom.diagnose(SHORT_KV)
    assert answer.findings[0].cause == "kv_too_small_for_max_len"
    assert "error[LR203]" in str(answer)
    assert answer.json()["verdict"] == "cause found"


def test_a_file_is_diagnosed(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(SHORT_KV, encoding="utf-8")
    assert legroom.diagnose(path).findings[0].entry == "LR203"
