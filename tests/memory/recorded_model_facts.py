"""What the KV planner needs of a model, small enough for a line of a fixture, and back."""

from __future__ import annotations

import dataclasses
from itertools import groupby
from typing import Any

from legroom.facts.model import Attention, LatentAttention, Layer, Mixer, Model, StateSpace

_KINDS: dict[str, type[Any]] = {"attention": Attention, "latent": LatentAttention, "state": StateSpace}
_WEIGHTS_ONLY = {"qkv_bias", "o_bias", "qk_norm", "output_gate", "sinks", "q_lora_rank"}
_CONFIG = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype", "max_source_positions")


def facts_of(model: Model) -> dict[str, Any]:
    """The caches of a model: its distinct mixers, which layer has which, and the few fields beside."""
    mixers: list[Mixer] = []

    def number(layer: Layer) -> list[int]:
        numbers = []
        for mixer in (layer.mixer, *layer.also):
            if mixer is not None and mixer not in mixers:
                mixers.append(mixer)
            numbers.append(-1 if mixer is None else mixers.index(mixer))
        return numbers

    runs = [[numbers, len(list(run))] for numbers, run in groupby(number(layer) for layer in model.layers)]
    draft = [number(layer)[0] for layer in model.draft_layers]
    facts: dict[str, Any] = {
        "architecture": model.architecture,
        "type": model.model_type,
        "max_len": model.max_position_embeddings,
        "layers": runs,
        "mixers": [_written(mixer) for mixer in mixers],
    }
    facts |= {"draft": draft} if draft else {}
    config = {name: model.config[name] for name in _CONFIG if model.config.get(name) is not None}
    return facts | ({"config": config} if config else {})


def model_of(facts: dict[str, Any]) -> Model:
    """The model that such facts describe; its widths and weights are not known."""
    mixers = [_read(written) for written in facts["mixers"]]

    def layer(numbers: list[int]) -> Layer:
        own = [None if index < 0 else mixers[index] for index in numbers]
        return Layer(own[0], None, tuple(mixer for mixer in own[1:] if mixer is not None))

    layers = tuple(layer(numbers) for numbers, count in facts["layers"] for _ in range(count))
    return Model(
        name="",
        architecture=facts["architecture"],
        model_type=facts["type"],
        dtype="bfloat16",
        hidden_size=1,
        vocab_size=1,
        max_position_embeddings=facts["max_len"],
        layers=layers,
        draft_layers=tuple(layer([index]) for index in facts.get("draft", ())),
        config=facts.get("config", {}),
    )


def _written(mixer: Mixer) -> dict[str, Any]:
    kind = next(name for name, cls in _KINDS.items() if isinstance(mixer, cls))
    if isinstance(mixer, StateSpace):
        return {"is": kind, "kind": mixer.kind, "config": dict(mixer.config)}
    own = {field.name: getattr(mixer, field.name) for field in dataclasses.fields(mixer) if _matters(mixer, field)}
    return {"is": kind, **own}


def _matters(mixer: Mixer, field: dataclasses.Field[Any]) -> bool:
    return field.name not in _WEIGHTS_ONLY and getattr(mixer, field.name) != field.default


def _read(written: dict[str, Any]) -> Mixer:
    fields = dict(written)
    cls = _KINDS[fields.pop("is")]
    if cls is StateSpace:
        return StateSpace(fields["kind"], tuple(sorted(fields["config"].items())))
    if cls is LatentAttention:
        fields.setdefault("q_lora_rank", None)
    mixer: Mixer = cls(**fields)
    return mixer
