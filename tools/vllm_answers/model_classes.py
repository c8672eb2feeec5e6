"""What each model class implements: pipeline parallelism, LoRA, EAGLE-3, MTP ..."""

from __future__ import annotations

import contextlib
import json
import sys
import types
from pathlib import Path
from typing import Any, get_args

_INTERFACES = {
    "supports_pp": "pipeline_parallel",
    "supports_lora": "lora",
    "supports_eagle3": "eagle3",
    "supports_mamba_prefix_caching": "mamba_prefix_caching",
    "supports_multimodal_encoder_tp_data": "encoder_data_parallel",
    "is_text_generation_model": "generates",
    "is_pooling_model": "pools",
    "is_mixture_of_experts": "mixture_of_experts",
}


class _Draft(types.SimpleNamespace):
    """A model's config, as `SpeculativeConfig.hf_config_override` turns it into the one of its MTP layers."""

    def update(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)

    def get_text_config(self) -> _Draft:
        return self


def _mtp(architecture: str, model_types: list[str]) -> list[str]:
    """`mtp` where the release runs the architecture's own MTP layers as the draft, `mtp:TYPE` where it does so for one
    of its model types, `counted_mtp` where the config must count the layers."""
    counts = {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}
    always = [name for name in model_types if _drafts_itself(architecture, name)]
    counted = [name for name in model_types if _drafts_itself(architecture, name, **counts)]
    if len(always) == len(model_types):
        return ["mtp"]
    return [f"mtp:{name}" for name in always] or ["counted_mtp"] * bool(counted)


def _drafts_itself(architecture: str, model_type: str, **counts: int) -> bool:
    from vllm.config import speculative

    config = _Draft(architectures=[architecture], model_type=model_type, layer_types=[], **counts)
    config.text_config = config
    try:
        changed = speculative.SpeculativeConfig.hf_config_override(config)
    except Exception as error:
        print(f"{architecture}: MTP: {error}", file=sys.stderr)
        return False
    return changed.model_type in get_args(speculative.MTPModelTypes)


def _model_types() -> dict[str, list[str]]:
    """The model types of each architecture, as `facts` knows them."""
    path = Path(__file__).parents[2] / "src/legroom/facts/data/architectures.json"
    found: dict[str, list[str]] = {}
    for name, architecture in json.loads(path.read_text())["architectures"].items():
        found.setdefault(architecture, []).append(name)
    return found


def model_interfaces() -> dict[str, Any]:
    """Architectures by the interfaces of their class; an architecture that cannot be imported is left out."""
    from vllm.model_executor.models import interfaces, interfaces_base, registry

    checks = {
        short: getattr(interfaces, name, None) or getattr(interfaces_base, name) for name, short in _INTERFACES.items()
    }
    model_types = _model_types()
    found: dict[str, str] = {}
    for name, model in registry.ModelRegistry.models.items():
        with contextlib.redirect_stdout(sys.stderr):
            try:
                cls = model.load_model_cls()
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}"[:150], file=sys.stderr)
                continue
        words = [short for short, check in checks.items() if check(cls)]
        found[name] = " ".join(words + _mtp(name, model_types.get(name, ["no_such_type"])))
    return dict(sorted(found.items()))
