"""A model, independent of vLLM: its layers, widths and stored precision; `facts.config` reads it from a config.json."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal

from legroom.records import dataclass, field


@dataclass(frozen=True, slots=True)
class Attention:
    """Multi-head or grouped-query attention: full, sliding-window (`window`) or chunked-local (`chunk`)."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    chunk: int | None = None
    shares_kv: bool = False
    """Reads the KV cache of an earlier layer and has none (Gemma-3n, Gemma-4 E models)."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    sinks: bool = False
    causal: bool = True
    cross: bool = False
    index_head_dim: int = 0
    """> 0: block-sparse attention whose indexer keeps a key cache of its own (MiniMax-M3)."""

    @property
    def sees_everything(self) -> bool:
        """Whether every token attends to all before it: neither a window nor chunks."""
        return self.window is None and self.chunk is None

    @property
    def score_width(self) -> int:
        """Elements that a head multiplies for each pair of tokens: its key and its value."""
        return self.head_dim + self.v_head_dim

    @property
    def rope_width(self) -> int:
        """Elements of a head to which rotary embeddings apply; 0 for cross attention."""
        return 0 if self.cross else self.head_dim

    @property
    def rope_kind(self) -> str:
        """Which of the config's RoPE parameter sets applies: the one for full or for sliding layers."""
        return "sliding_attention" if self.window or self.chunk else "full_attention"


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): one compressed latent a token, the same on every tensor-parallel rank."""

    heads: int
    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_heads: int = 0
    index_head_dim: int = 0
    """> 0: DeepSeek sparse attention with an indexer that keeps its own key cache."""
    window: int | None = None
    compress_ratio: int = 0
    output_gate: bool = False
    o_groups: int = 0
    o_lora_rank: int = 0
    """> 0: the output projection is of low rank, one factor a group of heads (DeepSeek-V4)."""
    rope_kind: ClassVar[str] = "latent"

    @property
    def sees_everything(self) -> bool:
        """Whether every token attends to all before it: no window."""
        return self.window is None

    @property
    def latent_width(self) -> int:
        """Elements of the cached latent of one token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def score_width(self) -> int:
        """Elements that a head multiplies for each pair of tokens: its key and its value."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim

    @property
    def rope_width(self) -> int:
        """Elements of a head to which rotary embeddings apply."""
        return self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class StateSpace:
    """A recurrent mixer with a state of fixed size: Mamba, gated delta net, linear attention, short convolution."""

    kind: str
    """mamba1 | mamba2 | gdn | kda | lightning | short_conv"""
    config: tuple[tuple[str, int], ...]
    """The widths of this kind by name, as a hashable tuple."""
    heads: ClassVar[int] = 0
    window: ClassVar[int | None] = None
    sees_everything: ClassVar[bool] = False
    score_width: ClassVar[int] = 0
    rope_width: ClassVar[int] = 0
    rope_kind: ClassVar[str] = ""

    def width(self, name: str) -> int:
        """The dimension of this name, such as `state_size` or `conv_kernel`; KeyError where this kind has none."""
        return dict(self.config)[name]


Mixer = Attention | LatentAttention | StateSpace


def attending(mixers: Iterable[Mixer | None]) -> list[Attention | LatentAttention]:
    """The mixers that are attention or latent attention, in order."""
    return [mixer for mixer in mixers if isinstance(mixer, Attention | LatentAttention)]


def latent(mixers: Iterable[Mixer | None]) -> list[LatentAttention]:
    """The mixers that are latent attention (MLA), in order."""
    return [mixer for mixer in mixers if isinstance(mixer, LatentAttention)]


def with_kv_heads(mixers: Iterable[Mixer | None]) -> list[Attention]:
    """The mixers that have key and value heads (not MLA), in order."""
    return [mixer for mixer in mixers if isinstance(mixer, Attention)]


def recurrent(mixers: Iterable[Mixer | None]) -> list[StateSpace]:
    """The mixers that are recurrent (Mamba, linear attention), in order."""
    return [mixer for mixer in mixers if isinstance(mixer, StateSpace)]


@dataclass(frozen=True, slots=True)
class Dense:
    """One feed-forward block. `gated`: SwiGLU-like, with gate and up projections."""

    hidden_size: int
    intermediate_size: int
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts, with shared experts where the architecture has them."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    experts_per_token: int
    gated: bool = True
    bias: bool = False
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    """The router's linear layer has a bias (gpt-oss)."""
    correction_bias: bool = False
    """One float per expert that balances the load (DeepSeek's e_score_correction_bias)."""
    router_fp32: bool = False
    """The router's weight is kept in float32 whatever the model's dtype."""
    latent_size: int = 0
    """> 0: experts work in this width instead of the hidden size (Nemotron-3, Kimi-K3)."""
    hash_vocabulary: int = 0
    """> 0: experts are looked up by token in a table of this many rows, not chosen (first layers of DeepSeek-V4)."""
    parallel_dense: Dense | None = None
    """A dense block beside the experts in the same layer (Gemma-4, Arctic)."""


FeedForward = Dense | Experts

Split = Literal["", "out", "in"]
"""Replicated on every rank, split by outputs (column parallel) or by inputs (row parallel)."""


@dataclass(frozen=True, slots=True)
class Linear:
    """`count` equal weights of `outputs` x `inputs`; `inputs` 0 makes a vector (a norm's weight, a bias table)."""

    name: str
    outputs: int
    inputs: int = 0
    bias: bool = False
    split: Split = ""
    count: int = 1
    dtype: str = ""
    """Empty: the model's dtype."""

    @property
    def parameters(self) -> int:
        """Elements of all `count` weights and their biases, before any tensor-parallel split."""
        return self.count * (self.outputs * max(self.inputs, 1) + (self.outputs if self.bias else 0))


@dataclass(frozen=True, slots=True)
class MediaItem:
    """The largest image, video or recording, which vLLM profiles an encoder with."""

    kind: str
    """image | video | audio"""
    tokens: int
    """Placeholder tokens of the item; of one step of frames where it grows."""
    patches: int
    """Rows inside the encoder, of the same."""
    outputs: int = 0
    """Rows that come out, where fewer than it has placeholders; 0: as many."""
    max_frames: int = 0
    """> 0: a video of as many frames as the longest request holds, no more than this."""
    frames_per_step: int = 1
    beside_image_until: str = ""
    """Before this release a growing video shared the longest request with an image; "always": it still does."""
    within_length: bool = False
    """Made no larger than the longest request."""
    pixels_per_token: int = 0
    """> 0: the processor's max_pixels sets the size."""
    lengths: tuple[int, ...] = ()
    """Tokens of the item with one frame, two, three ...: made with as many as gives the most within a request."""
    since: str = ""
    until: str = ""


@dataclass(frozen=True, slots=True)
class LiveTensors:
    """Live tensors per patch at one point of an encoder block; see `memory.activation.encoder_profile`."""

    where: str
    hidden: float = 0
    """Hidden states that every rank holds whole."""
    heads: float = 0
    """Hidden states that are split by heads over the tensor-parallel ranks."""
    inner: float = 0
    """Feed-forward widths, split over the ranks."""
    text: float = 0
    """Hidden states as wide as the language model's."""
    extra_bytes: int = 0
    """Rotary tables, masks and the like."""
    splits_keys: bool = False
    """The point is inside the attention kernel, which may split the keys."""
    since: str = ""
    until: str = ""


@dataclass(frozen=True, slots=True)
class Modality:
    """A vision or audio encoder and its projector."""

    kind: str
    """image | video | audio"""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    heads: int
    parameters: int
    """Encoder and projector parameters (they are rarely sharded or quantized)."""
    max_tokens_per_item: int
    """Placeholder tokens of the largest item that vLLM profiles with."""
    patch_tokens_per_item: int = 0
    """Tokens inside the encoder before merging."""
    weights: tuple[Linear, ...] = ()
    """Every weight of the encoder and its projector, in the order vLLM creates them."""
    feature_levels: int = 1
    """Features per token for the language model: of the last block and of DeepStack's blocks."""
    exact: bool = True
    """False: the config does not describe the encoder, and the family's usual one or a plain transformer is assumed."""
    items: tuple[MediaItem, ...] = ()
    """What it encodes: images, and often videos too."""
    moments: tuple[LiveTensors, ...] = ()
    """The candidates for its peak; empty: those of a plain transformer block."""
    pixels_per_patch: int = 0
    """Input values of one patch."""
    raw_pixels_since: str = ""
    """The first release that copies pixels as bytes and normalizes them on the card."""
    chunk_bytes_per_patch: int = 0
    """> 0: items are encoded in chunks whose position lookup (bytes per patch) fits a tenth of the card."""
    chunked_since: str = ""
    buffer_levels: int = 0
    """Persistent feature buffers of max_num_batched_tokens (DeepStack)."""
    attending_patches: int = 0
    """Patches of one attention sequence, where images are cut into tiles; 0: those of a whole item."""
    table_bytes: int = 0
    """Tables that the first run creates and keeps."""
    spread: float = 0.3
    """Half the error band of the peak as a ratio: small where measured, 0.3 where assumed."""

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of media that the encoder takes: image, video or audio."""
        return frozenset(item.kind for item in self.items) or frozenset({self.kind})


@dataclass(frozen=True, slots=True)
class Quantization:
    """One quantization scheme and its unquantized modules."""

    method: str
    """vLLM's name: awq, gptq, fp8, compressed-tensors, modelopt, modelopt_fp4, mxfp4, bitsandbytes, gguf ..."""
    weight_bits: int
    group_size: int | None = None
    block: tuple[int, int] | None = None
    zero_point: bool = False
    scale_bits: int = 16
    dynamic_activations: bool = False
    ignored: tuple[str, ...] = ()
    """Module name patterns left unquantized, as the checkpoint writes them."""
    kv_cache_dtype: str | None = None
    """The KV cache dtype in the checkpoint's config."""
    experts_bits: int | None = None
    """Where experts are stored at another width than the rest."""
    number: str = "int"
    """int | float: how the weights' bits are read."""
    strategy: str = "group"
    """What shares a scale: tensor | channel | group | block."""
    static_activations: bool = False
    """The checkpoint holds a scale for the activations of each linear layer."""
    act_order: bool = False
    """GPTQ with desc_act: every input channel names its group (g_idx)."""
    quantizes_lm_head: bool = False
    targets: tuple[str, ...] = ("Linear",)
    """Which modules are quantized: a class name such as Linear, or name patterns."""
    rules: "tuple[tuple[str, Quantization], ...]" = ()
    """Other schemes for modules whose name matches a pattern (mixed precision); the first match wins."""
    online: bool = False
    """The checkpoint is not quantized: vLLM quantizes while loading (--quantization fp8 on a bf16 model)."""
    mean_bits: float = 0.0
    """Mean bits of a weight in mixed precision, scales included, where a name states them; else 0."""
    list_assumed: bool = False
    """The config lacks its list of unquantized modules, and the usual list of such checkpoints is assumed."""
    named: bool = False
    """The model's name alone says so: its config has no quantization."""

    @property
    def is_nvfp4(self) -> bool:
        """Whether weights are 4-bit floats with an FP8 scale per 16 values, from any tool."""
        return self.weight_bits == 4 and self.number == "float" and self.method != "mxfp4" and self.group_size != 32


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: a mixer and a feed-forward block; hybrid models may lack either."""

    mixer: Mixer | None
    feedforward: FeedForward | None
    also: tuple[Mixer, ...] = ()
    """Further mixers of the layer: cross attention of an encoder-decoder, the attention beside Falcon-H1's Mamba."""


@dataclass(frozen=True)
class Model:
    """A checkpoint's architecture. Sizes are of the whole model, before any sharding."""

    name: str
    architecture: str
    model_type: str
    dtype: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    """The max_model_len that vLLM derives from the config (rope scaling applied)."""
    layers: tuple[Layer, ...]
    tie_word_embeddings: bool = False
    quantization: Quantization | None = None
    modalities: tuple[Modality, ...] = ()
    """Vision, audio ... encoders that come with the language model."""
    encoder_layers: tuple[Layer, ...] = ()
    """The encoder of an encoder-decoder model (Whisper, BART)."""
    draft_layers: tuple[Layer, ...] = ()
    """Multi-token-prediction layers of the checkpoint, loaded with speculative decoding only."""
    draft: "Model | None" = None
    """The draft model of --speculative-config, where it could be read."""
    is_pooling: bool = False
    checkpoint_bytes: int | None = None
    """Total bytes of the safetensors headers, where they were read."""
    known: bool = True
    """False: an unknown architecture, read as a plain transformer."""
    assumed: bool = False
    """True: the config was not read; the architecture or the quantization was taken from the name."""
    config: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False)
    """The text config."""
    source: str = ""
    named_alone: bool = False
    """True: nothing but the name was known, and it names a sibling's architecture; the longest length is a guess."""

    @cached_property
    def distinct_layers(self) -> tuple[Layer, ...]:
        """The layers without repetitions, in order: a model of a hundred layers has a few."""
        return tuple(dict.fromkeys(self.layers))
