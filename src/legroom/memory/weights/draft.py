"""The weights of speculative decoding: MTP layers, an EAGLE head, Medusa heads, or a draft model."""

from collections.abc import Iterator
from dataclasses import replace

from legroom.facts.anatomy import Anatomy
from legroom.facts.model import Dense, Experts, Layer, Model, with_kv_heads
from legroom.memory.weights.layer_modules import feedforward_modules, mixer_modules, norm
from legroom.memory.weights.module import Module, Ranks
from legroom.units import cdiv
from legroom.vllm.args import HEADS, EngineSettings, draft_method, predicts_itself

_EAGLE_VOCABULARY = 32000  # draft_vocab_size of the published EAGLE-3 heads for Llama.
EAGLE3_STATES = 3
"""Hidden states of the target model that an EAGLE-3 head reads."""


def draft_modules(model: Model, method: str, shape: Anatomy, ranks: Ranks, tokens: int) -> Iterator[Module]:
    """The modules of MTP layers, an EAGLE head, or a Medusa head for each of `tokens` drafted; without embeddings."""
    if predicts_itself(method):
        for layer in model.draft_layers:
            yield Module("draft", "mtp.eh_proj", model.hidden_size, 2 * model.hidden_size)
            yield from _draft_layer(model.hidden_size, layer, shape, ranks)
            for name in ("enorm", "hnorm", "norm"):
                yield from norm("draft", name, model.hidden_size, shape)
    elif method in HEADS:
        yield from _eagle_head(model, method, shape, ranks)
    elif method == "medusa":  # a linear layer on every rank, and an output layer of its own
        yield Module("draft", "medusa.blocks", model.hidden_size, model.hidden_size, copies=tokens)
        yield Module("draft", "medusa.lm_heads", cdiv(model.vocab_size, ranks.tensor), model.hidden_size, copies=tokens)


def _eagle_head(model: Model, method: str, shape: Anatomy, ranks: Ranks) -> Iterator[Module]:
    """The modules of an eagle or eagle3 head; where its config is unknown, with one dense layer like the target's."""
    head = model.draft
    hidden = head.hidden_size if head else model.hidden_size
    layers = head.layers if head else (_with_dense_feedforward(model.layers[-1], model),)
    yield Module("draft", "fc", hidden, (EAGLE3_STATES if method == "eagle3" else 2) * model.hidden_size)
    for layer in layers:
        yield from _draft_layer(hidden, layer, shape, ranks)
    if method == "eagle3":
        for first in with_kv_heads([layers[0].mixer]):
            # The first layer also reads the embedding, so qkv_proj has twice the inputs.
            rows = (first.heads + 2 * first.kv_heads) * first.head_dim // ranks.tensor
            yield Module("draft", "qkv.embedding", rows, hidden)
        vocabulary = head.config.get("draft_vocab_size") or head.vocab_size if head else _EAGLE_VOCABULARY
        yield Module("draft", "lm_head", cdiv(int(vocabulary), ranks.tensor), hidden)


def _with_dense_feedforward(layer: Layer, model: Model) -> Layer:
    """The layer with a dense MLP where it had experts, as the layers of vLLM's EAGLE heads are Llama's."""
    experts = layer.feedforward
    if not isinstance(experts, Experts):
        return layer
    if experts.parallel_dense is not None:
        return replace(layer, feedforward=experts.parallel_dense)
    active = experts.experts_per_token * experts.intermediate_size + experts.shared_intermediate_size
    width = int(model.config.get("intermediate_size") or active)
    return replace(layer, feedforward=Dense(experts.hidden_size, width))


def draft_settings(settings: EngineSettings) -> EngineSettings:
    """The settings of the draft model: one pipeline stage, and draft_tensor_parallel_size or the target's."""
    given = settings.given
    spec = given.speculative_config or {}
    size, quantization = spec.get("draft_tensor_parallel_size"), spec.get("quantization")
    env = {name: value for name, value in given.env.items() if name != "VLLM_PP_LAYER_PARTITION"}
    own = replace(
        given, speculative_config=None, enable_lora=None, cpu_offload_gb=None, env=env, quantization=quantization
    )
    ranks = size if isinstance(size, int) and size > 0 else settings.tensor_parallel_size
    alone = replace(settings, given=own, pipeline_parallel_size=1, enable_expert_parallel=False)
    return replace(alone, quantization=quantization, tensor_parallel_size=ranks)


def draft_is_uncounted(settings: EngineSettings) -> bool:
    """Whether vLLM leaves a draft model's weights out of its memory budget (V0 from 0.6.5 on)."""
    uncounted = settings.engine == "V0" and settings.release.at_least("0.6.5")
    return uncounted and draft_method(settings.given.speculative_config) == "draft_model"


def is_draft_estimated(model: Model, settings: EngineSettings) -> bool:
    """Whether the draft's weights are an estimate: always for a head, for a draft model if its config is unknown."""
    method = draft_method(settings.given.speculative_config)
    if method == "draft_model":
        return model.draft is None or not model.draft.known
    return method in (*HEADS, "medusa", "mlp_speculator", "dflash")


def _draft_layer(hidden: int, layer: Layer, shape: Anatomy, ranks: Ranks) -> Iterator[Module]:
    """The modules of one draft layer on one rank, with its norms."""
    if layer.mixer is not None:
        yield from mixer_modules(layer.mixer, hidden, shape, ranks)
    if layer.feedforward is not None:
        yield from feedforward_modules(layer.feedforward, shape, ranks)
    for number in range(shape.norms):
        yield from norm("draft", f"norm{number}", hidden, shape)
