"""Finds the real vLLM that `bin/setup-vllm` installs; without it these tests are skipped, and say so."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
Answers = list[dict[str, Any]]


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    named = os.environ.get("LEGROOM_VLLM_PYTHON")
    python = Path(named) if named else ROOT / ".vllm/bin/python"
    if not python.exists():
        pytest.skip("no real vLLM here: run bin/setup-vllm, or name one's Python in LEGROOM_VLLM_PYTHON")
    return python


@pytest.fixture(scope="session")
def real_vllm(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[dict[str, Any]]], Answers]:
    """Starts one engine a case in a single process of vLLM's own, and gives back what each reported."""

    def run(cases: list[dict[str, Any]]) -> Answers:
        folder = tmp_path_factory.mktemp("vllm")
        asked = []
        for number, case in enumerate(cases):
            model = folder / f"model{number}"
            model.mkdir()
            (model / "config.json").write_text(json.dumps(case["config"]))
            asked.append({"config": str(model), "args": case["args"]})
        (folder / "cases.json").write_text(json.dumps(asked))
        script = Path(__file__).with_name("start_engine.py")
        done = subprocess.run(
            [vllm_python, script, folder / "cases.json"], capture_output=True, text=True, timeout=600, check=False
        )
        answers = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        assert len(answers) == len(cases), done.stderr[-2000:]
        return answers

    return run
