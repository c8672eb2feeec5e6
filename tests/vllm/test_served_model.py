"""The model that the flags serve: overrides and drafts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from legroom.errors import LegroomError
from legroom.facts.model_sources import load, overridden
from legroom.vllm.args import ServeArgs, draft_method, draft_name
from legroom.vllm.resolve import served_model


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_hf_overrides_change_the_model_itself() -> None:
    args = ServeArgs(model="llama-3.1-8b", hf_overrides={"num_hidden_layers": 4})
    assert len(served_model(args).layers) == 4


def test_an_override_inside_a_sub_config_leaves_its_neighbours_alone() -> None:
    config = {"text_config": {"hidden_size": 8, "num_hidden_layers": 2}, "model_type": "x"}
    changed = overridden(config, {"text_config": {"num_hidden_layers": 1}})
    assert changed == {"text_config": {"hidden_size": 8, "num_hidden_layers": 1}, "model_type": "x"}
    assert config["text_config"] == {"hidden_size": 8, "num_hidden_layers": 2}


def test_rope_scaling_replaces_the_whole_of_the_old_one() -> None:
    config = {"rope_scaling": {"type": "yarn", "factor": 4.0, "extra": 1}}
    assert overridden(config, {"rope_scaling": {"type": "linear"}})["rope_scaling"] == {"type": "linear"}


def test_an_override_that_makes_no_model_is_refused() -> None:
    with pytest.raises(LegroomError, match="num_hidden_layers"):
        served_model(ServeArgs(model="llama-3.1-8b", hf_overrides={"num_hidden_layers": 0}))


def test_a_draft_model_is_read_by_its_name() -> None:
    spec = {"model": "meta-llama/Llama-3.2-1B-Instruct", "num_speculative_tokens": 5}
    model = served_model(ServeArgs(model="llama-3.1-8b", speculative_config=spec))
    assert model.draft is not None
    assert model.draft.layers == load("llama-3.2-1b").layers


def test_a_draft_model_that_cannot_be_read_is_said_and_not_counted_as_nothing() -> None:
    spec = {"model": "nobody/has-this-model", "num_speculative_tokens": 5}
    with pytest.raises(LegroomError, match="draft model of --speculative-config"):
        served_model(ServeArgs(model="llama-3.1-8b", speculative_config=spec))


def test_a_head_that_cannot_be_read_is_left_to_the_estimate() -> None:
    spec = {"method": "eagle3", "model": "nobody/has-this-head", "num_speculative_tokens": 3}
    assert served_model(ServeArgs(model="llama-3.1-8b", speculative_config=spec)).draft is None


def test_a_head_in_a_folder_is_read(tmp_path: Path) -> None:
    head = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 4096,
        "vocab_size": 128256,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "draft_vocab_size": 32000,
    }
    (tmp_path / "config.json").write_text(json.dumps(head))
    spec = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 3}
    model = served_model(ServeArgs(model="llama-3.1-8b", speculative_config=spec))
    assert model.draft is not None
    assert len(model.draft.layers) == 1


@pytest.mark.parametrize(
    ("config", "method", "name"),
    [
        (None, "", ""),
        ({"method": "ngram", "num_speculative_tokens": 3}, "ngram", ""),
        ({"model": "[ngram]"}, "ngram", ""),
        ({"model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}, "eagle3", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
        ({"model": "yuhuili/EAGLE-LLaMA3-Instruct-8B"}, "eagle", "yuhuili/EAGLE-LLaMA3-Instruct-8B"),
        ({"model": "Qwen/Qwen3-0.6B"}, "draft_model", "Qwen/Qwen3-0.6B"),
        ({"method": "mtp", "num_speculative_tokens": 1}, "mtp", ""),
    ],
)
def test_the_method_is_told_as_vllm_tells_it(config: dict[str, object] | None, method: str, name: str) -> None:
    assert (draft_method(config), draft_name(config)) == (method, name)
