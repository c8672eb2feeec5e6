"""Facts about models, GPUs and vLLM releases: data files with a source each, and their readers."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

DATA_FOLDER = Path(__file__).with_name("data")


@cache
def read_data(name: str) -> Any:
    """The parsed JSON file `name` of the folder `data` (in a wheel packed); by path, as importlib.resources is slow."""
    path = DATA_FOLDER / name
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    folder = path.parent if path.stem in read_texts(path.parent) else path.parent / "texts"
    return json.loads(read_texts(folder)[path.stem])


@cache
def family_rows(name: str) -> dict[str, dict[str, Any]]:
    """The rows of the data file `name` by model family; an alias of a family has the same row."""
    rows: dict[str, dict[str, Any]] = read_data(name)["families"]
    return rows | {alias: rows[family] for alias, family in read_data(name)["aliases"].items()}


@cache
def pattern(name: str) -> re.Pattern[str]:
    """The compiled regular expression that `reading_patterns.json` holds under this name."""
    return re.compile(read_data("reading_patterns.json")["patterns"][name]["pattern"])


@cache
def read_texts(folder: Path) -> dict[str, str]:
    """The text of each JSON file in a folder, by name without `.json`; wheels pack each folder into one file."""
    packed = folder.with_name(f"{folder.name}.packed")
    if packed.exists():
        import bz2  # a wheel alone

        files = (file.partition("\n") for file in bz2.decompress(packed.read_bytes()).decode().split("\f")[1:])
        return {name: text for name, _, text in files}
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.json"))}
