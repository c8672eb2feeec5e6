"""What speculative decoding loads beside the model: prediction layers of its own checkpoint, or a draft head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from legroom.facts.anatomy import Anatomy
from legroom.facts.model import Layer
from legroom.memory.module import Module, Ranks
from legroom.memory.weight_modules import feedforward_modules, mixer_modules, norm

if TYPE_CHECKING:
    from legroom.facts.model import Model
    from legroom.vllm.args import EngineSettings

_PREDICTORS = ("mtp", "deepseek_mtp", "qwen3_next_mtp", "qwen3_5_mtp", "glm4_moe_mtp", "mimo_mtp", "ernie_mtp")
_EAGLE_VOCABULARY = 32000


def draft_modules(model: Model, settings: EngineSettings, shape: Anatomy, ranks: Ranks) -> Iterator[Module]:
    """Embeddings and output layer are shared with the model; ngram and suffix methods load nothing."""
    method = draft_method(settings)
    if method in _PREDICTORS or method.endswith("mtp"):
        for layer in model.draft_layers:
            yield Module("draft", "mtp.eh_proj", model.hidden_size, 2 * model.hidden_size)
            yield from _layer(model, layer, shape, ranks)
            for name in ("enorm", "hnorm", "norm"):
                yield from norm("draft", name, model.hidden_size, shape)
    elif method in ("eagle", "eagle3"):
        inputs = (3 if method == "eagle3" else 2) * model.hidden_size
        yield Module("draft", "fc", model.hidden_size, inputs)
        yield from _layer(model, model.layers[-1], shape, ranks)
        if method == "eagle3":
            yield Module("draft", "lm_head", _EAGLE_VOCABULARY // ranks.tensor, model.hidden_size)


def draft_method(settings: EngineSettings) -> str:
    """The speculative method that was asked for, or an empty string."""
    config = settings.given.speculative_config
    if not config:
        return ""
    return str(config.get("method") or ("draft_model" if config.get("model") else ""))


def is_estimated(settings: EngineSettings) -> bool:
    """Whether the draft is another checkpoint, whose widths are not known here."""
    return draft_method(settings) in ("eagle", "eagle3", "draft_model", "medusa", "mlp_speculator", "dflash")


def _layer(model: Model, layer: Layer, shape: Anatomy, ranks: Ranks) -> Iterator[Module]:
    if layer.mixer is not None:
        yield from mixer_modules(layer.mixer, model.hidden_size, shape, ranks)
    if layer.feedforward is not None:
        yield from feedforward_modules(layer.feedforward, shape, ranks)
    for number in range(shape.norms):
        yield from norm("draft", f"norm{number}", model.hidden_size, shape)
