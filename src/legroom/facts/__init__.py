"""Facts about models, GPUs and vLLM releases: data files with a source each, and their readers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

DATA_FOLDER = Path(__file__).with_name("data")


@cache
def read_data(name: str) -> Any:
    """The parsed content of `data/NAME`; by path, because importing `importlib.resources` takes a tenth of a plan."""
    return json.loads(DATA_FOLDER.joinpath(name).read_text(encoding="utf-8"))
