"""What a pack looks like, kept as text. After a change that is meant: UPDATE_SNAPSHOTS=1 pytest tests/render."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from legroom.cli.main import main

SNAPSHOTS = Path(__file__).with_name("snapshots")
CASES = {
    "pack-fits": "--gpu h100 -- vllm serve llama-3.1-8b --max-model-len 16384 -- vllm serve qwen3-0.6b --name small",
    "pack-does-not-fit": "--gpu rtx4090 -- vllm serve llama-3.1-8b --max-model-len 16384 -- vllm serve qwen3-0.6b",
    "pack-shifts": "--gpu l40s --shift day=chat --shift night=batch -- vllm serve llama-3.1-8b --name chat "
    "--max-model-len 16384 -- vllm serve qwen3-14b --name batch --max-model-len 8192",
    "pack-slices": "--gpu h200 --gpus 3g.71gb,3g.71gb --other trainer=20GiB@1 -- vllm serve qwen3-14b "
    "--max-model-len 8192 -- vllm serve llama-3.1-8b --max-model-len 8192",
}


@pytest.mark.parametrize("case", CASES)
def test_the_picture_is_as_kept(case, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    main(["pack", "--vllm", "0.32.0", *CASES[case].split()])
    drawn = capsys.readouterr().out
    kept = SNAPSHOTS / f"{case}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        kept.write_text(drawn, encoding="utf-8")
    assert drawn == kept.read_text(encoding="utf-8")
