"""Reading the data files of this room."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).with_name("data")


def read_data(name: str) -> Any:
    """The content of `data/NAME`; by path, because importing `importlib.resources` costs a tenth of a plan's time."""
    return json.loads(_FOLDER.joinpath(name).read_text(encoding="utf-8"))
