"""What speculative decoding loads beside the model: prediction layers of its own checkpoint, a head, or a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from legroom.facts.anatomy import Anatomy
from legroom.facts.model import Dense, Experts, Layer, Model, with_kv_heads
from legroom.facts.releases import release as known_release
from legroom.memory.weights.layer_modules import feedforward_modules, mixer_modules, norm
from legroom.memory.weights.module import Module, Ranks
from legroom.units import cdiv
from legroom.vllm.args import HEADS, EngineSettings, draft_method, predicts_itself

_EAGLE_VOCABULARY = 32000
EAGLE3_STATES = 3
"""Hidden states of the model that an EAGLE-3 head sees at once."""


def draft_modules(model: Model, method: str, shape: Anatomy, ranks: Ranks) -> Iterator[Module]:
    """Prediction layers or a head. Embeddings are shared with the model; ngram and suffix methods load nothing."""
    if predicts_itself(method):
        for layer in model.draft_layers:
            yield Module("draft", "mtp.eh_proj", model.hidden_size, 2 * model.hidden_size)
            yield from _layer(model.hidden_size, layer, shape, ranks)
            for name in ("enorm", "hnorm", "norm"):
                yield from norm("draft", name, model.hidden_size, shape)
    elif method in HEADS:
        yield from _head(model, method, shape, ranks)


def _head(model: Model, method: str, shape: Anatomy, ranks: Ranks) -> Iterator[Module]:
    """An EAGLE head as its own config says; without one, a dense layer as wide as the model's last."""
    head = model.draft
    hidden = head.hidden_size if head else model.hidden_size
    layers = head.layers if head else (_dense(model.layers[-1], model),)
    states = EAGLE3_STATES if method == "eagle3" else 2
    yield Module("draft", "fc", hidden, states * model.hidden_size)
    for layer in layers:
        yield from _layer(hidden, layer, shape, ranks)
    if method == "eagle3":
        for first in with_kv_heads([layers[0].mixer]):
            # Its first layer reads the embedding beside the hidden state, so the queries' matrix is twice as wide.
            rows = (first.heads + 2 * first.kv_heads) * first.head_dim // ranks.tensor
            yield Module("draft", "qkv.embedding", rows, hidden)
        vocabulary = head.config.get("draft_vocab_size") or head.vocab_size if head else _EAGLE_VOCABULARY
        yield Module("draft", "lm_head", cdiv(int(vocabulary), ranks.tensor), hidden)


def _dense(layer: Layer, model: Model) -> Layer:
    """vLLM's EAGLE heads are layers of Llama (llama_eagle.py, llama_eagle3.py): dense, of whatever model they draft
    for. A published head of Gemma-4-26B-A4B takes 0.35 GiB, a layer of its experts would take 1.6."""
    experts = layer.feedforward
    if not isinstance(experts, Experts):
        return layer
    if experts.parallel_dense is not None:
        return replace(layer, feedforward=experts.parallel_dense)
    active = experts.experts_per_token * experts.intermediate_size + experts.shared_intermediate_size
    width = int(model.config.get("intermediate_size") or active)
    return replace(layer, feedforward=Dense(experts.hidden_size, width))


def draft_settings(settings: EngineSettings) -> EngineSettings:
    """How a draft model is run: in one stage, by the model's tensor-parallel size unless it was given its own."""
    given = settings.given
    spec = given.speculative_config or {}
    size = spec.get("draft_tensor_parallel_size")
    asked = spec.get("quantization")
    own = replace(
        given,
        speculative_config=None,
        enable_lora=None,
        cpu_offload_gb=None,
        quantization=asked,
        env={name: value for name, value in given.env.items() if name != "VLLM_PP_LAYER_PARTITION"},
    )
    return replace(
        settings,
        given=own,
        quantization=asked,
        pipeline_parallel_size=1,
        enable_expert_parallel=False,
        tensor_parallel_size=size if isinstance(size, int) and size > 0 else settings.tensor_parallel_size,
    )


def draft_is_uncounted(settings: EngineSettings) -> bool:
    """V0 from 0.6.5 on charges the weights of the model that it profiles; a draft model's worker has none."""
    uncounted = settings.engine == "V0" and known_release(settings.release).at_least("0.6.5")
    return uncounted and draft_method(settings.given.speculative_config) == "draft_model"


def is_estimated(model: Model, settings: EngineSettings) -> bool:
    """Whether the draft is another checkpoint that legroom could not read or does not know part by part."""
    method = draft_method(settings.given.speculative_config)
    if method == "draft_model":
        return model.draft is None or not model.draft.known
    return method in (*HEADS, "medusa", "mlp_speculator", "dflash")


def _layer(hidden: int, layer: Layer, shape: Anatomy, ranks: Ranks) -> Iterator[Module]:
    if layer.mixer is not None:
        yield from mixer_modules(layer.mixer, hidden, shape, ranks)
    if layer.feedforward is not None:
        yield from feedforward_modules(layer.feedforward, shape, ranks)
    for number in range(shape.norms):
        yield from norm("draft", f"norm{number}", hidden, shape)
