"""Properties of a model that vLLM's defaults depend on."""

from collections.abc import Mapping

from legroom.facts.model import Experts, Layer, Modality, Model, attending, latent, recurrent, with_kv_heads
from legroom.facts.releases import Release
from legroom.memo import Memo
from legroom.records import dataclass
from legroom.vllm.args import ServeArgs, other_value

VOCABULARY_PADDING = 64
"""vLLM's DEFAULT_VOCAB_PADDING_SIZE: rows of the embedding, and so columns of the logits, come in multiples of it."""
_POOLING_TASKS = {"embed", "embedding", "classify", "score", "reward"}


@dataclass(frozen=True, slots=True)
class LayerTraits:
    has_state: bool
    """Whether some layer keeps a recurrent state."""
    attention_free: bool
    """Whether every layer that mixes tokens is recurrent."""
    moe: bool
    """Whether some layer has experts."""
    mla: bool
    """Whether some layer is latent attention."""
    sparse_mla: bool
    """Whether some layer is latent attention with an indexer (DeepSeek V3.2, GLM-5)."""
    compressed_mla: bool
    """Whether some layer caches compressed latents (DeepSeek V4)."""
    bidirectional: bool
    """Whether attention sees the whole input (BERT-like)."""
    slides_everywhere: bool
    """Whether every attention layer has a window: what the V0 engine calls a sliding-window model."""
    chunked: bool
    """Whether some layer attends within chunks only (Llama 4)."""
    block_sparse: bool
    """Whether some layer selects blocks of keys and values (MiniMax-M3)."""
    heads: int | None
    """The head count that tensor parallelism must divide."""

    @property
    def hybrid(self) -> bool:
        """Whether attention and recurrent layers are mixed."""
        return self.has_state and not self.attention_free


_known: Memo[LayerTraits] = Memo(64)


def traits(model: Model) -> LayerTraits:
    """The properties of the model's layers, computed once per model."""
    return _known.get((model.layers,), (), lambda: _traits_of_layers(model.layers))


def _traits_of_layers(layers: tuple[Layer, ...]) -> LayerTraits:
    """The properties that vLLM's rules ask of a model, from its layers."""
    mixers = [layer.mixer for layer in layers if layer.mixer is not None]
    attentions, latents, states = with_kv_heads(mixers), latent(mixers), recurrent(mixers)
    return LayerTraits(
        has_state=bool(states),
        attention_free=bool(mixers) and len(states) == len(mixers),
        moe=any(isinstance(layer.feedforward, Experts) for layer in layers),
        mla=bool(latents),
        sparse_mla=any(mixer.index_heads for mixer in latents),
        compressed_mla=any(mixer.compress_ratio for mixer in latents),
        bidirectional=bool(attentions) and not any(attention.causal for attention in attentions),
        slides_everywhere=bool(attentions) and all(attention.window for attention in attentions),
        chunked=any(attention.chunk for attention in attentions),
        block_sparse=any(attention.index_head_dim for attention in attentions),
        heads=next((mixer.heads for mixer in attending(mixers)), None),
    )


def is_encoder_decoder(model: Model) -> bool:
    """Whether an encoder feeds cross attention (Whisper, BART)."""
    return bool(model.encoder_layers)


def is_pooling(args: ServeArgs, model: Model) -> bool:
    """Whether the server embeds, ranks or classifies rather than generates."""
    if args.runner in ("generate", "pooling"):
        return args.runner == "pooling"
    if other_value(args, "--convert") in _POOLING_TASKS:
        return True
    task = other_value(args, "--task")
    return task in _POOLING_TASKS if task is not None and task != "auto" else model.is_pooling


def _barred_kinds(args: ServeArgs) -> set[str]:
    """The kinds of media with a limit of 0 in --limit-mm-per-prompt."""
    limits = (args.limit_mm_per_prompt or {}).items()
    return {kind for kind, limit in limits if (limit.get("count") if isinstance(limit, Mapping) else limit) == 0}


def builds_encoders(args: ServeArgs, model: Model, release: Release) -> bool:
    """Whether encoders are loaded: not with --language-model-only, nor from 0.11 on with limits of 0 for all media."""
    barred, taken = _barred_kinds(args), frozenset[str]().union(*(encoder.kinds for encoder in model.modalities))
    none_allowed = len(barred) == len(args.limit_mm_per_prompt or {}) and taken <= barred
    return not (args.language_model_only or (none_allowed and release.at_least("0.11.0")))


def built_encoders(args: ServeArgs, model: Model, release: Release) -> tuple[Modality, ...]:
    """The encoders that are loaded: without those whose items all have a limit of 0 (0.11+)."""
    if not builds_encoders(args, model, release):
        return ()
    if release.before("0.11.0"):
        return model.modalities
    barred = _barred_kinds(args)
    return tuple(encoder for encoder in model.modalities if not encoder.kinds <= barred)


def replicates_encoders(args: ServeArgs, model: Model) -> bool:
    """Whether each TP rank holds whole encoders: --mm-encoder-tp-mode data, or Kimi's and DeepSeek's odd heads."""
    ranks = args.tensor_parallel_size or 1
    falls_back = model.architecture.startswith(("KimiK25", "KimiK3", "DeepseekV4"))
    return other_value(args, "--mm-encoder-tp-mode") == "data" or (
        falls_back and any(encoder.heads % ranks for encoder in model.modalities)
    )


_IMAGE_MASKS = {
    *("BagelForConditionalGeneration", "Gemma3ForConditionalGeneration", "Molmo2ForConditionalGeneration"),
    *("Moondream3ForCausalLM", "PaliGemmaForConditionalGeneration"),
}


def masks_images(args: ServeArgs, model: Model, release: Release) -> bool:
    """Whether tokens of one image attend to each other in both directions (vLLM's `is_mm_prefix_lm`)."""
    if not model.modalities or not builds_encoders(args, model, release):
        return False
    return model.config.get("use_bidirectional_attention") == "vision" or model.architecture in _IMAGE_MASKS
