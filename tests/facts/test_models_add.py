"""`tools/add_model.py` writes a config.json down so that nothing memory depends on is lost."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from legroom.facts import bundled
from legroom.facts.config.model_config import model_from_config


@pytest.fixture(scope="module")
def add_model() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "add_model.py"
    spec = importlib.util.spec_from_file_location("add_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-3-27b", "deepseek-v3", "nemotron-3-nano-30b-a3b", "glm-5-fp8"])
def test_a_model_survives_being_written_short(add_model: ModuleType, name: str) -> None:
    found = bundled.find(name)
    assert found is not None
    config = bundled.bundled_config(found)
    again = bundled._expand(json.loads(json.dumps(add_model.compact(config))))
    assert model_from_config(again) == model_from_config(config)


def test_what_memory_does_not_depend_on_is_dropped(add_model: ModuleType) -> None:
    config = {"hidden_size": 8, "bos_token_id": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6, "sliding_window": None}
    assert add_model.compact(config) == {"hidden_size": 8, "sliding_window": None}


def test_names_that_differ_in_their_layer_become_one_pattern(add_model: ModuleType) -> None:
    names = [
        "lm_head",
        *(f"model.layers.{i}.mlp.gate" for i in (0, 1, 2, 5)),
        *(f"layers.0.experts.{i}.w1" for i in range(4)),
    ]
    short = add_model._short(names)
    assert short == {
        "names": ["lm_head", ["model.layers.{}.mlp.gate", "0-2,5"], ["layers.{}.experts.{}.w1", "0", "0-3"]]
    }
    assert sorted(bundled._expand(short)) == sorted(names)


def test_a_new_model_is_found_once_it_is_written(
    add_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.json"
    found = bundled.find("llama-3.2-1b")
    assert found is not None
    config.write_text(json.dumps({**bundled.bundled_config(found), "bos_token_id": 1}))
    monkeypatch.setattr(add_model, "FOLDER", tmp_path)
    arguments = ["add_model.py", str(config), "--family", "mine", "--name", "my-model", "--id", "me/My-Model"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--parameters", "1235814400", "--source", "my own config.json"])
    add_model.main()
    entry = json.loads((tmp_path / "mine.json").read_text())["my-model"]
    assert entry["ids"] == ["me/My-Model"]
    assert entry["config"]["hidden_size"] == 2048
    assert "bos_token_id" not in entry["config"]
