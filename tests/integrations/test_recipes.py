"""The table of a recipes collection: what starts, what is tight, what does not and why, and what is not modelled."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import recipes

PROFILE = {"generation": "hopper", "brand": "NVIDIA", "gpu_count": 1, "vram_gb": 80}
RECIPE = {
    "model": {"model_id": "meta-llama/Llama-3.1-8B-Instruct"},
    "meta": {"hardware": {"h100": "verified", "trillium": "verified", "l4": "planned"}},
    "variants": {
        "default": {"vram_minimum_gb": 20},
        "long": {"model_id": "meta-llama/Llama-3.1-8B-Instruct", "extra_args": ["--max-model-len", "999999"]},
        "heavy": {"model_id": "meta-llama/Llama-3.1-405B", "vram_minimum_gb": 20},
    },
}


def test_a_collection_is_judged_and_written_as_a_table(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "taxonomy.yaml").write_text(
        yaml.safe_dump({"hardware_profiles": {"h100": PROFILE, "trillium": PROFILE}})
    )
    (tmp_path / "models/llama.yaml").write_text(yaml.safe_dump(RECIPE))
    outcomes = [recipes.judge(entry) for entry in recipes.entries(tmp_path)]
    answers = {outcome.entry.variant: outcome.answer for outcome in outcomes}
    assert answers["default on h100"] == "fits"
    assert answers["heavy on h100"] == "does_not_fit"
    assert answers["default on trillium"] == "skipped"
    assert not any("l4" in variant for variant in answers)
    rows = [row for row in "\n".join(recipes.table(outcomes)).splitlines() if row.startswith("| models/")]
    assert len(rows) == 3
    assert "| does not start |" in next(row for row in rows if "heavy" in row)
    assert all("trillium" not in row for row in rows)
