"""Packs each folder of many small JSON files into one file of the wheel, where together they compress better."""

import bz2
import json
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

zlib.Z_DEFAULT_COMPRESSION = 9
"""What zipfile compresses the wheel with."""
FOLDERS = ("catalog/entries", "facts/data", "facts/data/models", "facts/data/vllm")
"""`legroom.facts.read_texts` reads them, packed or not; the wheel leaves the folders out (`pyproject.toml`)."""


class PackedFolders(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        self.scratch = Path(tempfile.mkdtemp())
        for name in FOLDERS:
            paths = sorted((Path(self.root) / "src/legroom" / name).glob("*.json"))
            packed = self.scratch / name.replace("/", ".")
            content = "".join(f"\f{path.stem}\n{_without_spaces(path)}" for path in paths).encode()
            # Entries are read one at a time by people: a quarter smaller is worth the milliseconds.
            packed.write_bytes(bz2.compress(content) if name == "catalog/entries" else content)
            build_data["force_include"][str(packed)] = f"legroom/{name}.packed"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            shutil.rmtree(self.scratch)


def _without_spaces(path: Path) -> str:
    return json.dumps(json.loads(path.read_text("utf-8")), ensure_ascii=False, separators=(",", ":"))
