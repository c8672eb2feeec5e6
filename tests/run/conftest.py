"""Fixtures of more than one file."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import stand_in_vllm
from held_run import port, run

from legroom.run import tasks

__all__ = ["port", "run"]


@pytest.fixture(scope="session", autouse=True)
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a task reads and compiles once, every fork has: the facts of a release, the patterns of a diagnosis."""
    folder: Path = tmp_path_factory.mktemp("warm")
    vllm, log = folder / "vllm", folder / "log"
    vllm.write_text(f"#!{sys.executable}\n")
    vllm.chmod(0o755)
    short = stand_in_vllm._SHORT.format(pid=2, length=2048, need=0.12, have=0.06, tokens=1000)
    words = {
        "words": [str(vllm), "serve", "tiny"],
        "vllm": "0.32.0",
        "env": {},
        "gpus": {},
        "log": str(log),
        "keep": (),
    }
    tasks.prepare(words | {"gpu": None, "drain_s": 60.0})
    for last in ("ERROR 11-15 05:58:00 [async_llm.py:700] EngineDeadError: EngineCore", stand_in_vllm._OOM, short):
        log.write_text(f"{last}\n")
        tasks.find_fix(words | {"min_context": None, "min_concurrency": None, "tried": ()})
    importlib.import_module("aiohttp")  # what an answer is verified with
    tasks.verify_and_calibrate(words | {"verify": False, "url": ""})
