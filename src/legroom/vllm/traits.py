"""What vLLM asks of a model before it sets its defaults."""

from __future__ import annotations

from legroom.facts.attention import Attention, LatentAttention, StateSpace
from legroom.facts.feedforward import Experts
from legroom.facts.model import Model
from legroom.vllm.args import ServeArgs
from legroom.vllm.given import other_value

_POOLING_TASKS = {"embed", "embedding", "classify", "score", "reward"}


def has_state(model: Model) -> bool:
    """Whether some layer keeps a recurrent state."""
    return any(isinstance(layer.mixer, StateSpace) for layer in model.layers)


def is_attention_free(model: Model) -> bool:
    """Whether every layer that mixes tokens is recurrent."""
    mixers = [layer.mixer for layer in model.layers if layer.mixer is not None]
    return bool(mixers) and all(isinstance(mixer, StateSpace) for mixer in mixers)


def is_hybrid(model: Model) -> bool:
    """Whether attention and recurrent layers are mixed."""
    return has_state(model) and not is_attention_free(model)


def is_moe(model: Model) -> bool:
    """Whether some layer has experts."""
    return any(isinstance(layer.feedforward, Experts) for layer in model.layers)


def uses_mla(model: Model) -> bool:
    """Whether some layer is latent attention."""
    return any(isinstance(layer.mixer, LatentAttention) for layer in model.layers)


def is_encoder_decoder(model: Model) -> bool:
    """Whether an encoder feeds cross attention (Whisper, BART)."""
    return bool(model.encoder_layers)


def is_pooling(args: ServeArgs, model: Model) -> bool:
    """Whether the server embeds, ranks or classifies rather than generates."""
    if args.runner in ("generate", "pooling"):
        return args.runner == "pooling"
    task = other_value(args, "--task")
    if task is not None and task != "auto":
        return task in _POOLING_TASKS
    return model.is_pooling


def is_bidirectional(model: Model) -> bool:
    """Whether attention sees the whole input (BERT-like)."""
    attentions = [layer.mixer for layer in model.layers if isinstance(layer.mixer, Attention)]
    return bool(attentions) and not any(attention.causal for attention in attentions)


def slides_everywhere(model: Model) -> bool:
    """Whether every attention layer has a window: what the V0 engine calls a sliding-window model."""
    attentions = [layer.mixer for layer in model.layers if isinstance(layer.mixer, Attention)]
    return bool(attentions) and all(attention.window for attention in attentions)


def has_chunked_attention(model: Model) -> bool:
    """Whether some layer attends within chunks only (Llama 4)."""
    return any(isinstance(layer.mixer, Attention) and layer.mixer.chunk for layer in model.layers)


def attention_heads(model: Model) -> int | None:
    """The head count that tensor parallelism must divide."""
    for layer in model.layers:
        if isinstance(layer.mixer, Attention | LatentAttention):
            return layer.mixer.heads
    return None
