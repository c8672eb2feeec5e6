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
TEXTS = {
    *("alerts", "cause_words", "diagnosis_texts", "env", "evidence", "known_bugs", "line_mistakes", "lookalikes"),
    *("metric_roles", "metrics", "lint_rules", "node_labels", "sentences_zh", "startup_lines", "trainers"),
}
"""Files of `facts/data` that a plan does not read: packed apart, as `facts/data/texts`."""


class PackedFolders(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        self.scratch = Path(tempfile.mkdtemp())
        for name in FOLDERS:
            paths = sorted((Path(self.root) / "src/legroom" / name).glob("*.json"))
            texts = [path for path in paths if name == "facts/data" and path.stem in TEXTS]
            self._pack(name, [path for path in paths if path not in texts], build_data)
            if texts:
                self._pack(f"{name}/texts", texts, build_data)

    def _pack(self, name: str, paths: list[Path], build_data: dict[str, Any]) -> None:
        packed = self.scratch / name.replace("/", ".")
        content = "".join(f"\f{path.stem}\n{_without_spaces(path)}" for path in paths).encode()
        packed.write_bytes(bz2.compress(content))  # a fifth smaller than in the zip, for 20 ms of a plan
        build_data["force_include"][str(packed)] = f"legroom/{name}.packed"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            shutil.rmtree(self.scratch)


def _without_spaces(path: Path) -> str:
    content = json.loads(path.read_text("utf-8"))
    if path.stem == "lookalikes":
        content["rows"] = [{name: row[name] for name in row if name != "source"} for row in content["rows"]]
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))
